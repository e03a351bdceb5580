"""A ladder of post-training: the job as it is, then one saving after another, each stage a job of ``memcalc rl``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from memcalc._version import __version__
from memcalc.errors import CombinationError, InputError, MissingError
from memcalc.planner.sentences import split_words
from memcalc.posttraining import edits_of
from memcalc.posttraining.figures import Figures
from memcalc.posttraining.steps import PLACES, State, fields_between, state_of, step_of, step_samples
from memcalc.posttraining.words import read_words
from memcalc.results.posttraining import RlFigures, RlLadder, RlStep
from memcalc.specs.job import render
from memcalc.specs.posttraining import RL_OPTIONS, RL_WORDS, TRAINING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

ADAPTERS = "16"
"""The rank of the adapters that the last of the usual stages trains in the place of all weights."""
KNOWN = (*PLACES, *RL_WORDS, *TRAINING)
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
    if gpus is None:
        raise MissingError("on how many GPUs? give --gpus.")
    listed, dirs = tuple(stages), tuple(preset_dirs)
    if recipe and listed:
        raise CombinationError("recipe", True, "--recipe chooses the stages; drop --stage")
    given = {name: value for name, value in options.items() if value not in (None, "", [])}
    typed = {"model": model, "gpu": gpu, "gpus": gpus, **({"node": node} if node else {}), **given}
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
