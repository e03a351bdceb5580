"""Parallel layouts that are legal for a model, and the schedules and model chunks of a pipeline."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from memcalc.errors import CombinationError, InputError
from memcalc.formulas.bubbles import TURNED
from memcalc.frameworks.capability import SPLITS
from memcalc.grid import Layout
from memcalc.terms.pipeline import VIRTUAL, group_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from memcalc.formulas import Array
    from memcalc.frameworks import Habits
    from memcalc.grid import Grid
    from memcalc.planner.request import Request
    from memcalc.specs.model import Model
    from memcalc.specs.options import SharedSettings


CHUNKS = (2, 4, 8)
"""Model chunks a stage that a search tries."""
EVEN_CHUNKS = tuple(range(2, 13))
"""The same where only numbers that divide the blocks are legal: few are, and recipes use each of them up to 12
(NVIDIA/dgxc-benchmarking 8f5cbb3: 5, 6, 7 and 12)."""
NEVER_FASTER = ("gpipe", "dualpipe-v")
"""Schedules that idle as long as 1F1B, or ZB-V, and hold more: a search leaves them out."""


def divisors(number: int) -> list[int]:
    """All divisors, ascending.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def one_pipeline(request: Request, habits: Habits) -> tuple[str, int]:
    """The schedule and the chunks of ``estimate``: as asked, 1F1B and the fewest chunks by default."""
    schedule = str(request.given.get("pp_schedule") or _usual(request, habits))
    check_schedule(request, habits, schedule)
    if schedule not in VIRTUAL:
        return schedule, 1
    return schedule, int(request.get("vpp", 2))


def pipelines_for(request: Request, habits: Habits, able: Collection[str] = ()) -> list[tuple[str, int]]:
    """The schedules and chunks that a search tries: the framework's own, each with several numbers of chunks.

    ``able`` has the kinds of parallelism that it tries by itself: without a number of stages it is these that decide.
    """
    searched = "pp" in able or "pp" in request.choices
    known = [*habits.schedules, *habits.fork_schedules]
    default = [name for name in habits.schedules if name not in NEVER_FASTER]
    query, choice = request.given.get("pp_schedule"), request.choices.get("pp_schedule")
    if choice is not None:
        names = choice.of(default, known)
    else:
        names = (
            default if query is None and request.given.get("vpp", 1) == 1 else [str(query or _usual(request, habits))]
        )
    for name in names:
        check_schedule(request, habits, name, searched=searched)
    if query is None and request.given.get("pp", 1) > 1:
        request.assumptions["pp_schedule"] = f"searched: {', '.join(names)}"
    several, usual = request.choices.get("vpp"), EVEN_CHUNKS if habits.even_chunks else CHUNKS
    tried = [request.given["vpp"]] if "vpp" in request.given else several.of(usual) if several else usual
    return [
        (name, chunks)
        for name in names
        for chunks in ((1,) if name not in VIRTUAL else (2,) if name in TURNED else tried)
        if chunks > 1 or name not in VIRTUAL
    ]


def _usual(request: Request, habits: Habits) -> str:
    """The schedule where none is asked for: 1F1B, or with model chunks the only one of the framework that has them."""
    chunked = [name for name in habits.schedules if name in VIRTUAL]
    return chunked[0] if int(request.given.get("vpp") or 1) > 1 and len(chunked) == 1 else "1f1b"


def fewest_stages(request: Request) -> int:
    """Stages of the shortest pipeline that has what is asked for: two where that is a schedule or model chunks."""
    staged = request.given.get("pp_schedule") not in (None, "1f1b") or int(request.given.get("vpp") or 1) > 1
    return 1 + staged


def check_schedule(request: Request, habits: Habits, schedule: str, *, searched: bool = False) -> None:
    """Refuse a schedule that the framework does not run, and chunks that the schedule does not have."""
    known = (*habits.schedules, *habits.fork_schedules)
    query, vpp = request.given.get("pp_schedule"), request.given.get("vpp")
    if schedule not in known:
        raise CombinationError("pp-schedule", schedule, f"{habits.name} runs {', '.join(known)}", known)
    if query in (None, "1f1b") and (vpp or 1) == 1:
        return
    if request.given.get("pp", 2 if searched else 1) == 1:
        name, value = ("vpp", vpp) if query in (None, "1f1b") else ("pp-schedule", query)
        raise CombinationError(name, value, "a pipeline's schedule needs pp above 1")
    if vpp is not None and vpp > 1 and schedule not in VIRTUAL:
        having = [name for name in known if name in VIRTUAL] or ["interleaved"]
        raise CombinationError("vpp", vpp, f"model chunks need --pp-schedule {' or '.join(having)}")
    if schedule in TURNED and vpp not in (None, 2):
        raise CombinationError("vpp", vpp, f"{schedule} has exactly 2 model chunks a stage")
    if vpp == 1 and schedule in VIRTUAL:
        raise CombinationError("vpp", vpp, f"{schedule} has at least 2 model chunks a stage")


def check_chunks(model: Model, fixed: SharedSettings, layout: Layout, habits: Habits) -> None:
    """Refuse stages, and chunks of stages, into which the framework cannot part the model."""
    ends = (fixed.first_stage_layers, fixed.last_stage_layers)
    if layout.schedule in TURNED and any(ends):
        name, value = ("first", ends[0]) if ends[0] else ("last", ends[1])
        raise CombinationError(f"strategy.{name}_stage_layers", value, f"under {layout.schedule} stage 0 has both ends")
    blocks = model.num_layers - fixed.mtp + fixed.embedding_in_split + fixed.loss_in_split
    parts = layout.pp * layout.vpp
    if layout.vpp > 1 and parts > blocks:
        raise CombinationError(
            "vpp", layout.vpp, f"pp x vpp = {parts} must be at most the {blocks} blocks of {model.name}"
        )
    if not habits.even_chunks or layout.pp == 1:
        return
    rest, stages = blocks - sum(ends), layout.pp - sum(map(bool, ends))
    if not any(each % layout.vpp for each in ends) and rest % max(stages * layout.vpp, 1) == 0:
        return
    if layout.vpp > 1:
        allowed = f"{habits.name} needs pp x vpp = {parts} to be a divisor of the {blocks} blocks of {model.name}"
        names = () if rest != blocks or blocks != model.num_layers - fixed.mtp else _in_split(blocks, parts)
        raise CombinationError("vpp", layout.vpp, allowed + _told(names, habits))
    raise CombinationError("pp", layout.pp, _even(model, blocks, rest, stages, habits))


def _last_stage(blocks: int, stages: int) -> int:
    """Return how many blocks a last stage has that leaves the others alike; 0 where it would have none of its own.

    >>> _last_stage(61, 16), _last_stage(60, 16)
    (1, 0)
    """
    return blocks % (stages - 1) if stages > 1 else 0


def _even(model: Model, blocks: int, rest: int, stages: int, habits: Habits) -> str:
    """What a framework whose stages are alike allows (Megatron-LM d98e8a64, training/arguments.py, validate_args)."""
    if rest != blocks:
        return f"the {stages} stages between must share the {rest} blocks that are left of {model.name} alike"
    able = habits.capabilities.uneven.direct
    fields = [f"strategy.{name}" for name in able]
    last = _last_stage(blocks, stages)
    if last and "last_stage_layers" in able:
        fields = [f"strategy.last_stage_layers={last}"]
    unequal = f", or set unequal stages: --set {' or '.join(fields[:2])}" if fields else ""
    if blocks == model.num_layers:
        unequal = _told(_in_split(blocks, stages), habits) or unequal
    return f"{habits.name} needs it to be a divisor of the {blocks} blocks of {model.name}{unequal}"


def _in_split(blocks: int, parts: int) -> tuple[str, ...]:
    """The fields by which embedding and loss count as blocks, where so many parts are then alike; else none."""
    if (blocks + 2) % parts == 0:
        return ("embedding_in_split", "loss_in_split")
    return ("loss_in_split",) if (blocks + 1) % parts == 0 else ()


def _told(names: Sequence[str], habits: Habits) -> str:
    """The end of a refusal: fields that make stages unequal, where the framework can be told all of them."""
    fields = " ".join(f"--set strategy.{name}=true" for name in names)
    return f", or set unequal stages: {fields}" if fields and {*names} <= {*habits.capabilities.uneven.direct} else ""


def can_part(model: Model, fixed: SharedSettings, layout: Layout, habits: Habits) -> bool:
    """Whether the framework can part the model into a layout's chunks."""
    try:
        check_chunks(model, fixed, layout, habits)
    except CombinationError:
        return False
    return True


def rounds_fit(grid: Grid) -> Array:
    """Whether the micro-batches of a step pass the chunks in rounds that the framework runs.

    Megatron-LM (23e00ed core/pipeline_parallel/schedules.py) needs groups of at least p micro-batches, and no smaller
    rest; PyTorch 2.13 (ScheduleInterleaved1F1B) a number that its rounds divide, and as many as there are chunks under
    ScheduleDualPipeV.
    """
    m, stages, group = grid.accumulation, grid.degree("pp"), group_of(grid)
    rest = m % group
    if grid.habits.equal_rounds:
        fits = rest == 0
    else:
        fits = (group >= stages) & (group <= m) & ((rest == 0) | (rest >= stages))
    fits |= ~grid.runs("interleaved", "interleaved-zb")
    return fits & ((m >= 2 * stages) | ~grid.runs("dualpipe-v"))


def check_rounds(grid: Grid) -> None:
    """Refuse micro-batches of one strategy that do not pass its chunks in whole rounds."""
    if not np.all(rounds_fit(grid)):
        count, schedule, stages = int(np.ravel(grid.accumulation)[0]), grid.layouts[0].schedule, grid.layouts[0].pp
        number = f"at least 2 x pp = {2 * stages}" if schedule == "dualpipe-v" else f"a multiple of pp = {stages}"
        allowed = f"{schedule} needs {number} micro-batches, and there are {count}"
        raise CombinationError("global-batch", grid.fixed.global_batch, allowed)


def check_layout(
    model: Model, layout: Layout, seq_len: int, expert_tp: int = 0, *, alone: bool = False, parts: int = 2
) -> None:
    """Raise the error that says why a layout is impossible for a model; ``alone`` as for :func:`check_replicas`.

    Each context-parallel rank takes as many ``parts`` of a sequence: an early and a late one, to be as busy as others
    (Megatron-LM d98e8a64 training/arguments.py, ``validate_args``; torchtitan ``ParallelDims.seq_len_divisor``).
    """
    for attention in model.attentions:
        _check_tp(attention.heads, "attention heads", model, layout.tp)
        _check_tp(attention.kv_heads, "key-value heads", model, layout.tp)
    if layout.pp > model.num_layers:
        raise CombinationError("pp", layout.pp, f"must be at most the {model.num_layers} blocks of {model.name}")
    if layout.ep > 1 and not model.is_moe:
        raise CombinationError("ep", layout.ep, f"must be 1, because {model.name} has no experts")
    for group in model.groups:
        experts = getattr(group.block.mlp, "experts", layout.ep)
        if experts % layout.ep:
            raise CombinationError("ep", layout.ep, f"must be a divisor of the {experts} experts of {model.name}")
    check_replicas(layout, alone=alone)
    _check_experts(layout, expert_tp)
    if layout.cp > 1 and seq_len % (parts * layout.cp):
        shares = f"{parts} x cp" if parts > 1 else "cp"
        raise CombinationError("cp", layout.cp, f"{shares} must be a divisor of the sequence length {seq_len}")


def _splits_experts(layout: Layout, expert_tp: int) -> bool:
    """Whether an expert can be split over so many ranks of a layout; over those of TP where it is 0."""
    ranks = layout.dp * layout.cp // layout.dp_replicate
    if not expert_tp:
        return ranks % layout.ep == 0
    even = layout.tp % expert_tp == 0 or expert_tp % layout.tp == 0
    return even and ranks * layout.tp % (layout.ep * expert_tp) == 0


def _check_experts(layout: Layout, expert_tp: int) -> None:
    if _splits_experts(layout, expert_tp):
        return
    if expert_tp and layout.tp % expert_tp and expert_tp % layout.tp:
        raise CombinationError("strategy.etp", expert_tp, f"must be a divisor or a multiple of tp = {layout.tp}")
    ranks, part = layout.dp * layout.cp // layout.dp_replicate, " / dp-replicate" * (layout.dp_replicate > 1)
    if expert_tp:
        allowed = f"ep x etp must be a divisor of dp x cp x tp{part} = {ranks * layout.tp}"
        raise CombinationError("ep", layout.ep, allowed)
    # Megatron-LM d98e8a64 core/parallel_state.py: experts have a grid of ranks of their own
    of_all = ranks * layout.tp
    instead = "" if of_all % layout.ep else f"; of {of_all} where no expert is split: --set strategy.etp=1"
    raise CombinationError("ep", layout.ep, f"must be a divisor of dp x cp{part} = {ranks}{instead}")


def check_replicas(layout: Layout, *, alone: bool = False) -> None:
    """Refuse replicas into which data-parallel ranks cannot be parted, and those of one rank, which share nothing.

    Where replicas of one rank have a mode of their own (FSDP 1's NO_SHARD), they may stand ``alone``.
    """
    replicas = layout.dp_replicate
    if layout.dp % replicas:
        raise CombinationError("dp-replicate", replicas, f"must be a divisor of dp = {layout.dp}")
    if replicas > 1 and layout.dp * layout.cp == replicas and not alone:
        raise CombinationError("dp-replicate", replicas, "must leave each replica several ranks to shard over")


def can_replicate(layout: Layout, replicas: int) -> bool:
    """Whether a layout that is possible without replicas is so with some, as :func:`check_layout` has it."""
    ranks = layout.dp * layout.cp
    return replicas == 1 or (layout.dp % replicas == 0 and ranks > replicas and ranks // replicas % layout.ep == 0)


def check_split(model: Model, fixed: SharedSettings, stages: int) -> None:
    """Raise the error that says why blocks cannot be shared out over stages as asked."""
    for name in ("first_stage_layers", "last_stage_layers"):
        blocks = getattr(fixed, name)
        if blocks and stages < 2:
            raise CombinationError(f"strategy.{name}", blocks, "needs pp above 1")
        most = model.num_layers - fixed.mtp - (stages - 1)
        if blocks > most:
            raise CombinationError(
                f"strategy.{name}", blocks, f"must be at most {most}, so that {stages} stages have blocks"
            )


def _check_tp(heads: int, what: str, model: Model, tp: int) -> None:
    if heads % tp:
        raise CombinationError("tp", tp, f"must be a divisor of the {heads} {what} of {model.name}")


def layouts_for(
    model: Model,
    gpus: int,
    degrees: Sequence[Sequence[int]],
    seq_len: int,
    *,
    sp: bool | None,
    pipelines: Sequence[tuple[str, int]] = (("1f1b", 1),),
    expert_tp: int = 0,
) -> list[Layout]:
    """All legal layouts of a number of GPUs over the wanted tp, pp, cp and ep degrees, schedules and chunks.

    Sequence parallelism is on wherever TP is, unless ``sp`` says otherwise: it divides activations for no extra volume.
    An expert is split over ``expert_tp`` ranks, or where it is 0 over those of TP.
    """
    # What a degree needs of the model does not depend on the others, but that experts share out the ranks of a stage
    tps = [n for n in degrees[0] if is_legal(model, Layout(tp=n), seq_len)]
    pps = [n for n in degrees[1] if is_legal(model, Layout(pp=n), seq_len)]
    cps = [n for n in degrees[2] if is_legal(model, Layout(cp=n), seq_len)]
    eps = [n for n in degrees[3] if is_legal(model, Layout(dp=n, ep=n), seq_len)]
    legal = []
    for tp, pp, cp, ep in product(tps, pps, cps, eps):
        dp, rest = divmod(gpus, tp * pp * cp)
        if not rest and _splits_experts(Layout(dp, tp, cp=cp, ep=ep), expert_tp):
            runs = pipelines if pp > 1 else (("1f1b", 1),)
            legal += [Layout(dp, tp, tp > 1 if sp is None else sp, pp, cp, ep, *run) for run in runs]
    return legal


def is_legal(model: Model, layout: Layout, seq_len: int) -> bool:
    """Whether a layout is possible for a model."""
    try:
        check_layout(model, layout, seq_len)
    except InputError:
        return False
    return True


# Unequal stages that a search offers where a pipeline's depth does not divide the blocks of a model.


def splits_for(
    request: Request, habits: Habits, model: Model, depths: Iterable[int]
) -> list[tuple[dict[str, Any], tuple[int, ...]]]:
    """Fields of a strategy by which stages are unequal, with the numbers of stages that they serve.

    Where a framework's stages are alike by default and no such field is given: embedding and loss count as
    blocks, as Llama 3 was trained (arXiv:2407.21783, section 3.3.2), or first and last stage hold fewer of them.
    """
    fields = request.given["fields"]
    stated = any(name in fields for name in SPLITS)
    able = habits.even_chunks and {*SPLITS} <= {*habits.capabilities.uneven.direct}
    if stated or not able or any(group.tower != "decoder" for group in model.groups):
        return []
    blocks = model.num_layers - int(fields.get("mtp", 0))
    served: dict[tuple[tuple[str, Any], ...], list[int]] = {}
    for stages in depths:
        if blocks % stages and (split := split_of(blocks, stages)):
            served.setdefault(tuple(split.items()), []).append(stages)
    return [(dict(split), tuple(numbers)) for split, numbers in served.items()]


def split_of(blocks: int, stages: int) -> dict[str, Any]:
    """How a number of blocks that the stages do not divide is shared out all the same; empty where it is not.

    >>> split_of(126, 16), split_of(95, 16)
    ({'embedding_in_split': True, 'loss_in_split': True}, {'loss_in_split': True})
    >>> split_of(61, 16)
    {'first_stage_layers': 3, 'last_stage_layers': 2}
    """
    if names := _in_split(blocks, stages):
        return dict.fromkeys(names, True)
    share = -(-blocks // stages)
    ends = blocks - (stages - 2) * share
    if stages < 3 or stages & (stages - 1) or ends < 2:  # beyond powers of two nobody cuts so
        return {}
    return {"first_stage_layers": -(-ends // 2), "last_stage_layers": ends // 2}
