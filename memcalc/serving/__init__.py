"""An inference engine's memory: :func:`serve` says whether it starts, what its cache holds, and what can be set."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memcalc.results.serving import Served
    from memcalc.specs.hardware import GPU
    from memcalc.specs.model import Model


def serve(
    *,
    model: str | Model,
    gpu: str | GPU,
    gpus: int | str | None = None,
    node: str | None = None,
    tp: int | str = 1,
    pp: int | str = 1,
    preset_dirs: Iterable[str] = (),
    advice: bool = True,
    **options: Any,
) -> Served:
    """Say whether an inference engine starts, and what its cache holds.

    Parameters
    ----------
    model, gpu, node
        As for :func:`memcalc.estimate`.
    gpus
        GPUs in all: a multiple of ``tp`` times ``pp``, each multiple one engine.
    tp, pp
        Ranks of tensor parallelism, and pipeline stages, of one engine.
    preset_dirs
        Folders with presets of your own, looked up first.
    advice
        Whether what can be set is looked for.
    **options
        The words of an engine: ``engine``, ``utilization``, ``max_len`` [tokens], ``max_seqs``, and the others of
        ``memcalc serve --help``.

    Raises
    ------
    memcalc.errors.InputError
        For a value that cannot be used; where only the user can tell it, :class:`memcalc.errors.MissingError`.
    """
    from memcalc import catalog
    from memcalc._version import __version__
    from memcalc.convert.named_model import NamedModel, named_model
    from memcalc.errors import CombinationError
    from memcalc.serving.answer import answer_of
    from memcalc.serving.stages import EngineJob
    from memcalc.serving.words import check_model, completed, number, read_words
    from memcalc.specs.hardware import GPU
    from memcalc.specs.model import Model

    dirs, assumptions = tuple(preset_dirs), dict[str, str]()
    given = read_words(options)
    ranks, stages = number(tp, "tp"), number(pp, "pp")
    chip = gpu if isinstance(gpu, GPU) else catalog.gpu(gpu, dirs)
    named = NamedModel(model) if isinstance(model, Model) else named_model(model, dirs)
    check_model(named.model, ranks, stages)
    engine, inputs = completed(given, named.model, chip, assumptions)
    count = ranks * stages if gpus is None else number(gpus, "gpus")
    if count % (ranks * stages):
        raise CombinationError("gpus", count, f"must be a multiple of the {ranks * stages} GPUs of one engine")
    host = catalog.node(node, dirs) if node else catalog.node_for(chip, dirs)
    if host.gpu != chip.name:
        raise CombinationError("node", node, f"it holds {host.gpu} GPUs, and --gpu is {chip.name}")
    job = EngineJob(named.model, chip, engine, inputs, ranks, stages)
    question = {"model": model if isinstance(model, str) else model.name, "gpu": chip.name, "gpus": gpus, "node": node}
    question |= {"tp": None if ranks == 1 else ranks, "pp": None if stages == 1 else stages, **given}
    return answer_of(job, host, count, question, assumptions, dirs, __version__, advice=advice)
