"""Post-training: :func:`rl` says what every role holds in each phase of a step, and whether it fits.

The longest response, and the largest micro-batch, with which all roles of a job fit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, get_args

from memcalc import catalog
from memcalc.errors import CombinationError, InputError, MissingError
from memcalc.planner.request import one_of
from memcalc.posttraining.answer import cast_of, judged, record_of
from memcalc.posttraining.phases import phases_of
from memcalc.results.posttraining import RlLimit
from memcalc.serving.answer import last_that_works
from memcalc.specs.job import command_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from memcalc.posttraining.figures import Figures
    from memcalc.posttraining.words import RlJob
    from memcalc.results.posttraining import Rl
    from memcalc.specs.job import JobRecord


def rl(
    *,
    model: str,
    gpu: str,
    gpus: int | str | None = None,
    node: str | None = None,
    preset_dirs: Iterable[str] = (),
    advice: bool = True,
    largest: str | None = None,
    **options: Any,
) -> Rl:
    """Say what every role of post-training holds in each phase of a step, which phase binds, and whether it fits.

    Parameters
    ----------
    model, gpu, node
        As for :func:`memcalc.estimate`, by name.
    gpus
        GPUs in all, those of engines included.
    preset_dirs
        Folders with presets of your own, looked up first.
    advice
        Whether the cheapest change is looked for where the job does not fit.
    largest
        What the largest value is looked for of: ``response``, ``micro-batch`` or ``micro-tokens``.
    **options
        ``algorithm``, ``framework``, ``prompt``, ``response`` [tokens] and the others of ``memcalc rl --help``.

    Raises
    ------
    memcalc.errors.InputError
        For a value that cannot be used; where only the user can tell it, :class:`memcalc.errors.MissingError`.
    """
    from memcalc.posttraining.answer import answered
    from memcalc.posttraining.figures import Figures
    from memcalc.posttraining.words import check_engines, completed
    from memcalc.serving.engines import number

    if gpus is None:
        raise MissingError("on how many GPUs? give --gpus.")
    assumptions: dict[str, str] = {}
    job = completed(model, gpu, number(gpus, "gpus"), node, options, tuple(preset_dirs), assumptions)
    if job.recipe.online:
        check_engines(job)
    figures = Figures()
    answer = answered(job, options, assumptions, figures, advice=advice)
    if largest is None:
        return answer
    return answer.model_copy(update={"limit": limit_of(job, options, figures, largest)})


def rl_again(job: JobRecord, *, advice: bool = True) -> Rl:
    """Answer the job of an answer again."""
    typed: dict[str, Any] = {"model": job.model, "gpu": job.gpu, "node": job.node, **job.options}
    return rl(**typed, preset_dirs=job.preset_dirs, advice=advice)


Largest = Literal["response", "micro-batch", "micro-tokens"]
"""What can be asked for."""
_STEPS = {"response": 128, "micro_batch": 1, "micro_tokens": 1024}
"""In which multiples values are tried [tokens, samples]."""
_MOST = {"micro_batch": 1024, "micro_tokens": 1 << 20}
"""The largest values that are tried [samples, tokens]."""


def limit_of(job: RlJob, options: Mapping[str, Any], figures: Figures, what: str) -> RlLimit:
    """The last value with which the job fits with the margin, all else as it is, and what stands against the next."""
    name = one_of(what, "largest", get_args(Largest)).replace("-", "_")
    unsaid = {"micro_batch": job.inputs.micro_tokens, "micro_tokens": job.inputs.micro_batch}
    if unsaid.get(name):
        raise CombinationError("largest", what, "the job says its micro-batch in the other way")
    step = _STEPS[name]
    most = _MOST.get(name) or figures.model(job).max_positions - job.inputs.prompt
    least = job.length if name == "micro_tokens" else 1
    low, high = -(-least // step), max(most, least) // step
    value = last_that_works(low, high, lambda count: _verdict(job, name, count * step, figures)[0] == "fits")
    reason, binding, command = "", "", ""
    if value is None or value < high:
        following = (value + 1 if value is not None else low) * step
        verdict, reason, binding = _verdict(job, name, following, figures)
        reason = reason or verdict
    if value is not None:
        size = value * step
        changed = {name: size, **_budget(job, name, size)}
        command = command_line(record_of(job, {**options, **changed}))
    return RlLimit(
        what=what, value=None if value is None else value * step, step=step, reason=reason, binding=binding,
        command=command,
    )  # fmt: skip


def _budget(job: RlJob, name: str, value: int) -> dict[str, int]:
    """The tokens of a micro-batch, and of log-probabilities, where they do not hold one prompt with such a response."""
    inputs, length = job.inputs, job.inputs.prompt + value
    tokens = {"micro_tokens": inputs.micro_tokens, "logprob_tokens": inputs.logprob_tokens}
    return {name: length for name, size in tokens.items() if 0 < size < length} if name == "response" else {}


def _verdict(job: RlJob, name: str, value: int, figures: Figures) -> tuple[str, str, str]:
    """The verdict with a value, why it is not that it fits, and the phase that binds."""
    try:
        cast = cast_of(job.changed(**{name: value, **_budget(job, name, value)}), figures, advice=False)
    except InputError as error:
        return "does-not-fit", str(error), ""
    phases = tuple(phases_of(cast))
    verdict, reason = judged(cast, phases, catalog.gpu(job.gpu, job.dirs).memory_bytes)
    return verdict, reason, max(phases, key=lambda phase: phase.allocated).name
