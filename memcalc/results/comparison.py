"""What ``memcalc validate`` answers: measured figures beside predicted ones, and their errors."""

from typing import Literal

from memcalc.results.details import ErrorSummary
from memcalc.results.estimates import Answer, Verdict, schema
from memcalc.specs.strict import Figure, Frozen


class RunScore(Frozen):
    """One measured figure beside the predicted one [bytes]; ``error`` is predicted / measured - 1."""

    id: str
    """Of the run."""
    figure: Figure
    """Which of the three was read."""
    measured: int
    """As read [bytes]."""
    predicted: int
    """For the rank that was read [bytes]."""
    error: float
    """predicted / measured - 1 [-]."""
    within: bool
    """Whether the measured figure lies within the interval, moved from ``device`` at the peak to this figure."""
    group: str
    """The part of the runs that it counts in, as the file gives it."""
    grade: str
    """A and A-: every setting was read in the source; B: something is assumed, or was read coarsely."""
    framework: str
    """Name and era, as the run gives them."""
    gpu: str
    """The preset."""
    gpus: int
    """In all, [1]."""
    rank: str
    """Which rank was read: ``max``, ``last``, ``first stage``, a rank's number, or such as ``stage 2 of 16``."""
    source: str
    """Where the figure was read, with a commit or a date."""
    software: str
    """Versions, as the run gives them; empty where it gives none."""


class RunVerdict(Frozen):
    """Whether a run fitted, and what was said of it."""

    id: str
    """Of the run."""
    group: str
    """The part of the runs that it counts in, as the file gives it."""
    outcome: Literal["fits", "oom"]
    """What happened: it fitted, or ran out of memory."""
    verdict: Verdict
    """What was predicted."""
    device: int
    """Predicted [bytes]."""
    capacity: int
    """Of the GPU [bytes]."""
    wrong: bool
    """A false fit (it ran out of memory, and the verdict is fits), or a false reject."""


class RunUnknown(Frozen):
    """A measured figure whose kind the source does not say, beside the three predicted ones [bytes]; not scored."""

    id: str
    """Of the run."""
    measured: int
    """As read [bytes]."""
    allocated: int
    """Predicted [bytes]."""
    reserved: int
    """Predicted [bytes]."""
    device: int
    """Predicted [bytes]."""


class RunReason(Frozen):
    """A run without a prediction, or one that is explained, and why."""

    id: str
    """Of the run."""
    reason: str
    """As the file gives it; of a run without a prediction, the sentence that refused it."""


class RunThroughput(Frozen):
    """Measured throughput beside the predicted one [tokens/s per GPU]; ``error`` is predicted / measured - 1."""

    id: str
    """Of the run."""
    group: str
    """The part of the runs that it counts in, as the file gives it."""
    measured: float
    """As read, or from the time of a step [tokens/s per GPU]."""
    predicted: float
    """At the predicted step [tokens/s per GPU]."""
    error: float
    """predicted / measured - 1 [-]."""
    low: float
    """At the longest step of the range [tokens/s per GPU]."""
    high: float
    """At the shortest [tokens/s per GPU]."""
    within: bool
    """Whether the measured throughput lies within that range."""
    validated: bool
    """Whether published runs of this kind support the range."""
    sweep: str
    """Runs of one sweep differ in layout and micro-batch alone; empty where it is of none."""


class ThroughputGroup(ErrorSummary):
    """The errors of throughput in a part of the runs."""

    name: str
    """The group, or ``all``."""
    covered: int
    """Runs whose throughput lies within the range."""
    left_out_median: float | None = None
    """Median of |error| of a step by constants that were fitted without the source of that name; ``None`` where the
    shipped fit has none."""
    left_out_p90: float | None = None
    """Its 90th percentile."""


class StepRange(Frozen):
    """The range of a step of one kind of job, and how it holds for sources that it was made without."""

    name: str
    """The kind of job; ``outside`` where something of it has too few published runs."""
    low: float
    """Lower end of measured / predicted - 1 of a step [-]."""
    high: float
    """Upper end [-]."""
    claim: float
    """Share of runs that it claims to hold; 0 where it is a guess [-]."""
    crossed: float | None
    """Share of the runs of a source that lies in the range made without it, runs of one source counted as alike as they
    are; ``None`` where it is a guess."""
    by_source: float | None
    """The same share, the mean over sources."""
    runs: int
    """Published runs that it was made of."""
    sources: int
    """Documents that they were read from."""


class SweepOrder(Frozen):
    """How the layouts of one sweep are put in order."""

    group: str
    """The part of the runs that it counts in."""
    sweep: str
    """Its name, as the file gives it."""
    layouts: int
    """Layouts that ran and have a prediction."""
    pairs: int
    """Pairs of layouts whose measured speeds differ by more than 3%."""
    right: int
    """Of these, how many are predicted in the measured order."""
    regret: float
    """Speed that is lost by taking the layout that is predicted to be fastest [-]."""
    rank: int
    """Where the fastest layout stands among the predictions, from 1."""


class ErrorGroup(ErrorSummary):
    """The errors of a part of the runs and one figure."""

    by: Literal["group", "framework", "gpu", "figure"]
    """The field of a run that parts them."""
    name: str
    """Its value."""
    figure: Figure
    """The one whose errors these are."""


class TargetResult(ErrorSummary):
    """An aim, and what was reached."""

    name: str
    """As the runs file calls it."""
    figure: Figure
    """The one that it speaks of."""
    median_target: float
    """The largest median of |error| that meets it [-]."""
    p90_target: float
    """The largest 90th percentile of |error| that meets it [-]."""
    met: bool | None
    """``None`` where no run counts."""


class ValidationSummary(ErrorSummary):
    """All scored figures, and the verdicts."""

    false_fits: int
    """Runs that ran out of memory where the verdict is ``fits``."""
    ran_out: int
    """Runs that ran out of memory and have a prediction."""
    false_rejects: int
    """Runs that fitted where the verdict is ``does-not-fit``."""
    ran: int
    """Runs that fitted and have a prediction."""
    covered: int
    """Reserved and device figures within the interval."""
    covered_of: int
    """Reserved and device figures that were scored."""
    coverage_claim: float | None
    """The coverage that the interval claims; ``None`` where it claims none."""


class Validation(Answer):
    """The answer of ``memcalc validate``."""

    schema_: Literal["memcalc.validate/1"] = schema("memcalc.validate/1")
    runs: tuple[RunScore, ...]
    """One for each scored figure; a run that ran out of memory has none."""
    summary: ValidationSummary
    """Over all of them."""
    groups: tuple[ErrorGroup, ...]
    """By group, framework and GPU, each figure apart, and by figure alone."""
    targets: tuple[TargetResult, ...]
    """The aims of the runs file."""
    verdicts: tuple[RunVerdict, ...]
    """One for each run that has a prediction."""
    throughput: tuple[RunThroughput, ...]
    """One for each run that ran with a throughput, and has a prediction."""
    throughput_groups: tuple[ThroughputGroup, ...]
    """Its errors by group, then over all."""
    ranges: tuple[StepRange, ...]
    """The ranges of a step, as their fit found them."""
    orders: tuple[SweepOrder, ...]
    """One for each sweep of several layouts."""
    unknown: tuple[RunUnknown, ...]
    """Figures that are listed without a score."""
    explained: tuple[RunReason, ...]
    """Runs whose error the runs file explains."""
    not_modelled: tuple[RunReason, ...]
    """Runs that cannot be predicted."""
    left_out: tuple[RunReason, ...]
    """Runs that the runs file leaves out."""
    calibrations: tuple[str, ...] = ()
    """Those that count for some of the runs."""
