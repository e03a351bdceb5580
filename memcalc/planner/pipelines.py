"""Schedules of a pipeline and their model chunks: what a request may ask for, and what a search tries."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from memcalc.errors import CombinationError
from memcalc.terms.pipeline import VIRTUAL, group_of

if TYPE_CHECKING:
    from memcalc.formulas.types import Array
    from memcalc.frameworks import Habits
    from memcalc.grid import Fixed, Grid, Layout
    from memcalc.planner.request import Request
    from memcalc.specs.model import Model

CHUNKS = (2, 4, 8)
"""Model chunks a stage that a search tries."""
NEVER_FASTER = ("gpipe",)
"""Schedules that idle as long as 1F1B and hold more: a search leaves them out."""


def one_pipeline(request: Request, habits: Habits) -> tuple[str, int]:
    """The schedule and the chunks of ``estimate``: as asked, 1F1B and the fewest chunks by default."""
    schedule = str(request.given.get("pp_schedule", "1f1b"))
    check_schedule(request, habits, schedule)
    if schedule not in VIRTUAL:
        return schedule, 1
    return schedule, int(request.get("vpp", 2))


def pipelines_for(request: Request, habits: Habits) -> list[tuple[str, int]]:
    """The schedules and chunks that a search tries: the framework's own, each with several numbers of chunks."""
    known = [*habits.schedules, *habits.fork_schedules]
    own = [name for name in habits.schedules if name not in NEVER_FASTER]
    asked, choice = request.given.get("pp_schedule"), request.choices.get("pp_schedule")
    if choice is not None:
        names = choice.of(own, known)
    else:
        names = own if asked is None and request.given.get("vpp", 1) == 1 else [str(asked or "1f1b")]
    for name in names:
        check_schedule(request, habits, name)
    if asked is None and request.given.get("pp", 1) > 1:
        request.assumptions["pp_schedule"] = f"searched: {', '.join(names)}"
    several = request.choices.get("vpp")
    tried = [request.given["vpp"]] if "vpp" in request.given else several.of(CHUNKS) if several else CHUNKS
    return [
        (name, chunks)
        for name in names
        for chunks in ((1,) if name not in VIRTUAL else (2,) if name == "zb-v" else tried)
        if chunks > 1 or name not in VIRTUAL
    ]


def check_schedule(request: Request, habits: Habits, schedule: str) -> None:
    """Refuse a schedule that the framework does not run, and chunks that the schedule does not have."""
    known = (*habits.schedules, *habits.fork_schedules)
    asked, vpp = request.given.get("pp_schedule"), request.given.get("vpp")
    if schedule not in known:
        raise CombinationError("pp-schedule", schedule, f"{habits.name} runs {', '.join(known)}", known)
    if asked in (None, "1f1b") and (vpp or 1) == 1:
        return
    if request.given.get("pp", 1) == 1:
        name, value = ("vpp", vpp) if asked in (None, "1f1b") else ("pp-schedule", asked)
        raise CombinationError(name, value, "a pipeline's schedule needs pp above 1")
    if vpp is not None and vpp > 1 and schedule not in VIRTUAL:
        having = [name for name in known if name in VIRTUAL] or ["interleaved"]
        raise CombinationError("vpp", vpp, f"model chunks need --pp-schedule {' or '.join(having)}")
    if schedule == "zb-v" and vpp not in (None, 2):
        raise CombinationError("vpp", vpp, "zb-v has exactly 2 model chunks a stage")
    if vpp == 1 and schedule in VIRTUAL:
        raise CombinationError("vpp", vpp, f"{schedule} has at least 2 model chunks a stage")


def check_chunks(model: Model, fixed: Fixed, layout: Layout, habits: Habits) -> None:
    """Refuse chunks into which the framework cannot part the model."""
    if layout.vpp == 1:
        return
    own = (fixed.first_stage_layers, fixed.last_stage_layers)
    if layout.schedule == "zb-v" and any(own):
        name, value = ("first", own[0]) if own[0] else ("last", own[1])
        raise CombinationError(f"strategy.{name}_stage_layers", value, "under zb-v stage 0 has both ends")
    blocks = model.num_layers - fixed.mtp + fixed.embedding_in_split + fixed.loss_in_split
    parts = layout.pp * layout.vpp
    if parts > blocks:
        raise CombinationError(
            "vpp", layout.vpp, f"pp x vpp = {parts} must be at most the {blocks} blocks of {model.name}"
        )
    if not habits.even_chunks:
        return
    rest, stages = blocks - sum(own), layout.pp - sum(map(bool, own))
    if any(each % layout.vpp for each in own) or rest % max(stages * layout.vpp, 1):
        allowed = f"{habits.name} needs pp x vpp = {parts} to be a divisor of the {blocks} blocks of {model.name}"
        raise CombinationError("vpp", layout.vpp, allowed)


def can_part(model: Model, fixed: Fixed, layout: Layout, habits: Habits) -> bool:
    """Whether the framework can part the model into a layout's chunks."""
    try:
        check_chunks(model, fixed, layout, habits)
    except CombinationError:
        return False
    return True


def rounds_fit(grid: Grid) -> Array:
    """Whether the micro-batches of a step pass the chunks in rounds that the framework runs.

    Megatron-LM (23e00ed core/pipeline_parallel/schedules.py) needs groups of at least p micro-batches, and no smaller
    rest; PyTorch 2.13 (ScheduleInterleaved1F1B) a number that its rounds divide.
    """
    m, stages, group = grid.accumulation, grid.degree("pp"), group_of(grid)
    rest = m % group
    if grid.habits.equal_rounds:
        fits = rest == 0
    else:
        fits = (group >= stages) & (group <= m) & ((rest == 0) | (rest >= stages))
    return fits | ~grid.runs("interleaved", "interleaved-zb")


def check_rounds(grid: Grid) -> None:
    """Refuse micro-batches of one strategy that do not pass its chunks in whole rounds."""
    if not np.all(rounds_fit(grid)):
        count, stages = int(np.ravel(grid.accumulation)[0]), grid.layouts[0].pp
        allowed = f"{grid.layouts[0].schedule} needs a multiple of pp = {stages} micro-batches, and there are {count}"
        raise CombinationError("global-batch", grid.fixed.global_batch, allowed)
