"""Names of torchtitan's TOML, by day, and its batch and pipeline: micro-batches, schedule, how blocks are shared out.

Keys, with the day until which it took them: every commit that changed ``config_manager.py`` or
``config/job_config.py``, from the first of February 2024 to 73a0e6979 of February 2026, which is 0.2.2, the last
release that reads TOML: 9810191bb replaced it by functions. Models, with the presets of their sizes: 0.2.2
models/*/__init__.py. The flavors of Llama 3 have the sizes of 3 and 3.1 alike; 3.1 stands for both, as their assets
are those of 3.1.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from memcalc import catalog
from memcalc.convert.config import ConfigReader, Setting
from memcalc.convert.formats.base import ConfigJob, key_table
from memcalc.errors import ObjectiveError, cut
from memcalc.formulas.bubbles import TURNED

if TYPE_CHECKING:
    from memcalc.convert.document import Document


LAST = "2026-02-23"
"""The day on which TOML went."""
KEYS = key_table("torchtitan")
CURRENT = frozenset(KEYS.lists["newest"])
"""What 0.2.2 takes."""
REMOVED = {key: day for day, keys in KEYS.tables["removed"].items() for key in keys.split()}
"""By key: the day on which a commit removed or renamed it."""
SPELLED: dict[str, tuple[tuple[str, str], ...]] = {
    name: tuple((since, key) for since, key in spelled) for name, spelled in KEYS.tables["spelled"].items()
}
"""By the name of 0.2.2: the days since which a setting has had its names, the newest first."""
FLAVORS: dict[str, dict[str, str]] = {
    "llama3": {"8B": "llama-3.1-8b", "70B": "llama-3.1-70b", "405B": "llama-3.1-405b"},
    "deepseek_v3": {"16B": "deepseek-v2-lite", "236B": "deepseek-v2", "671B": "deepseek-v3"},
    "qwen3": {
        **{f"{size}B": f"qwen3-{size}b" for size in ("0.6", "1.7", "4", "8", "14", "32")},
        "30B-A3B": "qwen3-30b-a3b",
        "235B-A22B": "qwen3-235b-a22b",
    },
    "gpt_oss": {"20b": "gpt-oss-20b", "120b": "gpt-oss-120b"},
    "llama2": {"7B": "llama-2-7b", "13B": "llama-2-13b", "70B": "llama-2-70b"},
}
"""Presets by name and flavor; ``llama2`` (first called ``llama``) was there until February 2025."""
PRESETS = frozenset(preset for flavors in FLAVORS.values() for preset in flavors.values())
FLEXIBLE = frozenset({"deepseek_v3"})
"""Models whose flavors run FlexAttention; flavors of others say so in their name."""
_DEBUG = {"name": "llama3-debugmodel", "n_layers": 6, "hidden": 256, "heads": 16, "ffn": 768, "vocab": 2048,
          "max_positions": 131072}  # fmt: skip
"""dim 256; 8/3 of it rounded up to a multiple of 256."""


def overrides(document: Document) -> Document:
    """Flags of a command as keys of TOML; those of a release that has functions in its place are refused.

    ``--compile.no-enable`` is ``compile.enable`` false, tyro's form of a truth value.
    """
    named = [name for name in ("module", "config") if name in document.data or (name,) in document.unknown]
    if named and "config_file" not in document.data.get("job", {}):
        stated = " ".join(f"--{name} {cut(str(document.data.get(name, '…')))}" for name in named)
        raise ObjectiveError(
            f"{document.path.name} starts torchtitan with {stated}: its settings are a Python function of its "
            "config_registry.py, of which none is read: give memcalc estimate --framework torchtitan what it sets."
        )
    data = {
        table: dict(_positive(*item) for item in inner.items()) if isinstance(inner, dict) else inner
        for table, inner in document.data.items()
    }
    return replace(document, data=data)


def _positive(name: str, value: Any) -> tuple[str, Any]:
    return (name.removeprefix("no_"), False) if name.startswith("no_") and value is True else (name, value)


def of_idle_converters(reader: ConfigReader) -> frozenset[str]:
    """Keys of 8-bit products by a converter that ``model.converters`` does not list: they count for nothing."""
    working = {str(name) for name in reader.items("model.converters")}
    working |= {"float8"} if reader.flag("float8.enable_float8_linear") else set()
    keys = (*KEYS.not_counted, *KEYS.not_modelled)
    tables = {key: key.rpartition(".")[0] for key in keys if key.startswith(("quantize.", "float8.", "mx."))}
    return frozenset(key for key, table in tables.items() if table not in working)


def until(document: Document) -> tuple[str, str]:
    """The day until which torchtitan took all keys of a document, and the key that decides; unknown ones aside."""
    removed = [(day, key) for key, day in REMOVED.items() if _has(document.data, key)]
    return min(removed, default=(LAST, ""))


def _has(data: Any, key: str) -> bool:
    for part in key.split("."):
        if not isinstance(data, dict) or part not in data:
            return False
        data = data[part]
    return True


def spelling(document: Document, key: str) -> str:
    """How a document's torchtitan calls a setting; empty where it does not have it."""
    day, _ = until(document)
    return next((name for since, name in SPELLED.get(key, (("", key),)) if since < day), "")


def model_of(name: str, flavor: str) -> str | dict[str, Any]:
    """Return the preset or the sizes of a flavor; a name that is no preset where neither is known.

    >>> model_of("llama3", "8B_flex")
    'llama-3.1-8b'
    """
    family = {"llama": "llama2"}.get(name, name)
    plain = flavor.removesuffix("_attn").removesuffix("_flex").removesuffix("_varlen")
    if family == "llama3" and plain == "debugmodel":
        return dict(_DEBUG)
    return FLAVORS.get(family, {}).get(plain, f"{name} {flavor}")


def flavor_of(preset: str) -> tuple[str, str] | None:
    """Return name and flavor of a preset, or None where torchtitan has none.

    >>> flavor_of("llama-3-8b")
    ('llama3', '8B')
    """
    alike = preset.replace("llama-3-", "llama-3.1-")
    for name, flavors in FLAVORS.items():
        for flavor, known in flavors.items():
            if known == alike and name != "llama2":
                return name, flavor
    return None


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


def batch_fields(job: ConfigJob) -> dict[str, Any]:
    """The fields of the batch and the pipeline."""
    plan = job.strategy
    if plan.pp == 1:  # the global batch is that of one micro-batch on each rank where it is not stated
        global_batch = job.global_batch if job.accumulation > 1 else None
        return {"training.local_batch_size": plan.micro_batch, "training.global_batch_size": global_batch}
    names = {"1f1b": "1F1B", "gpipe": "GPipe", "interleaved": "Interleaved1F1B",
             "interleaved-zb": "InterleavedZeroBubble", "zb-v": "ZBVZeroBubble", "dualpipe-v": "DualPipeV"}  # fmt: skip
    blocks = catalog.model(job.model).num_layers
    first, last = _blocks_less(job, blocks)
    prefix = "parallelism.pipeline_parallel"
    fields = {
        "training.local_batch_size": plan.micro_batch * job.accumulation,
        f"{prefix}_schedule": names[plan.pp_schedule],
        f"{prefix}_microbatch_size": plan.micro_batch,
        f"{prefix}_first_stage_less_layers": first,
        f"{prefix}_last_stage_less_layers": last,
    }
    if plan.vpp > 2:
        blocks += first + last
        each = -(-blocks // (plan.pp * plan.vpp))
        job.require(-(-blocks // each) == plan.pp * plan.vpp, "vpp", "no whole number of blocks a stage gives it")
        fields[f"{prefix}_layers_per_stage"] = each
    return fields


def _blocks_less(job: ConfigJob, blocks: int) -> tuple[int, int]:
    """How many blocks less than another stage the first and the last one hold (pipeline_parallel.py, generate_llm).

    Below two the file's numbers are embedding and loss, which count as a block.
    """
    plan = job.strategy
    ends = plan.first_stage_layers, plan.last_stage_layers
    if not any(ends):
        return int(plan.embedding_in_split), int(plan.loss_in_split)
    stages = plan.pp
    given = [end for end in ends if end]
    inner, rest = divmod(blocks - sum(given), max(stages - len(given), 1))
    share = max(inner if stages > len(given) else 0, *ends)
    less = tuple(share - (end or inner) for end in ends)
    fine = rest == 0 and plan.vpp == 1 and max(less) > 1 and (stages == len(given) or inner == share)
    allowed = "torchtitan takes two or more blocks less in the first or the last stage, beside others that are alike"
    job.require(fine, "strategy.first_stage_layers", allowed, ends[0] or ends[1])
    return less[0], less[1]
