"""The tables of the flat form; a field without a word of its own is that of the same name in the model's records."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from memcalc.specs.block import AttentionForm, LatentAttention, RouterForm
from memcalc.specs.model import Tail

Size = Annotated[int, Field(gt=0, lt=2**31)]
Count = Annotated[int, Field(ge=0, lt=2**31)]
Rate = Annotated[float, Field(ge=0.0, lt=1.0)]


class _Strict(BaseModel):
    """No text is taken for a number, and no truth value for a one."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, defer_build=True)


class FlatBias(_Strict):
    """Which linear layers have a bias; `q`, `k` and `v` default to `qkv`."""

    qkv: bool = False
    """Queries, keys and values."""
    q: bool | None = None
    """Queries alone."""
    k: bool | None = None
    """Keys alone."""
    v: bool | None = None
    """Values alone."""
    o: bool = False
    """The output projection."""
    mlp: bool = False
    """The MLP's matrices."""
    lm_head: bool = False
    """The output head."""


class FlatDropout(_Strict):
    """Probabilities of the dropouts, by place."""

    attention: Rate = 0.0
    """On the scores."""
    block: Rate = 0.0
    """On both branches."""
    mlp: Rate = 0.0
    """Inside the MLP."""
    embedding: Rate = 0.0
    """On the embeddings."""


class FlatExperts(RouterForm, _Strict):
    """The routed part of the MLPs."""

    experts: Size
    """Routed experts [-]."""
    topk: Size
    ffn: Size | None = None
    """Width of one routed expert; the model's `ffn` where absent."""
    shared: Count = 0
    """Number of shared experts."""
    shared_ffn: Count | None = None
    """Width of the shared experts together; `shared` times `ffn` where absent."""
    first_dense: Count = 0
    """Leading blocks with a dense MLP of the model's `ffn`."""
    dense_layers: Annotated[tuple[Count, ...] | None, Field(strict=False)] = None
    """Which blocks, counted from 0, have that dense MLP; by `first_dense` where absent."""


class FlatLatent(LatentAttention, _Strict):
    """Multi-head latent attention."""


class FlatOutside(_Strict):
    """A tensor outside the blocks."""

    name: str
    parameters: Annotated[int, Field(gt=0, lt=2**62)]
    place: Literal["first", "last"] = "first"


class Flat(AttentionForm, _Strict):
    """A stack of equal blocks (after a few dense ones in some mixtures of experts), its embedding and its head."""

    name: str = "inline"
    family: str = "custom"
    aliases: Annotated[tuple[str, ...], Field(strict=False)] = ()
    n_layers: Size
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
    norm_rescales_input: bool = False
    """See `rescales_input` of :class:`memcalc.specs.block.Norm`."""
    norms: Count = 2
    norm_place: Literal["pre", "post", "branch", "both"] = "pre"
    final_norm: bool = True
    parallel: bool = False
    summed_branches: bool = False
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
    dropout: FlatDropout = FlatDropout()
    moe: FlatExperts | None = None
    """The routed part, where there is one."""
    mla: FlatLatent | None = None
    """Widths of latent attention."""
    outside: Annotated[tuple[FlatOutside, ...], Field(strict=False)] = ()
    tower: Literal["decoder", "encoder", "vision", "text"] = "decoder"
    fixed_tokens: dict[str, Size] = Field(default_factory=dict)
    hf_class: str | None = None
    hf_config: dict[str, object] = Field(default_factory=dict)
    published_parameters: Annotated[int, Field(gt=0)] | None = None
    source: Annotated[str, Field(min_length=1)] = "given by the user"
    notes: str = ""
