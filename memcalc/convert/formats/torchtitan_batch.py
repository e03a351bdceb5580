"""The batch and the pipeline of a torchtitan TOML: micro-batches, schedule, and how blocks are shared out."""

from __future__ import annotations

from typing import Any

from memcalc import catalog
from memcalc.convert.config import Reading, Said
from memcalc.convert.formats.torchtitan_keys import SPELLED, until
from memcalc.errors import UnknownNameError

__all__ = ["degree", "key_of", "say_batch", "say_pipeline"]

_SCHEDULES = {
    "1F1B": "1f1b",
    "GPipe": "gpipe",
    "Interleaved1F1B": "interleaved",
    "InterleavedZeroBubble": "interleaved-zb",
    "ZBVZeroBubble": "zb-v",
    "LoopedBFS": "interleaved",
    "DualPipeV": "zb-v",
}
"""torch.distributed.pipelining's names; the last two are counted as the one most like them."""
_CHUNKED = frozenset({"interleaved", "interleaved-zb", "zb-v"})
_MICROBATCH_SIZE = "2025-04-07"
"""Until then a pipeline had as many micro-batches as stages; since, micro-batches of one sequence (8b737fe3c)."""
_WEIGHTED_SPLIT = "2025-07-30"
"""Since then embedding and output weigh as much as blocks in the split over stages (3c84ce095)."""


def key_of(reading: Reading, name: str) -> str:
    """The name that the file has for a setting; two names of one are an error."""
    found = [one for _, one in SPELLED.get(name, (("", name),)) if reading.has(one)]
    unknown = [one for _, one in SPELLED.get(name, ()) if tuple(one.split(".")) in reading.document.unknown]
    if len(found) > 1:
        allowed = f"no torchtitan takes {found[0]} beside it: they are one setting, by its new and its old name"
        raise reading.wrong(found[1], reading.raw(found[1]), allowed)
    return (unknown or found or [name])[0]


def degree(reading: Reading, name: str) -> tuple[str, int]:
    """The name that the file has for a degree of parallelism, and the degree."""
    key = key_of(reading, name)
    return key, reading.whole(key, 1, low=1) or 1


def say_batch(reading: Reading) -> None:
    """A pipeline cuts the local batch into micro-batches: of one sequence, or until April 2025 as many as stages."""
    reading.say("seq_len", reading.whole("training.seq_len", 2048, low=1), "training.seq_len")
    key = key_of(reading, "training.local_batch_size")
    local = reading.whole(key, 8, low=1) or 8
    _, stages = degree(reading, "parallelism.pipeline_parallel_degree")
    micro, micro_key = local, key
    old = key_of(reading, "parallelism.pipeline_parallel_microbatches")
    if stages > 1 and (reading.has(old) or until(reading.document)[0] <= _MICROBATCH_SIZE):
        parts = reading.whole(old, stages, low=1) or stages
        if local % parts:
            raise reading.wrong(key, local, f"must be a multiple of the {parts} micro-batches of the pipeline")
        micro = local // parts
    elif stages > 1:
        micro_key = "parallelism.pipeline_parallel_microbatch_size"
        micro = reading.whole(micro_key, 1, low=1) or 1
        if local % micro:
            raise reading.wrong(key, local, f"must be a multiple of {micro_key} {micro}")
    reading.say("micro_batch", micro, micro_key)
    reading.harmless("parallelism.pipeline_parallel_microbatch_size")
    whole = reading.number("training.global_batch_size", -1)
    if whole is not None and whole > 0:
        reading.say("train_batch", reading.whole("training.global_batch_size", low=1), "training.global_batch_size")
    else:
        reading.say("accumulation", local // micro, key if stages > 1 else "training.global_batch_size")


def say_pipeline(reading: Reading, day: str) -> None:
    """State the schedule and the split; interleaved stages are two on each rank unless the file says otherwise."""
    _, stages = degree(reading, "parallelism.pipeline_parallel_degree")
    name = key_of(reading, "parallelism.pipeline_parallel_schedule")
    schedule = reading.one_of(name, _SCHEDULES, "1f1b")
    points_key = key_of(reading, "parallelism.pipeline_parallel_split_points")
    points = [_block(reading, points_key, point) for point in reading.items(points_key)]
    each = reading.whole("parallelism.pipeline_parallel_layers_per_stage", low=1)
    ends = [reading.whole(f"parallelism.pipeline_parallel_{end}_stage_less_layers", 1) for end in ("first", "last")]
    if stages == 1:
        return
    reading.say("pp_schedule", schedule, name)
    if reading.text(name).lower() in {"loopedbfs", "dualpipev"}:
        reading.not_modelled({name: f"counted as {schedule}"})
    blocks = _blocks(reading.said)
    chunks = 2 if schedule in _CHUNKED else 1
    if points:
        chunks = (len(points) + 1) // stages
    elif each and blocks:
        chunks = -(-(blocks + sum(end or 0 for end in ends)) // (each * stages))
    if schedule in _CHUNKED:
        reading.say("vpp", chunks, "parallelism.pipeline_parallel_layers_per_stage")
    if points and blocks:
        reading.say("strategy.first_stage_layers", points[0] * chunks, points_key)
        reading.say("strategy.last_stage_layers", (blocks - points[-1]) * chunks, points_key)
    elif day <= _WEIGHTED_SPLIT and blocks:
        reading.say("strategy.first_stage_layers", blocks // (stages * chunks) * chunks, points_key)
    elif day > _WEIGHTED_SPLIT:
        _ends(reading, ends, blocks, stages * chunks, chunks)


def _ends(reading: Reading, ends: list[int | None], blocks: int, parts: int, chunks: int) -> None:
    """The first and last part have as many blocks less as the file says; a remainder goes to the earlier parts."""
    keys = [f"parallelism.pipeline_parallel_{end}_stage_less_layers" for end in ("first", "last")]
    words = ("strategy.embedding_in_split", "strategy.loss_in_split")
    if all(end in (0, 1) for end in ends):
        for key, word, end in zip(keys, words, ends, strict=True):
            reading.say(word, bool(end), key)
    elif blocks:
        less = [end or 0 for end in ends]
        base, rest = divmod(blocks + sum(less), parts)
        reading.say("strategy.first_stage_layers", (base + (rest > 0) - less[0]) * chunks, keys[0])
        reading.say("strategy.last_stage_layers", (base - less[1]) * chunks, keys[1])


def _block(reading: Reading, key: str, point: Any) -> int:
    """The number of the block at which a stage begins, from such as ``layers.4``."""
    last = str(point).rpartition(".")[2]
    if not last.isdigit():
        raise reading.wrong(key, str(point), "must name blocks, such as layers.4")
    return int(last)


def _blocks(said: list[Said]) -> int:
    """Blocks of the model, where its sizes are known."""
    model = next((one.value for one in said if one.word == "model"), "")
    if isinstance(model, dict):
        return int(model["n_layers"])
    try:
        return catalog.model(model).num_layers
    except UnknownNameError:
        return 0
