"""The flat form of a model: one table of sizes for a stack of equal blocks, as people write it by hand.

A runs file's inline model, a preset of a plain decoder and what is read from another format all go through here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationError

from memcalc.errors import CombinationError, InputError, UnknownNameError
from memcalc.specs.block import (
    Attention,
    AttentionForm,
    Block,
    LatentAttention,
    MixtureOfExperts,
    Mlp,
    Norm,
    RouterForm,
)
from memcalc.specs.flat_tables import (
    Count,
    FlatBias,
    FlatDropout,
    FlatExperts,
    FlatFar,
    FlatLatent,
    FlatOutside,
    Layers,
    Size,
)
from memcalc.specs.mixers import Told
from memcalc.specs.model import BlockGroup, Lookup, Model, Outside, Pattern, Tail, TowerEnds, patterns
from memcalc.specs.strict import Strict


class Flat(AttentionForm, Strict):
    """A stack of equal blocks (after a few dense ones in some mixtures of experts), its embedding and its head."""

    name: str = "inline"
    family: str = "custom"
    aliases: Annotated[tuple[str, ...], Field(strict=False)] = ()
    n_layers: Layers
    """Blocks [-]."""
    hidden: Size
    heads: Size
    kv_heads: Size | None = None
    head_dim: Size | None = None
    ffn: Size | None = None
    vocab: Count
    gated: bool = True
    activation: str | None = None
    packed_mlp: bool = False
    """Gate and up come out of one projection."""
    cast_before_down: bool = False
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    norm_weight: bool = True
    """Norms have a learned scale."""
    norm_bias: bool | None = None
    """Whether norms have a bias; as usual for `norm` where absent."""
    norm_scale: Literal["narrow", "wide", "plus-one"] = "narrow"
    """Where an RMSNorm multiplies by it; see :class:`memcalc.specs.block.Norm`."""
    norm_powered: bool = False
    """See `powered` of :class:`memcalc.specs.block.Norm`."""
    norm_written_out: bool = False
    """See `written_out` of :class:`memcalc.specs.block.Norm`."""
    norm_rescales_input: bool = False
    """See `rescales_input` of :class:`memcalc.specs.block.Norm`."""
    norms: Count = 2
    norm_place: Literal["pre", "post", "branch", "both"] = "pre"
    mixer_norm_place: Literal["pre", "post", "branch", "both"] | None = None
    """That of blocks with a mixer, where it is another (OLMo Hybrid)."""
    final_norm: bool = True
    parallel: bool = False
    summed_branches: bool = False
    weight_views: bool = False
    scaled_blocks: bool = False
    """See `scaled` of :class:`memcalc.specs.block.Block`."""
    bias: FlatBias = FlatBias()
    """Which linear layers have one."""
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
    """Values of one patch."""
    tail: Annotated[Tail, Field(strict=False)] = Tail()
    position_rows: Size | None = None
    """Rows of the learned positions; `max_positions` where absent."""
    max_positions: Size
    embedding_dim: Size | None = None
    embedding_scaled: bool = False
    """The embedding is multiplied by a constant (Granite, Gemma)."""
    full_every: Annotated[int, Field(gt=1)] | None = None
    """Each such block sees the whole sequence all the same (Gemma 2: 2, Gemma 3: 6)."""
    full_layers: Annotated[tuple[Count, ...] | None, Field(strict=False)] = None
    """Which blocks, counted from 0, see the whole sequence all the same; by `full_every` where absent."""
    far: FlatFar | None = None
    """Attention of those blocks, where it has other sizes."""
    unturned_layers: Annotated[tuple[Count, ...] | None, Field(strict=False)] = None
    """Which blocks, counted from 0, have no rotary embedding, nor norms after it; those alone then scale queries."""
    qk_norm_weight: bool = True
    """The norms of q and k have a learned scale where the others have one."""
    dropout: FlatDropout = FlatDropout()
    moe: FlatExperts | None = None
    """The routed part, where there is one."""
    mla: FlatLatent | None = None
    """Widths of latent attention."""
    mixer: Told | None = None
    """What mixes tokens in attention's place in some blocks, or in all."""
    mixer_layers: Annotated[tuple[Count, ...] | None, Field(strict=False)] = None
    """Which blocks, counted from 0, have it; all where absent."""
    mixer_beside: bool = False
    """Those blocks have attention beside it."""
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
    """Return the blocks of a flat model by kind, in the order in which the kinds appear."""
    kinds = _kinds(flat)
    return tuple(
        BlockGroup(count=kinds.count(kind), tower=flat.tower, block=_block(flat, *kind))
        for kind in dict.fromkeys(kinds)
    )


def order_of(flat: Flat) -> tuple[Pattern, ...]:
    """Return where the blocks of each group stand; nothing where they stand one group after another."""
    kinds = _kinds(flat)
    places = {kind: index for index, kind in enumerate(dict.fromkeys(kinds))}
    sequence = [places[kind] for kind in kinds]
    return () if sequence == sorted(sequence) else patterns(sequence)


def _kinds(flat: Flat) -> list[tuple[bool, ...]]:
    """Of each block whether it has a window, experts, a mixer in attention's place, positions, and keys to share."""
    layers = range(flat.n_layers)
    full = set(_listed(flat.full_layers, "full_layers", flat.n_layers))
    if flat.full_layers is None and flat.full_every is not None:
        full = set(layers[flat.full_every - 1 :: flat.full_every])
    dense = set(layers)
    if flat.moe is not None:
        if not flat.moe.first_dense < flat.n_layers:
            raise CombinationError("moe.first_dense", flat.moe.first_dense, f"must be below n_layers {flat.n_layers}")
        listed = flat.moe.dense_layers
        dense = set(
            layers[: flat.moe.first_dense] if listed is None else _listed(listed, "moe.dense_layers", flat.n_layers)
        )
    mixed = set[int]()
    if flat.mixer is not None:
        listed = flat.mixer_layers
        mixed = set(layers if listed is None else _listed(listed, "mixer_layers", flat.n_layers))
    windowed = [flat.window is not None and index not in full | mixed for index in layers]
    unturned = set(_listed(flat.unturned_layers, "unturned_layers", flat.n_layers))
    last = {windowed[index]: index for index in layers if index not in mixed}.values() if flat.shares_keys else ()
    return [(windowed[i], i not in dense, i in mixed, i not in unturned, i in last) for i in layers]


def _listed(indices: tuple[int, ...] | None, key: str, layers: int) -> tuple[int, ...]:
    """Return the indices of some blocks, each of which the model has."""
    beyond = next((index for index in indices or () if index >= layers), None)
    if beyond is not None:
        raise CombinationError(key, beyond, f"must be below n_layers {layers}")
    return indices or ()


def norm_of(flat: Flat) -> Norm:
    """Return the norm that every block of a flat model has."""
    bias = flat.norm == "layernorm" if flat.norm_bias is None else flat.norm_bias
    return Norm(
        kind=flat.norm,
        weight=flat.norm_weight,
        bias=bias,
        scale=flat.norm_scale,
        written_out=flat.norm_written_out,
        rescales_input=flat.norm_rescales_input,
        powered=flat.norm_powered,
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
        order=order_of(flat),
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


def _block(flat: Flat, windowed: bool, routed: bool, mixed: bool, turned: bool, shares: bool) -> Block:
    attention = _attention(flat) if flat.mixer_beside or not mixed else None
    if attention is not None and flat.unturned_layers is not None:
        attention = attention.model_copy(update={"scaled_queries": False} if turned else _unturned(attention))
    if attention is not None and not windowed:
        far = flat.far.model_dump(exclude_none=True) if flat.far else {}
        attention = attention.model_copy(update={"window": None, "chunked": False, **far})
    if attention is not None and flat.shares_keys:
        attention = attention.model_copy(update={"shares_keys": shares})
    return Block(
        hidden=flat.hidden,
        attention=attention,
        mixer=flat.mixer if mixed else None,
        mlp=_experts(flat, flat.moe) if routed and flat.moe is not None else _dense(flat),
        norm=norm_of(flat),
        norms=flat.norms,
        norm_place=(mixed and flat.mixer_norm_place) or flat.norm_place,
        parallel=flat.parallel,
        summed_branches=flat.summed_branches,
        weight_views=flat.weight_views,
        scaled=flat.scaled_blocks,
        dropout=flat.dropout.block,
    )


def _attention(flat: Flat) -> Attention:
    bias, kv_heads = flat.bias, flat.kv_heads or flat.heads
    if flat.heads % kv_heads:
        raise CombinationError("kv_heads", kv_heads, f"must divide heads {flat.heads}")
    q, k, v = (bias.qkv if given is None else given for given in (bias.q, bias.k, bias.v))
    return Attention(
        **{key: getattr(flat, key) for key in AttentionForm.model_fields},
        heads=flat.heads,
        kv_heads=kv_heads,
        head_dim=_head_dim(flat),
        q_bias=q,
        k_bias=k,
        v_bias=v,
        o_bias=bias.o,
        qk_norm_kind=_qk_norm(flat),
        rotary=flat.positions == "rope",
        dropout=flat.dropout.attention,
        latent=LatentAttention(**flat.mla.model_dump()) if flat.mla else None,
    )


def _qk_norm(flat: Flat) -> Norm:
    """Return of what kind the norms on q and k are."""
    if flat.qk_norm == "none":
        return Norm()
    norm = norm_of(flat)
    return norm if flat.qk_norm_weight else norm.model_copy(update={"weight": False})


def _unturned(attention: Attention) -> dict[str, Any]:
    """Return what is otherwise where a block of rotary attention has no positions."""
    late = attention.late_qk_norm and attention.qk_norm != "none"
    norms = {"qk_norm": "none", "qk_norm_kind": Norm(), "late_qk_norm": False} if late else {}
    return {"rotary": False, "complex_rotary": False, **norms}


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
    if moe.experts % moe.n_group or moe.topk_group > moe.n_group:
        allowed = f"must divide moe.experts {moe.experts} and be at least moe.topk_group {moe.topk_group}"
        raise CombinationError("moe.n_group", moe.n_group, allowed)
    if ffn is None:
        raise InputError("moe.ffn", None, "must be given: the inner width of one expert")
    return MixtureOfExperts(
        **{key: getattr(moe, key) for key in (*RouterForm.model_fields, "experts", "topk")},
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
    message = first["msg"].removeprefix("Value error, ").replace("Input should be", "must be").rstrip(".")
    return InputError(key, first["input"], message.partition(" or instance of")[0])


def _table(path: list[str]) -> type[BaseModel]:
    """Return the table of keys that `path` leads to."""
    tables: dict[str, type[BaseModel]] = {
        "bias": FlatBias,
        "dropout": FlatDropout,
        "moe": FlatExperts,
        "mla": FlatLatent,
        "far": FlatFar,
        "outside": FlatOutside,
    }
    return tables.get(path[0], Flat) if path else Flat
