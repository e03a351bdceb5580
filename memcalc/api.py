"""The library: :func:`estimate` one strategy, :func:`plan` over all that fit, in the words of the options."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, Literal, get_args

from memcalc import calibrations, catalog
from memcalc.convert.named_model import NamedModel, named_model
from memcalc.errors import CombinationError, InputError, MissingError, UnknownNameError
from memcalc.frameworks import habits_of
from memcalc.frameworks.habits import rewritten
from memcalc.planner import Tally
from memcalc.planner.adapted_layers import adapter_warnings
from memcalc.planner.as_is import check_class
from memcalc.planner.direct import is_launched
from memcalc.planner.finalists import One
from memcalc.planner.images import with_images
from memcalc.planner.job import PlanJob, flat_options, pinned, record_of, split_options
from memcalc.planner.request import check_words, positive
from memcalc.specs.job import Largest, Smallest
from memcalc.specs.options import BATCHING, RANK_DEGREES
from memcalc.terms.head import with_predictors
from memcalc.trace.template import TraceCache

if TYPE_CHECKING:
    from memcalc.planner import Listener
    from memcalc.planner.limit_answer import LimitQuery
    from memcalc.planner.limit_grid import LimitJob
    from memcalc.planner.request import Request
    from memcalc.planner.varying import JobLengths
    from memcalc.results.changes import Ladder
    from memcalc.results.estimates import Estimate
    from memcalc.results.plans import Inverse, Plans
    from memcalc.specs.hardware import GPU
    from memcalc.specs.job import JobRecord
    from memcalc.specs.model import Model

TOP, ALL = 6, 30
"""Plans that are listed for one number of GPUs: of ideas, and of a whole ranking."""


def load_model(name: str, preset_dirs: Iterable[str] = ()) -> Model:
    """A preset, a ``config.json``, a directory with one, a TOML file, or OWNER/NAME that the local Hub cache has."""
    return named_model(name, tuple(preset_dirs)).model


def estimate(
    *,
    model: str | Model,
    gpu: str | GPU,
    node: str | None = None,
    settings: Mapping[str, Any] | None = None,
    preset_dirs: Iterable[str] = (),
    timeline: bool = False,
    advice: bool = True,
    **options: Any,
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
    advice
        Whether a large allocator cache is compared with what expandable segments leave of it, and what the states
        leave for activations is told.
    **options
        The words of a job: ``gpus``, ``seq_len`` [tokens], ``micro_batch`` and ``global_batch`` [sequences], and all
        others of :doc:`/python`. ``calibration`` is the file of one, or ``none``; without it the user's own
        calibration of a GPU that is named is taken, where there is one.

    Raises
    ------
    memcalc.errors.InputError
        For a value that cannot be used; where only the user can tell it, :class:`memcalc.errors.MissingError`.
    """
    job = single(model=model, gpu=gpu, node=node, settings=settings, preset_dirs=preset_dirs, **options)
    return job.estimate(timeline=timeline, advice=advice, budget=advice)


def single(
    *,
    model: str | Model,
    gpu: str | GPU,
    node: str | None = None,
    settings: Mapping[str, Any] | None = None,
    preset_dirs: Iterable[str] = (),
    **options: Any,
) -> One:
    """The job of :func:`estimate` with every default resolved and checked, before its figures are computed."""
    dirs = tuple(preset_dirs)
    job = resolve(model, gpu, options, node=node, settings=settings, preset_dirs=dirs)
    return One.of(job, record_of("estimate", model, gpu, node, options, settings, dirs, job.request))


def plan(
    *,
    model: str | Model,
    gpu: str,
    node: str | None = None,
    settings: Mapping[str, Any] | None = None,
    preset_dirs: Iterable[str] = (),
    objective: str = "simplicity",
    critical_batch: int | str | None = None,
    tokens: int | str | None = None,
    why: str | None = None,
    recipe: bool = False,
    advice: bool = True,
    beyond: bool = False,
    top: int | str | None = None,
    rank_all: bool = False,
    on_progress: Listener | None = None,
    **options: Any,
) -> Plans:
    """Search every strategy that the given words leave open; rank those that fit.

    The job is told as for :func:`estimate`, and the same errors are raised. Each of ``options`` pins or narrows what is
    searched; without ``gpus`` the best plan is told for 1, 2, 4, … GPUs of one node.

    Parameters
    ----------
    objective
        ``simplicity`` (the simplest plan within 5% of the fastest), ``throughput``, ``memory``, ``gpus`` or ``cost``.
    critical_batch, tokens
        The critical batch, with which large batches count for less; the budget for which GPU-hours are told [tokens].
    why
        A strategy, as in ``tp=1,zero=3``, of which the answer says why it lost.
    recipe, advice
        Whether the usual order of tuning is added; whether the smallest changes are told where nothing fits.
    beyond
        Whether strategies are searched too that the framework cannot be told; each plan says what code they need.
    top, rank_all
        Plans that are listed for one number of GPUs; whether they are all strategies in order, not one of each idea.
    on_progress
        Is told how many strategies of how many are searched.
    """
    dirs = tuple(preset_dirs)
    from memcalc.planner.plans import PlanOptions, plan_for

    job = resolve(model, gpu, options, node=node, settings=settings, preset_dirs=dirs, several=True, beyond=beyond)
    usual = ALL if rank_all else TOP
    wish = replace(PlanOptions.of(top or usual, objective, critical_batch, tokens), question=why or "", recipe=recipe)
    wish = replace(wish, advice=advice, rank_all=rank_all, filled=wish.top if top else wish.filled)
    query = {
        "objective": None if objective == "simplicity" else objective,
        "critical_batch": critical_batch,
        "tokens": tokens,
        "why": why,
        "recipe": recipe,
        "beyond": beyond,
        "top": None if wish.top == usual else wish.top,
        "rank_all": rank_all,
    }
    record = record_of("plan", model, gpu, node, options, settings, dirs, job.request, query=query)
    return plan_for(replace(job, tally=Tally(on_progress)), wish, record)


def ladder(
    *,
    model: str | Model,
    gpu: str,
    node: str | None = None,
    settings: Mapping[str, Any] | None = None,
    preset_dirs: Iterable[str] = (),
    stages: Iterable[str] = (),
    recipe: bool = False,
    reading: str | None = None,
    **options: Any,
) -> Ladder:
    """The job at fp32, then with one remedy after another: what each saves and costs, and the first stage that fits.

    ``stages`` are words of :func:`estimate` as in ``recompute=full,micro_batch=2``, each on top of those before, with
    ``precision=16-bit`` for the precision of a reading; without them the usual ones. ``recipe`` takes those of the
    usual order of tuning, which ends where it fits. ``reading`` is ``pure-16-bit``, ``fp32-master`` or ``autocast``.
    """
    from memcalc.planner import ladder as rungs

    dirs, wanted = tuple(preset_dirs), rungs.LadderOptions(tuple(stages), recipe, reading)
    base, traces = flat_options({**options, "settings": settings}), TraceCache()

    def resolved(changed: Mapping[str, Any]) -> tuple[PlanJob, JobRecord]:
        plain = split_options(changed)
        fields = plain.pop("settings")
        job = resolve(model, gpu, plain, node=node, settings=fields, preset_dirs=dirs)
        record = record_of("estimate", model, gpu, node, plain, fields, dirs, job.request)
        return replace(job, traces=traces), record

    return rungs.ladder_of(resolved, base, wanted)


def largest(
    what: str,
    *,
    gpu: str,
    model: str | Model | None = None,
    node: str | None = None,
    settings: Mapping[str, Any] | None = None,
    preset_dirs: Iterable[str] = (),
    step: int | str = 1,
    tight: bool = False,
    search: str | None = None,
    family: str | None = None,
    beyond: bool = False,
    curve: bool = False,
    on_progress: Listener | None = None,
    **options: Any,
) -> Inverse:
    """The largest ``seq-len``, ``micro-batch`` or ``model`` that fits; what the other words leave open is searched.

    The job is told as for :func:`plan`.

    Parameters
    ----------
    what
        ``seq-len`` [tokens], ``micro-batch`` [sequences] or ``model``, which then is left out of the words.
    step, tight
        Only multiples of ``step`` are answered, and only where ``tight`` values whose verdict is that.
    search, family
        A part of a name, or a family, that narrows the models.
    beyond
        Whether strategies are searched too that the framework cannot be told.
    curve
        Whether the answer's strategy is added at values below and above it, except for models.
    on_progress
        Is told how many models of how many are begun, or how many strategies are evaluated, of an unknown number (0).
    """
    from memcalc.planner import limits

    ask = _Ask("max", _one_of(what, get_args(Largest)), node, settings, tuple(preset_dirs), options, tight, beyond)
    if what == "model":
        if model is not None:
            raise InputError("model", model, "max model answers it, so it must be left out")
        specs = limits.candidates(search, family, ask.dirs)
        if not options.get("image_size"):  # without it, those of which it must be known are left out
            specs = [spec for spec in specs if spec.images is None or not spec.images.depends_on_size] or specs
        of = partial(ask.of, gpu=gpu, step=positive(step, "step"), search=search, family=family)
        return limits.max_model([partial(of, spec) for spec in specs], ask.gpus, on_progress)
    if model is None:
        raise MissingError("the largest of what? give --model.")
    job, query = ask.of(model, gpu, positive(step, "step"))
    job = replace(job, tally=Tally(on_progress))
    find = limits.max_seq_len if what == "seq-len" else limits.max_micro_batch
    return find(job, replace(query, curve=curve), ask.gpus(job))


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
    tight: bool = False,
    beyond: bool = False,
    on_progress: Listener | None = None,
    **options: Any,
) -> Inverse:
    """The smallest number of ``gpus`` on which a strategy fits, with the fastest there.

    The job is told as for :func:`plan`; ``what`` is ``gpus``, ``tight`` as for :func:`largest`.

    Parameters
    ----------
    up_to
        The largest number that is tried; eight nodes when left out.
    any_count
        Whether every number is tried; otherwise powers of two within a node, and whole nodes.
    beyond
        Whether strategies are searched too that the framework cannot be told.
    on_progress
        Is told how many strategies are evaluated, of an unknown number (0).
    """
    from memcalc.planner import limits

    ask = _Ask("min", _one_of(what, get_args(Smallest)), node, settings, tuple(preset_dirs), options, tight, beyond)
    job, query = ask.of(model, gpu, 1, up_to=up_to, any_count=any_count)
    job = replace(job, tally=Tally(on_progress), by_share="offload" not in job.request.given)
    most = limits.NODES * job.node.gpus if up_to is None else positive(up_to, "up_to")
    return limits.min_gpus(job, query, limits.counts_up_to(most, job.node.gpus, any_count=any_count))


def _one_of(what: str, names: tuple[str, ...]) -> str:
    if what not in names:
        raise UnknownNameError("what", what, f"must be one of {', '.join(names)}", names)
    return what


@dataclass(frozen=True)
class _Ask:
    """A question for the last value that fits, as it was put."""

    command: Literal["max", "min"]
    what: str
    node: str | None
    settings: Mapping[str, Any] | None
    dirs: tuple[str, ...]
    options: Mapping[str, Any]
    tight: bool
    beyond: bool

    def of(self, model: str | Model, gpu: str, step: int, **options: Any) -> tuple[LimitJob, LimitQuery]:
        """The question for a model, checked."""
        from memcalc.planner.limit_answer import LimitQuery
        from memcalc.planner.limit_grid import LimitJob

        started = time.perf_counter()
        job = resolve(
            model, gpu, self.options, node=self.node, settings=self.settings, preset_dirs=self.dirs, beyond=self.beyond
        )
        if job.lengths is not None:
            from memcalc.planner.varying import refuse_lengths

            refuse_lengths(job.lengths, self.command, self.what)
        given = job.request.given.get(self.what.replace("-", "_"))
        if given is not None:
            raise InputError(self.what, given, f"{self.command} {self.what} answers it, so leave it out")
        query = {"step": step if step > 1 else None, "tight": self.tight, "beyond": self.beyond, **options}
        subject = None if self.what == "model" else model
        record = record_of(
            self.command, subject, gpu, self.node, self.options, self.settings, self.dirs, job.request,
            what=self.what, query=query,
        )  # fmt: skip
        limit_job = LimitJob(job.request, job.model, job.gpu, job.node, safe=not self.tight)
        return limit_job, LimitQuery(record, pinned(record, model), step, started)

    def gpus(self, job: LimitJob) -> int:
        """As told, or as many as the degrees that are given need, as an estimate takes them."""
        return int(job.request.get("gpus", prod(job.request.given.get(name, 1) for name in RANK_DEGREES)))


def resolve(
    model: str | Model,
    gpu: str | GPU,
    options: Mapping[str, Any],
    *,
    node: str | None = None,
    settings: Mapping[str, Any] | None = None,
    preset_dirs: Iterable[str] = (),
    several: bool = False,
    beyond: bool = False,
) -> PlanJob:
    """The job of :func:`estimate`, its options checked and its presets read; with ``several`` that of :func:`plan`.

    ``beyond`` opens a search to what the framework cannot be told.
    """
    from memcalc.specs.hardware import GPU
    from memcalc.specs.model import Model

    dirs = tuple(preset_dirs)
    chip = gpu if isinstance(gpu, GPU) else catalog.gpu(gpu, dirs)
    host = catalog.node(node, dirs) if node else catalog.node_for(chip, dirs)
    if host.gpu != chip.name:
        raise CombinationError("node", node, f"it holds {host.gpu} GPUs, and --gpu is {chip.name}")
    request = replace(check_words(options, settings, several=several), beyond=beyond)
    word = request.given.pop("calibration", None)
    chip, request.calibration = calibrations.applied(chip, word, look=isinstance(gpu, str))
    if chip.calibration is not None:
        request.assumptions["calibration"] = chip.calibration.said
    lengths = None if request.given.keys().isdisjoint(BATCHING) else _lengths(request, searched=several)
    named = NamedModel(model) if isinstance(model, Model) else named_model(model, dirs)
    spec = named.model
    if named.origin:
        request.assumptions["sizes"] = named.origin
    warned = tuple(adapter_warnings(request, spec))
    request.warnings = (*named.warnings(str(model), request.given.get("quantize")), *warned)
    check_class(request, spec)
    spec = with_images(request, spec)
    if "framework" in request.given:
        spec = rewritten(spec, habits_of(request.given["framework"]).own_code)
    request.launched = is_launched(request, spec)
    spec = with_predictors(spec, int(request.given["fields"].get("mtp", 0)))
    if not node:
        request.assumptions["node"] = host.name
    return PlanJob(request, spec, chip, host, lengths=lengths)


def _lengths(request: Request, *, searched: bool) -> JobLengths | None:
    """What is told of lengths, which few jobs do."""
    from memcalc.planner.varying import lengths_of

    return lengths_of(request, searched=searched)
