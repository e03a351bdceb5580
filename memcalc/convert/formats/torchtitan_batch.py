"""The batch and the pipeline of a torchtitan TOML: micro-batches, schedule, and how blocks are shared out."""

from __future__ import annotations

import itertools
from typing import Any

from memcalc import catalog
from memcalc.convert.config import Reading, Said
from memcalc.convert.formats.torchtitan_keys import SPELLED, until
from memcalc.convert.formats.torchtitan_models import PRESETS

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
_UNUSED = (
    "parallelism.pipeline_parallel_layers_per_stage",
    "parallelism.pipeline_parallel_first_stage_less_layers",
    "parallelism.pipeline_parallel_last_stage_less_layers",
)
"""What counts for nothing without a pipeline."""
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
    if stages == 1:
        reading.harmless(*_UNUSED)
        return
    reading.say("pp_schedule", schedule, name)
    if reading.text(name).lower() in {"loopedbfs", "dualpipev"}:
        reading.not_modelled({name: f"counted as {schedule}"})
    blocks = _blocks(reading.said)
    parts = _parts(reading, len(points) + 1 if points else 0, schedule, stages, blocks)
    chunks = parts // stages
    if schedule in _CHUNKED:
        reading.say("vpp", chunks, "parallelism.pipeline_parallel_layers_per_stage")
    if points and blocks:
        _points(reading, points_key, [0, *points, blocks], chunks)
    elif day > _WEIGHTED_SPLIT:
        _ends(reading, blocks, parts, chunks, both=schedule == "zb-v")
    elif blocks and schedule != "zb-v":
        reading.say("strategy.first_stage_layers", blocks // parts * chunks, points_key)


def _parts(reading: Reading, listed: int, schedule: str, stages: int, blocks: int) -> int:
    """Stages over all ranks: as listed, from the blocks of each, or one or two on each rank (pipeline_llm)."""
    key = "parallelism.pipeline_parallel_layers_per_stage"
    each = reading.whole(key, low=1)
    found = stages * (2 if schedule in _CHUNKED else 1)
    if listed:
        found, key = listed, key_of(reading, "parallelism.pipeline_parallel_split_points")
    elif each and blocks:
        found = -(-(blocks + sum(_less(reading))) // each)
    if found % stages or (found > stages) != (schedule in _CHUNKED):
        several = "two or more" if schedule in _CHUNKED else "one"
        raise reading.wrong(key, reading.raw(key), f"must give {several} stages on each of {stages} ranks")
    return found


def _points(reading: Reading, key: str, edges: list[int], chunks: int) -> None:
    """Stages that begin at some blocks: the first and the last have their own number, the others share alike."""
    sizes = [after - before for before, after in itertools.pairwise(edges)]
    if min(sizes) < 1:
        raise reading.wrong(key, reading.raw(key), f"must be rising numbers of blocks below {edges[-1]}")
    inner = sizes[1:-1]
    if inner != sorted(inner, reverse=True) or (inner and inner[0] - inner[-1] > 1):
        message = f"{key} changes memory and is not modelled: the stages between first and last are counted as equal"
        reading.note("warning", "MC002", key, message)
    reading.say("strategy.first_stage_layers", sizes[0] * chunks, key)
    reading.say("strategy.last_stage_layers", sizes[-1] * chunks, key)


def _less(reading: Reading) -> list[int]:
    """Blocks that the first and the last stage have less, in whose place they have embedding and output."""
    names = [f"parallelism.pipeline_parallel_{end}_stage_less_layers" for end in ("first", "last")]
    return [reading.whole(name, 1) or 0 for name in names]


def _ends(reading: Reading, blocks: int, parts: int, chunks: int, *, both: bool) -> None:
    """The first and last part have as many blocks less as the file says; a remainder goes to the earlier parts."""
    keys = [f"parallelism.pipeline_parallel_{end}_stage_less_layers" for end in ("first", "last")]
    less = _less(reading)
    if max(less) <= 1:
        for key, word, end in zip(keys, ("embedding", "loss"), less, strict=True):
            reading.say(f"strategy.{word}_in_split", bool(end), key)
    elif both:
        reading.not_modelled(dict.fromkeys(keys, "stage 0 has both ends; counted as equal shares"), unless=(0, 1))
    elif blocks:
        base, rest = divmod(blocks + sum(less), parts)
        if max(less) >= base:
            raise reading.wrong(keys[0], less[0], f"must leave blocks to stages of {base}")
        reading.say("strategy.first_stage_layers", (base + (rest > 0) - less[0]) * chunks, keys[0])
        reading.say("strategy.last_stage_layers", (base - less[1]) * chunks, keys[1])


def _block(reading: Reading, key: str, point: Any) -> int:
    """The number of the block at which a stage begins, from such as ``layers.4``."""
    last = str(point).rpartition(".")[2]
    if not last.isdecimal():
        raise reading.wrong(key, str(point), "must name blocks, such as layers.4")
    return int(last)


def _blocks(said: list[Said]) -> int:
    """Blocks of the model, where its sizes are known."""
    model = next((one.value for one in said if one.word == "model"), "")
    if isinstance(model, dict):
        return int(model["n_layers"])
    return catalog.model(model).num_layers if model in PRESETS else 0
