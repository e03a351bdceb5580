"""A job: what was asked for, on which model and hardware; the searches over what it leaves open; and its records."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import inf, prod
from numbers import Integral
from typing import TYPE_CHECKING, Any

from memcalc.errors import MissingError
from memcalc.frameworks import habits_of
from memcalc.frameworks.capabilities import capabilities_of
from memcalc.frameworks.capability import SPLITS
from memcalc.planner import Tally, axes
from memcalc.planner.defaults import casts_frozen, habits_for
from memcalc.planner.grid_parts import refuse_batch
from memcalc.planner.pipelines import check_layout
from memcalc.planner.request import OR, Request, boolean, factor
from memcalc.specs.job import Command, JobRecord, Value
from memcalc.specs.options import BY_NAME, DEGREES, FLAGS, NEEDING, RANK_DEGREES, SEARCHED, SETTINGS
from memcalc.terms.model_on_grid import ModelOnGrid
from memcalc.trace.template import TraceCache

if TYPE_CHECKING:
    from memcalc.formulas import Array
    from memcalc.grid import Grid, Layout
    from memcalc.planner.search import SearchResult, Wanted
    from memcalc.planner.stage_peaks import Peaks
    from memcalc.planner.varying import JobLengths
    from memcalc.specs.hardware import GPU, Node
    from memcalc.specs.model import Model
    from memcalc.specs.strategy import Strategy


CHOSEN = frozenset({*SEARCHED, "framework", "seq_len"})
"""Options that a search decides, or that each of its plans repeats."""
_NUMBERS = ("count", "stage", "batch")
"""Kinds whose digits are a number, so that a typed job has the record of the same job in Python."""


def record_of(
    command: Command,
    model: str | Model | None,
    gpu: str | GPU,
    node: str | None,
    options: Mapping[str, Any],
    settings: Mapping[str, Any] | None,
    preset_dirs: Iterable[str],
    request: Request,
    *,
    what: str = "",
    query: Mapping[str, Any] | None = None,
) -> JobRecord:
    """The record of what was asked; a field that is an option stands under the option's name.

    ``request`` has the calibration that was taken, also where it was found and not named.
    """
    fields = dict(settings or {})
    named = {**options, **{SETTINGS[name]: fields.pop(name) for name in tuple(fields) if name in SETTINGS}}
    if request.calibration:
        named["calibration"] = request.calibration
    return JobRecord(
        command=command,
        what=what,
        **_model(model),
        gpu=gpu if isinstance(gpu, str) else gpu.name,
        node=node or None,
        options=_given(named),
        settings={name: as_option(name, value) for name, value in fields.items() if value is not None},
        query=_given(query or {}),
        preset_dirs=tuple(map(os.fspath, preset_dirs)),
    )


def _model(model: str | Model | None) -> dict[str, Any]:
    """How a model is named: by its name, or as the module that it was recorded from."""
    if model is None or isinstance(model, str):
        return {"model": model}
    if model.recording is None:
        return {"model": model.name}
    options = {name.replace("-", "_"): value for name, value in model.recording.words}
    return {"model": None, "module": {"module": model.recording.origin, **options}}


def with_query(job: JobRecord, command: Command, **query: Any) -> JobRecord:
    """The same job, asked by another command."""
    return job.model_copy(update={"command": command, "query": _given(query)})


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that say something: of a flag without a ``--no-`` form, false is as if it were not given."""
    values = {name: as_option(name, value) for name, value in options.items() if value is not None}
    return {name: value for name, value in values.items() if value is not False or _has_negative(name)}


def _has_negative(name: str) -> bool:
    return name in BY_NAME and BY_NAME[name].negative


def as_option(name: str, value: Any) -> Any:
    """A value as the record has it: a list is several values for a search, or all that is offloaded or trained.

    >>> as_option("tp", [2, 4]), as_option("tp", "2"), as_option("offload", ("optimizer", "params"))
    ('2/4', 2, 'optimizer,params')
    """
    if name == "stages":
        return tuple(map(str, value))
    if name in FLAGS:
        return boolean(value, name)
    if isinstance(value, tuple | list | set | frozenset):
        between = OR if name in SEARCHED and name != "offload" else ","
        return between.join(map(str, value)) or "none"
    row = BY_NAME.get(name.rpartition(".")[2])
    if row and row.kind == "factor":
        return factor(value, row.name)
    if isinstance(value, str):
        return int(value) if row and row.kind in _NUMBERS and value.isascii() and value.isdigit() else value
    if isinstance(value, bool | float):
        return value
    return int(value) if isinstance(value, Integral) else str(value)


def flat_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords of :func:`memcalc.estimate` in one table, a field that is an option under that name; nothing is None.

    >>> flat_options({"zero": None, "settings": {"strategy.tp": "2", "strategy.reduce_dtype": "bf16"}})
    {'tp': '2', 'strategy.reduce_dtype': 'bf16'}
    """
    merged = {**options, **(options.get("settings") or {})}
    return {
        SETTINGS.get(name, name): value for name, value in merged.items() if name != "settings" and value is not None
    }


def split_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """A flat table as keywords of :func:`memcalc.estimate`.

    >>> split_options({"zero": 3, "strategy.reduce_dtype": "bf16"})
    {'zero': 3, 'settings': {'strategy.reduce_dtype': 'bf16'}}
    """
    plain = {name: value for name, value in options.items() if "." not in name}
    return {**plain, "settings": {name: value for name, value in options.items() if "." in name}}


def value_text(value: Any) -> str:
    """A value as it is typed.

    >>> value_text(("optimizer", "params")), value_text(()), value_text(True)
    ('optimizer,params', 'none', 'true')
    """
    if isinstance(value, tuple | list):
        return ",".join(map(str, value)) or "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


def pinned(job: JobRecord, model: str | Model | None = None) -> JobRecord:
    """The estimate of what a search does not choose, of another model where one is given."""
    options = {name: value for name, value in job.options.items() if name not in CHOSEN}
    update = {"command": "estimate", "what": "", "query": {}, "options": options}
    return job.model_copy(update={**update, **({} if model is None else _model(model))})


def strategy_record(job: JobRecord, strategy: Strategy, gpus: int, seq_len: int, global_batch: int) -> JobRecord:
    """The estimate of a strategy that a search found for a job."""
    chosen = split_options(
        {**chosen_options(strategy, gpus, seq_len, global_batch), **_launcher_options(job, strategy)}
    )
    alone = pinned(job)
    idle = {row.name for row in NEEDING if row.needs in DEGREES and getattr(strategy, row.needs) == 1}
    alone = alone.model_copy(update={"options": {name: v for name, v in alone.options.items() if name not in idle}})
    alone = alone.model_copy(update={"settings": {**alone.settings, **chosen.pop("settings")}})
    return alone.with_options(**chosen)


def _launcher_options(job: JobRecord, strategy: Strategy) -> dict[str, Value]:
    """What a search takes of a launcher that an estimate does not, since its framework is named: see ``Request``."""
    autocast: dict[str, Value] = {"autocast": True} if strategy.autocast else {}
    if strategy.lora:
        usual = casts_frozen(habits_of(strategy.framework), [strategy.precision])
        return {"autocast": False} if usual and not strategy.autocast else autocast
    if "framework" in job.options or strategy.reduce_dtype == "fp32":
        return {}
    return {**autocast, "strategy.reduce_dtype": strategy.reduce_dtype}


def chosen_options(s: Strategy, gpus: int, seq_len: int, global_batch: int) -> dict[str, Value]:
    """What a search chose of a strategy, as options of :func:`memcalc.estimate`; defaults are left out."""
    usual = s.sp and "tp+sp" in capabilities_of(s.framework).parallel.direct
    return {
        "gpus": gpus,
        "seq_len": seq_len,
        "global_batch": global_batch,
        "micro_batch": s.micro_batch,
        "framework": s.framework,
        "precision": s.precision,
        **({"optimizer": s.optimizer} if s.optimizer != "adamw" else {}),
        "zero": s.zero,
        "recompute": s.recompute,
        **{name: getattr(s, name) for name in DEGREES if getattr(s, name) > 1},
        **({"pp_schedule": s.pp_schedule} if s.pp > 1 and s.pp_schedule != "1f1b" else {}),
        **({"vpp": s.vpp} if s.vpp > 1 else {}),
        **({"offload": ",".join(s.offload)} if s.offload else {}),
        **({"offload_to": s.offload_to} if s.offload and s.offload_to != "cpu" else {}),
        **({"sp": s.sp} if s.tp > 1 and not usual else {}),
        **{BY_NAME[name].key: value for name in SPLITS if s.pp > 1 and (value := getattr(s, name))},
        **({BY_NAME["etp"].key: s.etp} if s.etp and s.tp > 1 else {}),
    }


MOST_COUNTS = 64
"""Numbers of GPUs that one search tries."""
UNLIMITED = 2**50
"""Memory of a GPU on which everything fits [bytes]."""


@dataclass(frozen=True)
class PlanJob:
    """A checked request with its model, GPU and node."""

    request: Request
    model: Model
    gpu: GPU
    node: Node
    lengths: JobLengths | None = field(default=None, kw_only=True)
    """Where sequences differ in length: the request is about the longest."""
    tally: Tally | None = field(default=None, kw_only=True, compare=False)
    """What is told of how far a search is."""
    traces: TraceCache = field(default_factory=TraceCache, kw_only=True, compare=False, repr=False)
    """Blocks that were traced before; jobs that are made from this one share them."""
    replayed: dict[tuple[object, ...], tuple[Model, Node, dict[bool, Peaks | None]]] = field(
        default_factory=dict, kw_only=True, compare=False, repr=False
    )
    """Figures of strategies that were replayed before, shared likewise: by whether only safe ones were wanted, and None
    where a strategy was then refused. Model and node, by whose identity they are found, live as long."""
    evaluated: dict[tuple[object, ...], tuple[Model, Array]] = field(
        default_factory=dict, kw_only=True, compare=False, repr=False
    )
    """What evaluations of the strategies of a grid need at least [bytes], shared likewise."""
    _found: dict[int, SearchResult] = field(default_factory=dict, init=False, compare=False, repr=False)
    """What the search that wants most has found, by the number of GPUs."""
    _spaces: dict[int, tuple[Grid, ...]] = field(default_factory=dict, init=False, compare=False, repr=False)
    """What is searched, by the number of GPUs."""

    def on(self, grid: Grid) -> ModelOnGrid:
        """The model on a grid."""
        return ModelOnGrid(self.model, grid, self.traces)

    def counts(self) -> list[int]:
        """The numbers of GPUs that are wanted; by default 1, 2, 4, … of one node, as many as pinned degrees need."""
        given, choice = self.request.given, self.request.choices.get("gpus")
        if "gpus" in given:
            return [given["gpus"]]
        if choice is not None and choice.listed:
            return list(choice.listed)[:MOST_COUNTS]
        least = prod(given.get(name, 1) for name in RANK_DEGREES)
        most = max(self.node.gpus, least) if choice is None or choice.most is None else choice.most
        counts = [least << k for k in range(20) if least << k <= most]
        counts = [count for count in counts if choice is None or choice.takes(count)] or [max(most, 1)]
        self.request.assumptions["gpus"] = f"each of {', '.join(map(str, counts))}"
        return counts

    def size(self, gpus: int) -> int:
        """How many strategies a search on so many GPUs evaluates."""
        return sum(grid.size for grid in self._space(gpus))

    def search(self, counts: Iterable[int], wanted: Wanted | None = None) -> dict[int, SearchResult]:
        """The best strategies of each number of GPUs."""
        from memcalc.planner.search import search

        spaces = [self._space(gpus) for gpus in counts]
        grids = joined([grid for space in spaces for grid in space])
        outcomes = search(self.model, grids, self.gpu, self.node, wanted, self.tally, self.traces)
        if wanted is None or not (wanted.tight or wanted.trusting or wanted.most < inf):
            self._found.update(outcomes)
        return outcomes

    def _space(self, gpus: int) -> tuple[Grid, ...]:
        if gpus not in self._spaces:
            self._spaces[gpus] = axes.space(self.request, self.model, self.gpu, self.node, gpus)
        return self._spaces[gpus]

    def known(self, gpus: int) -> SearchResult | None:
        """Counts, and what is nearest to fitting, of a search that wants a plan to fit; None where nothing is legal."""
        if gpus not in self._found:
            self.search([gpus])
        return self._found.get(gpus)

    def is_hopeful(self, gpus: int, *, resident: bool = False) -> bool:
        """Whether a search that wants less may find more than one that was made before found, on so many GPUs.

        ``resident``: more that offloads nothing.
        """
        known = self._found.get(gpus)
        return known is None or (known.resident_hopeful if resident else known.hopeful)

    def pinned(self, **options: Any) -> PlanJob:
        """The same job with some words pinned; its assumptions are its own."""
        choices = {name: choice for name, choice in self.request.choices.items() if name not in options}
        given = {**self.request.given, **options}
        return replace(self, request=replace(self.request, given=given, assumptions={}, choices=choices))

    def freed(self, *names: str) -> PlanJob:
        """The same job with some words left open."""
        given = {name: value for name, value in self.request.given.items() if name not in names}
        choices = {name: choice for name, choice in self.request.choices.items() if name not in names}
        return replace(self, request=replace(self.request, given=given, assumptions={}, choices=choices))

    def unlimited(self) -> PlanJob:
        """The same job on a GPU with memory for everything."""
        return replace(self, gpu=self.gpu.model_copy(update={"memory_bytes": UNLIMITED}))

    def refuse_batch(self, gpus: int) -> None:
        """Refuse a global batch that the data-parallel ranks of no layout divide, with the micro-batch as given."""
        choice, given = self.request.choices.get("micro_batch"), self.request.given.get("micro_batch")
        sizes = [given] if given is not None else choice.listed if choice is not None and choice.listed else [1]
        grids = [grid for grid in self._space(gpus) if grid.layouts]
        steps = {layout.dp * size for grid in grids for layout in grid.layouts for size in sizes}
        batches = {grid.fixed.global_batch for grid in grids}
        if len(batches) == 1:
            refuse_batch(batches.pop(), steps, f"micro-batch x data-parallel ranks on {gpus} GPU{'s' * (gpus > 1)}")

    def refuse(self, counts: list[int]) -> None:
        """Say why no layout is legal: the error of the first pinned degree that cannot be."""
        pinned = Request({**self.request.given, "gpus": counts[-1]})
        longest = self.request.given.get("seq_len", self.model.max_positions)
        habits = habits_for(pinned)[1]
        layout, split = axes.one_layout(pinned, habits, self.model), self.request.given.get("fields", {}).get("etp", 0)
        check_layout(self.model, layout, longest, split, alone=habits.flat_units)
        raise MissingError(f"no valid layout for {self.model.name} on {counts[-1]} GPUs: give --gpus.")


def joined(grids: Iterable[Grid]) -> tuple[Grid, ...]:
    """Grids that differ in their layouts alone as one, a space of its own: what they share is computed once."""
    alike: dict[Grid, list[Layout]] = {}
    for grid in grids:
        alike.setdefault(replace(grid, layouts=(), space=()), []).extend(grid.layouts)
    return tuple(replace(grid, layouts=tuple(layouts)) for grid, layouts in alike.items())
