"""What is said of a strategy's time: throughput, utilisation, the range that published runs support, and its basis.

Who sends the messages that a step waits for: a strategy's communication by the ranks that it goes between.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from memcalc.formulas import flops as fl
from memcalc.specs.step_time import FEWEST
from memcalc.terms.adapters import active_adapters
from memcalc.terms.parameters import mixing_flops, model_count
from memcalc.terms.tensors import outside_matrices
from memcalc.timing.rates import ANY, VIRTUAL, hardware_of, peak_flops, rates_for, table_for
from memcalc.timing.times import seconds
from memcalc.timing.work import is_alone, work_of

if TYPE_CHECKING:
    from memcalc.grid import Grid
    from memcalc.specs.hardware import GPU, Node
    from memcalc.specs.model import Model
    from memcalc.specs.options import SharedSettings
    from memcalc.specs.step_time import Span, StepTimeTable
    from memcalc.terms.model_on_grid import ModelOnGrid
    from memcalc.timing.messages import Messages
    from memcalc.timing.rates import Rates
    from memcalc.timing.work import Work


SHORTEST = 2048
"""Tokens of a micro-batch on one rank below which times are not validated: fewer than :data:`FEWEST` fitted runs have
less, and there the host sets the pace."""
SAME_LOOP = {"fsdp1": "FSDP", "fsdp2": "FSDP", "torchtitan": "FSDP", "ddp": "plain PyTorch", "plain": "plain PyTorch"}
"""Frameworks whose runs are counted together: the same wrappers of PyTorch around the same model."""
OUTSIDE = "outside"
"""The range of jobs of which too little is measured."""
UNFITTED = ("offload", "MoE")
"""Kinds of which no run is fitted on."""


class Forecast(NamedTuple):
    """One strategy's figures beside its times."""

    tokens_per_second_per_gpu: float
    mfu: float
    """Model FLOPs utilisation: attention in full, recomputation not at all (PaLM).

    Beyond some 200,000 tokens attention in full is more than the device could multiply, as a causal mask skips half:
    then that of the hardware.
    """
    hfu: float
    """Hardware FLOPs utilisation: what the device multiplies, recomputation included."""
    low: float
    high: float
    """Ends of the range of the step [s]."""
    validated: bool
    basis: str


def forecast(census: ModelOnGrid, gpu: GPU, node: Node, step: float) -> Forecast:
    """The figures of the grid's one strategy, whose step takes ``step`` seconds."""
    grid, gpus = census.grid, census.grid.layouts[0].gpus
    fixed, peak = grid.fixed, peak_flops(gpu, grid.precisions[0], grid.recipe)
    speed = fixed.global_batch * fixed.seq_len / step / gpus
    needed = model_flops_per_token(census.model, fixed, stacked=grid.habits.stacks_experts)
    span, basis = span_of(census.model, grid, gpu, node)
    mfu, hfu = float(fl.model_flops_utilization(speed, needed, peak)), hardware_flops(census, node) / step / gpus / peak
    return Forecast(
        tokens_per_second_per_gpu=speed,
        mfu=mfu if mfu <= 1 else hfu,
        hfu=hfu,
        low=step * (1 + span.low),
        high=step * (1 + span.high) * on_a_slow_host(census, gpu, node),
        validated=span.coverage > 0 and not basis.startswith("not validated"),
        basis=basis,
    )


def on_a_slow_host(census: ModelOnGrid, gpu: GPU, node: Node) -> float:
    """How many times as long one process takes where its host launches as slowly as the slowest that was measured.

    A host that was measured is known, and of processes that wait for each other its launches are part of the fit.
    """
    grid, table = census.grid, table_for(gpu)
    if table.own_runs or not is_alone(grid).all():
        return 1.0
    work, rates = work_of(census, node), rates_for(gpu, grid)
    slower = rates._replace(launch=rates.launch * table.value("launch", VIRTUAL) / table.value("launch", ANY))
    hardware = hardware_of(gpu, node, grid)
    usual, slow = (float(seconds(work, hardware, each).step.item()) for each in (rates, slower))
    return slow / usual


def hardware_flops(census: ModelOnGrid, node: Node) -> float:
    """Operations that all devices of a job multiply in one step, recomputation included [FLOP]."""
    work = work_of(census, node)
    total: float = 0.0
    for part in (work.once, work.again):
        each = part.linear + part.plain + part.unaligned + part.attention
        total += float(np.sum(each * work.weights))
    layout = census.grid.layouts[0]
    return total * float(work.micro_batches.reshape(-1)[0]) * layout.dp * layout.cp * layout.tp


def model_flops_per_token(model: Model, fixed: SharedSettings, *, stacked: bool = False) -> float:
    """Model FLOPs a token, forward and backward; it attends to all that a window lets it (arXiv:2204.02311 appendix B).

    Under adapters the weights are frozen, and have no gradients of their own; experts that are ``stacked`` have none.
    """
    if model.recording is not None:
        return recorded_flops_per_token(model, fixed.seq_len)
    kinds = [(group.count, group.block.attention) for group in model.groups]
    attention = sum(
        fl.model_flops_per_token(0, count, kind.q_dim, min(kind.window or fixed.seq_len, fixed.seq_len))
        for count, kind in kinds
        if kind is not None
    )
    mixing = sum(
        g.count * fl.step_flops(mixing_flops(g.block.mixer, np.int64(1))) for g in model.groups if g.block.mixer
    )
    return float(attention + mixing + fl.model_flops_per_token(*_passed(model, fixed, stacked=stacked)))


def _passed(model: Model, fixed: SharedSettings, *, stacked: bool) -> tuple[int, int, int, int, int]:
    """What :func:`memcalc.formulas.flops.model_flops_per_token` takes of a model without its attention."""
    active = model_count(model).active
    if fixed.adapters is None:
        return active, 0, 0, 0, 0
    copies = sum(m.elements for m in outside_matrices(model) if m.target in fixed.also_train)
    adapters = active_adapters(model, fixed.adapters, stacked=stacked, classes=fixed.lora_classes)
    return copies + adapters, 0, 0, 0, active - copies


def recorded_flops_per_token(model: Model, seq_len: int) -> float:
    """The same of a recorded model: the operations that a run was seen to make, of one sequence."""
    parts = [(group.count, group.block.recorded) for group in model.groups]
    ends = [] if model.recording is None else [(1, model.recording.entry), (1, model.recording.head)]
    units = {"once": 1, "sample": 1, "row": seq_len, "token": seq_len, "square": seq_len**2, "pair": seq_len**2}
    forward = sum(
        count * flops * units[unit]
        for count, part in (*parts, *ends)
        if part is not None
        for unit, flops in part.flops.items()
    )
    return float(fl.step_flops(forward)) / seq_len


def span_of(model: Model, grid: Grid, gpu: GPU, node: Node) -> tuple[Span, str]:
    """The range of a job's time and what it stands on; the widest of those that apply."""
    table, kinds = table_for(gpu), kinds_of(model, grid)
    doubts = doubts_of(table, model, grid, gpu, node)
    named = [table.span_of(kind) for kind in (*kinds, *([OUTSIDE] if doubts else []))]
    doubts = [*(kind for kind in kinds if kind in UNFITTED), *doubts]
    widest = max(named, key=lambda span: span.high - span.low)
    return widest, f"not validated: {', '.join(doubts)}" if doubts else widest.basis


def kinds_of(model: Model, grid: Grid) -> list[str]:
    """What a job is of that has a range; the first is what a published run counts for."""
    layout = grid.layouts[0]
    kinds = {
        "offload": bool(grid.offloads[0]),
        "MoE": model.is_moe,
        "adapters": grid.fixed.adapters is not None,
        "fp8": grid.precisions[0].startswith("fp8"),
        "model parallel": layout.tp * layout.pp * layout.cp > 1,
        "one GPU": layout.gpus == 1,
        "data parallel": layout.tp * layout.pp * layout.cp == 1 < layout.gpus,
    }
    return [name for name, applies in kinds.items() if applies]


def doubts_of(table: StepTimeTable, model: Model, grid: Grid, gpu: GPU, node: Node) -> list[str]:
    """What too few published runs have that the job has; what was measured on the very GPU counts for it."""
    fixed, layout = grid.fixed, grid.layouts[0]
    traits = traits_of(grid, gpu, node)
    unmeasured = {trait for trait, name in traits.items() if not table.supports(trait, name)}
    if table.own_runs >= FEWEST:
        unmeasured -= {"gpu", "framework"}
    elif "gpu" in unmeasured:
        unmeasured -= {"framework"}
    doubts = {
        f"too few runs on {gpu.name}": "gpu" in unmeasured,
        traits["framework"]: "framework" in unmeasured,
        traits.get("sharding", ""): "sharding" in unmeasured,
        _of_adapters(traits): "adapters" in unmeasured,
        "short micro-batches": grid.micro_batches[0] * fixed.seq_len // layout.cp < SHORTEST,
        "recorded modules": model.recording is not None,
        "packed activations": fixed.compress_activations != "none",
    }
    return [name for name, applies in doubts.items() if applies] + list(model.mixer_kinds if model.mixers else ())


def _of_adapters(traits: dict[str, str]) -> str:
    """Adapters and their base, of a list with commas.

    >>> _of_adapters({"adapters": "Ampere, nf4"})
    'nf4 adapters on Ampere'
    """
    arch, _, stored = traits.get("adapters", "").partition(", ")
    return f"{stored} adapters on {arch}"


ONE_GPU = ", one GPU"
"""Runs on one GPU tell nothing of jobs on several, which wait for each other; those on several tell of one."""


def traits_of(grid: Grid, gpu: GPU, node: Node) -> dict[str, str]:
    """What published runs are counted by, of a job.

    Where ranks of several nodes share the weights, each pass gathers them over the network, unit by unit ahead of its
    use under FSDP, as modules ask for them under ZeRO-3: runs of one tell nothing of the other.
    """
    name, layout = grid.fixed.framework.partition("@")[0], grid.layouts[0]
    loop = f"{SAME_LOOP.get(name, name)} on {gpu.arch.split()[0]}"
    traits = {"gpu": gpu.name, "framework": loop + ONE_GPU * (layout.gpus == 1)}
    sharing = layout.dp * layout.cp // layout.dp_replicate
    if grid.zeros[0] == 3 and sharing > 1 and sharing * layout.tp > node.gpus:
        traits["sharding"] = f"{'ZeRO-3' if grid.habits.gather == 'live' else 'FSDP'} over nodes"
    return traits if grid.fixed.adapters is None else traits | {"adapters": base_of(gpu, grid.fixed)}


def base_of(gpu: GPU, fixed: SharedSettings) -> str:
    """The architecture and the kind of frozen base by which runs with adapters are counted.

    >>> from memcalc import catalog
    >>> from memcalc.specs.options import SharedSettings
    >>> base_of(catalog.gpu("rtx-3090"), SharedSettings(seq_len=1, global_batch=1, quantize="nf4-dq"))
    'Ampere, nf4'
    """
    stored = "16-bit" if fixed.quantize == "none" else fixed.quantize.partition("-")[0]
    return f"{gpu.arch.split()[0]}, {stored}"


KINDS: dict[str, tuple[str, ...]] = {
    "tensor": ("tensor", "tensor_beside"),
    "context": ("context", "context_waited"),
    "expert": ("expert",),
    "pipeline": ("pipeline",),
    "data": ("gather", "reduction", "between", "gradients", "gradients_between", "parameters", "broadcasts"),
}
"""Messages by the ranks that they go between. Those of data-parallel ranks come last: what they hide behind lasts as
long as the others make it."""


def exposed_by_kind(census: ModelOnGrid, gpu: GPU, node: Node, rates: Rates) -> dict[str, float]:
    """What each kind of message adds to the step of a grid's one strategy [s]; the sum is its communication.

    Kinds share what hides them, so each is what is added where it joins those before it.
    """
    work, hardware = work_of(census, node), hardware_of(gpu, node, census.grid)
    present = [kind for kind, names in KINDS.items() if any(_sent(getattr(work.messages, name)) for name in names)]
    taken, before = dict.fromkeys(KINDS, 0.0), 0.0
    for index, kind in enumerate(present):
        silent = [name for later in present[index + 1 :] for name in KINDS[later]]
        total = float(np.max(seconds(_without(work, silent), hardware, rates).communication))
        taken[kind], before = max(total - before, 0.0), total
    return taken


def _without(work: Work, names: list[str]) -> Work:
    """The same work where some messages are not sent."""
    messages: Messages = work.messages
    return work._replace(messages=messages._replace(**{name: _silent(getattr(messages, name)) for name in names}))


def _silent(message: Any) -> Any:
    """A message, an exchange of tokens or a number of broadcasts, with nothing sent."""
    if isinstance(message, np.ndarray):
        return 0 * message
    sent = {name: 0 * getattr(message, name) for name in message._fields if name in _SENT}
    return message._replace(**sent)


_SENT = ("volume", "calls", "inside", "outside")
"""What is sent of a message or an exchange, beside the ranks and the way."""


def _sent(message: Any) -> bool:
    if isinstance(message, np.ndarray):
        return bool(np.any(message))
    return any(np.any(getattr(message, name)) for name in message._fields if name in _SENT)
