"""A model: a list of groups of equal blocks, what stands outside them, and a head.

Nothing here says how the model is trained. Every architecture (dense, mixture of experts, latent attention,
encoder-decoder, vision tower) is a combination of the same attention and MLP kinds; no family has code of its own.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from memcalc.specs.block import MOST_LAYERS, Attention, Block, Norm
from memcalc.specs.mixers import Mixer
from memcalc.specs.recorded import Recording, Segment
from memcalc.specs.strict import Frozen

# How a model sees images: the rule of its processor, and what joins its tower to the text.


class Images(Frozen):
    """The rule by which an image becomes views, patches and tokens (:mod:`memcalc.formulas.images`)."""

    rule: Literal["square", "scaled", "bounded", "tiled", "split", "canvas", "unknown"]
    """`square`: one size whatever the image; `scaled`: its own proportions between two areas (Qwen); `bounded`: its own
    size up to a longest side (Pixtral); `tiled`: the grid of tiles nearest to its proportions (InternVL); `split`:
    tiles of the image scaled to a longest side (Idefics 3); `canvas`: tiles of the canvas that distorts and scales it
    least (Llama 4); `unknown`: the processor's rule is not modelled."""
    patch: int = Field(gt=0)
    """Side of a patch [px]."""
    merge: int = Field(default=1, gt=0)
    """Patches along a side that become one token [-]."""
    side: int = Field(default=0, ge=0)
    """Side of a square view or a tile [px]."""
    class_tokens: int = Field(default=0, ge=0)
    """Rows of the tower beside the patches of a view [-]."""
    least_pixels: int = Field(default=0, ge=0)
    """Area up to which smaller images grow [px]."""
    most_pixels: int = Field(default=0, ge=0)
    """Area down to which larger ones shrink [px]."""
    longest: int = Field(default=0, ge=0)
    """The longest side [px]."""
    most_tiles: int = Field(default=0, ge=0)
    """Most tiles of one image, the thumbnail left out [-]."""

    @property
    def depends_on_size(self) -> bool:
        """Whether images of another size come to another number of tokens."""
        return self.rule != "square"


class Projector(Frozen):
    """From the rows of a vision tower to tokens of the text."""

    merge: int = Field(default=1, gt=0)
    """Rows side by side that become one [-]."""
    pool: int = Field(default=1, gt=0)
    """Rows of which one is the mean (Gemma 3) [-]."""
    copied: bool = False
    """Merging copies (pixel shuffle), where it is no view."""
    norm: Norm | None = None
    """Before its first linear layer."""
    norm_merged: bool = False
    """That norm is over the merged rows; else over each."""
    linears: tuple[int, ...] = Field(min_length=1)
    """Outputs of its linear layers [elements]."""
    activation: str | None = None
    """Before the last of them."""
    activated: bool = False
    """It stands before each but the first (Llama 4)."""
    deep: int = Field(default=0, ge=0)
    """Further ones of its kind, which read the output of earlier blocks (Qwen3-VL's DeepStack)."""
    early: bool = False
    """It reads what is the input of the last block as well (LLaVA)."""


Tower = Literal["decoder", "encoder", "vision", "text"]
"""A stack of blocks that passes its hidden states from one to the next."""


class BlockGroup(Frozen):
    """Equal blocks of a tower: one after another, or where the model's ``order`` puts them."""

    count: int = Field(gt=0, le=MOST_LAYERS)
    """Blocks of this kind in the model [-]."""
    tower: Tower = "decoder"
    """The stack of blocks that they belong to."""
    block: Block
    """What each of them is."""


class Pattern(Frozen):
    """Blocks of several groups in turn, over and over: local and global attention, dense and routed MLPs."""

    count: int = Field(default=1, gt=0, le=MOST_LAYERS)
    """How often the pattern is repeated [-]."""
    runs: tuple[tuple[int, Annotated[int, Field(gt=0, le=MOST_LAYERS)]], ...] = Field(min_length=1)
    """For each run of equal blocks the index of their group, counted from 0, and how many they are [-]."""


class Outside(Frozen):
    """A named parameter tensor outside the blocks that is neither the token embedding nor the output head."""

    name: str
    """What it is, such as positions."""
    parameters: int = Field(gt=0)
    """Its elements [-]."""
    tower: Tower = "decoder"
    """The tower that it belongs to."""
    place: Literal["first", "last"] = "first"
    """Before the blocks (positions, patches) or after them (final norm, pooler): which pipeline stage owns it."""


class Lookup(Frozen):
    """A table of which each token takes a row on the way to the first block."""

    name: str
    """What is looked up, such as token."""
    parameters: int = Field(gt=0)
    """Elements of the table [-]."""
    index: Literal["token", "row", "buffer"] = "token"
    """What holds the numbers of the rows: a tensor with one for each token, one for each position of a sequence, or a
    buffer of the model."""


class TowerEnds(Frozen):
    """What stands before and after the blocks of one tower."""

    tower: Tower = "decoder"
    """Which tower."""
    lookups: tuple[Lookup, ...] = ()
    """Tables that the way to the first block reads."""
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
    """Probability of the dropout on the embeddings."""
    end_norm: Norm | None = None
    """The final norm of a tower that is not the last."""
    end_dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Probability of the dropout after the final norm."""
    position_taps: int = Field(default=0, ge=0)
    """Rows of a table of positions that each patch takes by their numbers: 1, or 4 with weights (Qwen3-VL)."""
    projector: Projector | None = None
    """What makes tokens of the text of the tower's rows."""


class Tail(Frozen):
    """What stands between the final norm and the loss."""

    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """After the final norm (T5)."""
    transform: str | None = None
    """The activation of a layer of width `hidden` with a norm, before the logits (BERT's masked language modelling)."""
    transform_norm: Norm = Norm(kind="layernorm", bias=True)
    """That layer's norm."""
    pooled: bool = False
    """The head reads the first token alone (ViT)."""
    classes: int = Field(default=0, ge=0)
    """Outputs of a head that is not the vocabulary's; 0 for none."""
    wide_logits: bool = False
    """The model casts its logits to fp32, so that the 16-bit ones are gone before the loss (Mamba)."""
    wide_loss: bool = True
    """The loss is computed in fp32; else in the dtype of the logits (T5, BERT, ViT, Whisper)."""
    narrow_before_446: bool = False
    """Its class in Transformers computed the loss in the dtype of the logits until 4.45 (GPT-2, GPT-NeoX, OPT)."""


class Model(Frozen):
    """An architecture with its sizes.

    The token embedding has ``vocab * embedding_dim`` parameters; the head is
    its transpose (``tied``), a matrix of its own, or absent (``head = False``).
    """

    name: str
    """What it is called."""
    family: str
    """The kind of model, by which presets are listed."""
    aliases: tuple[str, ...] = ()
    """Other names."""
    hidden: int = Field(gt=0)
    """Width of the main tower's residual stream."""
    vocab: int = Field(ge=0)
    """Token types; 0 where there is no token embedding (vision)."""
    embedding_dim: int | None = None
    """Width of the embedding where it differs from hidden."""
    tied: bool = False
    """The head is the token embedding's transpose."""
    head: bool = True
    """There is an output head."""
    head_bias: bool = False
    """The head has a bias."""
    head_scaled: bool = False
    """The logits are divided by a constant (Granite)."""
    head_softcap: bool = False
    """The logits pass a tanh (Gemma 2)."""
    embedding_dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Probability of the dropout on the embeddings."""
    positions: Literal["rope", "learned", "alibi", "relative", "none"] = "rope"
    """How tokens know their place."""
    max_positions: int = Field(gt=0)
    """Longest sequence the model was made for [tokens]."""
    final_norm: Norm | None = Norm()
    """After the last block; `false` for none."""
    groups: tuple[BlockGroup, ...] = Field(min_length=1)
    """Its blocks by kind."""
    order: tuple[Pattern, ...] = ()
    """Where the blocks of each group stand; where empty, those of one group follow those of the one before it."""
    outside: tuple[Outside, ...] = ()
    """Tensors outside the blocks."""
    ends: tuple[TowerEnds, ...] = ()
    """How each tower begins and ends; a tower that is not listed looks its tokens up, and adds learned positions."""
    tail: Tail = Tail()
    """Between final norm and loss."""
    fixed_tokens: dict[str, int] = Field(default_factory=dict)
    """Tokens a sample that a tower always sees, whatever the sequence length (vision: 197; Whisper's encoder: 1500)."""
    images: Images | None = None
    """How it sees images, where it has a tower for them beside its text model."""
    views: int = Field(default=1, gt=0)
    """Views that the vision tower sees of a sample: images, or their tiles [-]."""
    image_tokens: int = Field(default=0, ge=0)
    """Places that a sample's images take in its text [tokens]."""
    hf_class: str | None = None
    """Its class in Transformers."""
    hf_config: dict[str, object] = Field(default_factory=dict)
    """What that class is built from."""
    published_parameters: int | None = None
    """Unique parameters as counted on the real class or printed by the authors; checked by the tests, never used."""
    source: str = Field(min_length=1)
    """Where the sizes were read."""
    notes: str = ""
    """What else to know."""
    recording: Recording | None = None
    """Where the model was recorded: what stands before and after its blocks."""

    @field_validator("final_norm", mode="before")
    @classmethod
    def _no_norm(cls, value: object) -> object:
        return None if value is False else value

    @model_validator(mode="after")
    def _order(self) -> Self:
        if self.num_layers > MOST_LAYERS:
            raise ValueError(f"a model has at most {MOST_LAYERS:,} blocks, not {self.num_layers:,}")
        if self.order:
            if sum(part.count * sum(n for _, n in part.runs) for part in self.order) != self.num_layers:
                raise ValueError("order must name each block of each group once")
            listed = self.sequence
            counts = [listed.count(index) for index in range(len(self.groups))]
            if counts != [group.count for group in self.groups]:
                raise ValueError("order must name each block of each group once")
            towers = [tower for tower, _ in groupby(listed, key=lambda index: self.groups[index].tower)]
            if len(towers) != len(set(towers)):
                raise ValueError("order must not mix blocks of several towers")
        return self

    @property
    def sequence(self) -> tuple[int, ...]:
        """The index of each block's group, from the first block to the last."""
        if not self.order:
            return tuple(index for index, group in enumerate(self.groups) for _ in range(group.count))
        return tuple(
            index for part in self.order for _ in range(part.count) for index, n in part.runs for _ in range(n)
        )

    @property
    def num_layers(self) -> int:
        """Blocks of all groups [-]."""
        return sum(group.count for group in self.groups)

    @property
    def main(self) -> BlockGroup:
        """The group with the most parameters' worth of blocks in the main tower: what `saved.per_block` speaks of."""
        return max(self.groups, key=lambda group: group.count * group.block.hidden)

    @property
    def fixed_length(self) -> int | None:
        """Tokens of every sample, where the last tower is fed no text: None where a sequence may have any length."""
        return self.fixed_tokens.get(self.groups[-1].tower)

    @property
    def recorded_blocks(self) -> tuple[Segment, ...]:
        """What was recorded of each group's blocks."""
        return tuple(group.block.recorded for group in self.groups if group.block.recorded is not None)

    @property
    def attentions(self) -> tuple[Attention, ...]:
        """The attention of each group that has one, in the order of the groups."""
        return tuple(group.block.attention for group in self.groups if group.block.attention is not None)

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        """What stands in attention's place in each group that has none."""
        return tuple(group.block.mixer for group in self.groups if group.block.mixer is not None)

    @property
    def mixer_kinds(self) -> tuple[str, ...]:
        """What its mixers are, in the plural, each kind once: `Mamba-2 mixers`."""
        return tuple(dict.fromkeys(f"{mixer.kind}s" for mixer in self.mixers))

    @property
    def wide_residual(self) -> bool:
        """Whether the residual stream is fp32 whatever the weights are."""
        return any(group.block.wide_residual for group in self.groups)

    @property
    def counted_parts(self) -> tuple[str, ...]:
        """What of it is counted and not modelled, each part once."""
        parts = [group.block.counted.part for group in self.groups if group.block.counted is not None]
        return tuple(dict.fromkeys(parts))

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
    def architecture(self) -> str:
        """Its class in Transformers without the ending, or its ``model_type``; lower case, without underscores."""
        named = self.hf_class or self.family
        endings = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
        return next((named.removesuffix(e) for e in endings if named.endswith(e)), named).replace("_", "").lower()

    @property
    def runs_every_expert(self) -> bool:
        """Whether the experts of some block each run over every token."""
        return any(getattr(group.block.mlp, "every_expert", False) for group in self.groups)

    @property
    def unlisted_experts(self) -> str:
        """What experts of no class with linear layers are, in the plural; empty where there are none."""
        if self.runs_every_expert:
            return "experts that run over every token"
        beside = any(getattr(group.block.mlp, "own_norms", False) for group in self.groups)
        return "experts beside a dense MLP" if beside else ""

    @property
    def is_moe(self) -> bool:
        """Whether any block is routed."""
        return any(group.block.is_moe for group in self.groups)


def patterns(sequence: Sequence[int]) -> tuple[Pattern, ...]:
    """The order of blocks as the shortest pattern that repeats, and what is left of it at the end.

    >>> [(part.count, part.runs) for part in patterns([0, 0, 1, 0, 0, 1, 0])]
    [(2, ((0, 2), (1, 1))), (1, ((0, 1),))]
    """
    total = len(sequence)
    length = next(n for n in range(1, total + 1) if all(sequence[i] == sequence[i + n] for i in range(total - n)))
    times, rest = divmod(total, length)
    listed = [Pattern(count=times, runs=_runs(sequence[:length]))]
    return tuple([*listed, Pattern(runs=_runs(sequence[-rest:]))] if rest else listed)


def _runs(sequence: Sequence[int]) -> tuple[tuple[int, int], ...]:
    return tuple((index, len(list(run))) for index, run in groupby(sequence))
