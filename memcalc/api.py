"""The library: :func:`estimate` one strategy, :func:`plan` over all that fit, in the words of the options."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args

from memcalc import catalog
from memcalc.errors import CombinationError, InputError
from memcalc.frameworks import habits_of
from memcalc.frameworks.own_code import rewritten
from memcalc.planner import answer, axes
from memcalc.planner.job import Job
from memcalc.planner.objectives import Goal, Objective
from memcalc.planner.plans import BILLION, Wish, plan_for
from memcalc.planner.request import Request, check_words, one_of, positive
from memcalc.terms import overhead_of
from memcalc.terms.prediction import with_predictors

if TYPE_CHECKING:
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
        "sp",
        "pp",
        "pp_schedule",
        "vpp",
        "cp",
        "ep",
        "offload",
        "offload_to",
        "optimizer",
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
    objective: str = "throughput",
    critical_batch: int | str | None = None,
    tokens: int | str | None = None,
    why: str | None = None,
    recipe: bool = False,
    top: int | str = TOP,
    **words: Any,
) -> Plans:
    """Search every strategy that the given words leave open; rank those that fit.

    Without ``gpus``: the best plan for 1, 2, 4 and 8 GPUs of one node. ``objective`` is throughput, memory, gpus, cost
    or simplicity; ``critical_batch`` in tokens makes large batches count for less; ``tokens`` is the budget for which
    GPU-hours are told; ``why`` names a strategy, as in ``tp=1,zero=3``, and asks why it lost; ``recipe`` adds the
    usual order of tuning, and what each remedy returns.
    """
    request, spec, chip, host = _resolve(model, gpu, node, settings, preset_dirs, words, several=True)
    wish = replace(_wish(top, objective, critical_batch, tokens), question=why or "", recipe=recipe)
    own = {
        "objective": None if objective == "throughput" else objective,
        "critical_batch": critical_batch,
        "tokens": tokens,
        "why": why,
        "recipe": recipe or None,
        "top": None if wish.top == TOP else wish.top,
    }
    command = _command("plan", model, gpu, node, {**words, **own}, settings)
    pinned = {name: value for name, value in words.items() if name not in CHOSEN}
    base = _command("estimate", model, gpu, node, pinned, settings)
    return plan_for(Job(request, spec, chip, host), wish, command, base)


def _wish(top: int | str, objective: str, critical_batch: Any, tokens: Any) -> Wish:
    """How the answer is wanted, checked."""
    name = one_of(objective, "objective", get_args(Objective))
    critical = None if critical_batch is None else positive(critical_batch, "critical_batch")
    budget = BILLION if tokens is None else positive(tokens, "tokens")
    return Wish(Goal(cast("Objective", name), critical), positive(top, "top"), budget)


def _resolve(
    model: str | Model,
    gpu: str | GPU,
    node: str | None,
    settings: Mapping[str, Any] | None,
    preset_dirs: Iterable[str],
    words: Mapping[str, Any],
    *,
    several: bool = False,
) -> tuple[Request, Model, GPU, Node]:
    from memcalc.specs.hardware import GPU
    from memcalc.specs.model import Model

    dirs = tuple(preset_dirs)
    chip = gpu if isinstance(gpu, GPU) else catalog.gpu(gpu, dirs)
    host = catalog.node(node, dirs) if node else catalog.node_for(chip, dirs)
    if host.gpu != chip.name:
        raise CombinationError("node", node, f"it holds {host.gpu} GPUs, and --gpu is {chip.name}")
    request = check_words(words, settings, several=several)
    spec = model if isinstance(model, Model) else load_model(model, dirs)
    if "framework" in request.given:
        spec = rewritten(spec, habits_of(request.given["framework"]).own_code)
    spec = with_predictors(spec, int(request.given["fields"].get("mtp", 0)))
    if not node:
        request.assumptions["node"] = host.name
    return request, spec, chip, host


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
