"""Post-training: :func:`rl` says what every role holds in each phase of a step, and whether it fits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from memcalc.errors import MissingError

if TYPE_CHECKING:
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
    from memcalc.serving.words import number

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
    from memcalc.posttraining.limits import limit_of

    return answer.model_copy(update={"limit": limit_of(job, options, figures, largest)})


def rl_again(job: JobRecord, *, advice: bool = True) -> Rl:
    """Answer the job of an answer again."""
    typed: dict[str, Any] = {"model": job.model, "gpu": job.gpu, "node": job.node, **job.options}
    return rl(**typed, preset_dirs=job.preset_dirs, advice=advice)
