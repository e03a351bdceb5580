"""A checked request as the record of its job, and the records of the strategies that a search finds for it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from numbers import Integral
from typing import TYPE_CHECKING, Any

from memcalc.frameworks.capabilities import capabilities_of
from memcalc.frameworks.capability import SPLITS
from memcalc.planner.request import OR, boolean, factor
from memcalc.specs.job import Command, JobRecord, Value
from memcalc.specs.options import BY_NAME, DEGREES, FLAGS, NEEDING, SEARCHED, SETTINGS

if TYPE_CHECKING:
    from memcalc.planner.request import Request
    from memcalc.specs.hardware import GPU
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
    chosen = split_options(chosen_options(strategy, gpus, seq_len, global_batch))
    alone = pinned(job)
    idle = {row.name for row in NEEDING if row.needs in DEGREES and getattr(strategy, row.needs) == 1}
    alone = alone.model_copy(update={"options": {name: v for name, v in alone.options.items() if name not in idle}})
    alone = alone.model_copy(update={"settings": {**alone.settings, **chosen.pop("settings")}})
    return alone.with_options(**chosen)


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
    }
