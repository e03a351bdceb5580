"""What mixes the tokens of a block in attention's place: short convolutions, recurrences with a state."""

from typing import Annotated, Literal

from pydantic import Field

from memcalc.specs.strict import Frozen

Size = Annotated[int, Field(gt=0, lt=2**31)]
Taps = Annotated[int, Field(gt=0, le=256)]


class ShortConvolution(Frozen):
    """A gated convolution along the sequence (LFM2, arXiv:2511.23404)."""

    kind: Literal["short convolution"]
    """What it is."""
    taps: Taps
    """Tokens that one output sees, its own and those before it [-]."""
    bias: bool = False
    """Its convolution and both projections have biases."""


class GatedDeltaNet(Frozen):
    """A linear recurrence that decays and corrects a state of each head (arXiv:2412.06464)."""

    kind: Literal["gated delta net"]
    """What it is."""
    key_heads: Size
    """Heads of queries and of keys [-]."""
    value_heads: Size
    """Heads of values, each with a state and a gate [-]."""
    key_dim: Size
    """Width of one head's query and key [elements]."""
    value_dim: Size
    """Width of one head's value and output [elements]."""
    taps: Taps
    """Length of the convolution on queries, keys and values [tokens]."""
    packed: bool = False
    """Its inputs come out of two projections, heads side by side, and are copied apart (Qwen3-Next); else of four."""

    apart: bool = False
    """Queries, keys and values have a projection each, and the gate's follows the recurrence (OLMo Hybrid)."""
    doubled: bool = False
    """Rates are doubled, so that a state can change its sign."""

    @property
    def keys(self) -> int:
        """Width of all keys [elements]."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Width of all values [elements]."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution [-]."""
        return 2 * self.keys + self.values


class Mamba2(Frozen):
    """A selective state space with a scalar decay for each head (Mamba-2, arXiv:2405.21060)."""

    kind: Literal["Mamba-2 mixer"]
    """What it is."""
    heads: Size
    """Heads, each with a step and a decay [-]."""
    head_dim: Size
    """Width of one head [elements]."""
    state: Size
    """Width of the state of each of its channels [elements]."""
    groups: Size = 1
    """Groups of heads that share B and C [-]."""
    taps: Taps
    """Length of the convolution [tokens]."""
    chunk: Size = 256
    """Tokens of one chunk of the scan."""
    conv_bias: bool = True
    """The convolution has a bias."""
    bias: bool = False
    """Both projections have one."""
    normed: bool = True
    """A gated RMSNorm follows the scan, inside of its kernel; else the gate alone (Falcon-H1)."""
    scaled: bool = False
    """Its input, what is projected and its output are multiplied by constants, and so are those of attention beside it
    (Falcon-H1)."""

    @property
    def inner(self) -> int:
        """Width of all heads [elements]."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: heads, B and C [-]."""
        return self.inner + 2 * self.groups * self.state

    @property
    def projected(self) -> int:
        """Outputs of the input projection: gate, channels and steps [elements]."""
        return self.inner + self.channels + self.heads


class Mamba(Frozen):
    """A selective state space with a decay for each channel and place of its state (Mamba, arXiv:2312.00752)."""

    kind: Literal["Mamba mixer"]
    """What it is."""
    inner: Size
    """Channels, each with a state [-]."""
    state: Size
    """Width of the state of each channel [elements]."""
    rank: Size
    """Width of what the steps of all channels are projected from [elements]."""
    taps: Taps
    """Length of the convolution [tokens]."""
    conv_bias: bool = True
    """The convolution has a bias."""
    bias: bool = False
    """The projections of its input and of its output have one."""
    norms: Literal["none", "weightless", "learned"] = "none"
    """Norms on the steps, B and C: `weightless`, inside of the kernel that runs all of the mixer (Falcon-Mamba); or
    `learned`, for which the class runs convolution, projections and scan one by one (Jamba)."""

    @property
    def selected(self) -> int:
        """Outputs of the projection that steps, B and C are made from [elements]."""
        return self.rank + 2 * self.state


class DeltaAttention(Frozen):
    """A delta rule whose states decay channel by channel (Kimi Linear, arXiv:2510.26692)."""

    kind: Literal["delta attention"]
    """What it is."""
    heads: Size
    """Heads, each with a state [-]."""
    head_dim: Size
    """Width of one head's query, key and value, and of what decays and gates are projected through [elements]."""
    taps: Taps
    """Length of the convolution on queries, keys and values [tokens]."""

    @property
    def inner(self) -> int:
        """Width of all heads [elements]."""
        return self.heads * self.head_dim


Mixer = ShortConvolution | GatedDeltaNet | Mamba2 | Mamba | DeltaAttention
Told = Annotated[
    Annotated[ShortConvolution, Field(strict=False)]
    | Annotated[GatedDeltaNet, Field(strict=False)]
    | Annotated[Mamba2, Field(strict=False)]
    | Annotated[Mamba, Field(strict=False)]
    | Annotated[DeltaAttention, Field(strict=False)],
    Field(discriminator="kind"),
]
"""A mixer as a field of a model, of which ``kind`` says what it is."""
