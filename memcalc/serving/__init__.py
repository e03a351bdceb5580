"""An inference engine's memory: :func:`serve` says whether it starts, what its cache holds, and what can be set.

What would start in the place of an engine that does not fit: one change each, else two; and each is tried.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memcalc.errors import MemcalcError
from memcalc.results.serving import Served

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

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
    from memcalc.serving.engines import check_model, completed, number, read_words
    from memcalc.serving.stages import EngineJob
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


FEWER_SEQUENCES = (256, 64, 16, 4, 1)
SHARES_OF_LENGTH = (2, 4, 8, 16, 32)
QUANTIZED = ("fp8", "int4")
RANKS = (2, 4, 8, 16)


def remedies(result: Served, keywords: Mapping[str, Any]) -> tuple[tuple[str, Served], ...]:
    """Return options as they are typed with the answer that they bring, the mildest of each kind that starts."""
    if result.verdict != "does-not-fit":
        return ()
    for kinds in (_kinds(result), _pairs(result)):
        started = [next(_started(changes, keywords), None) for changes in kinds]
        if any(started):
            return tuple(remedy for remedy in started if remedy is not None)
    return ()


def _kinds(result: Served) -> tuple[tuple[dict[str, Any], ...], ...]:
    """Return changes by kind: fewer sequences, a shorter context, a smaller cache, smaller weights, more GPUs."""
    return (
        tuple({"max_seqs": count} for count in FEWER_SEQUENCES if count < result.max_seqs),
        tuple({"max_len": result.max_len // share} for share in SHARES_OF_LENGTH if result.max_len // share),
        ({"kv_dtype": "fp8"},),
        tuple({"quantization": name} for name in QUANTIZED),
        _on_more(result),
    )


def _pairs(result: Served) -> tuple[tuple[dict[str, Any], ...], ...]:
    """Return smaller weights on more GPUs, for what starts with neither."""
    return tuple(tuple({"quantization": name, **more} for more in _on_more(result)) for name in QUANTIZED)


def _on_more(result: Served) -> tuple[dict[str, Any], ...]:
    return tuple({"tp": ranks, "gpus": ranks * result.pp} for ranks in RANKS if ranks > result.tp)


def _started(changes: tuple[dict[str, Any], ...], keywords: Mapping[str, Any]) -> Iterator[tuple[str, Served]]:
    """Yield what starts, in the order of the changes; what is refused is passed over."""
    for change in changes:
        if any(
            keywords.get(name) not in (None, "none", "auto") for name in change if name in {"kv_dtype", "quantization"}
        ):
            continue
        try:
            answer = serve(**{**keywords, **change}, advice=False)
        except MemcalcError:
            continue
        if answer.verdict != "does-not-fit":
            yield " ".join(f"--{name.replace('_', '-')} {value}" for name, value in change.items()), answer
