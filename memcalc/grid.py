"""The strategy grid: named axes, each an array dimension; one strategy is the grid whose axes have length one.

Axes in order: parallel layout (the legal combinations of dp, tp, pp, cp, ep are one axis with columns, because they are
coupled), pipeline stage, precision, recompute policy, sharding stage, offload, micro-batch with its sequence length. A
column broadcasts along its own axis only, so that a term costs the axes it depends on.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from memcalc.formulas.recompute import Policy, parse_policy
from memcalc.frameworks import Habits, habits_of
from memcalc.stages import Chunks, Split, peak_stages

if TYPE_CHECKING:
    from memcalc.formulas.types import Array
    from memcalc.specs.adapters import Lora

TURNED = ("zb-v",)
"""Schedules under which the second half of the model's parts runs back over the stages."""
AXES = ("layout", "stage", "precision", "recompute", "zero", "offload", "micro_batch")


def column(values: Iterable[Any], axis: str, dtype: Any = np.int64) -> Array:
    """A column along one axis of the grid."""
    array = np.asarray(list(values), dtype=dtype)
    shape = [1] * len(AXES)
    shape[AXES.index(axis)] = array.size
    return array.reshape(shape)


@dataclass(frozen=True, order=True)
class Layout:
    """Degrees of the parallel layout [ranks], and the schedule of its pipeline."""

    dp: int = 1
    tp: int = 1
    sp: bool = False
    pp: int = 1
    cp: int = 1
    ep: int = 1
    schedule: str = "1f1b"
    """Of the pipeline; 1f1b where there is none."""
    vpp: int = 1
    """Model chunks a stage."""

    @property
    def gpus(self) -> int:
        """Ranks in all."""
        return self.dp * self.tp * self.pp * self.cp


@dataclass(frozen=True)
class Fixed:
    """What all strategies of a grid share."""

    framework: str
    seq_len: int
    global_batch: int
    """Sequences an optimizer step; where 0 it follows from the micro-batch, see :attr:`Grid.global_batch`."""
    global_tokens: int = 0
    """Tokens an optimizer step, where the batch follows from the micro-batch; one micro-batch a rank where 0."""
    optimizer: str = "adamw"
    optimizer_impl: str = "foreach"
    optimizer_in_backward: bool = False
    attention: str = "flash"
    loss: str = "standard"
    kernels: str = "model"
    reduce_dtype: str = "fp32"
    offload_to: str = "cpu"
    checkpoint: str = ""
    compile: str = "none"
    cp_kind: str = "ring"
    etp: int = 0
    """Tensor-parallel ranks of an expert; as many as of the rest where 0."""
    mtp: int = 0
    """Blocks that predict further tokens."""
    microbatch_group: int = 0
    """Micro-batches that pass one model chunk before the next chunk's turn; as many as stages where 0."""
    first_stage_layers: int = 0
    last_stage_layers: int = 0
    """Blocks of the first and last stage of a pipeline; an equal share where 0."""
    embedding_in_split: bool = False
    loss_in_split: bool = False
    """Embedding and loss count as a block each where blocks are shared out over stages."""
    wgrad_fusion: bool = True
    blas_workspace: int | None = None
    """Of one cuBLAS handle [bytes]; PyTorch's default where None."""
    attention_mask: bool = False
    """The data loader makes an attention mask."""
    longest_first: bool = False
    """The longest sequences come in the first micro-batch, before gradients and optimizer states exist."""
    float8: str = ""
    float8_all_gather: bool = False
    async_tp: bool = False
    fsdp_schedule: str = "default"
    reshard: str = "default"
    expandable_segments: bool = False
    lora: Lora | None = None
    adapter_dtype: str = "fp32"
    autocast: bool = False
    also_train: tuple[str, ...] = ()
    quantize: str = "none"
    lora_dropout: float = 0.0
    lora_kernels: str = "model"
    gptq_group: int = 128
    prepare_kbit: bool = False
    bnb: str = "0.45"
    peft: str = "0.13"
    wide_embedding_moments: bool = False
    """Embedding tables keep 32-bit moments under an 8-bit optimizer."""
    bucket_view: bool = False
    """DDP's gradients are views of its buckets, so that there is no second copy."""
    whole_accumulation: bool | None = None
    """FSDP leaves the gradients of all micro-batches but the last unsharded; as the framework does it where None."""
    partition_activations: bool = False
    grad_accum_dtype: str = ""
    reduce_bucket_size: int | None = None
    overlap_comm: bool | None = None
    zero_prefetch_bucket: int | None = None
    persistence_threshold: int | None = None
    max_live_parameters: int | None = None
    sub_group_size: int | None = None


@dataclass(frozen=True)
class Grid:
    """A space of strategies: the values of each axis, and what all share."""

    fixed: Fixed
    layouts: tuple[Layout, ...]
    precisions: tuple[str, ...]
    recomputes: tuple[str, ...]
    zeros: tuple[int, ...]
    offloads: tuple[tuple[str, ...], ...]
    micro_batches: tuple[int, ...]
    every_stage: bool = False
    """All pipeline stages, instead of those alone that can carry the peak."""
    model_groups: tuple[int, ...] = ()
    """Blocks of each group of the model, by which stages are told apart; all blocks are alike where it is empty."""
    seq_lens: tuple[int, ...] = ()
    """Sequence length of each micro-batch [tokens]; where empty, all have that of ``fixed``."""

    @cached_property
    def habits(self) -> Habits:
        """The framework's habits."""
        return habits_of(self.fixed.framework)

    @cached_property
    def persistent_gradients(self) -> bool:
        """Whether one buffer of all gradients lives all the time: Megatron-LM's, or DDP's where they are views of it.

        DDP's buckets are allocated when the model is wrapped, and stay when gradients are set to None (torch 2.13
        csrc/distributed/c10d/reducer.cpp, initialize_buckets and initialize_bucket_views).
        """
        return self.habits.persistent_gradients or (self.habits.gradient_copy and self.fixed.bucket_view)

    @cached_property
    def policies(self) -> tuple[Policy, ...]:
        """The parsed recompute policies."""
        return tuple(parse_policy(name) for name in self.recomputes)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Length of each axis."""
        lengths = (self.precisions, self.recomputes, self.zeros, self.offloads, self.micro_batches)
        return (len(self.layouts), self.num_stages, *(len(axis) for axis in lengths))

    @property
    def size(self) -> int:
        """Number of strategies."""
        return int(np.prod([length for axis, length in zip(AXES, self.shape, strict=True) if axis != "stage"]))

    @cached_property
    def num_stages(self) -> int:
        """Length of the stage axis."""
        return max(len(row) for row in self.rows)

    @cached_property
    def split(self) -> Split:
        """How blocks are shared out over stages."""
        fixed = self.fixed
        own = (fixed.first_stage_layers, fixed.last_stage_layers)
        return Split(*own, fixed.embedding_in_split, fixed.loss_in_split, fixed.mtp)

    @cached_property
    def rows(self) -> list[tuple[tuple[int, int], ...]]:
        """The pipeline stages of each layout that are looked at, and how many each counts for."""
        if self.every_stage:
            return [tuple((stage, 1) for stage in range(layout.pp)) for layout in self.layouts]
        rows = []
        for layout, several in zip(self.layouts, self.accumulation, strict=True):
            batches = frozenset(int(m) for m in several.ravel() if m <= 2 * layout.pp)
            turned = layout.schedule in TURNED
            rows.append(
                peak_stages(
                    layout.pp, layout.vpp, turned=turned, groups=self.model_groups, split=self.split, batches=batches
                )
            )
        return rows

    def with_offloads(self, offloads: tuple[tuple[str, ...], ...]) -> Grid:
        """The same grid with another offload axis; no other column is computed again."""
        other = replace(self, offloads=offloads)
        kept = {name: value for name, value in vars(self).items() if name not in {"offloads", "shape", "flat"}}
        vars(other).update(kept)
        return other

    def with_layouts(self, layouts: tuple[Layout, ...]) -> Grid:
        """The same grid with some of its layouts; parts of a space share what depends on the sharding of blocks."""
        other = replace(self, layouts=layouts)
        vars(other)["ways"] = self.ways
        return other

    @cached_property
    def flat(self) -> tuple[Grid, Array]:
        """Each stage that is looked at as a layout of its own, and the place of the layout that it belongs to.

        So no layout has as many rows as the one that has most.
        """
        each = [(place, row) for place, rows in enumerate(self.rows) for row in rows]
        other = self.with_layouts(tuple(self.layouts[place] for place, _ in each))
        vars(other)["rows"] = [(row,) for _, row in each]
        return other, np.array([place for place, _ in each])

    @cached_property
    def ways(self) -> Grid:
        """One layout for each way of sharding a block, which is all that a block's own tensors depend on."""
        alike = (Layout(tp=one.tp, sp=one.sp, cp=one.cp, ep=one.ep) for one in self.layouts)
        return replace(self, layouts=tuple(dict.fromkeys(alike)), offloads=((),), model_groups=())

    @cached_property
    def way(self) -> Array:
        """The place of each layout among the ways."""
        places = {(one.tp, one.sp, one.cp, one.ep): i for i, one in enumerate(self.ways.layouts)}
        return np.array([places[one.tp, one.sp, one.cp, one.ep] for one in self.layouts])

    @cached_property
    def _degrees(self) -> dict[str, Array]:
        return {}

    def degree(self, name: str) -> Array:
        """A column of the layout axis: dp, tp, sp, pp, vpp, cp, ep or gpus."""
        if name not in self._degrees:
            self._degrees[name] = column([int(getattr(layout, name)) for layout in self.layouts], "layout")
        return self._degrees[name]

    @cached_property
    def ranks(self) -> Array:
        """Ranks that share one set of weights under ZeRO and FSDP: dp * cp."""
        return self.degree("dp") * self.degree("cp")

    @cached_property
    def expert_ranks(self) -> Array:
        """Ranks that share one set of expert weights: dp * cp * tp / (ep * etp)."""
        return np.maximum(self.ranks * self.degree("tp") // (self.degree("ep") * self.expert_tp), 1)

    @cached_property
    def expert_tp(self) -> Array:
        """Tensor-parallel ranks of an expert."""
        tp = self.degree("tp")
        return np.full_like(tp, self.fixed.etp) if self.fixed.etp else tp

    @cached_property
    def sequence_shard(self) -> Array:
        """What divides tensors outside the tensor-parallel region: TP where sequence parallelism is on, else 1."""
        return np.where(self.degree("sp") == 1, self.degree("tp"), 1)

    @cached_property
    def stage(self) -> Array:
        """Index of the pipeline stage, along layout and stage; the last one looked at fills a layout's row."""
        return self._padded([[*row, *row[-1:] * (self.num_stages - len(row))] for row in self.rows], 0)

    @cached_property
    def stage_counts(self) -> Array:
        """How many stages each entry of the stage axis counts for."""
        return self._padded([[*row, *((0, 0),) * (self.num_stages - len(row))] for row in self.rows], 1)

    def _padded(self, rows: list[list[tuple[int, int]]], place: int) -> Array:
        found = [[entry[place] for entry in row] for row in rows]
        return np.asarray(found, dtype=np.int64).reshape(len(rows), self.num_stages, 1, 1, 1, 1, 1)

    def runs(self, *schedules: str) -> Array:
        """Whether a layout's pipeline runs one of these schedules, along the layout axis."""
        return column([layout.schedule in schedules for layout in self.layouts], "layout", np.bool_)

    @cached_property
    def ends_apart(self) -> Array:
        """Whether embedding and head stand on different ranks."""
        return np.asarray((self.degree("pp") > 1) & ~self.runs(*TURNED))

    @cached_property
    def is_first(self) -> Array:
        """1 on the stage that holds the embedding."""
        return (self.stage == 0).astype(np.int64)

    @cached_property
    def is_last(self) -> Array:
        """1 on the stage that holds the head: the last, or where the parts of the model turn back the first."""
        return (self.stage == np.where(self.ends_apart, self.degree("pp") - 1, 0)).astype(np.int64)

    @cached_property
    def micro_batch(self) -> Array:
        """Sequences a forward pass."""
        return column(self.micro_batches, "micro_batch")

    @property
    def lengths(self) -> tuple[int, ...]:
        """The sequence lengths of the grid [tokens]."""
        return self.seq_lens or (self.fixed.seq_len,)

    @cached_property
    def seq_len(self) -> Array:
        """Tokens a sequence, along the axis of the micro-batches."""
        return column(self.lengths, "micro_batch")

    @cached_property
    def tokens(self) -> Array:
        """Tokens of one micro-batch on a rank: micro-batch * ceil(sequence / cp)."""
        return self.micro_batch * -(-self.seq_len // self.degree("cp"))

    @cached_property
    def global_batch(self) -> Array:
        """Sequences an optimizer step: as told, or as many whole micro-batches of all ranks as the tokens hold."""
        at_once = self.degree("dp") * self.micro_batch
        if self.fixed.global_batch:
            return np.full_like(at_once, self.fixed.global_batch)
        return at_once * np.maximum(self.fixed.global_tokens // (at_once * self.seq_len), 1)

    @cached_property
    def accumulation(self) -> Array:
        """Micro-batches an optimizer step; at least one."""
        return np.maximum(self.global_batch // (self.degree("dp") * self.micro_batch), 1)

    @cached_property
    def divides(self) -> Array:
        """Whether micro-batch * dp divides the global batch."""
        return self.global_batch % (self.degree("dp") * self.micro_batch) == 0

    @cached_property
    def zero(self) -> Array:
        """Sharding stage."""
        return column(self.zeros, "zero")

    def zero_from(self, stage: int) -> Array:
        """Whether the sharding stage is at least ``stage``; of length one where all stages of the grid agree."""
        reached = [zero >= stage for zero in self.zeros]
        return column(reached if len(set(reached)) > 1 else reached[:1], "zero", np.bool_)

    @cached_property
    def is_mixed(self) -> Array:
        """1 where 16-bit weights stand beside fp32 ones: a master, or FSDP's shards."""
        return column([name.endswith("-mixed") for name in self.precisions], "precision")

    def width(self, name: str) -> Array:
        """Bytes an element of one copy of a parameter, by precision (see :class:`memcalc.frameworks.Widths`)."""
        return column([getattr(self.habits.widths[p], name) for p in self.precisions], "precision")

    @cached_property
    def reduce_width(self) -> Array:
        """Bytes an element in which FSDP reduces gradients: as told, but never wider than 16-bit weights need."""
        wide = np.maximum(self.width("compute"), 4 if self.fixed.reduce_dtype == "fp32" else 2)
        return np.where(self.width("parameter") == 2, 2, wide)

    def offloaded(self, what: str) -> Array:
        """1 where ``optimizer``, ``params`` or ``activations`` leave the GPU; of length one where all choices agree."""
        chosen = [what in choice for choice in self.offloads]
        return column(chosen if len(set(chosen)) > 1 else chosen[:1], "offload")

    def layers(self, group_start: int, group_count: int, total: int) -> Array:
        """Blocks of a group on each stage."""
        return sum(self.chunks(group_start, group_count, total), np.int64(0))

    def chunks(self, group_start: int, group_count: int, total: int) -> list[Array]:
        """Blocks of a group in each model chunk of each stage: chunk c of stage i is part c * p + i of the model.

        Under ZB-V the second chunk of stage i is part 2 p - 1 - i.
        """
        columns = Chunks(self.stage, self.degree("pp"), self.degree("vpp"), self.runs(*TURNED))
        return columns.blocks(self.split, group_start, group_count, total)
