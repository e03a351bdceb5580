"""Mamba mixers with the kernels of mamba-ssm and causal-conv1d, which their classes take where they are.

Source: mamba e9594ce ``ops/selective_scan_interface.py``, ``MambaInnerFn`` and ``SelectiveScanFn`` (what is saved, and
each tensor of both directions), with ``csrc/selective_scan/selective_scan.cpp``; causal-conv1d 0d2252d
``cpp_functions.py`` and ``csrc/causal_conv1d.cpp``; Transformers 5.24 ``models/mamba/modeling_mamba.py``,
``MambaMixer.forward``, and ``models/jamba/modeling_jamba.py``, ``JambaMambaMixer.forward``.

The kernels want the channels before the tokens. Where rows of several sequences are put side by side for a product,
they are copied; those of one sequence are a view.

Mamba-2 has one kernel of mamba-ssm in training: convolution, scan, norm, projection.

Source: mamba e9594ce ``ops/triton/ssd_combined.py``, ``MambaSplitConv1dScanCombinedFn`` (what is saved, and each tensor
of both directions), with ``ssd_chunk_state.py``, ``ssd_state_passing.py``, ``ssd_chunk_scan.py``, ``ssd_bmm.py`` and
``layernorm_gated.py``; Transformers 5.24 ``models/mamba2/modeling_mamba2.py``, ``Mamba2Mixer.forward``. Sums over
parts of the heads are taken to be in one part, as they are once the card has work enough.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from memcalc.specs.block import Norm
from memcalc.trace import ops
from memcalc.trace.delta_net import convolution, decay_rates
from memcalc.trace.layers import WIDE, BlockConfig, linear, norm
from memcalc.trace.tape import Edge, Grads, Leaf, Shard, Size, Tape, Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from memcalc.specs.mixers import Mamba, Mamba2


BATCHED: Shard = "tp if batched"
IN, SELECTION, STEP, OUT = (
    f"mixer's {name} projection" for name in ("input", "selection", "step", "output")
)  # fmt: skip


class Sizes(NamedTuple):
    """Extents of the tensors between the projections."""

    both: Size
    """The channels and their gates."""
    inner: Size
    """A value of each channel."""
    selected: Size
    """What steps, B and C are made from."""
    shared: Size
    """B or C."""
    states: Size
    """States at the ends of chunks of the scan, with the decays up to there, in fp32."""
    matrix: Size
    """The decay of each channel and place, in fp32."""
    vector: Size
    """A weight of each channel, in fp32."""


def mamba(tape: Tape, x: Tensor, spec: Mamba, setting: BlockConfig, hidden: int) -> Tensor:
    """From a block's normalised input to the branch's output."""
    projected = linear(tape, x, setting, IN, 2 * spec.inner, "2·d")
    del x
    projected = turned(tape, projected, "mixer's input")
    sizes = sizes_of(projected.size, spec)
    rate = decay_rates(tape, spec.inner * spec.state, setting, "d·n")
    if spec.norms == "learned":
        return step_by_step(tape, [projected, rate], sizes, spec, setting, hidden)
    vectors = wide_vectors(tape, sizes, setting)
    return fused_mixer(tape, [projected, rate, *vectors], sizes, spec, setting, hidden)


def turned(tape: Tape, x: Tensor, name: str) -> Tensor:
    """A view with the channels first; to a product, rows of several sequences go back as a copy of its gradient."""
    size = x.size

    def rule(grads: Grads) -> Grads:
        rows = tape.new(f"gradient of {name}, as rows", size._replace(shard=BATCHED))
        del rows
        return [grads.pop()]

    return tape.record(Tensor(x.storage, size), [x], rule)


def sizes_of(projected: Size, spec: Mamba) -> Sizes:
    """Extents of the tensors, by that of the projected input."""

    def of(elements: int, label: str) -> Size:
        return projected._replace(elements=elements, label=label)

    return Sizes(
        both=projected,
        inner=of(spec.inner, "d"),
        selected=of(spec.selected, "r + 2·n"),
        shared=of(spec.state, "n"),
        states=Size(2 * spec.inner * spec.state, WIDE, "scan_chunk", "none", "2·d·n"),
        matrix=Size(spec.inner * spec.state, WIDE, "once", "none", "d·n"),
        vector=Size(spec.inner, WIDE, "once", "none", "d"),
    )


def wide_vectors(tape: Tape, sizes: Sizes, setting: BlockConfig) -> list[Tensor]:
    """The weight of the skip and the bias of the steps in fp32: copies where weights are narrower."""
    if setting.weight == WIDE:
        return []
    return [wide_vector(tape, sizes, setting, name) for name in ("skip", "bias of steps")]


def wide_vector(tape: Tape, sizes: Sizes, setting: BlockConfig, name: str) -> Tensor:
    """An fp32 copy of a weight of each channel."""
    leaf, narrow = Leaf(name, keep=True) if setting.trainable else None, sizes.vector.wide(1)
    out = tape.new(f"{name}, fp32", sizes.vector)
    return tape.record(out, [leaf], lambda _: [tape.new(f"gradient of {name}", narrow, "gradient")])


# The one function of Mamba and Falcon-Mamba, from the projected input to the mixer's output.


def fused_mixer(
    tape: Tape, given: list[Tensor], sizes: Sizes, spec: Mamba, setting: BlockConfig, hidden: int
) -> Tensor:
    """``MambaInnerFn``: the convolution's output and the steps are computed again in backward."""
    out_size = sizes.inner._replace(elements=hidden, label="h")
    narrows, weights = setting.compute != setting.weight, weights_of(spec, hidden)
    out, made = forward(tape, sizes, spec, out_size, narrows=narrows)
    copies = [tape.weight_copy(name, size.wide(2)) if narrows else None for name, size in weights.items()]
    edges: list[Tensor | Edge | None] = list(given)
    if setting.trainable:
        leaves = [(Leaf(f"{name} weight", keep=True), size) for name, size in weights.items()]
        edges += [tape.cast_weight(leaf, size) if narrows else leaf for leaf, size in leaves]
        edges.append(Leaf("mixer's filter", keep=True))
    vectors = len(given) - 2
    filters = Size((spec.taps + spec.conv_bias + 2 * (vectors == 0)) * spec.inner, 1, "once")

    def gradient(name: str) -> Tensor | None:
        """That of a weight, in 16 bits first where autocast narrows it; a frozen one's is made all the same."""
        if narrows or not setting.trainable:
            return tape.new(f"gradient of {name} weight, narrow", weights[name].wide(setting.compute))
        return tape.new(f"gradient of {name} weight", weights[name], "gradient")

    def rule(_: Grads) -> Grads:
        grad, of_scan, of_weights = backward(tape, sizes, spec, vectors, gradient)
        if not setting.trainable:
            return [grad, None]
        return [grad, *of_scan, *of_weights, tape.new("gradient of mixer's filter", filters, "gradient")]

    saved = [*(tensor.storage for tensor in (*made, *given[1:])), *copies]
    return tape.record(out, edges, rule, saved)


def weights_of(spec: Mamba, hidden: int) -> dict[str, Size]:
    """The weights of the projections that the function makes itself."""
    rows = {SELECTION: spec.selected, STEP: spec.rank, OUT: hidden}
    return {name: Size(spec.inner * width, 1, "once") for name, width in rows.items()}


def forward(tape: Tape, sizes: Sizes, spec: Mamba, out_size: Size, *, narrows: bool) -> tuple[Tensor, list[Tensor]]:
    """The output and what is kept: a copy of the input, what was selected, B and C, states, and the scan's output."""
    both = tape.new("mixer's input, channels first", sizes.both)
    convolved = tape.new("convolution's output", sizes.inner)
    batched = sizes.inner._replace(shard=BATCHED)
    rows = [tape.new("convolution's output, as rows", batched)]
    selected = tape.new(f"{SELECTION} output", sizes.selected)
    rows.clear()
    steps = tape.new(f"{STEP} output", sizes.inner)
    b, c = (tape.new(f"{name}, tokens last", sizes.shared) for name in "BC")
    if spec.norms == "weightless":
        b, c = normalised(tape, b, "B"), normalised(tape, c, "C")
        steps = normalised(tape, steps, "steps")
    gated, scanned = (tape.new(name, sizes.inner) for name in ("scan's output, gated", "scan's output"))
    states = tape.new("states of chunks", sizes.states)
    del convolved, steps
    # Autocast's copy of the weight needs no gradient, so that torch.matmul folds nothing
    rows += [] if narrows else [tape.new("scan's output, as rows", batched)]
    out = tape.operator("mm", lambda: tape.new(f"{OUT} output", out_size))
    del rows, gated
    return out, [both, selected, b, c, states, scanned]


def normalised(tape: Tape, x: Tensor, name: str) -> Tensor:
    """A norm without a graph, on a copy with the tokens first; its output is copied back."""
    rows = tape.new(f"{name}, tokens first", x.size)
    del x
    out = tape.new(f"{name}, normalised", rows.size)
    statistics = tape.new(f"{name}' norms", rows.size._replace(elements=1, width=WIDE, label="1"))
    del statistics, rows
    return tape.new(f"{name}, normalised, tokens last", out.size)


def backward(
    tape: Tape, sizes: Sizes, spec: Mamba, vectors: int, gradient: Callable[[str], Tensor | None]
) -> tuple[Tensor, list[Tensor], list[Tensor | None]]:
    """The gradients of the projected input, of decays and ``vectors``, and of the weights in their order."""
    weightless, batched = spec.norms == "weightless", sizes.inner._replace(shard=BATCHED)
    working = [tape.new("convolution's output, computed again", sizes.inner)]
    steps = tape.new("steps, computed again", sizes.inner)
    if weightless:
        steps = normalised(tape, steps, "steps")
        working += [normalised(tape, tape.new(f"{name}, tokens first", sizes.shared), name) for name in "BC"]
    grad = tape.new("gradient of mixer's input, channels first", sizes.both)
    working += [steps, tape.new("gradient of scan's output", sizes.inner)]
    working.append(tape.new("scan's output, gated again", sizes.inner))
    working += [tape.new(f"gradient of {name}", sizes.inner) for name in ("convolution's output", "steps")]
    of_scan = [tape.new("gradient of decay", sizes.matrix)]
    shared = [tape.new(f"gradient of {name}, fp32", sizes.shared.wide(WIDE)) for name in "BC"]
    of_scan += [tape.new("gradient of skip and steps, fp32", sizes.vector) for _ in range(vectors)]
    if sizes.shared.width != WIDE:
        shared = [tape.new(f"gradient of {name}", sizes.shared) for name in "BC"]
    rows = tape.new("scan's output, gated again, as rows", batched) if weightless else None
    of_output = gradient(OUT)
    del rows
    working.append(tape.new("gradient of what was selected", sizes.selected))
    del shared
    rows = tape.new("gradient of steps, as rows", batched) if weightless else None
    del rows
    of_steps = gradient(STEP)
    rows = tape.new("gradient of convolution's output, as rows", batched)
    del rows
    rows = tape.new("convolution's output, as rows again", batched)
    of_selection = gradient(SELECTION)
    del rows, working, steps
    return grad, of_scan, [of_selection, of_steps, of_output]


# The same one by one (Jamba).


def step_by_step(
    tape: Tape, given: list[Tensor], sizes: Sizes, spec: Mamba, setting: BlockConfig, hidden: int
) -> Tensor:
    """A convolution, what is selected from its output with a norm each, and a scan of what the kernel copies."""
    projected, rate = given
    channels, gate = ops.split(tape, projected, [spec.inner] * 2, ["d"] * 2, "mixer's input, channels first")
    convolved = convolution(tape, channels, spec.taps, setting, bias=spec.conv_bias, turned=True)
    del channels
    selected = linear(tape, convolved, setting, SELECTION, spec.selected, "r + 2·n")
    widths, labels = [spec.rank, spec.state, spec.state], ["r", "n", "n"]
    parts = ops.split(tape, selected, widths, labels, f"{SELECTION} output")
    del selected
    names = ("steps", "B", "C")
    step, b, c = (norm(tape, parts.pop(0), Norm(), setting, f"{name} norm") for name in names)
    step = linear(tape, step, setting, STEP, spec.inner, "d")
    step = turned(tape, step, "steps")
    vectors = wide_vectors(tape, sizes, setting)
    out = scan(tape, [convolved, step, b, c, gate, rate, *vectors], sizes, setting)
    out = ops.copy(tape, out, "scan's output, as rows")
    return linear(tape, out, setting, OUT, hidden, "h", setting.branch_output)


def scan(tape: Tape, given: list[Tensor], sizes: Sizes, setting: BlockConfig) -> Tensor:
    """``SelectiveScanFn``: keeps copies of all with the tokens last, states and its output before the gate."""
    names = ("convolution's output", "steps", "B", "C", "gate")
    copies = [tape.new(f"{name}, tokens last", tensor.size) for name, tensor in zip(names, given, strict=False)]
    gated, scanned = (tape.new(name, sizes.inner) for name in ("scan's output, gated", "scan's output"))
    states = tape.new("states of chunks", sizes.states)
    vectors, both = len(given) - len(names) - 1, sizes.vector._replace(elements=2 * sizes.vector.elements, width=1)
    skips = Leaf("skip and steps", keep=True) if setting.trainable and not vectors else None

    def rule(_: Grads) -> Grads:
        grad = tape.new("gradient of scan's output, tokens last", sizes.inner)
        of_gate, of_convolved, of_steps = (tape.new(f"gradient of {names[n]}", sizes.inner) for n in (4, 0, 1))
        decay = tape.new("gradient of decay", sizes.matrix) if setting.trainable else None
        of_b, of_c = (tape.new(f"gradient of {name}, fp32", sizes.shared.wide(WIDE)) for name in "BC")
        of_vectors = [tape.new("gradient of skip and steps, fp32", sizes.vector) for _ in range(vectors)]
        narrow = [tape.new(f"gradient of {name}", sizes.shared) for name in "BC" if sizes.shared.width != WIDE]
        of_b, of_c = narrow or [of_b, of_c]
        del grad
        last = tape.new("gradient of skip and steps", both, "gradient") if skips else None
        return [of_convolved, of_steps, of_b, of_c, of_gate, decay, *of_vectors, last]

    saved = [tensor.storage for tensor in (*copies, states, scanned, *given[len(names) :])]
    return tape.record(gated, [*given, skips], rule, saved)


class Mamba2Sizes(NamedTuple):
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
    sizes = mamba2_sizes(projected.size, spec)
    out_size = projected.size._replace(elements=hidden, width=setting.compute, label="h")
    rate = decay_rates(tape, spec.heads, setting)
    out, scanned, rstd = mamba2_forward(tape, sizes, spec, out_size)
    leaves = [Leaf(name, keep=True) for name in ("mixer's filter", "mixer's output projection weight")]
    weights = Size(spec.inner * hidden, 1, "once")
    filters = Size((spec.taps + spec.conv_bias) * spec.channels + 3 * spec.heads + spec.normed * spec.inner, 1, "once")
    copied = tape.weight_copy("mixer's output projection", weights.wide(2)) if _narrows(setting) else None

    vector = rate.size

    def rule(_: Grads) -> Grads:
        grad = mamba2_backward(tape, sizes, spec, out_size.width)
        if not setting.trainable:
            return [grad, None]
        decay = tape.new("gradient of decay", vector)
        products = tape.new("gradient of mixer's filter", filters, "gradient")
        return [grad, decay, products, tape.new("gradient of mixer's output projection weight", weights, "gradient")]

    saved = [projected.storage, rate.storage, scanned.storage, rstd.storage if rstd else None, copied]
    return tape.record(out, [projected, rate, *(leaves if setting.trainable else ())], rule, saved)


def _narrows(setting: BlockConfig) -> bool:
    return setting.compute != setting.weight


def mamba2_sizes(projected: Size, spec: Mamba2) -> Mamba2Sizes:
    """Extents of the tensors, of which those of a chunk are shared out to its tokens."""

    def of(elements: int, label: str, width: int = projected.width) -> Size:
        return projected._replace(elements=elements, width=width, label=label)

    return Mamba2Sizes(
        projected=projected,
        channels=of(spec.channels, "d + 2·g·n"),
        inner=of(spec.inner, "d"),
        steps=of(spec.heads, "H"),
        wide_steps=of(spec.heads, "H", WIDE),
        states=of(-(-spec.inner * spec.state // spec.chunk), "d·n/chunk", WIDE),
        products=of(spec.groups * spec.chunk, "g·chunk", WIDE),
        shared=of(spec.groups * spec.state, "g·n", WIDE),
    )


def mamba2_forward(
    tape: Tape, sizes: Mamba2Sizes, spec: Mamba2, out_size: Size
) -> tuple[Tensor, Tensor, Tensor | None]:
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


def mamba2_backward(tape: Tape, sizes: Mamba2Sizes, spec: Mamba2, width: int) -> Tensor:
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
