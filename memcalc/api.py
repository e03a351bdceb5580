"""The library: :func:`estimate` one strategy, :func:`plan` over all that fit, in the words of the options."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memcalc import catalog
from memcalc.errors import CombinationError, InputError, MissingError
from memcalc.planner import answer, axes
from memcalc.planner.request import Request, check_words, positive
from memcalc.planner.search import Outcome, search
from memcalc.terms import overhead_of

if TYPE_CHECKING:
    from memcalc.grid import Grid
    from memcalc.results import Estimate, Plans
    from memcalc.specs.hardware import GPU, Node
    from memcalc.specs.model import Model

TOP = 10
"""Plans that are listed for one number of GPUs."""
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
    model: str,
    gpu: str,
    node: str | None = None,
    settings: Mapping[str, Any] | None = None,
    preset_dirs: Iterable[str] = (),
    **words: Any,
) -> Estimate:
    """Estimate one strategy: components, terms, phases, the three peak figures and the verdict.

    Raises :class:`memcalc.errors.InputError` for a value that cannot be used.
    """
    request, spec, chip, host = _resolve(model, gpu, node, settings, preset_dirs, words)
    grid = axes.one_strategy(request, spec, chip, host)
    overhead = overhead_of(chip, grid.layouts[0].gpus)
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
    outcomes: dict[int, Outcome] = {}
    for gpus in counts:
        grid = axes.space(request, spec, chip, host, gpus)
        if grid is not None:
            kept = wanted if len(counts) == 1 else 1
            outcomes[gpus] = search(spec, grid, overhead_of(chip, gpus), chip, host, kept)
    if not outcomes:
        _refuse(request, spec, counts)
    nearest = [] if any(o.best for o in outcomes.values()) else _nearest(request, spec, chip, host, max(counts))
    command = _command("plan", model, gpu, node, {**words, "top": None if wanted == TOP else wanted}, settings)
    pinned = {name: value for name, value in words.items() if name not in CHOSEN}
    base = _command("estimate", model, gpu, node, pinned, settings)
    return answer.plans_of(spec, chip, host, outcomes, nearest, request, command, base, started)


def _resolve(
    model: str,
    gpu: str,
    node: str | None,
    settings: Mapping[str, Any] | None,
    preset_dirs: Iterable[str],
    words: Mapping[str, Any],
) -> tuple[Request, Model, GPU, Node]:
    dirs = tuple(preset_dirs)
    chip = catalog.gpu(gpu, dirs)
    host = catalog.node(node, dirs) if node else catalog.node_for(chip, dirs)
    if host.gpu != chip.name:
        raise CombinationError("node", node, f"it holds {host.gpu} GPUs, and --gpu is {chip.name}")
    request = check_words(words, settings)
    spec = load_model(model, dirs)
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
    check_layout(model, axes.one_layout(pinned), request.given.get("seq_len", model.max_positions))
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
    overhead = overhead_of(gpu, gpus)
    best = search(model, grid, overhead, gpu, node, 1).best
    return [(change + answer.short(best[0]), overhead.device(best[0].allocated))] if best else []


def _command(
    command: str, model: str, gpu: str, node: str | None, words: Mapping[str, Any], settings: Mapping[str, Any] | None
) -> str:
    """The command line that reproduces the answer."""
    import shlex

    parts = ["memcalc", command, "--model", model, "--gpu", gpu, *(["--node", node] if node else [])]
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
