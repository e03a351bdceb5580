"""The flat form of a model: one table of sizes for a stack of equal blocks, as people write it by hand.

A runs file's inline model, a preset of a plain decoder and what is read from another format all go through here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from memcalc.errors import CombinationError, InputError, UnknownNameError
from memcalc.specs.model import (
    Attention,
    Block,
    BlockGroup,
    LatentAttention,
    Lookup,
    MixtureOfExperts,
    Mlp,
    Model,
    Norm,
    Outside,
    Tail,
    TowerEnds,
)

Size = Annotated[int, Field(gt=0, lt=2**31)]
Count = Annotated[int, Field(ge=0, lt=2**31)]
Rate = Annotated[float, Field(ge=0.0, lt=1.0)]


class _Strict(BaseModel):
    """No text is taken for a number, and no truth value for a one."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, defer_build=True)


class FlatBias(_Strict):
    """Which linear layers have a bias; `q`, `k` and `v` default to `qkv`."""

    qkv: bool = False
    q: bool | None = None
    k: bool | None = None
    v: bool | None = None
    o: bool = False
    mlp: bool = False
    lm_head: bool = False


class FlatDropout(_Strict):
    """Probabilities of the dropouts, by place."""

    attention: Rate = 0.0
    block: Rate = 0.0
    mlp: Rate = 0.0
    embedding: Rate = 0.0


class FlatExperts(_Strict):
    """The routed part of the MLPs."""

    experts: Size
    topk: Size
    ffn: Size | None = None
    """Width of one routed expert; the model's `ffn` where absent."""
    shared: Count = 0
    """Number of shared experts."""
    shared_ffn: Count | None = None
    """Width of the shared experts together; `shared` times `ffn` where absent."""
    first_dense: Count = 0
    """Leading blocks with a dense MLP of the model's `ffn`."""
    shared_gate: bool = False
    router_bias: bool = False
    expert_bias: bool = False
    scores: Literal["softmax", "sigmoid"] = "softmax"
    fp32_router: bool = False
    group_limited: bool = False
    normalised: bool = False
    narrow_weights: bool = False
    scaled: bool = False


class FlatLatent(_Strict):
    """Multi-head latent attention."""

    q_lora_rank: Size | None = None
    kv_lora_rank: Size
    qk_nope_head_dim: Size
    qk_rope_head_dim: Size
    v_head_dim: Size
    rotation: Literal["complex", "pairs"] = "pairs"


class FlatOutside(_Strict):
    """A tensor outside the blocks."""

    name: str
    parameters: Annotated[int, Field(gt=0, lt=2**62)]
    place: Literal["first", "last"] = "first"


class Flat(_Strict):
    """A stack of equal blocks (after a few dense ones in some mixtures of experts), its embedding and its head."""

    name: str = "inline"
    family: str = "custom"
    aliases: Annotated[tuple[str, ...], Field(strict=False)] = ()
    n_layers: Size
    hidden: Size
    heads: Size
    kv_heads: Size | None = None
    head_dim: Size | None = None
    ffn: Size | None = None
    vocab: Count
    gated: bool = True
    activation: str | None = None
    packed_mlp: bool = False
    cast_before_down: bool = False
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    norm_weight: bool = True
    norm_bias: bool | None = None
    """Whether norms have a bias; as usual for `norm` where absent."""
    norm_scale: Literal["narrow", "wide", "plus-one"] = "narrow"
    norm_rescales_input: bool = False
    norms: Count = 2
    norm_place: Literal["pre", "post", "branch", "both"] = "pre"
    final_norm: bool = True
    parallel: bool = False
    summed_branches: bool = False
    bias: FlatBias = FlatBias()
    tied: bool = False
    head: bool = True
    head_scaled: bool = False
    head_softcap: bool = False
    positions: Literal["rope", "learned", "alibi", "relative", "none"] = "rope"
    position_index: Literal["token", "row", "buffer"] = "row"
    """What holds the numbers of learned positions (see :class:`memcalc.specs.model.Lookup`)."""
    image_values: Count = 0
    """Values of a sample's image, for a vision tower; with `patch_values`, those of one of its patches."""
    patch_values: Count = 0
    tail: Annotated[Tail, Field(strict=False)] = Tail()
    position_rows: Size | None = None
    """Rows of the learned positions; `max_positions` where absent."""
    max_positions: Size
    embedding_dim: Size | None = None
    embedding_scaled: bool = False
    """The embedding is multiplied by a constant (Granite, Gemma)."""
    qk_norm: Literal["none", "head", "full"] = "none"
    packed_qkv: bool = False
    returns_cache: bool = False
    kv_form: Literal["views", "copied", "expanded", "broadcast"] = "views"
    sinks: bool = False
    causal: bool = True
    window: Size | None = None
    full_every: Annotated[int, Field(gt=1)] | None = None
    softcap: bool = False
    rotary_fraction: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    rotary_joined: bool = False
    rotary_tables: Size = 1
    wide_rotary: bool = False
    scores_bias: Literal["none", "in-product", "added", "relative", "zeros"] = "none"
    contiguous_queries: bool = False
    fused: bool = True
    explicit_mask: bool = False
    upcast_softmax: bool = True
    relative_buckets: Size | None = None
    dropout: FlatDropout = FlatDropout()
    moe: FlatExperts | None = None
    mla: FlatLatent | None = None
    outside: Annotated[tuple[FlatOutside, ...], Field(strict=False)] = ()
    tower: Literal["decoder", "encoder", "vision", "text"] = "decoder"
    fixed_tokens: dict[str, Size] = Field(default_factory=dict)
    hf_class: str | None = None
    hf_config: dict[str, object] = Field(default_factory=dict)
    published_parameters: Annotated[int, Field(gt=0)] | None = None
    source: Annotated[str, Field(min_length=1)] = "given by the user"
    notes: str = ""


def from_flat(mapping: Mapping[str, Any]) -> Model:
    """Return the model that a flat table describes.

    >>> flat = {"n_layers": 2, "hidden": 64, "heads": 4, "ffn": 256, "vocab": 1000, "max_positions": 128}
    >>> from_flat(flat).groups[0].block.attention.head_dim
    16
    """
    return _model(flat_of(mapping))


def flat_of(mapping: Mapping[str, Any]) -> Flat:
    """Return the checked flat table."""
    try:
        return Flat.model_validate(mapping)
    except ValidationError as error:
        raise _sentence(error) from None


def groups_of(flat: Flat) -> tuple[BlockGroup, ...]:
    """Return the block groups of a flat model: the leading dense blocks of a mixture of experts come first."""
    if flat.moe is None:
        return (BlockGroup(count=flat.n_layers, tower=flat.tower, block=_block(flat, _dense(flat))),)
    dense, routed = flat.moe.first_dense, flat.n_layers - flat.moe.first_dense
    if routed <= 0:
        raise CombinationError("moe.first_dense", dense, f"must be below n_layers {flat.n_layers}")
    groups = [BlockGroup(count=routed, tower=flat.tower, block=_block(flat, _experts(flat, flat.moe)))]
    if dense:
        groups.insert(0, BlockGroup(count=dense, tower=flat.tower, block=_block(flat, _dense(flat))))
    return tuple(groups)


def norm_of(flat: Flat) -> Norm:
    """Return the norm that every block of a flat model has."""
    bias = flat.norm == "layernorm" if flat.norm_bias is None else flat.norm_bias
    return Norm(
        kind=flat.norm,
        weight=flat.norm_weight,
        bias=bias,
        scale=flat.norm_scale,
        rescales_input=flat.norm_rescales_input,
    )


def outside_of(flat: Flat) -> tuple[Outside, ...]:
    """Return what stands outside the blocks of a flat model, the learned positions first."""
    listed = [Outside(**tensor.model_dump(), tower=flat.tower) for tensor in flat.outside]
    if flat.positions == "learned":
        rows = flat.position_rows or flat.max_positions
        listed.insert(0, Outside(name="positions", parameters=rows * flat.hidden, tower=flat.tower))
    return tuple(listed)


def _model(flat: Flat) -> Model:
    same = (
        "name", "family", "aliases", "hidden", "vocab", "embedding_dim", "tied", "head", "head_scaled", "head_softcap",
        "positions", "max_positions", "fixed_tokens", "hf_class", "hf_config", "published_parameters", "source",
        "notes",
    )  # fmt: skip
    return Model(
        **{key: getattr(flat, key) for key in same},
        head_bias=flat.bias.lm_head,
        embedding_dropout=flat.dropout.embedding,
        final_norm=norm_of(flat) if flat.final_norm else None,
        groups=groups_of(flat),
        outside=outside_of(flat),
        ends=(ends_of(flat),),
        tail=flat.tail,
    )


def ends_of(flat: Flat) -> TowerEnds:
    """Return how a flat model begins: with its image, or its tables, those of token types among them."""
    normed = any(tensor.name in ("embedding_norm", "pre_norm") for tensor in flat.outside)
    return TowerEnds(
        tower=flat.tower,
        lookups=_lookups(flat) if flat.vocab else (),
        embedding_dim=flat.embedding_dim,
        pixels=flat.image_values,
        patch=flat.patch_values,
        norm=norm_of(flat) if normed else None,
        dropout=flat.dropout.embedding,
        scaled=flat.embedding_scaled,
    )


def _lookups(flat: Flat) -> tuple[Lookup, ...]:
    tables = [Lookup(name="token", parameters=flat.vocab * (flat.embedding_dim or flat.hidden))]
    types = [tensor.parameters for tensor in flat.outside if tensor.name == "token_types"]
    tables += [Lookup(name="token type", parameters=parameters, index="row") for parameters in types]
    if flat.positions == "learned":
        rows = flat.position_rows or flat.max_positions
        tables.append(Lookup(name="position", parameters=rows * flat.hidden, index=flat.position_index))
    return tuple(tables)


def _block(flat: Flat, mlp: Mlp | MixtureOfExperts) -> Block:
    return Block(
        hidden=flat.hidden,
        attention=_attention(flat),
        mlp=mlp,
        norm=norm_of(flat),
        norms=flat.norms,
        norm_place=flat.norm_place,
        parallel=flat.parallel,
        summed_branches=flat.summed_branches,
        dropout=flat.dropout.block,
    )


def _attention(flat: Flat) -> Attention:
    bias, kv_heads = flat.bias, flat.kv_heads or flat.heads
    if flat.heads % kv_heads:
        raise CombinationError("kv_heads", kv_heads, f"must divide heads {flat.heads}")
    q, k, v = (bias.qkv if own is None else own for own in (bias.q, bias.k, bias.v))
    same = ("heads", "qk_norm", "packed_qkv", "returns_cache", "sinks", "causal", "window", "full_every", "softcap",
            "rotary_fraction", "relative_buckets", "kv_form", "rotary_joined", "rotary_tables", "wide_rotary",
            "scores_bias", "fused", "explicit_mask", "upcast_softmax", "contiguous_queries")  # fmt: skip
    return Attention(
        **{key: getattr(flat, key) for key in same},
        kv_heads=kv_heads,
        head_dim=_head_dim(flat),
        q_bias=q,
        k_bias=k,
        v_bias=v,
        o_bias=bias.o,
        qk_norm_kind=Norm() if flat.qk_norm == "none" else norm_of(flat),
        rotary=flat.positions == "rope",
        dropout=flat.dropout.attention,
        latent=LatentAttention(**flat.mla.model_dump()) if flat.mla else None,
    )


def _head_dim(flat: Flat) -> int:
    if flat.mla is not None:
        return flat.mla.qk_nope_head_dim + flat.mla.qk_rope_head_dim
    if flat.head_dim is None and flat.hidden % flat.heads:
        raise CombinationError("heads", flat.heads, f"must divide hidden {flat.hidden}, or head_dim must be given")
    return flat.head_dim or flat.hidden // flat.heads


def _activation(flat: Flat) -> str:
    return flat.activation or ("silu" if flat.gated else "gelu")


def _dense(flat: Flat) -> Mlp:
    if flat.ffn is None:
        raise InputError("ffn", None, "must be given: the inner width of the dense MLPs")
    return Mlp(
        ffn=flat.ffn,
        gated=flat.gated,
        bias=flat.bias.mlp,
        activation=_activation(flat),
        packed=flat.packed_mlp,
        cast_before_down=flat.cast_before_down,
        dropout=flat.dropout.mlp,
    )


def _experts(flat: Flat, moe: FlatExperts) -> MixtureOfExperts:
    ffn = moe.ffn or flat.ffn
    if moe.topk > moe.experts:
        raise CombinationError("moe.topk", moe.topk, f"must be at most moe.experts {moe.experts}")
    if ffn is None:
        raise InputError("moe.ffn", None, "must be given: the inner width of one expert")
    same = ("experts", "topk", "shared_gate", "router_bias", "expert_bias", "scores", "fp32_router", "group_limited",
            "normalised", "narrow_weights", "scaled")  # fmt: skip
    return MixtureOfExperts(
        **{key: getattr(moe, key) for key in same},
        ffn=ffn,
        gated=flat.gated,
        activation=_activation(flat),
        shared_ffn=moe.shared * ffn if moe.shared_ffn is None else moe.shared_ffn,
    )


def _sentence(error: ValidationError) -> InputError:
    """Return the first thing wrong with a flat model as one sentence."""
    first = error.errors(include_url=False)[0]
    path = [str(part) for part in first["loc"]]
    key = f"model key {'.'.join(path)}" if path else "model"
    if first["type"] == "extra_forbidden":
        known = sorted(_table(path[:-1]).model_fields)
        return UnknownNameError("model key", path[-1], f"must be one of {', '.join(known)}", known)
    if first["type"] == "missing":
        return InputError(key, None, "must be given")
    said = first["msg"].removeprefix("Value error, ").replace("Input should be", "must be").rstrip(".")
    return InputError(key, first["input"], said.partition(" or instance of")[0])


def _table(path: list[str]) -> type[BaseModel]:
    """Return the table of keys that `path` leads to."""
    tables: dict[str, type[BaseModel]] = {
        "bias": FlatBias,
        "dropout": FlatDropout,
        "moe": FlatExperts,
        "mla": FlatLatent,
        "outside": FlatOutside,
    }
    return tables.get(path[0], Flat) if path else Flat
