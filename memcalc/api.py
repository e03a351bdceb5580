"""The library: :func:`estimate` one strategy, :func:`plan` over all that fit, in the words of the options."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memcalc import catalog
from memcalc.errors import CombinationError, InputError, MissingError
from memcalc.frameworks import habits_of
from memcalc.frameworks.own_code import rewritten
from memcalc.planner import answer, axes, finalists
from memcalc.planner.request import Request, check_words, habits_for, positive
from memcalc.planner.search import Outcome, search
from memcalc.terms import overhead_of
from memcalc.terms.prediction import with_predictors

if TYPE_CHECKING:
    from memcalc.grid import Grid
    from memcalc.results import Estimate, Plans
    from memcalc.specs.hardware import GPU, Node
    from memcalc.specs.model import Model

TOP = 10
"""Plans that are listed for one number of GPUs."""
SPARE = 8
"""Strategies that a search keeps beyond those wanted, since a replay may find that one does not run, or is tight."""
CHOSEN = frozenset(
    [
        "gpus",
        "seq_len",
        "global_batch",
        "micro_batch",
        "framework",
        "precision",
        "zero",
        "recompute",
        "tp",
        "pp",
        "pp_schedule",
        "vpp",
        "cp",
        "ep",
        "offload",
    ]
)
"""Words that a search decides, or that each of its plans repeats."""

__all__ = ["estimate", "load_model", "plan"]


def load_model(name: str, preset_dirs: Iterable[str] = ()) -> Model:
    """A preset by its name, or a model from a ``config.json``, a directory that has one, or a TOML file."""
    if not name:
        raise InputError("model", name, "must be a preset's name, a config.json, a directory with one, or a .toml file")
    path = Path(name)
    if name.endswith(".json") or (not name.endswith(".toml") and _is_directory(path)):
        from memcalc.convert.huggingface import read_model

        return read_model(name)
    return catalog.model(name, tuple(preset_dirs))


def _is_directory(path: Path) -> bool:
    try:
        return path.is_dir() and ("/" in str(path) or (path / "config.json").exists() or str(path) == ".")
    except (OSError, ValueError):
        return False


def estimate(
    *,
    model: str | Model,
    gpu: str | GPU,
    node: str | None = None,
    settings: Mapping[str, Any] | None = None,
    preset_dirs: Iterable[str] = (),
    **words: Any,
) -> Estimate:
    """Estimate one strategy: components, terms, phases, the three peak figures and the verdict.

    ``model`` and ``gpu`` are names, or a ready :class:`~memcalc.specs.model.Model` and
    :class:`~memcalc.specs.hardware.GPU`.
    Raises :class:`memcalc.errors.InputError` for a value that cannot be used.
    """
    request, spec, chip, host = _resolve(model, gpu, node, settings, preset_dirs, words)
    grid = axes.one_strategy(request, spec, chip, host)
    overhead = overhead_of(chip, grid, grid.layouts[0])
    return answer.estimate_of(
        spec, grid, chip, host, overhead, request, _command("estimate", model, gpu, node, words, settings)
    )


def plan(
    *,
    model: str,
    gpu: str,
    node: str | None = None,
    settings: Mapping[str, Any] | None = None,
    preset_dirs: Iterable[str] = (),
    top: int | str = TOP,
    **words: Any,
) -> Plans:
    """Search every strategy that the given words leave open; rank those that fit by predicted throughput.

    Without ``gpus``: the best plan for 1, 2, 4 and 8 GPUs of one node.
    """
    started = time.perf_counter()
    request, spec, chip, host = _resolve(model, gpu, node, settings, preset_dirs, words)
    wanted = positive(top, "top")
    counts = [request.given["gpus"]] if "gpus" in request.given else _counts(request, host)
    kept = wanted if len(counts) == 1 else 1
    outcomes: dict[int, Outcome] = {}
    for gpus in counts:
        grid = axes.space(request, spec, chip, host, gpus)
        if grid is not None:
            outcomes[gpus] = search(spec, grid, overhead_of(chip, grid), chip, host, kept + SPARE)
    if not outcomes:
        _refuse(request, spec, counts)
    nearest = [] if any(o.best for o in outcomes.values()) else _nearest(request, spec, chip, host, max(counts))
    command = _command("plan", model, gpu, node, {**words, "top": None if wanted == TOP else wanted}, settings)
    pinned = {name: value for name, value in words.items() if name not in CHOSEN}
    base = _command("estimate", model, gpu, node, pinned, settings)
    return finalists.plans_of(spec, chip, host, outcomes, nearest, request, command, base, kept, started)


def _resolve(
    model: str | Model,
    gpu: str | GPU,
    node: str | None,
    settings: Mapping[str, Any] | None,
    preset_dirs: Iterable[str],
    words: Mapping[str, Any],
) -> tuple[Request, Model, GPU, Node]:
    from memcalc.specs.hardware import GPU
    from memcalc.specs.model import Model

    dirs = tuple(preset_dirs)
    chip = gpu if isinstance(gpu, GPU) else catalog.gpu(gpu, dirs)
    host = catalog.node(node, dirs) if node else catalog.node_for(chip, dirs)
    if host.gpu != chip.name:
        raise CombinationError("node", node, f"it holds {host.gpu} GPUs, and --gpu is {chip.name}")
    request = check_words(words, settings)
    spec = model if isinstance(model, Model) else load_model(model, dirs)
    if "framework" in request.given:
        spec = rewritten(spec, habits_of(request.given["framework"]).own_code)
    spec = with_predictors(spec, int(request.given["fields"].get("mtp", 0)))
    if not node:
        request.assumptions["node"] = host.name
    return request, spec, chip, host


def _counts(request: Request, node: Node) -> list[int]:
    """1, 2, 4, … GPUs of one node, at least as many as the pinned degrees need."""
    least = 1
    for name in ("tp", "pp", "cp"):
        least *= request.given.get(name, 1)
    counts = [least << k for k in range(12) if least << k <= max(node.gpus, least)]
    request.assumptions["gpus"] = f"each of {', '.join(map(str, counts))}"
    return counts


def _refuse(request: Request, model: Model, counts: list[int]) -> None:
    """Say why no layout is legal: the error of the first pinned degree that cannot be."""
    from memcalc.grid import check_layout

    pinned = Request({**request.given, "gpus": counts[-1]})
    check_layout(
        model, axes.one_layout(pinned, habits_for(pinned)[1]), request.given.get("seq_len", model.max_positions)
    )
    raise MissingError(f"no parallel layout of {counts[-1]} GPUs is legal for {model.name}; give --gpus.")


def _nearest(request: Request, model: Model, gpu: GPU, node: Node, gpus: int) -> list[tuple[str, int]]:
    """Changes that would fit: one pinned word left open, or more GPUs."""
    changes: list[tuple[str, int]] = []
    pinned = [n for n in ("recompute", "zero", "offload", "micro_batch", "tp", "precision") if n in request.given]
    for name in pinned:
        freed = Request({k: v for k, v in request.given.items() if k != name})
        changes += _if_fits(freed, model, gpu, node, gpus, f"leave --{name.replace('_', '-')} open: ")
    for factor in (2, 4, 8, 16, 32, 64):
        more = _if_fits(Request(dict(request.given)), model, gpu, node, gpus * factor, f"--gpus {gpus * factor}: ")
        if more:
            return changes + more
    return changes


def _if_fits(request: Request, model: Model, gpu: GPU, node: Node, gpus: int, change: str) -> list[tuple[str, int]]:
    grid: Grid | None = axes.space(request, model, gpu, node, gpus)
    if grid is None:
        return []
    overhead = overhead_of(gpu, grid)
    best = search(model, grid, overhead, gpu, node, 1).best
    return [(change + finalists.short(best[0]), overhead.device(best[0].reserved))] if best else []


def _command(
    command: str,
    model: str | Model,
    gpu: str | GPU,
    node: str | None,
    words: Mapping[str, Any],
    settings: Mapping[str, Any] | None,
) -> str:
    """The command line that reproduces the answer."""
    import shlex

    named = [thing if isinstance(thing, str) else thing.name for thing in (model, gpu)]
    parts = ["memcalc", command, "--model", named[0], "--gpu", named[1], *(["--node", node] if node else [])]
    for name, value in words.items():
        if value is None or (value is False and name != "sp"):
            continue
        flag = f"--{name.replace('_', '-')}"
        parts += [flag] if value is True else ["--no-sp"] if value is False else [flag, _typed(value)]
    for key, value in (settings or {}).items():
        parts += ["--set", f"{key}={value}"]
    return shlex.join(parts)


def _typed(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple | list) else str(value)
