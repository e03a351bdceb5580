"""The library: :func:`estimate` one strategy, :func:`plan` over all that fit, in the words of the options."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args

from memcalc import calibrations, catalog
from memcalc.errors import CombinationError, InputError, MissingError, UnknownNameError
from memcalc.formulas.census import model_count
from memcalc.frameworks import habits_of
from memcalc.frameworks.own_code import rewritten
from memcalc.planner.choices import OR
from memcalc.planner.job import Job
from memcalc.planner.objectives import Goal, Objective
from memcalc.planner.one import One
from memcalc.planner.plans import BILLION, Wish, plan_for
from memcalc.planner.recorded import check_recorded
from memcalc.planner.request import SEARCHED, Request, check_words, one_of, positive
from memcalc.planner.tally import Tally
from memcalc.specs.strategy import Largest, Smallest
from memcalc.terms.prediction import with_predictors

if TYPE_CHECKING:
    from memcalc.planner.columns import Inquiry
    from memcalc.planner.inverse_answer import Asked
    from memcalc.planner.tally import Listener
    from memcalc.results import Estimate, Inverse, Plans
    from memcalc.specs.hardware import GPU, Node
    from memcalc.specs.model import Model

TOP = 10
"""Plans that are listed for one number of GPUs."""
CHOSEN = frozenset({*SEARCHED, "framework", "seq_len"})
"""Words that a search decides, or that each of its plans repeats."""

__all__ = ["estimate", "largest", "load_model", "plan", "single", "smallest"]


def load_model(name: str, preset_dirs: Iterable[str] = ()) -> Model:
    """A preset by its name, or a model from a ``config.json``, a directory that has one, or a TOML file."""
    if not name:
        raise InputError("model", name, "must be a preset's name, a config.json, a directory with one, or a .toml file")
    path = Path(name)
    if name.endswith(".json") and _is_recorded(path):
        from memcalc.convert.recorded import read_recorded

        return read_recorded(path)
    if name.endswith(".json") or (not name.endswith(".toml") and _is_directory(path)):
        from memcalc.convert.huggingface import read_model

        return read_model(name)
    return catalog.model(name, tuple(preset_dirs))


def _is_recorded(path: Path) -> bool:
    from memcalc.convert.recorded import is_recorded

    return is_recorded(path)


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
    timeline: bool = False,
    **words: Any,
) -> Estimate:
    """Estimate one strategy: components, terms, phases, the three peak figures and the verdict.

    Parameters
    ----------
    model
        A preset's name, the path of a ``config.json``, its directory, a TOML file or a recorded module, or a record.
    gpu
        A preset's name, or a record.
    node
        A preset's name; the usual host of the GPU when left out.
    settings
        Fields that have no word of their own, by dotted name, as in ``{"strategy.reduce_dtype": "bf16"}``.
    preset_dirs
        Folders with presets of your own, looked up first.
    timeline
        Whether one step over time is added.
    **words
        The words of a job: ``gpus``, ``seq_len`` [tokens], ``micro_batch`` and ``global_batch`` [sequences], and all
        others of :doc:`/python`. ``calibration`` is the file of one, or ``none``; without it the user's own
        calibration of a GPU that is named is taken, where there is one.

    Raises
    ------
    memcalc.errors.InputError
        For a value that cannot be used; where only the user can tell it, :class:`memcalc.errors.MissingError`.
    """
    job = single(model=model, gpu=gpu, node=node, settings=settings, preset_dirs=preset_dirs, **words)
    return job.estimate(timeline=timeline)


def single(
    *,
    model: str | Model,
    gpu: str | GPU,
    node: str | None = None,
    settings: Mapping[str, Any] | None = None,
    preset_dirs: Iterable[str] = (),
    **words: Any,
) -> One:
    """The job of :func:`estimate` with every default resolved and checked, before its figures are computed."""
    request, spec, chip, host = _resolve(model, gpu, node, settings, preset_dirs, words)
    command = _command("estimate", model, gpu, node, _said(words, request), settings)
    return One.of(Job(request, spec, chip, host), command)


def plan(
    *,
    model: str | Model,
    gpu: str,
    node: str | None = None,
    settings: Mapping[str, Any] | None = None,
    preset_dirs: Iterable[str] = (),
    objective: str = "throughput",
    critical_batch: int | str | None = None,
    tokens: int | str | None = None,
    why: str | None = None,
    recipe: bool = False,
    advice: bool = True,
    top: int | str = TOP,
    on_progress: Listener | None = None,
    **words: Any,
) -> Plans:
    """Search every strategy that the given words leave open; rank those that fit.

    The job is told as for :func:`estimate`, and the same errors are raised. Each of ``words`` pins or narrows what is
    searched; without ``gpus`` the best plan is told for 1, 2, 4, … GPUs of one node.

    Parameters
    ----------
    objective
        ``throughput``, ``memory``, ``gpus``, ``cost`` or ``simplicity``.
    critical_batch, tokens
        The critical batch, with which large batches count for less; the budget for which GPU-hours are told [tokens].
    why
        A strategy, as in ``tp=1,zero=3``, of which the answer says why it lost.
    recipe, advice
        Whether the usual order of tuning is added; whether the smallest changes are told where nothing fits.
    top
        Plans that are listed for one number of GPUs.
    on_progress
        Is told how many strategies of how many are searched.
    """
    request, spec, chip, host = _resolve(model, gpu, node, settings, preset_dirs, words, several=True)
    wish = replace(_wish(top, objective, critical_batch, tokens), question=why or "", recipe=recipe, advice=advice)
    own = {
        "objective": None if objective == "throughput" else objective,
        "critical_batch": critical_batch,
        "tokens": tokens,
        "why": why,
        "recipe": recipe or None,
        "top": None if wish.top == TOP else wish.top,
    }
    words = _said(words, request)
    command = _command("plan", model, gpu, node, {**words, **own}, settings)
    pinned = {name: value for name, value in words.items() if name not in CHOSEN}
    base = _command("estimate", model, gpu, node, pinned, settings)
    return plan_for(Job(request, spec, chip, host, tally=Tally(on_progress)), wish, command, base)


def _wish(top: int | str, objective: str, critical_batch: Any, tokens: Any) -> Wish:
    """How the answer is wanted, checked."""
    name = one_of(objective, "objective", get_args(Objective))
    critical = None if critical_batch is None else positive(critical_batch, "critical_batch")
    budget = BILLION if tokens is None else positive(tokens, "tokens")
    return Wish(Goal(cast("Objective", name), critical), positive(top, "top"), budget)


def largest(
    what: str,
    *,
    gpu: str,
    model: str | Model | None = None,
    node: str | None = None,
    settings: Mapping[str, Any] | None = None,
    preset_dirs: Iterable[str] = (),
    step: int | str = 1,
    safe: bool = False,
    search: str | None = None,
    family: str | None = None,
    curve: bool = False,
    on_progress: Listener | None = None,
    **words: Any,
) -> Inverse:
    """The largest ``seq-len``, ``micro-batch`` or ``model`` that fits; what the other words leave open is searched.

    The job is told as for :func:`plan`.

    Parameters
    ----------
    what
        ``seq-len`` [tokens], ``micro-batch`` [sequences] or ``model``, which then is left out of the words.
    step, safe
        Only multiples of ``step`` are answered, and where ``safe`` no value whose verdict is ``tight``.
    search, family
        A part of a name, or a family, that narrows the models.
    curve
        Whether the answer's strategy is added at values below and above it, except for models.
    on_progress
        Is told how many models of how many are begun, or how many strategies are evaluated, of 0: nobody knows.
    """
    from memcalc.planner import questions

    ask = _Ask("max", _one_of(what, get_args(Largest)), node, settings, tuple(preset_dirs), words, safe=safe)
    if what == "model":
        if model is not None:
            raise InputError("model", model, "max model answers it, so it must be left out")
        specs = _models(search, family, ask.dirs)
        options = {"search": search, "family": family}
        pairs = [ask.of(spec, gpu, positive(step, "step"), **options) for spec in specs]
        return questions.biggest(pairs, ask.gpus(pairs[0][0]), on_progress)
    if model is None:
        raise MissingError("the largest of what? give --model.")
    job, asked = ask.of(model, gpu, positive(step, "step"))
    job = replace(job, tally=Tally(on_progress))
    find = questions.longest if what == "seq-len" else questions.widest
    return find(job, replace(asked, curve=curve), ask.gpus(job))


def smallest(
    what: str,
    *,
    model: str | Model,
    gpu: str,
    node: str | None = None,
    settings: Mapping[str, Any] | None = None,
    preset_dirs: Iterable[str] = (),
    up_to: int | str | None = None,
    any_count: bool = False,
    safe: bool = False,
    on_progress: Listener | None = None,
    **words: Any,
) -> Inverse:
    """The smallest number of ``gpus`` on which a strategy fits, with the fastest there.

    The job is told as for :func:`plan`; ``what`` is ``gpus``, ``safe`` as for :func:`largest`.

    Parameters
    ----------
    up_to
        The largest number that is tried; eight nodes when left out.
    any_count
        Whether every number is tried; otherwise powers of two within a node, and whole nodes.
    on_progress
        Is told how many strategies are evaluated, of 0: nobody knows how many.
    """
    from memcalc.planner import questions

    ask = _Ask("min", _one_of(what, get_args(Smallest)), node, settings, tuple(preset_dirs), words, safe=safe)
    job, asked = ask.of(model, gpu, 1, up_to=up_to, any_count=any_count)
    job = replace(job, tally=Tally(on_progress))
    most = questions.NODES * job.node.gpus if up_to is None else positive(up_to, "up_to")
    return questions.fewest(job, asked, questions.counts_up_to(most, job.node.gpus, every=any_count))


def _one_of(what: str, names: tuple[str, ...]) -> str:
    if what not in names:
        raise UnknownNameError("what", what, f"must be one of {', '.join(names)}", names)
    return what


@dataclass(frozen=True)
class _Ask:
    """The words of an inverse question."""

    command: str
    what: str
    node: str | None
    settings: Mapping[str, Any] | None
    dirs: tuple[str, ...]
    words: Mapping[str, Any]
    safe: bool

    def of(self, model: str | Model, gpu: str, step: int, **options: Any) -> tuple[Inquiry, Asked]:
        """The question for a model, checked."""
        from memcalc.planner.columns import Inquiry
        from memcalc.planner.inverse_answer import Asked

        started = time.perf_counter()
        request, spec, chip, host = _resolve(model, gpu, self.node, self.settings, self.dirs, self.words)
        name = self.what.replace("-", "_")
        if request.given.get(name) is not None:
            raise InputError(self.what, request.given[name], f"{self.command} {self.what} answers it, so leave it out")
        words = _said(self.words, request)
        pinned = {name: value for name, value in words.items() if name not in CHOSEN}
        base = _command("estimate", model, gpu, self.node, pinned, self.settings)
        said = {**words, "step": step if step > 1 else None, "safe": self.safe or None, **options}
        line = _command(f"{self.command} {self.what}", model, gpu, self.node, said, self.settings)
        line = line.replace(f"'{self.command} {self.what}'", f"{self.command} {self.what}", 1)
        if self.what == "model":
            line = line.replace(f" --model {spec.name}", "", 1)
        schema: Any = f"memcalc.{self.command}/1"
        return Inquiry(request, spec, chip, host, self.safe), Asked(schema, self.what, step, base, line, started)

    def gpus(self, job: Inquiry) -> int:
        """As told, or all of one node; plain trains on one."""
        if job.request.given.get("framework", "").partition("@")[0] == "plain":
            return int(job.request.get("gpus", 1))
        return int(job.request.get("gpus", job.node.gpus, f"{job.node.gpus}, one node"))


def _models(search: str | None, family: str | None, dirs: tuple[str, ...]) -> list[Model]:
    """Shipped and own models, the largest first, narrowed by a text in a name and by a family."""
    found = catalog.models(dirs)
    if family is not None:
        families = sorted({model.family for model in found})
        if family not in families:
            raise UnknownNameError("family", family, f"must be one of {', '.join(families)}", families)
        found = [model for model in found if model.family == family]
    if search is not None:
        text = search.casefold()
        kept = [m for m in found if any(text in name.casefold() for name in (m.name, *m.aliases))]
        if not kept:
            names = [model.name for model in found]
            raise UnknownNameError("search", search, "must be part of a name that `memcalc models` lists", names)
        found = kept
    return sorted(found, key=lambda model: -model_count(model).total)


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
    word = request.given.pop("calibration", None)
    chip, request.calibration = calibrations.applied(chip, word, look=isinstance(gpu, str))
    if chip.calibration is not None:
        request.assumptions["calibration"] = chip.calibration.said
    spec = model if isinstance(model, Model) else load_model(model, dirs)
    check_recorded(request, spec)
    if "framework" in request.given:
        spec = rewritten(spec, habits_of(request.given["framework"]).own_code)
    spec = with_predictors(spec, int(request.given["fields"].get("mtp", 0)))
    if not node:
        request.assumptions["node"] = host.name
    return request, spec, chip, host


def _said(words: Mapping[str, Any], request: Request) -> dict[str, Any]:
    """Words with the calibration that was taken, also where it was found and not named."""
    return {**words, **({"calibration": request.calibration} if request.calibration else {})}


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

    chip = gpu if isinstance(gpu, str) else gpu.name
    parts = ["memcalc", command, *_model_words(model), "--gpu", chip, *(["--node", node] if node else [])]
    for name, value in words.items():
        if value is None or (value is False and name != "sp"):
            continue
        flag = f"--{name.replace('_', '-')}"
        parts += [flag] if value is True else ["--no-sp"] if value is False else [flag, _typed(name, value)]
    for key, value in (settings or {}).items():
        parts += ["--set", f"{key}={value}"]
    return shlex.join(parts)


def _model_words(model: str | Model) -> list[str]:
    """How a model is told on the command line: by its name, or as the module that it was recorded from."""
    if isinstance(model, str):
        return ["--model", model]
    if model.recording is None:
        return ["--model", model.name]
    words = [part for name, value in model.recording.words for part in (f"--{name}", value)]
    return ["--module", model.recording.origin, *words]


def _typed(name: str, value: object) -> str:
    """A value as it is typed: a list is several values for a search, or all that is offloaded or trained."""
    if not isinstance(value, tuple | list | set | frozenset):
        return str(value)
    between = OR if name in SEARCHED and name != "offload" else ","
    return between.join(map(str, value))
