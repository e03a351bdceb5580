"""The table of options, read from the declarations of what a job is; every list of options is one of those below."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, Field

from memcalc.specs.batching import BatchInputs
from memcalc.specs.option import JOB, MEMORY, PANELS, Kind, Option
from memcalc.specs.strategy import Strategy
from memcalc.specs.strict import Frozen


class JobInputs(Frozen):
    """What a job is told beside its strategy and its workload."""

    # fmt: off
    model: Annotated[
        str,
        Option("A preset, a config.json, a directory with one, a .toml file, or a recorded module's .json.", panel=JOB,
            metavar="NAME|FILE|DIR", group="", required=True, completed_by="models", step=10),
    ]
    gpu: Annotated[
        str,
        Option("The GPU; `memcalc gpus` lists them.", panel=JOB, metavar="NAME", group="", required=True,
            completed_by="gpus", step=11),
    ]
    gpus: Annotated[
        int,
        Option("GPUs in all; plan tries 1, 2, 4, … of one node when left out.", "GPUs", JOB, "N", group="hardware",
            searched=True, step=13),
    ] = 1
    node: Annotated[
        str,
        Option("The kind of host; `memcalc nodes` lists them.", panel=JOB, metavar="NAME", group="",
            completed_by="nodes", step=12),
    ] = ""
    calibration: Annotated[
        str,
        Option("A calibration of this GPU (memcalc calibrate); by default the installed one; none switches it off.",
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
        Option("Tokens a sequence; 4k is 4096.", "tokens", JOB, "N", group="workload", most=100_000_000, step=17),
        Field(gt=0),
    ]
    global_batch: Annotated[
        int,
        Option("Sequences an optimizer step; where 0 it follows from the micro-batch, see `Grid.global_batch`.",
            "sequences", JOB, "N|TOKENS", 'Sequences an optimizer step, or tokens as in "4M tokens".', kind="batch",
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
        bool, Option("The GPU takes 8-bit operands in one layout alone, so that weights are kept transposed too.",
            derived=True)
    ] = False
    attention_mask: Annotated[bool, Option("The data loader makes an attention mask.", group="workload")] = False
    longest_first: Annotated[
        bool,
        Option("The longest sequences come once, in the first micro-batch, before there are gradients and states.",
            group="workload"),
    ] = False
    eval_micro_batch: Annotated[
        int | None,
        Option("Sequences that a rank evaluates at a time, 0 where the job evaluates nothing; where None, the "
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
    resumes: Annotated[
        bool,
        Option("The job goes on from a checkpoint, so that what reading its states takes counts for the verdict.",
            group="workload"),
    ] = False
    state_dict: Annotated[
        Literal["", "sharded", "full", "full-on-gpu"],
        Option("What a checkpoint has of sharded weights: each rank its shards; all of them, which leave the GPU as "
            "they are gathered; or all, gathered on each GPU. The framework's default where empty, without counting "
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
        given = {"values": option.values or values, "kind": option.kind or kind}
        rows.append(replace(option, name=name, default=field.get_default(), **given))  # type: ignore[arg-type]
    return rows


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
