"""The tables inside the flat form of a model: biases, dropouts, experts, latent widths, tensors outside the blocks."""

from typing import Annotated, Literal

from pydantic import Field

from memcalc.specs.block import MOST_LAYERS, LatentAttention, RouterForm
from memcalc.specs.strict import Strict

Size = Annotated[int, Field(gt=0, lt=2**31)]
Layers = Annotated[int, Field(gt=0, le=MOST_LAYERS)]
Count = Annotated[int, Field(ge=0, lt=2**31)]
Rate = Annotated[float, Field(ge=0.0, lt=1.0)]


class FlatBias(Strict):
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


class FlatDropout(Strict):
    """Probabilities of the dropouts, by place."""

    attention: Rate = 0.0
    """On the scores."""
    block: Rate = 0.0
    """On both branches."""
    mlp: Rate = 0.0
    """Inside the MLP."""
    embedding: Rate = 0.0
    """On the embeddings."""


class FlatExperts(RouterForm, Strict):
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


class FlatLatent(LatentAttention, Strict):
    """Multi-head latent attention."""


class FlatFar(Strict):
    """Attention of the blocks that see the whole sequence, where it is not that of the others."""

    kv_heads: Size | None = None
    """Key-value heads [-]; those of the other blocks where absent."""
    head_dim: Size | None = None
    """Width of a head [elements]; that of the other blocks where absent."""
    values_of_keys: bool | None = None
    """See `values_of_keys` of :class:`memcalc.specs.block.AttentionForm`."""


class FlatOutside(Strict):
    """A tensor outside the blocks."""

    name: str
    parameters: Annotated[int, Field(gt=0, lt=2**62)]
    place: Literal["first", "last"] = "first"
