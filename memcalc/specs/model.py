"""A model: a list of groups of equal blocks, what stands outside them, and a head.

Nothing here says how the model is trained. Every architecture (dense, mixture of experts, latent attention,
encoder-decoder, vision tower) is a combination of the same attention and MLP kinds; no family has code of its own.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from memcalc.specs.recorded import Recording, Segment


class Frozen(BaseModel):
    """Base of the records: immutable, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


class Norm(Frozen):
    """A normalisation layer."""

    kind: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    weight: bool = True
    """False for a norm without a learned scale (OLMo 1)."""
    bias: bool = False
    scale: Literal["narrow", "wide", "plus-one"] = "narrow"
    """Where an RMSNorm multiplies by its weight: `narrow`, after the cast back to the input's width (Llama); `wide`,
    before it (OLMo 2); `plus-one`, before it and by a new tensor 1 + w (Gemma)."""

    rescales_input: bool = False
    """An RMSNorm whose fp32 statistic multiplies the input itself, not its fp32 copy (T5)."""

    @property
    def vectors(self) -> int:
        """Number of learned vectors [-]."""
        return int(self.weight) + int(self.bias)


class LatentAttention(Frozen):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434)."""

    q_lora_rank: int | None = Field(default=None, gt=0)
    kv_lora_rank: int = Field(gt=0)
    qk_nope_head_dim: int = Field(gt=0)
    qk_rope_head_dim: int = Field(gt=0)
    v_head_dim: int = Field(gt=0)
    rotation: Literal["complex", "pairs"] = "pairs"
    """How the rotary embedding is written: as complex fp32 numbers (V2), or on even and odd elements (V3)."""


class Attention(Frozen):
    """Multi-head, grouped-query or multi-query attention; `latent` makes it multi-head latent attention."""

    heads: int = Field(gt=0)
    kv_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0)
    q_bias: bool = False
    k_bias: bool = False
    v_bias: bool = False
    o_bias: bool = False
    qk_norm: Literal["none", "head", "full"] = "none"
    """`head`: one vector of head_dim for all heads; `full`: over the whole projection."""
    qk_norm_kind: Norm = Norm()
    packed_qkv: bool = False
    """q, k and v come out of one projection as views of one storage."""
    kv_form: Literal["views", "copied", "expanded", "broadcast"] = "views"
    """How keys and values leave a packed projection: as views; copied by an index, the kernel not being told that heads
    share them, so that PyTorch has the math kernel alone (Falcon 7B); copied so and expanded to all heads (Falcon 40B);
    or expanded alone, which copies nothing where one head serves all (litgpt)."""
    returns_cache: bool = False
    """Keys and values are returned for a cache even where a checkpointed block is trained (GPTBigCode until 4.48)."""
    sinks: bool = False
    """One learned logit a head (gpt-oss)."""
    causal: bool = True
    window: int | None = Field(default=None, gt=0)
    full_every: int | None = Field(default=None, gt=1)
    """With a window: each such block of a group sees the whole sequence all the same (Gemma 2: 2, Gemma 3: 6)."""
    softcap: bool = False
    """The scores pass a tanh (Gemma 2), which no fused kernel of PyTorch does."""
    rotary: bool = True
    rotary_fraction: float = Field(default=1.0, gt=0.0, le=1.0)
    """Part of a head that the rotary embedding turns."""
    rotary_joined: bool = False
    """The turned part is concatenated with the rest even where it is the whole head (Phi-3)."""
    rotary_tables: int = Field(default=1, ge=1)
    """Pairs of cosine and sine tables: one for each base of the rotary embedding (Gemma 3: 2)."""
    wide_rotary: bool = False
    """Cosine and sine are fp32 whatever the queries are (OLMo 2)."""
    scores_bias: Literal["none", "in-product", "added", "relative", "zeros"] = "none"
    """A bias of each head on the scores: ALiBi inside their product (BLOOM) or as a sum of its own (MPT); learned for
    relative positions, or zeros in its place (T5's cross attention), both of which a fused kernel takes as a mask."""
    contiguous_queries: bool = False
    """Queries are scaled and copied head by head before attention (Whisper)."""
    fused: bool = True
    """False where the model's class has materialised scores alone (BLOOM, MPT; Gemma 2, whose tanh no kernel of PyTorch
    has): the default where no kernel is asked for."""
    explicit_mask: bool = False
    """The class always builds a mask, with which PyTorch has no flash kernel (Falcon)."""
    upcast_softmax: bool = True
    """Where scores are materialised, the softmax is computed in fp32 and cast back; else in their own width (GPT-2)."""
    relative_buckets: int | None = None
    """Rows of a learned relative position bias, in the first block of a stack (T5)."""
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    latent: LatentAttention | None = None

    @model_validator(mode="after")
    def _groups(self) -> Attention:
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads must divide heads: {self.kv_heads} does not divide {self.heads}")
        return self

    @property
    def value_dim(self) -> int:
        """Width of one head's values and output [elements]."""
        return self.latent.v_head_dim if self.latent else self.head_dim

    @property
    def q_dim(self) -> int:
        """Width of all queries [elements]."""
        return self.heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        """Width of all keys (or values) [elements]."""
        return self.kv_heads * self.head_dim


class Mlp(Frozen):
    """A dense MLP: two matrices, or three where gated."""

    ffn: int = Field(gt=0)
    gated: bool = True
    bias: bool = False
    activation: str = "silu"
    """As the model writes it: `silu`, `gelu`, `gelu_tanh` (one kernel), `gelu_python` (`gelu_new`, op by op), …"""
    packed: bool = False
    """Gate and up come out of one projection as views of one storage (Phi-3, GLM)."""
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Probability of the dropout on the inner activations (T5)."""
    cast_before_down: bool = False
    """The inner activations are cast to the weight's dtype before the down projection, autocast or not (T5)."""


class MixtureOfExperts(Frozen):
    """A routed MLP."""

    experts: int = Field(gt=1)
    topk: int = Field(gt=0)
    ffn: int = Field(gt=0)
    """Width of one routed expert."""
    gated: bool = True
    activation: str = "silu"
    shared_ffn: int = Field(default=0, ge=0)
    """Width of all shared experts together; 0 for none."""
    shared_gate: bool = False
    router_bias: bool = False
    expert_bias: bool = False
    scores: Literal["softmax", "sigmoid"] = "softmax"
    fp32_router: bool = False
    """The router multiplies fp32 copies of its input and weight (DeepSeek)."""
    group_limited: bool = False
    """Experts outside the best groups are masked before the choice (DeepSeek-V2, `group_limited_greedy`)."""
    normalised: bool = False
    """The weights of the chosen experts are divided by their sum."""
    narrow_weights: bool = False
    """The weights of the chosen experts are cast to the dtype of the router's output (Qwen 3)."""
    scaled: bool = False
    """The weights of the chosen experts are multiplied by a constant (DeepSeek)."""

    @model_validator(mode="after")
    def _topk(self) -> MixtureOfExperts:
        if self.topk > self.experts:
            raise ValueError(f"topk must be at most experts: {self.topk} is above {self.experts}")
        return self


class Block(Frozen):
    """One residual block."""

    hidden: int = Field(gt=0)
    attention: Attention
    cross_attention: Attention | None = None
    cross_hidden: int | None = None
    """Width of the encoder's output that cross attention reads; `hidden` where absent."""
    mlp: Mlp | MixtureOfExperts
    norm: Norm = Norm()
    norms: int = Field(default=2, ge=0)
    """Norms of width `hidden` in the block, those of q and k left out."""
    norm_place: Literal["pre", "post", "branch", "both"] = "pre"
    """Before attention and MLP; after the residual sum (BERT); on the branch before that sum (OLMo 2); or before
    attention and MLP and on the branch (Gemma 2)."""
    parallel: bool = False
    """Attention and MLP read the same normalised input."""
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Probability of the residual dropouts."""
    summed_branches: bool = False
    """Parallel branches are added in place, and one dropout is on their sum (Falcon)."""
    recorded: Segment | None = None
    """What the block allocates, where it was recorded: then attention, MLP and norms stand for nothing."""

    @property
    def is_moe(self) -> bool:
        """Whether the MLP is routed."""
        return isinstance(self.mlp, MixtureOfExperts)


class BlockGroup(Frozen):
    """`count` equal blocks, one after another."""

    count: int = Field(gt=0)
    tower: Literal["decoder", "encoder", "vision", "text"] = "decoder"
    block: Block


class Outside(Frozen):
    """A named parameter tensor outside the blocks that is neither the token embedding nor the output head."""

    name: str
    parameters: int = Field(gt=0)
    tower: Literal["decoder", "encoder", "vision", "text"] = "decoder"
    place: Literal["first", "last"] = "first"
    """Before the blocks (positions, patches) or after them (final norm, pooler): which pipeline stage owns it."""


class Lookup(Frozen):
    """A table of which each token takes a row on the way to the first block."""

    name: str
    parameters: int = Field(gt=0)
    index: Literal["token", "row", "buffer"] = "token"
    """What holds the numbers of the rows: a tensor with one for each token, one for each position of a sequence, or a
    buffer of the model."""


class TowerEnds(Frozen):
    """What stands before and after the blocks of one tower."""

    tower: Literal["decoder", "encoder", "vision", "text"] = "decoder"
    lookups: tuple[Lookup, ...] = ()
    embedding_dim: int | None = None
    """Width of the first table where a projection to `hidden` follows it."""
    pixels: int = Field(default=0, ge=0)
    """Values of one sample's image, which a convolution cuts into patches; 0 for none."""
    patch: int = Field(default=0, ge=0)
    """Values of one patch."""
    mel_bins: int = Field(default=0, ge=0)
    """Values of one frame of a spectrogram, which two convolutions read; 0 for none."""
    scaled: bool = False
    """The embedding is multiplied by a constant (Granite, Gemma)."""
    norm: Norm | None = None
    """After the embeddings (BERT, BLOOM)."""
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    end_norm: Norm | None = None
    """The final norm of a tower that is not the last."""
    end_dropout: float = Field(default=0.0, ge=0.0, lt=1.0)


class Tail(Frozen):
    """What stands between the final norm and the loss."""

    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """After the final norm (T5)."""
    transform: str | None = None
    """The activation of a layer of width `hidden` with a norm, before the logits (BERT's masked language modelling)."""
    transform_norm: Norm = Norm(kind="layernorm", bias=True)
    pooled: bool = False
    """The head reads the first token alone (ViT)."""
    classes: int = Field(default=0, ge=0)
    """Outputs of a head that is not the vocabulary's; 0 for none."""
    wide_loss: bool = True
    """The loss is computed in fp32; else in the dtype of the logits (T5, BERT, ViT, Whisper)."""


class Model(Frozen):
    """An architecture with its sizes.

    ``groups`` are in the order of execution. The token embedding has ``vocab * embedding_dim`` parameters; the head is
    its transpose (``tied``), a matrix of its own, or absent (``head = False``).
    """

    name: str
    family: str
    aliases: tuple[str, ...] = ()
    hidden: int = Field(gt=0)
    """Width of the main tower's residual stream."""
    vocab: int = Field(ge=0)
    """Token types; 0 where there is no token embedding (vision)."""
    embedding_dim: int | None = None
    """Width of the embedding where it differs from hidden."""
    tied: bool = False
    head: bool = True
    head_bias: bool = False
    head_scaled: bool = False
    """The logits are divided by a constant (Granite)."""
    head_softcap: bool = False
    """The logits pass a tanh (Gemma 2)."""
    embedding_dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    positions: Literal["rope", "learned", "alibi", "relative", "none"] = "rope"
    max_positions: int = Field(gt=0)
    """Longest sequence the model was made for [tokens]."""
    final_norm: Norm | None = Norm()
    groups: tuple[BlockGroup, ...] = Field(min_length=1)
    outside: tuple[Outside, ...] = ()
    ends: tuple[TowerEnds, ...] = ()
    """How each tower begins and ends; a tower that is not listed looks its tokens up, and adds learned positions."""
    tail: Tail = Tail()
    fixed_tokens: dict[str, int] = Field(default_factory=dict)
    """Tokens a sample that a tower always sees, whatever the sequence length (vision: 197; Whisper's encoder: 1500)."""
    hf_class: str | None = None
    hf_config: dict[str, object] = Field(default_factory=dict)
    published_parameters: int | None = None
    """Unique parameters as counted on the real class or printed by the authors; checked by the tests, never used."""
    source: str = Field(min_length=1)
    notes: str = ""
    recording: Recording | None = None
    """Where the model was recorded: what stands before and after its blocks."""

    @property
    def num_layers(self) -> int:
        """Blocks of all groups [-]."""
        return sum(group.count for group in self.groups)

    @property
    def main(self) -> BlockGroup:
        """The group with the most parameters' worth of blocks in the main tower: what `saved.per_block` speaks of."""
        return max(self.groups, key=lambda group: group.count * group.block.hidden)

    def ends_of(self, tower: str) -> TowerEnds:
        """How a tower begins and ends."""
        listed = next((ends for ends in self.ends if ends.tower == tower), None)
        if listed is not None or not self.vocab:
            return listed or TowerEnds(lookups=())
        tokens = Lookup(name="token", parameters=self.vocab * (self.embedding_dim or self.hidden))
        learned = [tensor for tensor in self.outside if tensor.name == "positions" and tensor.tower == tower]
        positions = [Lookup(name="position", parameters=tensor.parameters, index="row") for tensor in learned]
        narrow = self.embedding_dim if self.embedding_dim != self.hidden else None
        return TowerEnds(lookups=(tokens, *positions), embedding_dim=narrow, dropout=self.embedding_dropout)

    @property
    def is_moe(self) -> bool:
        """Whether any block is routed."""
        return any(group.block.is_moe for group in self.groups)
