"""From one job of post-training to another: what each change costs or saves, and a ladder of such changes.

A ladder is the job as it is, then one saving after another, each stage a job of ``memcalc rl``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from memcalc._version import __version__
from memcalc.errors import CombinationError, InputError
from memcalc.planner.sentences import split_words
from memcalc.posttraining import answered, edits_of
from memcalc.posttraining.figures import Figures, trainer_options
from memcalc.posttraining.words import RlJob, check_engines, completed, gpus_of, read_words
from memcalc.results.changes import DiffField, Value
from memcalc.results.posttraining import RlFigures, RlLadder, RlStep
from memcalc.serving.engines import number
from memcalc.specs.job import render
from memcalc.specs.posttraining import LAYOUT, RL_OPTIONS, RL_WORDS, TRAINING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from memcalc.results.posttraining import Rl


PLACES = ("model", "gpu", "gpus", "node")
"""Words that say what is trained, and on what."""
_OPEN = {
    "micro_batch": "none",
    "micro_tokens": "none",
    "prompts": "none",
    "logprob_batch": "default",
    "logprob_tokens": "default",
    "critic_micro_batch": "the policy's",
    "critic_micro_tokens": "the policy's",
    "max_seqs": "default",
}
"""What is said of counts that are 0."""


@dataclass(frozen=True)
class State:
    """A job with its answer."""

    typed: Mapping[str, Any]
    """As typed, those of :data:`PLACES` among them."""
    job: RlJob
    answer: Rl
    figures: RlFigures


def job_of(typed: Mapping[str, Any], dirs: tuple[str, ...], assumptions: dict[str, str]) -> RlJob:
    """The job that ``memcalc rl`` makes of these words."""
    options = {name: value for name, value in typed.items() if name not in PLACES}
    gpus = number(typed["gpus"], "gpus")
    job = completed(typed["model"], typed["gpu"], gpus, typed.get("node"), options, dirs, assumptions)
    if job.recipe.online:
        check_engines(job)
    return job


def step_samples(job: RlJob) -> int:
    """Samples, or pairs, of a step where it is told, else of one micro-batch on each rank, [1]."""
    inputs = job.inputs
    if job.recipe.online and inputs.prompts:
        return inputs.prompts * max(1, inputs.samples)
    rows, tokens = job.batch(gradients=True)
    return max(1, rows * tokens // (job.length * job.recipe.rows)) * job.trainer_gpus


def state_of(typed: Mapping[str, Any], dirs: tuple[str, ...], figures: Figures, samples: int = 0) -> State:
    """A job with what is compared of it; ``samples`` are those that its update is timed for, else its own."""
    assumptions: dict[str, str] = {}
    job = job_of(typed, dirs, assumptions)
    options = {name: value for name, value in typed.items() if name not in PLACES}
    answer = answered(job, options, assumptions, figures, advice=False)
    compared = RlFigures(
        verdict=answer.verdict,
        reason=answer.reason,
        phases=answer.phases,
        binding=answer.binding,
        allocated=answer.capacity - answer.headroom,
        capacity=answer.capacity,
        host=answer.host,
        concurrency=answer.rollout.concurrency if answer.rollout else None,
        rounds=answer.rollout.rounds if answer.rollout else None,
        update=figures.updates(job, samples or step_samples(job)),
    )
    return State(typed, job, answer, compared)


def facts_of(job: RlJob) -> dict[str, Value]:
    """Every word of a job with its value, the framework's defaults among them."""
    trains = trainer_options(job)
    facts: dict[str, Any] = {"model": job.model, "gpu": job.gpu, "gpus": job.gpus, "node": job.node or "default"}
    facts |= job.inputs.model_dump()
    facts |= {"framework": job.toolkit.name, "trainer": job.trainer, "reference": job.reference}
    facts |= {"park": ",".join(job.parks) or "none"}
    facts |= {name: text for name, text in _OPEN.items() if not facts[name]}
    facts |= {name: trains[name] for name in (*TRAINING, *LAYOUT) if name in trains}
    return {name: ",".join(map(str, value)) if isinstance(value, tuple) else value for name, value in facts.items()}


def fields_between(before: RlJob, after: RlJob, stated: frozenset[str] | set[str]) -> tuple[DiffField, ...]:
    """What is different; first what is among the words that are stated, then what follows from them."""
    was, now = facts_of(before), facts_of(after)
    fields = [
        DiffField(
            field=name, before=was.get(name, "default"), after=now.get(name, "default"), follows=name not in stated
        )
        for name in dict.fromkeys((*was, *now))
        if was.get(name, "default") != now.get(name, "default")
    ]
    return tuple(sorted(fields, key=lambda field: field.follows))


def step_of(
    name: str, before: State, after: State, fields: tuple[DiffField, ...], *, alone: int | None, impossible: str = ""
) -> RlStep:
    """One change, with what it costs beside the state before it."""
    return RlStep(
        name=name,
        fields=fields,
        change=after.figures.allocated - before.figures.allocated,
        alone=alone,
        impossible=impossible,
        after=after.figures,
        job=after.answer.job,
        command=after.answer.command,
    )


ADAPTERS = "16"
"""The rank of the adapters that the last of the usual stages trains in the place of all weights."""
KNOWN = (*PLACES, *RL_WORDS, *TRAINING, *LAYOUT)
"""What a stage may change."""
FLAGS = tuple(option.name for option in RL_OPTIONS if option.kind == "flag")


def ladder_rl(
    *,
    model: str,
    gpu: str,
    gpus: int | str | None = None,
    node: str | None = None,
    preset_dirs: Iterable[str] = (),
    stages: Iterable[str] = (),
    recipe: bool = False,
    **options: Any,
) -> RlLadder:
    """Apply savings to a job of post-training one after another: what each saves, costs, and from which on it fits.

    Parameters
    ----------
    model, gpu, gpus, node, preset_dirs
        As for :func:`memcalc.rl`.
    stages
        Words of each stage, such as ``"sleep=2,utilization=0.6"``; the usual savings in the order of what they cost
        where there are none.
    recipe
        Whether the usual savings end where the job fits.
    **options
        As for :func:`memcalc.rl`: the job at the start.

    Raises
    ------
    memcalc.errors.InputError
        For a value that cannot be used; where only the user can tell it, :class:`memcalc.errors.MissingError`.
    """
    count = gpus_of(gpus, options)
    listed, dirs = tuple(stages), tuple(preset_dirs)
    if recipe and listed:
        raise CombinationError("recipe", True, "--recipe chooses the stages; drop --stage")
    given = {name: value for name, value in options.items() if value not in (None, "", [])}
    typed = {"model": model, "gpu": gpu, "gpus": count, **({"node": node} if node else {}), **given}
    changes = [(text, parse_stage(text)) for text in listed]
    figures = Figures()
    start = state_of(typed, dirs, figures)
    run = Run(dirs, figures, step_samples(start.job), [start])
    for text, change in changes:
        run.take(text, change, required=True)
    if not listed:
        run.climb(recipe=recipe)
    return _answer(run, {"stages": listed or None, "recipe": recipe or None})


def parse_stage(text: str) -> dict[str, Any]:
    """The words of ``sleep=2,utilization=0.6``, each checked as on the command line.

    >>> parse_stage("sleep=2,utilization=0.6")
    {'sleep': '2', 'utilization': '0.6'}
    """
    typed = split_words(text, "stage", KNOWN, FLAGS)
    try:
        read_words({name: value for name, value in typed.items() if name not in PLACES})
    except InputError as error:
        raise error.within(f"stage {text!r}") from None
    return typed


@dataclass
class Run:
    """The stages so far."""

    dirs: tuple[str, ...]
    figures: Figures
    samples: int
    states: list[State]
    steps: list[RlStep] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        start = self.states[0]
        self.steps.append(step_of("", start, start, (), alone=None))

    @property
    def fits(self) -> bool:
        """Whether the job does as it is now."""
        return _fits(self.states[-1].figures)

    def take(self, text: str, change: dict[str, Any], *, required: bool) -> None:
        """Add a stage; one of the usual ones that changes nothing, or is not possible, is none."""
        before = self.states[-1]
        try:
            after = state_of({**before.typed, **change}, self.dirs, self.figures, self.samples)
        except InputError as error:
            if required:
                raise error.within(f"stage {text!r}") from None
            self.left_out[text] = str(error)
            return
        fields = fields_between(before.job, after.job, set(change))
        if not fields and not required:
            return
        self.states.append(after)
        self.steps.append(step_of(text, before, after, fields, alone=self._alone(change)))

    def _alone(self, change: dict[str, Any]) -> int | None:
        start = self.states[0]
        try:
            state = state_of({**start.typed, **change}, self.dirs, self.figures, self.samples)
        except InputError:
            return None
        return state.figures.allocated - start.figures.allocated

    def climb(self, *, recipe: bool) -> None:
        """Take the usual savings, each once; with ``recipe`` only until the job fits."""
        done: set[str] = set()
        while not (recipe and self.fits):
            following = next(((text, change) for text, change in savings(self.states[-1]) if text not in done), None)
            if following is None:
                return
            done.add(following[0])
            self.take(*following, required=False)


def savings(state: State) -> Iterator[tuple[str, dict[str, Any]]]:
    """Savings in the order of what they cost, each as typed after ``--stage``; adapters, which learn less, at last."""
    shared = False
    for change, update in edits_of(state.job):
        if "utilization" in update:
            shared = True
            continue
        yield change.removeprefix("--").replace(" ", "="), update
    rollout = state.answer.rollout
    if shared and rollout is not None and rollout.largest_utilization is not None:
        share = rollout.largest_utilization
        if share < rollout.utilization:
            yield f"utilization={share:g}", {"utilization": share}
    if not state.job.lora:
        yield f"lora={ADAPTERS}", {"lora": ADAPTERS}


def _fits(figures: RlFigures) -> bool:
    """Whether a state does, samples of the longest length too."""
    return figures.verdict != "does-not-fit" and figures.allocated <= figures.capacity


def _answer(run: Run, query: dict[str, Any]) -> RlLadder:
    start, last = run.states[0], run.states[-1]
    job = start.answer.job
    options = {"model": job.model, "gpu": job.gpu, "node": job.node, **job.options, **query}
    return RlLadder(
        version=__version__,
        model=start.answer.model,
        hardware=start.answer.hardware,
        algorithm=start.answer.algorithm,
        framework=start.answer.framework,
        samples=run.samples,
        steps=tuple(run.steps),
        first=next((at for at, step in enumerate(run.steps) if _fits(step.after)), None),
        left_out=tuple(f"{text}: {reason}" for text, reason in run.left_out.items()),
        warnings=last.answer.warnings,
        assumptions=start.answer.assumptions,
        command=render("ladder", options=options, dirs=job.preset_dirs),
    )
