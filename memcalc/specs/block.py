"""One block of a model: attention, MLP and norms, each as its class runs them."""

from typing import Literal, Self

from pydantic import Field, model_validator

from memcalc.specs.mixers import Told
from memcalc.specs.recorded import Segment
from memcalc.specs.strict import Frozen

MOST_LAYERS = 4096
"""Blocks of a model at the most [-]: four times the deepest published Transformer (DeepNet, arXiv 2203.00555)."""


class Norm(Frozen):
    """A normalisation layer."""

    kind: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    """RMSNorm or LayerNorm."""
    weight: bool = True
    """False for a norm without a learned scale (OLMo 1)."""
    bias: bool = False
    """A learned shift."""
    scale: Literal["narrow", "wide", "plus-one"] = "narrow"
    """Where an RMSNorm multiplies by its weight: `narrow`, after the cast back to the input's width (Llama); `wide`,
    before it (OLMo 2); `plus-one`, before it and by a new tensor 1 + w (Gemma). A LayerNorm that is `wide` runs on an
    fp32 copy (OLMo 1), and one that is `plus-one` has such a tensor too (Nemotron)."""
    written_out: bool = False
    """A LayerNorm op by op in fp32, as the class writes it (Cohere); an RMSNorm that multiplies by an fp32 copy of its
    weight (Nemotron-H)."""

    powered: bool = False
    """An RMSNorm whose root is a power of the mean, which is saved beside it (Gemma 4)."""
    rescales_input: bool = False
    """An RMSNorm whose fp32 statistic multiplies the input itself, not its fp32 copy (T5)."""

    @property
    def vectors(self) -> int:
        """Number of learned vectors [-]."""
        return int(self.weight) + int(self.bias)


class LatentAttention(Frozen):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434)."""

    q_lora_rank: int | None = Field(default=None, gt=0, lt=2**31)
    """Width of the compressed queries [elements]; absent where they are not compressed."""
    kv_lora_rank: int = Field(gt=0, lt=2**31)
    """Width of the compressed keys and values [elements]."""
    qk_nope_head_dim: int = Field(gt=0, lt=2**31)
    """Part of a head's query and key without the rotary embedding [elements]."""
    qk_rope_head_dim: int = Field(gt=0, lt=2**31)
    """Part of it with the rotary embedding [elements]."""
    v_head_dim: int = Field(gt=0, lt=2**31)
    """Width of a head's value [elements]."""
    rotation: Literal["complex", "pairs"] = "pairs"
    """How the rotary embedding is written: as complex fp32 numbers (V2), or on even and odd elements (V3)."""


class AttentionForm(Frozen):
    """How attention is written, whatever its sizes."""

    qk_norm: Literal["none", "head", "full"] = "none"
    """`head`: one vector of head_dim for all heads; `full`: over the whole projection."""
    packed_qkv: bool = False
    """q, k and v come out of one projection as views of one storage."""
    kv_form: Literal["views", "copied", "expanded", "broadcast"] = "views"
    """How keys and values leave a packed projection: as views; copied by an index, the kernel not being told that heads
    share them, so that PyTorch has the math kernel alone (Falcon 7B); copied so and expanded to all heads (Falcon 40B);
    or expanded alone, which copies nothing where one head serves all (litgpt)."""
    returns_cache: bool = False
    """Keys and values are returned for a cache even where a checkpointed block is trained (GPTBigCode until 4.48)."""
    returns_weights: bool = False
    """Blocks return materialised weights, to which their caller refers while the next one runs (BLOOM, Falcon)."""
    sinks: bool = False
    """One learned logit a head (gpt-oss)."""
    causal: bool = True
    """A token sees those before it alone."""
    window: int | None = Field(default=None, gt=0, lt=2**31)
    """Tokens that a token sees, itself and those before it; None for the whole sequence."""
    chunked: bool = False
    """The sequence is cut into parts as long as the window; a token sees those before it in its own part (Llama 4)."""
    softcap: bool = False
    """The scores pass a tanh (Gemma 2), which no fused kernel of PyTorch does."""
    rotary_fraction: float = Field(default=1.0, gt=0.0, le=1.0)
    """Part of a head that the rotary embedding turns."""
    rotary_joined: bool = False
    """The turned part is concatenated with the rest even where it is the whole head (Phi-3)."""
    rotary_tables: int = Field(default=1, ge=0, lt=2**31)
    """Pairs of cosine and sine tables: one for each base of the rotary embedding (Gemma 3: 2); a buffer is none."""
    half_rotary: bool = False
    """Cosine and sine are as wide as the half of a head (gpt-oss)."""
    rotary_pairs: int = Field(default=0, ge=0, lt=2**31)
    """Pairs of cosine and sine tables that each block makes anew, its elements in pairs (GLM: 1, GPT-J: 2)."""
    complex_rotary: bool = False
    """Queries and keys are turned together, as complex fp32 numbers, and cast back (Llama 4)."""
    scaled_queries: bool = False
    """Queries are multiplied by an fp32 number for each place, and cast back (Llama 4)."""
    outlives_sum: bool = False
    """Its output is a variable of the block, which holds it after the residual sum until the block ends (Llama 4)."""
    wider_tables: int = Field(default=0, ge=0, lt=2**31)
    """Width of a further pair of cosine and sine tables, for blocks whose heads are wider (Gemma 4) [elements]."""
    rotary_by_token: bool = False
    """Queries and keys are turned before heads and tokens change places, and stay in the order of tokens (GPT-J)."""
    late_qk_norm: bool = False
    """The norms of q and k follow the rotary embedding (Hunyuan), and read what it is as wide as (autocast: fp32)."""
    values_of_keys: bool = False
    """Values are what the projection of keys gives, before the norm and the turn of keys (Gemma 4)."""
    value_norm: bool = False
    """Values pass the norm of keys without its weight; queries are done before keys are projected (Gemma 4)."""
    shares_keys: bool = False
    """Its keys and values stand in a table of the model, to which checkpointed blocks refer (Gemma 4)."""
    wide_rotary: bool = False
    """Cosine and sine are fp32 whatever the queries are (OLMo 2)."""
    scores_bias: Literal["none", "in-product", "added", "relative", "zeros"] = "none"
    """A bias of each head on the scores: ALiBi inside their product (BLOOM) or as a sum of its own (MPT); learned for
    relative positions, or zeros in its place (T5's cross attention), both of which a fused kernel takes as a mask."""
    output_gate: bool = False
    """The output is multiplied by the sigmoid of a second half of the query projection (Qwen3-Next)."""
    head_gate: bool = False
    """The output of each head is multiplied by the sigmoid of a projection of the input (LFM3)."""
    contiguous_queries: bool = False
    """Queries are scaled and copied head by head before attention (Whisper)."""
    fused: bool = True
    """False where the model's class has materialised scores alone (BLOOM, MPT): the default where no kernel is asked
    for."""
    sdpa: bool = True
    """False where Transformers has no kernel of PyTorch for the class, but others (``_supports_sdpa`` of Gemma 2, whose
    tanh, and of gpt-oss, whose sinks none of them has): materialised scores are the default then too."""
    explicit_mask: bool = False
    """The class always builds a mask, with which PyTorch has no flash kernel (Falcon)."""
    wide_scores: bool = False
    """Where scores are materialised, queries and keys are cast to fp32 before their product (GPT-Neo)."""
    joins_images: bool = False
    """Attention runs image by image, and its outputs are concatenated even where there is one (Qwen2-VL's tower)."""
    joins_batch: bool = False
    """All images of a micro-batch stand in one sequence, and one mask keeps them apart in all blocks (Pixtral)."""
    chunk: int | None = Field(default=None, gt=0, lt=2**31)
    """Tokens of a square of the image, which see one another alone (Qwen2.5-VL's tower)."""
    upcast_softmax: bool = True
    """Where scores are materialised, the softmax is computed in fp32 and cast back; else in their own width (GPT-2)."""


class Attention(AttentionForm):
    """Multi-head, grouped-query or multi-query attention; `latent` makes it multi-head latent attention."""

    heads: int = Field(gt=0)
    """Query heads [-]."""
    kv_heads: int = Field(gt=0)
    """Key-value heads [-]."""
    head_dim: int = Field(gt=0)
    """Width of one head's query and key [elements]."""
    q_bias: bool = False
    """The projection of queries has a bias."""
    k_bias: bool = False
    """That of keys."""
    v_bias: bool = False
    """That of values."""
    o_bias: bool = False
    """The output projection has a bias."""
    qk_norm_kind: Norm = Norm()
    """Of what kind the norms on q and k are."""
    rotary: bool = True
    """Queries and keys are turned by their position."""
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Probability of the dropout on the scores."""
    latent: LatentAttention | None = None
    """Its widths, where attention is latent."""

    @model_validator(mode="after")
    def _groups(self) -> Self:
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
    """Inner width [elements]."""
    gated: bool = True
    """Three matrices: a gate beside up and down."""
    bias: bool = False
    """Its matrices have biases."""
    activation: str = "silu"
    """As the model writes it: `silu`, `gelu`, `gelu_tanh` (one kernel), `gelu_python` (`gelu_new`, op by op), …"""
    packed: bool = False
    """Gate and up come out of one projection as views of one storage (Phi-3, GLM)."""
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Probability of the dropout on the inner activations (T5)."""
    cast_before_down: bool = False
    """The inner activations are cast to the weight's dtype before the down projection, autocast or not (T5)."""


class RouterForm(Frozen):
    """How tokens find their experts, and what stands beside them."""

    shared_gate: bool = False
    """A gate scales the shared experts' output (Qwen 2)."""
    shared_packed: bool = False
    """Gate and up of the shared experts come out of one projection (Granite)."""
    every_expert: bool = False
    """Each expert runs over every token, its input multiplied by the router's score, which is 0 where it is not
    chosen: batched products of all experts (Llama 4)."""
    own_norms: bool = False
    """The shared experts are the dense MLP of the block; the router and the routed ones read the residual stream, each
    through a norm, and both outputs are normalised before their sum. The router's input is multiplied by a learned
    vector, the weights of the chosen experts by a learned number of each (Gemma 4)."""
    router_bias: bool = False
    """The router has a bias."""
    expert_bias: bool = False
    """Experts have biases (gpt-oss)."""
    scores: Literal["softmax", "sigmoid", "chosen"] = "softmax"
    """What the router makes of its logits: a softmax or sigmoid of all, or a softmax of the chosen ones (gpt-oss)."""
    fp32_router: bool = False
    """The router multiplies fp32 copies of its input and weight (DeepSeek)."""
    group_limited: bool = False
    """Experts outside the best groups are masked before the choice (DeepSeek-V2, `group_limited_greedy`)."""
    n_group: int = Field(default=1, gt=0, le=256)
    """Equal groups that the experts form in their order [-]."""
    topk_group: int = Field(default=1, gt=0, le=256)
    """Groups that the experts of one token are of at the most [-]; as many as there are for no limit."""
    normalised: bool = False
    """The weights of the chosen experts are divided by their sum."""
    narrow_weights: bool = False
    """The weights of the chosen experts are cast to the dtype of the router's output (Qwen 3)."""
    scaled: bool = False
    """The weights of the chosen experts are multiplied by a constant (DeepSeek)."""


class MixtureOfExperts(RouterForm):
    """A routed MLP."""

    experts: int = Field(gt=1)
    """Routed experts [-]."""
    topk: int = Field(gt=0)
    """Experts that a token goes to [-]."""
    ffn: int = Field(gt=0)
    """Width of one routed expert."""
    gated: bool = True
    """Each expert has a gate beside up and down."""
    activation: str = "silu"
    """As in :class:`Mlp`."""
    shared_ffn: int = Field(default=0, ge=0)
    """Width of all shared experts together; 0 for none."""

    @property
    def unlisted(self) -> bool:
        """Whether no class has had its experts as linear layers, which are what PEFT and quantisation know."""
        return self.every_expert or self.own_norms

    @model_validator(mode="after")
    def _topk(self) -> Self:
        if self.topk > self.experts:
            raise ValueError(f"topk must be at most experts: {self.topk} is above {self.experts}")
        if self.experts % self.n_group:
            raise ValueError(f"n_group must divide experts: {self.n_group} does not divide {self.experts}")
        if self.topk_group > self.n_group:
            raise ValueError(f"topk_group must be at most n_group: {self.topk_group} is above {self.n_group}")
        return self


class Counted(Frozen):
    """A block of which the parameters are known, and not what it keeps for backward: no estimate is made of it."""

    part: str = Field(min_length=1)
    """What of it is not modelled, as a sentence names it: `Mamba-2 mixers`."""
    parameters: int = Field(gt=0)
    """All that it has [elements]."""
    idle: int = Field(default=0, ge=0)
    """Of these, what one token does not pass: the experts that are not chosen [elements]."""


class Block(Frozen):
    """One residual block."""

    hidden: int = Field(gt=0)
    """Width of the residual stream [elements]."""
    attention: Attention | None = None
    """Of the block's own tokens; absent where `mixer` stands in its place, or where the block is an MLP alone."""
    mixer: Told | None = None
    """What mixes tokens in attention's place, or beside it on the same input, both added up."""
    cross_attention: Attention | None = None
    """Of the encoder's output, where there is any."""
    cross_hidden: int | None = None
    """Width of the encoder's output that cross attention reads; `hidden` where absent."""
    mlp: Mlp | MixtureOfExperts | None = None
    """Dense or routed; absent where the block is a mixer alone."""
    norm: Norm = Norm()
    """The kind of its norms."""
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
    weight_views: bool = False
    """Linear layers multiply by a view of their weight, of which autocast's cache keeps no copy (Falcon)."""
    wide_residual: bool = False
    """The residual stream is fp32 whatever the weights are, and cast for the norm (Mamba's `residual_in_fp32`)."""
    scaled: bool = False
    """Its output is multiplied, in place, by a number of its own that is not trained (Gemma 4)."""
    layer_scale: bool = False
    """Each branch is multiplied by a learned vector before its residual sum (InternVL's tower)."""
    recorded: Segment | None = None
    """What the block allocates, where it was recorded: then it has neither attention nor MLP."""
    counted: Counted | None = None
    """How many parameters it has, where that alone is known: then it has neither attention nor MLP."""

    @property
    def own_attention(self) -> Attention:
        """The attention of a block that is known to have one.

        Raises
        ------
        ValueError : it has none

        """
        if self.attention is None:
            raise ValueError("the block has no attention")
        return self.attention

    @property
    def shares_keys(self) -> bool:
        """Whether its keys and values stand in a table of the model."""
        return self.attention is not None and self.attention.shares_keys

    @property
    def own_mlp(self) -> Mlp:
        """The dense MLP of a block that is known to have one.

        Raises
        ------
        TypeError : it has none, or experts

        """
        if not isinstance(self.mlp, Mlp):
            raise TypeError("the block has no dense MLP")
        return self.mlp

    @property
    def is_moe(self) -> bool:
        """Whether the MLP is routed."""
        return isinstance(self.mlp, MixtureOfExperts)


def bare_block(hidden: int = 1, *, recorded: Segment | None = None, counted: Counted | None = None) -> Block:
    """Return a block of which a recording, or a count, is all."""
    return Block(hidden=hidden, norms=0, recorded=recorded, counted=counted)
