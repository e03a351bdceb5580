"""A Mamba-2 mixer in the one kernel of mamba-ssm that its class takes in training: convolution, scan, norm, projection.

Source: mamba e9594ce ``ops/triton/ssd_combined.py``, ``MambaSplitConv1dScanCombinedFn`` (what is saved, and each tensor
of both directions), with ``ssd_chunk_state.py``, ``ssd_state_passing.py``, ``ssd_chunk_scan.py``, ``ssd_bmm.py`` and
``layernorm_gated.py``; Transformers 5.24 ``models/mamba2/modeling_mamba2.py``, ``Mamba2Mixer.forward``. Sums over
parts of the heads are taken to be in one part, as they are once the card has work enough.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from memcalc.trace import ops
from memcalc.trace.delta_net import decay_rates
from memcalc.trace.layers import WIDE, BlockConfig, linear
from memcalc.trace.tape import Grads, Leaf, Size, Tape, Tensor

if TYPE_CHECKING:
    from memcalc.specs.mixers import Mamba2


class Sizes(NamedTuple):
    """Extents of the tensors of the scan."""

    projected: Size
    channels: Size
    inner: Size
    steps: Size
    """The step of each head, in the width of the input."""
    wide_steps: Size
    """The same in fp32, or the sum of decays."""
    states: Size
    """States at the chunks' ends, in fp32."""
    products: Size
    """Products of B and C within chunks, in fp32."""
    shared: Size
    """The gradient of B or of C, in fp32."""


def mamba2(tape: Tape, x: Tensor, spec: Mamba2, setting: BlockConfig, hidden: int) -> Tensor:
    """From a block's normalised input to the branch's output."""
    x = ops.plain(tape, x, "mixer's input, scaled") if spec.scaled else x
    projected = linear(tape, x, setting, "mixer's input projection", spec.projected, "2·d + 2·g·n + H")
    del x
    if spec.scaled:  # by a vector of the model, which autocast leaves as wide as the weights
        projected = ops.scaled(tape, projected, setting.weight, "mixer's projections, scaled")
    sizes = sizes_of(projected.size, spec)
    out_size = projected.size._replace(elements=hidden, width=setting.compute, label="h")
    rate = decay_rates(tape, spec.heads, setting)
    out, scanned, rstd = forward(tape, sizes, spec, out_size)
    leaves = [Leaf(name, keep=True) for name in ("mixer's filter", "mixer's output projection weight")]
    weights = Size(spec.inner * hidden, 1, "once")
    filters = Size((spec.taps + spec.conv_bias) * spec.channels + 3 * spec.heads + spec.normed * spec.inner, 1, "once")
    copied = tape.weight_copy("mixer's output projection", weights.wide(2)) if _narrows(setting) else None

    vector = rate.size

    def rule(_: Grads) -> Grads:
        grad = backward(tape, sizes, spec, out_size.width)
        if not setting.trainable:
            return [grad, None]
        decay = tape.new("gradient of decay", vector)
        products = tape.new("gradient of mixer's filter", filters, "gradient")
        return [grad, decay, products, tape.new("gradient of mixer's output projection weight", weights, "gradient")]

    saved = [projected.storage, rate.storage, scanned.storage, rstd.storage if rstd else None, copied]
    return tape.record(out, [projected, rate, *(leaves if setting.trainable else ())], rule, saved)


def _narrows(setting: BlockConfig) -> bool:
    return setting.compute != setting.weight


def sizes_of(projected: Size, spec: Mamba2) -> Sizes:
    """Extents of the tensors, of which those of a chunk are shared out to its tokens."""

    def of(elements: int, label: str, width: int = projected.width) -> Size:
        return projected._replace(elements=elements, width=width, label=label)

    return Sizes(
        projected=projected,
        channels=of(spec.channels, "d + 2·g·n"),
        inner=of(spec.inner, "d"),
        steps=of(spec.heads, "H"),
        wide_steps=of(spec.heads, "H", WIDE),
        states=of(-(-spec.inner * spec.state // spec.chunk), "d·n/chunk", WIDE),
        products=of(spec.groups * spec.chunk, "g·chunk", WIDE),
        shared=of(spec.groups * spec.state, "g·n", WIDE),
    )


def forward(tape: Tape, sizes: Sizes, spec: Mamba2, out_size: Size) -> tuple[Tensor, Tensor, Tensor | None]:
    """The output, what the scan gave, and the norm's statistics; all else is gone at the end."""
    working = [tape.new("convolution's output", sizes.channels)]
    working += [tape.new(name, sizes.wide_steps) for name in ("decays, summed up", "steps, softplus")]
    states = tape.new("states of chunks", sizes.states)
    states = tape.new("states, passed on", sizes.states.wide(sizes.inner.width))
    working += [states, tape.new("products of B and C", sizes.products)]
    gated = tape.new("scan's output, gated", sizes.inner) if not spec.normed else None
    scanned = tape.new("scan's output", sizes.inner)
    rstd = None
    if spec.normed:
        gated = tape.new("gated norm's output", sizes.inner)
        statistics = sizes.inner._replace(elements=spec.groups, width=WIDE, label="g")
        rstd = tape.new("gated norm's statistics", statistics)
    if out_size.width != sizes.inner.width:
        working.append(tape.new("scan's output, 16-bit copy", sizes.inner.wide(out_size.width)))
    out = tape.operator("mm", lambda: tape.new("mixer's output projection output", out_size))
    del working, states, gated
    return out, scanned, rstd


def backward(tape: Tape, sizes: Sizes, spec: Mamba2, width: int) -> Tensor:
    """The gradient of the projected input; the scan and its output are computed again.

    ``width`` is that of the output's gradient.
    """
    working = [tape.new("scan's output, computed again", sizes.inner)]
    working.append(tape.new("convolution's output, computed again", sizes.channels))
    grad = tape.new("gradient of mixer's input", sizes.projected)
    working.append(tape.new("gradient of convolution's output", sizes.channels))
    working.append(tape.new("gradient of mixer's output", sizes.inner.wide(width)))
    if spec.normed:
        working.append(tape.new("gradient of scan's output", sizes.inner))
    working.append(tape.new("steps, copied", sizes.steps))
    working += [tape.new(name, sizes.wide_steps) for name in ("decays, summed up", "steps, softplus")]
    working.append(tape.new("products of B and C", sizes.products))
    states = tape.new("states of chunks", sizes.states)
    states = tape.new("states, passed on", sizes.states)
    if not spec.normed:
        working.append(tape.new("gradient of scan's output", sizes.inner.wide(width)))
    wide = tape.new("gradient of states of chunks", sizes.states)
    narrow = sizes.states.wide(sizes.inner.width)
    before = tape.new("gradient of states", narrow)
    states = tape.new("states, 16-bit", narrow)
    del wide
    working += [tape.new(f"gradient of {name}", sizes.wide_steps) for name in ("steps", "decays, next")]
    working += [tape.new(f"gradient of {name}, fp32", sizes.shared) for name in ("B", "C")]
    working.append(tape.new("gradient of decays, before", sizes.wide_steps))
    working.append(tape.new("gradient of products of B and C", sizes.products))
    del working, states, before
    return grad
