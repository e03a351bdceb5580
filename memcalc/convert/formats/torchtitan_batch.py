"""The batch and the pipeline of a torchtitan TOML: micro-batches, schedule, and how blocks are shared out."""

from __future__ import annotations

import itertools
from typing import Any

from memcalc import catalog
from memcalc.convert.config import ConfigReader, Setting
from memcalc.convert.formats.torchtitan_names import PRESETS, SPELLED, until
from memcalc.formulas.bubbles import TURNED

_SCHEDULES = {
    "1F1B": "1f1b", "GPipe": "gpipe", "Interleaved1F1B": "interleaved", "InterleavedZeroBubble": "interleaved-zb",
    "ZBVZeroBubble": "zb-v", "DualPipeV": "dualpipe-v", "LoopedBFS": "interleaved",
}  # fmt: skip
"""torch.distributed.pipelining's names; the last is counted as the one most like it."""
_CHUNKED = frozenset({"interleaved", "interleaved-zb", *TURNED})
_PER_STAGE = "parallelism.pipeline_parallel_layers_per_stage"
_LESS = tuple(f"parallelism.pipeline_parallel_{end}_stage_less_layers" for end in ("first", "last"))
"""Blocks that the first and the last stage have less, in whose place they have embedding and output."""
_MICROBATCH_SIZE = "2025-04-07"
"""Until then a pipeline had as many micro-batches as stages; since, micro-batches of one sequence (8b737fe3c)."""
_WEIGHTED_SPLIT = "2025-07-30"
"""Since then embedding and output weigh as much as blocks in the split over stages (3c84ce095)."""


def key_of(reader: ConfigReader, name: str) -> str:
    """The name that the file has for a setting; two names of one are an error."""
    stated = [spelled for _, spelled in SPELLED.get(name, (("", name),)) if reader.has(spelled)]
    unknown = [spelled for _, spelled in SPELLED.get(name, ()) if tuple(spelled.split(".")) in reader.document.unknown]
    if len(stated) > 1:
        allowed = f"no torchtitan takes {stated[0]} beside it: they are one setting, by its new and its old name"
        raise reader.error(stated[1], reader.raw(stated[1]), allowed)
    return (unknown or stated or [name])[0]


def degree(reader: ConfigReader, name: str) -> tuple[str, int]:
    """The name that the file has for a degree of parallelism, and the degree."""
    key = key_of(reader, name)
    return key, reader.integer(key, 1, low=1) or 1


def set_batch(reader: ConfigReader) -> None:
    """A pipeline cuts the local batch into micro-batches: of one sequence, or until April 2025 as many as stages."""
    reader.set_integer("seq_len", "training.seq_len", 2048)
    key = key_of(reader, "training.local_batch_size")
    local = reader.integer(key, 8, low=1) or 8
    _, stages = degree(reader, "parallelism.pipeline_parallel_degree")
    micro, micro_key = local, key
    old = key_of(reader, "parallelism.pipeline_parallel_microbatches")
    if stages > 1 and (reader.has(old) or until(reader.document)[0] <= _MICROBATCH_SIZE):
        parts = reader.integer(old, stages, low=1) or stages
        if local % parts:
            raise reader.error(key, local, f"must be a multiple of the {parts} micro-batches of the pipeline")
        micro = local // parts
    elif stages > 1:
        micro_key = "parallelism.pipeline_parallel_microbatch_size"
        micro = reader.integer(micro_key, 1, low=1) or 1
        if local % micro:
            raise reader.error(key, local, f"must be a multiple of {micro_key} {micro}")
    reader.set("micro_batch", micro, micro_key)
    reader.harmless("parallelism.pipeline_parallel_microbatch_size")
    global_batch = reader.number("training.global_batch_size", -1)
    if global_batch is not None and global_batch > 0:
        reader.set_integer("train_batch", "training.global_batch_size")
    else:
        reader.set("accumulation", local // micro, key if stages > 1 else "training.global_batch_size")


def set_pipeline(reader: ConfigReader, day: str) -> None:
    """Set the schedule and the split; interleaved stages are two on each rank unless the file says otherwise."""
    _, stages = degree(reader, "parallelism.pipeline_parallel_degree")
    name = key_of(reader, "parallelism.pipeline_parallel_schedule")
    schedule = reader.one_of(name, _SCHEDULES, "1f1b")
    points_key = key_of(reader, "parallelism.pipeline_parallel_split_points")
    points = [_block(reader, points_key, point) for point in reader.items(points_key)]
    if stages == 1:
        reader.harmless(_PER_STAGE, *_LESS)
        return
    reader.set("pp_schedule", schedule, name)
    if reader.text(name).lower() == "loopedbfs":
        reader.not_modelled({name: f"counted as {schedule}"})
    blocks = _blocks(reader.settings)
    parts = _parts(reader, len(points) + 1 if points else 0, schedule, stages, blocks)
    chunks = parts // stages
    if schedule in _CHUNKED:
        reader.set("vpp", chunks, _PER_STAGE)
    if points and blocks:
        _points(reader, points_key, [0, *points, blocks], chunks)
    elif day > _WEIGHTED_SPLIT:
        _ends(reader, blocks, parts, chunks, both=schedule in TURNED)
    elif blocks and schedule not in TURNED:
        reader.set("strategy.first_stage_layers", blocks // parts * chunks, points_key)


def _parts(reader: ConfigReader, listed: int, schedule: str, stages: int, blocks: int) -> int:
    """Stages over all ranks: as listed, from the blocks of each, or one or two on each rank (pipeline_llm)."""
    key = _PER_STAGE
    each = reader.integer(key, low=1)
    parts = stages * (2 if schedule in _CHUNKED else 1)
    if listed:
        parts, key = listed, key_of(reader, "parallelism.pipeline_parallel_split_points")
    elif each and blocks:
        parts = -(-(blocks + sum(_less(reader))) // each)
    if parts % stages or (parts > stages) != (schedule in _CHUNKED):
        several = "two or more" if schedule in _CHUNKED else "one"
        raise reader.error(key, reader.raw(key), f"must give {several} stages on each of {stages} ranks")
    return parts


def _points(reader: ConfigReader, key: str, edges: list[int], chunks: int) -> None:
    """Stages that begin at some blocks: the first and the last have their own number, the others share alike."""
    sizes = [after - before for before, after in itertools.pairwise(edges)]
    if min(sizes) < 1:
        raise reader.error(key, reader.raw(key), f"must be rising numbers of blocks below {edges[-1]}")
    inner = sizes[1:-1]
    if inner != sorted(inner, reverse=True) or (inner and inner[0] - inner[-1] > 1):
        message = f"{key} changes memory but is not counted: the stages between first and last are counted as equal"
        reader.note("warning", "MC002", key, message)
    reader.set("strategy.first_stage_layers", sizes[0] * chunks, key)
    reader.set("strategy.last_stage_layers", sizes[-1] * chunks, key)


def _less(reader: ConfigReader) -> list[int]:
    return [reader.integer(key, 1) or 0 for key in _LESS]


def _ends(reader: ConfigReader, blocks: int, parts: int, chunks: int, *, both: bool) -> None:
    """The first and last part have as many blocks less as the file says; a remainder goes to the earlier parts."""
    less = _less(reader)
    if max(less) <= 1:
        for key, word, end in zip(_LESS, ("embedding", "loss"), less, strict=True):
            reader.set(f"strategy.{word}_in_split", bool(end), key)
    elif both:
        reader.not_modelled(dict.fromkeys(_LESS, "stage 0 has both ends; counted as equal shares"), unless=(0, 1))
    elif blocks:
        base, rest = divmod(blocks + sum(less), parts)
        if max(less) >= base:
            raise reader.error(_LESS[0], less[0], f"must leave blocks to stages of {base}")
        reader.set("strategy.first_stage_layers", (base + (rest > 0) - less[0]) * chunks, _LESS[0])
        reader.set("strategy.last_stage_layers", (base - less[1]) * chunks, _LESS[1])


def _block(reader: ConfigReader, key: str, point: Any) -> int:
    """The number of the block at which a stage begins, from such as ``layers.4``."""
    last = str(point).rpartition(".")[2]
    if not last.isdecimal():
        raise reader.error(key, str(point), "must name blocks, such as layers.4")
    return int(last)


def _blocks(settings: list[Setting]) -> int:
    """Blocks of the model, where its sizes are known."""
    model = next((setting.value for setting in settings if setting.name == "model"), "")
    if isinstance(model, dict):
        return int(model["n_layers"])
    return catalog.model(model).num_layers if model in PRESETS else 0
