"""A grid in parts where a default that all strategies of a grid share is another for some of them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from memcalc.errors import CombinationError
from memcalc.planner import defaults

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memcalc.frameworks import Habits
    from memcalc.grid import Grid, Layout
    from memcalc.planner.request import Request
    from memcalc.specs.hardware import GPU
    from memcalc.specs.model import Model


def by_loss(grid: Grid, request: Request, habits: Habits) -> list[Grid]:
    """A grid apart for the layouts with tensor parallelism where the framework's own loss is another there."""
    if not habits.tensor_loss or request.given.get("loss") is not None:
        return [grid]
    parted = ((habits.loss, False), (habits.tensor_loss, True))
    grids = []
    for loss, tensor in parted:
        layouts = tuple(layout for layout in grid.layouts if (layout.tp > 1) == tensor)
        if layouts:
            grids.append(replace(grid, fixed=grid.fixed.model_copy(update={"loss": loss}), layouts=layouts))
    request.assumptions["loss"] = f"{habits.tensor_loss} under tensor parallelism, else {habits.loss}"
    return grids


def by_defaults(grid: Grid, request: Request, habits: Habits, model: Model, gpu: GPU) -> list[Grid]:
    """A grid apart for each set of what framework and kernels decide by precision and by whether states are sharded.

    Precisions for which what was asked does not exist are left out, unless nothing is left: then it is refused.
    """
    quiet = replace(request, assumptions={})
    parts: dict[tuple[Any, ...], list[str]] = {}
    refusal: CombinationError | None = None
    for sharded, layouts, zeros in _shardings(grid, quiet, habits):
        for precision in grid.precisions:
            try:
                kernel = defaults.attention_for(quiet, habits, model, gpu, [precision], grid.fixed.seq_len)
            except CombinationError as error:
                refusal = error
                continue
            fields = {"attention": kernel, **defaults.runtime_fields(quiet, habits, [precision], sharded=sharded)}
            given = request.given["fields"]
            decided = tuple(sorted((name, value) for name, value in fields.items() if name not in given))
            parts.setdefault((decided, layouts, zeros), []).append(precision)
    if not parts and refusal is not None:
        raise refusal
    return [
        replace(
            grid,
            fixed=grid.fixed.model_copy(update=dict(decided)),
            layouts=layouts,
            zeros=zeros,
            precisions=tuple(precisions),
        )
        for (decided, layouts, zeros), precisions in parts.items()
    ]


def _shardings(
    grid: Grid, request: Request, habits: Habits
) -> Iterator[tuple[bool, tuple[Layout, ...], tuple[int, ...]]]:
    """Layouts and stages whose states are sharded, and those whose states are not; all at once where nothing differs.

    What is decided of one precision alone may differ where that of all together does not.
    """
    decided = [
        [defaults.runtime_fields(request, habits, [name], sharded=sharded) for name in grid.precisions]
        for sharded in (False, True)
    ]
    single = tuple(layout for layout in grid.layouts if layout.dp == 1)
    several = tuple(layout for layout in grid.layouts if layout.dp > 1)
    stages = tuple(stage for stage in grid.zeros if stage > 0)
    plain = tuple(stage for stage in grid.zeros if stage == 0)
    if decided[0] == decided[1]:
        yield True, grid.layouts, grid.zeros
        return
    if single:
        yield False, single, grid.zeros
    if several and plain:
        yield False, several, plain
    if several and stages:
        yield True, several, stages
