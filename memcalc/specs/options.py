"""The table of options, read from the declarations of what a job is; every list of options is one of those below."""

from collections.abc import Iterable
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, Field

from memcalc.specs.strategy import Strategy
from memcalc.specs.strict import JOB, MEMORY, PANELS, Frozen, Kind, Option

# How batches are made where sequences differ in length, as options of a job.

Batching = Literal[
    "pad", "pad-max", "grouped", "flatten", "bfd", "bfd-split", "wrapped", "multipack", "max-tokens", "token-budget"
]


class BatchInputs(Frozen):
    """The lengths of the data, and what is made of them; without lengths every sequence is the longest."""

    # fmt: off
    lengths: Annotated[
        str,
        Option("Lengths of the sequences: a file (numbers by line, JSON, CSV, .npy), or a log-normal by its median, "
            "99th percentile and largest, in tokens.", panel=JOB, metavar="FILE|P50:P99:MAX", group="", step=18),
    ] = ""
    batching: Annotated[
        Batching,
        Option("How --lengths become micro-batches.", panel=JOB, metavar="NAME", help="How --lengths become "
            "micro-batches: {values}.", group="", step=18),
    ] = "pad"
    token_budget: Annotated[
        int,
        Option("Tokens of a micro-batch, under the batching max-tokens or token-budget.", "tokens", JOB, "N", group="",
            most=100_000_000, step=18),
        Field(ge=0),
    ] = 0
    pad_multiple: Annotated[
        int,
        Option("What padded lengths are rounded up to a multiple of.", "tokens", JOB, "N", group="", step=18),
        Field(gt=0),
    ] = 1
    # fmt: on


# Values as other tools call them, and what they are called here; the one table of them.

MEANT: dict[str, dict[str, str]] = {
    "framework": {
        "fsdp": "fsdp2", "fully_shard": "fsdp2", "zero": "deepspeed", "ds": "deepspeed", "zero3": "deepspeed",
        "huggingface": "hf", "transformers": "hf", "trainer": "hf", "accelerate": "hf", "trl": "hf", "axolotl": "hf",
        "llamafactory": "hf", "unsloth": "hf", "megatron-lm": "megatron", "megatron-core": "megatron",
        "nemo": "megatron", "mcore": "megatron", "titan": "torchtitan", "pytorch": "plain", "torch": "plain",
    },
    "precision": {
        "amp": "bf16-autocast", "mixed": "bf16-mixed", "bf16_mixed": "bf16-mixed", "bfloat16": "bf16",
        "float32": "fp32", "float16": "fp16-mixed", "fp16": "fp16-mixed", "fp8": "fp8-mixed", "tf32": "fp32",
        "mxfp8": "fp8-mixed", "nvfp4": "fp8-mixed", "fp4": "fp8-mixed",
    },
    "optimizer": {
        "adam": "adamw", "adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adam8bit": "adamw-8bit",
        "adamw_8bit": "adamw-8bit", "adamw_bnb_8bit": "adamw-8bit", "paged_adamw_8bit": "paged-adamw-8bit",
        "paged_adamw_32bit": "paged-adamw", "momentum": "sgd-momentum", "galore": "galore-adamw",
    },
    "attention": {
        "flash2": "flash", "fa2": "flash", "flash_attention_2": "flash", "flash-attn": "flash", "xformers": "efficient",
    },
    "quantize": {"4bit": "nf4", "int4": "nf4", "fp4": "nf4", "qlora": "nf4", "8bit": "int8", "bnb": "nf4"},
    "offload": {"cpu": "optimizer", "all": "optimizer,params", "param": "params", "nvme": "optimizer"},
    "recompute": {
        "true": "full", "yes": "full", "on": "full", "all": "full", "block": "full", "selective": "selective-core-attn",
        "false": "none", "no": "none", "off": "none",
    },
    "compile": {"true": "blocks", "false": "none"},
    "loss": {"liger": "fused-linear", "cut-cross-entropy": "fused-linear", "loss-parallel": "parallel"},
    "zero": {"zero2": "2", "zero3": "3"},
    "to": {
        "hf": "trainer", "transformers": "trainer", "ds": "deepspeed", "fsdp": "fsdp2", "titan": "torchtitan",
        "ms-swift": "swift_megatron", "swift": "swift_megatron",
    },
}  # fmt: skip
"""By option: a value of another tool, in lower case, and the value here that is nearest in meaning."""


def meant(option: str, value: object) -> str | None:
    """The value of an option that a word of another tool stands for; None where none is known.

    >>> meant("framework", "FSDP"), meant("framework", "fsdp3")
    ('fsdp2', None)
    """
    return MEANT.get(option, {}).get(str(value).lower())


class JobInputs(Frozen):
    """What a job is told beside its strategy and its workload."""

    # fmt: off
    model: Annotated[
        str,
        Option("Preset name, config.json or folder (memcalc models).", panel=JOB,
            metavar="NAME|FILE|DIR", group="", required=True, completed_by="models", step=10),
    ]
    gpu: Annotated[
        str,
        Option("The GPU; `memcalc gpus` lists them.", panel=JOB, metavar="NAME", group="", required=True,
            completed_by="gpus", step=11),
    ]
    gpus: Annotated[
        int,
        Option("Number of GPUs; plan tries 1, 2, 4, … of one node when left out.", "GPUs", JOB, "N", group="hardware",
            searched=True, step=13),
    ] = 1
    node: Annotated[
        str,
        Option("The kind of host; `memcalc nodes` lists them.", panel=JOB, metavar="NAME", group="",
            completed_by="nodes", step=12),
    ] = ""
    calibration: Annotated[
        str,
        Option("Calibration file; by default the installed one, none for off.",
            panel=MEMORY, metavar="FILE", group="", kind="calibration", after="quantize", step=14),
    ] = ""
    set: Annotated[
        tuple[str, ...],
        Option("Any field by its dotted name, such as strategy.reduce_dtype=bf16; repeatable.", panel=MEMORY,
            metavar="KEY=VALUE", group="", kind="list", after="calibration"),
    ] = ()
    # fmt: on


class SharedSettings(Strategy):
    """What all strategies of a grid share: a strategy without what is an axis, its workload and its software."""

    # fmt: off
    seq_len: Annotated[
        int,
        Option("Sequence length; 4k is 4096.", "tokens", JOB, "N", group="workload", most=100_000_000, step=17),
        Field(gt=0),
    ]
    global_batch: Annotated[
        int,
        Option("Sequences an optimizer step; where 0 it follows from the micro-batch, see `Grid.global_batch`.",
            "sequences", JOB, "N|TOKENS", 'Sequences per optimizer step, or "4M tokens".', kind="batch",
            group="workload", searched=True, most=100_000_000, step=91),
        Field(ge=0),
    ]
    global_tokens: Annotated[
        int,
        Option("Tokens an optimizer step, where the batch follows from them; one micro-batch a rank where 0.", "tokens",
            group="", derived=True),
    ] = 0
    blas_workspace: Annotated[
        int | None, Option("Workspace of one cuBLAS handle; PyTorch's default where None.", "bytes", kind="bytes")
    ] = None
    float8_transposes: Annotated[
        bool, Option("The GPU takes 8-bit operands in one layout only, so weights are also kept transposed.",
            derived=True)
    ] = False
    images: Annotated[
        int | None,
        Option("Images of each sequence, for a model with a vision tower; one where left out, 0 for text alone.",
            "images", JOB, "N", group="workload", least=0, most=10_000, step=18),
        Field(ge=0),
    ] = None
    image_size: Annotated[
        str,
        Option("Size of an image before the model's processor resizes it; WIDTHxHEIGHT in pixels.", "px", JOB, "WxH",
            group="workload", step=19),
    ] = ""
    image_pixels: Annotated[
        int | None,
        Option("Most pixels that the processor leaves of an image (``max_pixels``); that of the released processor "
            "where None.", "px", group="workload", most=1_000_000_000),
        Field(gt=0),
    ] = None
    attention_mask: Annotated[bool, Option("The data loader makes an attention mask.", group="workload")] = False
    longest_first: Annotated[
        bool,
        Option("The longest sequences come once, in the first micro-batch, before there are gradients and states.",
            group="workload"),
    ] = False
    eval_micro_batch: Annotated[
        int | None,
        Option("Sequences that one rank evaluates at a time, 0 for no evaluation; where None, the "
            "framework's default is told without counting for the verdict.", "sequences", group="workload"),
        Field(ge=0),
    ] = None
    eval_batches_kept: Annotated[
        int,
        Option("Batches of an evaluation whose logits stay on the GPU at once: ``eval_accumulation_steps``, or all of "
            "them, where the Trainer has ``compute_metrics``; 0 where it has none.", "batches", group="workload"),
        Field(ge=0),
    ] = 0
    eval_new_tokens: Annotated[
        int,
        Option("Tokens that an evaluation generates after each sequence; 0 where it generates none.", "tokens",
            group="workload"),
        Field(ge=0),
    ] = 0
    loading: Annotated[
        Literal["", "every-rank", "rank-0"],
        Option("Who reads the weights on its host: every rank, or rank 0 of all (``cpu_ram_efficient_loading``). The "
            "framework's default where empty, without counting for the verdict."),
    ] = ""
    kbit_passing: Annotated[
        bool,
        Option("Embedding and head are fp32 while a quantized base is prepared, then 16 bits again (axolotl): loading "
            "counts for the verdict.", needs_lora=True),
    ] = False
    resumes: Annotated[
        bool,
        Option("The job resumes from a checkpoint: reading its states counts for the verdict.",
            group="workload"),
    ] = False
    state_dict: Annotated[
        Literal["", "sharded", "full", "full-on-gpu"],
        Option("What a checkpoint has of sharded weights: each rank its shards; all of them, which leave the GPU as "
            "they are gathered; or all, gathered on every GPU. The framework's default where empty, without counting "
            "for the verdict."),
    ] = ""
    bnb: Annotated[str, Option("Version of bitsandbytes.", kind="version", needs_lora=True)] = "0.45"
    peft: Annotated[str, Option("Version of PEFT.", kind="version", needs_lora=True)] = "0.13"
    te: Annotated[str, Option("Version of TransformerEngine.", kind="version")] = "2.14"
    # fmt: on


def options_of(record: type[BaseModel]) -> list[Option]:
    """The options of a record's fields, with what each field's type and default say."""
    rows = []
    for name, field in record.model_fields.items():
        option = next(part for part in field.metadata if isinstance(part, Option))
        values, kind = _read(field.annotation)
        given = {"values": option.values or values, "kind": option.kind or kind, **_bounds(field.metadata)}
        rows.append(option._replace(name=name, default=field.get_default(), **given))
    return rows


def _bounds(metadata: Iterable[Any]) -> dict[str, Any]:
    """The smallest and the largest number that a field's own constraints allow, where these are said there."""
    signs = {"ge": "least", "le": "most"}
    return {signs[sign]: int(getattr(part, sign)) for part in metadata for sign in signs if hasattr(part, sign)}


_KINDS: dict[Any, Kind] = {bool: "flag", int: "count", float: "fraction", str: "text"}


def _read(annotation: Any) -> tuple[tuple[str, ...], Kind]:
    """The allowed values of a type, and how one is read."""
    parts = [part for part in get_args(annotation) if part not in (NoneType, Ellipsis)]
    if get_origin(annotation) is Literal:
        return tuple(str(value) for value in parts if value != ""), "name"
    return _read(parts[0]) if parts else ((), _KINDS[annotation])


def _ordered(rows: Iterable[Option]) -> tuple[Option, ...]:
    """Options panel by panel, the others last, those with ``after`` where they say."""
    panels = (*PANELS, "")
    rows = sorted(rows, key=lambda row: panels.index(row.panel))
    ordered = [row for row in rows if not row.after]
    for moved in (row for row in rows if row.after):
        index = next(i for i, row in enumerate(ordered) if row.name == moved.after)
        ordered.insert(index + 1, moved)
    return tuple(ordered)


_SHARED = options_of(SharedSettings)
_OWN = len(Strategy.model_fields)
_BATCHES = options_of(BatchInputs)
OPTIONS = _ordered(
    row for row in (*options_of(JobInputs), *_SHARED[_OWN:], *_BATCHES, *_SHARED[:_OWN]) if not row.derived
)
"""All options of a job, in the order of the command line; those that ``--set`` alone takes come last."""
COMMAND_LINE = tuple(row for row in OPTIONS if row.panel)
"""Those with a flag of their own."""
SHARED = tuple(row.name for row in _SHARED if row.panel and not row.axis)
"""Options with a flag of their own that all strategies of a grid share."""
FIELDS = {row.key: row for row in OPTIONS if not row.panel}
"""By dotted name those that ``--set`` alone takes."""
SETTINGS = {row.key: row.name for row in COMMAND_LINE if row.group}
"""By dotted name the library's keyword of those that ``--set`` takes besides."""
BATCHING = tuple(row.name for row in _BATCHES)
"""Keywords that say how long sequences are and how batches are made of them."""
WORDS = tuple(sorted({*SETTINGS.values(), *BATCHING, "calibration"}))
"""What :func:`memcalc.estimate` and :func:`memcalc.plan` take besides model, gpu, node, settings and preset_dirs."""
BY_NAME = {row.name: row for row in OPTIONS}
"""Each by the library's keyword, or by the last part of its dotted name."""
CHOICES = {row.name: row.values for row in COMMAND_LINE if row.kind == "name"}
"""Keywords with one of a few names."""
FLAGS = tuple(row.name for row in COMMAND_LINE if row.kind == "flag")
"""Keywords that are true or false."""
NUMBERS = tuple(row.name for row in COMMAND_LINE if row.kind == "count")
"""Keywords with a whole number above zero."""
NEEDING = tuple(row for row in COMMAND_LINE if row.needs)
"""Options that say nothing without a degree above 1, or without routed experts."""
SEARCHED = tuple(row.name for row in COMMAND_LINE if row.searched)
"""Keywords of which a search takes several values (:mod:`memcalc.planner.request`)."""
DEGREES = tuple(row.name for row in COMMAND_LINE if row.degree)
"""Degrees of the parallel layout: tensor, pipeline, context and expert parallelism, and replicas of the shards."""
RANK_DEGREES = tuple(row.name for row in COMMAND_LINE if row.degree == "ranks")
"""Those of them whose product is the number of GPUs of one replica."""
REMEDIES = tuple(row.name for row in sorted(OPTIONS, key=lambda row: row.remedy) if row.remedy)
"""Options that are left open where nothing fits, first those that change neither the update nor the hardware."""
