"""The strategy grid: named axes, each an array dimension; one strategy is the grid whose axes have length one.

Axes in order: parallel layout (the legal combinations of dp, tp, pp, cp, ep are one axis with columns, because they are
coupled), pipeline stage, precision, recompute policy, sharding stage, offload, micro-batch with its sequence length. A
column broadcasts along its own axis only, so that a term costs the axes it depends on.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from memcalc.formulas.bubbles import TURNED
from memcalc.formulas.recompute import Policy, parse_policy
from memcalc.frameworks import Habits, habits_of
from memcalc.frameworks.float8 import RECIPES, Recipe
from memcalc.frameworks.megatron import narrowed
from memcalc.stages import Chunks, Split, peak_stages

if TYPE_CHECKING:
    from collections.abc import Iterable

    from memcalc.formulas import Array
    from memcalc.frameworks.capability import Clash
    from memcalc.frameworks.habits import Widths
    from memcalc.specs.options import SharedSettings
    from memcalc.specs.strategy import Strategy

StageCounts = tuple[tuple[int, int], ...]
"""Pipeline stages of a layout, and how many stages each counts for."""
AXES = ("layout", "stage", "precision", "recompute", "zero", "offload", "micro_batch")


def column(values: Iterable[Any], axis: str, dtype: Any = np.int64) -> Array:
    """A column along one axis of the grid."""
    array = np.asarray(values if isinstance(values, np.ndarray) else list(values), dtype=dtype)
    shape = [1] * len(AXES)
    shape[AXES.index(axis)] = array.size
    return array.reshape(shape)


@dataclass(frozen=True, order=True)
class Layout:
    """Degrees of the parallel layout [ranks], and the schedule of its pipeline."""

    dp: int = 1
    """Data-parallel ranks, context parallelism left out."""
    tp: int = 1
    """Tensor-parallel ranks."""
    sp: bool = False
    """Whether norms and residuals are divided over the tensor-parallel ranks."""
    pp: int = 1
    """Pipeline stages."""
    cp: int = 1
    """Context-parallel ranks."""
    ep: int = 1
    """Expert-parallel ranks."""
    schedule: str = "1f1b"
    """Of the pipeline; 1f1b where there is none."""
    vpp: int = 1
    """Model chunks a stage."""
    dp_replicate: int = 1
    """Groups of data-parallel ranks each of which has all shards."""

    @property
    def gpus(self) -> int:
        """Ranks in all."""
        return self.dp * self.tp * self.pp * self.cp

    def replicated(self, replicas: int) -> Layout:
        """The same with so many replicas of the shards."""
        return Layout(self.dp, self.tp, self.sp, self.pp, self.cp, self.ep, self.schedule, self.vpp, replicas)


def layout_of(s: Strategy) -> Layout:
    """The parallel layout of a strategy."""
    return Layout(s.dp, s.tp, s.sp, s.pp, s.cp, s.ep, s.pp_schedule, s.vpp, s.dp_replicate)


@dataclass(frozen=True)
class Grid:
    """A space of strategies: the values of each axis, and what all share."""

    fixed: SharedSettings
    """What all strategies share."""
    layouts: tuple[Layout, ...]
    """Values of the layout axis."""
    precisions: tuple[str, ...]
    """Values of the precision axis."""
    recomputes: tuple[str, ...]
    """Values of the recompute axis."""
    zeros: tuple[int, ...]
    """Values of the sharding axis: ZeRO stages."""
    offloads: tuple[tuple[str, ...], ...]
    """Values of the offload axis: what leaves the GPU."""
    micro_batches: tuple[int, ...]
    """Values of the last axis [sequences]."""
    every_stage: bool = False
    """All pipeline stages, instead of those alone that can carry the peak."""
    sequence: tuple[int, ...] = ()
    """The group of each block of the model, by which stages are told apart; all blocks are alike where it is empty."""
    seq_lens: tuple[int, ...] = ()
    """Sequence length of each micro-batch [tokens]; where empty, all have that of ``fixed``."""
    stages_looked_at: tuple[StageCounts, ...] = field(default=(), compare=False)
    """Of each layout, as :attr:`rows` has them; they follow from the other fields where it is empty."""
    clashes: tuple[Clash, ...] = ()
    """What the framework cannot be told together, and a search therefore leaves out."""
    space: tuple[Layout, ...] = field(default=(), compare=False)
    """The ways of sharding a block in the space that this grid is a part of; its own where it is empty."""
    _columns: dict[str | tuple[str, ...], Array] = field(default_factory=dict, init=False, compare=False, repr=False)

    @cached_property
    def habits(self) -> Habits:
        """The framework's habits."""
        return habits_of(self.fixed.framework)

    @cached_property
    def recipe(self) -> Recipe | None:
        """How TransformerEngine quantises the operands of 8-bit products; None where other libraries multiply."""
        habits = self.habits
        return RECIPES[self.fixed.float8 or habits.float8[0]] if habits.engine and habits.float8 else None

    @cached_property
    def narrow_weights(self) -> Array:
        """1 where the weights of linear layers are kept in 8 or 4 bits (``--fp8-param-gather``)."""
        stored = self.recipe is not None and self.fixed.float8_all_gather
        return column([stored and name.startswith("fp8") for name in self.precisions], "precision")

    @cached_property
    def persistent_gradients(self) -> bool:
        """Whether one buffer of all gradients lives all the time: Megatron-LM's, or DDP's where they are views of it.

        DDP's buckets are allocated when the model is wrapped, and stay when gradients are set to None (torch 2.13
        csrc/distributed/c10d/reducer.cpp, initialize_buckets and initialize_bucket_views).
        """
        return self.habits.persistent_gradients or (self.habits.gradient_copy and self.fixed.bucket_view)

    @cached_property
    def copied_gradients(self) -> Array:
        """1 where DDP copies gradients into its buckets; of length one where that is so, or not, in the whole grid."""
        if self.habits.gradient_copy:
            return np.int64(not self.fixed.bucket_view)
        replicas = self.degree("dp") * self.degree("cp") > 1
        return (self.habits.wraps_replicas & ~self.zero_from(1) & replicas).astype(np.int64)

    @cached_property
    def policies(self) -> tuple[Policy, ...]:
        """The parsed recompute policies."""
        parsed = tuple(parse_policy(name) for name in self.recomputes)
        return tuple(replace(policy, skipped=0) for policy in parsed) if self.habits.checkpoints_first else parsed

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Length of each axis."""
        return (len(self.layouts), self.num_stages, *self._lengths)

    @property
    def _lengths(self) -> tuple[int, ...]:
        return tuple(map(len, (self.precisions, self.recomputes, self.zeros, self.offloads, self.micro_batches)))

    @property
    def size(self) -> int:
        """Number of strategies, for which stages need not be known."""
        return len(self.layouts) * int(np.prod(self._lengths))

    @cached_property
    def num_stages(self) -> int:
        """Length of the stage axis."""
        return max(len(row) for row in self.rows)

    @cached_property
    def split(self) -> Split:
        """How blocks are shared out over stages."""
        fixed = self.fixed
        ends = (fixed.first_stage_layers, fixed.last_stage_layers)
        return Split(*ends, fixed.embedding_in_split, fixed.loss_in_split, fixed.mtp)

    @cached_property
    def rows(self) -> tuple[StageCounts, ...]:
        """The pipeline stages of each layout that are looked at, and how many each counts for."""
        if self.stages_looked_at:
            return self.stages_looked_at
        if self.every_stage:
            return tuple(tuple((stage, 1) for stage in range(layout.pp)) for layout in self.layouts)
        alike = [(a.pp, a.vpp, a.schedule in TURNED) for a in self.layouts]
        keys = [*zip(alike, map(tuple, self.accumulation.reshape(len(alike), -1).tolist()), strict=True)]
        rows = {key: self._peak_stages(*key[0], key[1]) for key in dict.fromkeys(keys)}
        return tuple(rows[key] for key in keys)

    def _peak_stages(self, pp: int, vpp: int, turned: bool, several: tuple[int, ...]) -> StageCounts:
        batches = frozenset(m for m in several if m <= 2 * pp)
        return peak_stages(pp, vpp, turned=turned, sequence=self.sequence, split=self.split, batches=batches)

    def with_offloads(self, offloads: tuple[tuple[str, ...], ...]) -> Grid:
        """The same grid with another offload axis."""
        return self if offloads == self.offloads else replace(self, offloads=offloads, stages_looked_at=self.rows)

    def with_layouts(self, layouts: tuple[Layout, ...]) -> Grid:
        """The same grid with some of its layouts; parts of a space share what depends on the sharding of blocks."""
        return replace(self, layouts=layouts, stages_looked_at=(), space=self.space or self.ways.layouts)

    @cached_property
    def flat(self) -> tuple[Grid, Array]:
        """Each stage that is looked at as a layout of its own, and the place of the layout that it belongs to.

        So no layout has as many rows as the one that has most.
        """
        if self.num_stages == 1:
            return self, np.arange(len(self.layouts))
        each = [(index, row) for index, rows in enumerate(self.rows) for row in rows]
        rows = self.with_layouts(tuple(self.layouts[index] for index, _ in each))
        return replace(rows, stages_looked_at=tuple((row,) for _, row in each)), np.array([index for index, _ in each])

    @cached_property
    def ways(self) -> Grid:
        """One layout for each way of sharding a block, which is all that a block's own tensors depend on."""
        known = dict.fromkeys((a.tp, a.sp, a.cp, a.ep) for a in self.layouts) if not self.space else ()
        layouts = self.space or tuple(Layout(tp=tp, sp=sp, cp=cp, ep=ep) for tp, sp, cp, ep in known)
        return replace(self, layouts=layouts, offloads=((),), sequence=(), stages_looked_at=(), space=())

    @cached_property
    def way(self) -> Array:
        """The place of each layout among the ways."""
        places = {(layout.tp, layout.sp, layout.cp, layout.ep): i for i, layout in enumerate(self.ways.layouts)}
        return np.array([places[layout.tp, layout.sp, layout.cp, layout.ep] for layout in self.layouts])

    def degree(self, name: str) -> Array:
        """A column of the layout axis: dp, dp_replicate, tp, sp, pp, vpp, cp, ep or gpus."""
        if name not in self._columns:
            self._columns[name] = column(np.fromiter(map(attrgetter(name), self.layouts), np.int64), "layout")
        return self._columns[name]

    @cached_property
    def ranks(self) -> Array:
        """Ranks that share one set of weights under ZeRO and FSDP: dp * cp / dp_replicate."""
        return self.degree("dp") * self.degree("cp") // self.degree("dp_replicate")

    @cached_property
    def expert_ranks(self) -> Array:
        """Ranks that share one set of expert weights: dp * cp * tp / (dp_replicate * ep * etp)."""
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

    def _padded(self, rows: list[list[tuple[int, int]]], index: int) -> Array:
        return np.array([[entry[index] for entry in row] for row in rows], np.int64).reshape(*self.shape[:2], *(1,) * 5)

    def runs(self, *schedules: str) -> Array:
        """Whether a layout's pipeline runs one of these schedules, along the layout axis."""
        if schedules not in self._columns:
            self._columns[schedules] = column(
                [layout.schedule in schedules for layout in self.layouts], "layout", np.bool_
            )
        return self._columns[schedules]

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

    @property
    def is_bf16_mixed(self) -> Array:
        """1 by precision where bf16 weights have fp32 masters."""
        return column([name == "bf16-mixed" for name in self.precisions], "precision")

    @property
    def is_fp16_mixed(self) -> Array:
        """1 by precision where fp16 weights have fp32 masters."""
        return column([name == "fp16-mixed" for name in self.precisions], "precision")

    def width(self, name: str) -> Array:
        """Bytes an element of one copy of a parameter, by precision (see :class:`memcalc.frameworks.Widths`)."""
        return column([getattr(self._widths(p), name) for p in self.precisions], "precision")

    def _widths(self, precision: str) -> Widths:
        """A framework's own, or with its gradients in 16 bits (Megatron-LM, ``--grad-reduce-in-bf16``).

        The optimizer then makes an fp32 copy of its share of them (core/optimizer/distrib_optimizer.py d98e8a64,
        ``_copy_model_grads_to_main_grads``), unless they are read as they are (--use-precision-aware-optimizer).
        """
        widths = self.habits.widths[precision]
        if self.fixed.adapters is not None and widths.master and not self.habits.casts_adapters:  # nobody casts PEFT's
            widths = widths._replace(parameter=widths.master, gradient=widths.master, master=0)
        narrows = self.habits.narrow_gradients and self.fixed.reduce_dtype == "bf16" and widths.compute == 2
        if narrows and widths.gradient == 4:
            widths = widths._replace(gradient=2, step_gradient=4)
        return narrowed(widths, self.fixed, precision, self.habits)

    @cached_property
    def reduce_width(self) -> Array:
        """Bytes an element in which FSDP reduces gradients: as told, but never wider than 16-bit weights need."""
        wide = np.maximum(self.width("compute"), 4 if self.fixed.reduce_dtype == "fp32" else 2)
        return np.where(self.width("parameter") == 2, 2, wide)

    def offloaded(self, what: str) -> Array:
        """1 where ``optimizer``, ``params`` or ``activations`` leave the GPU; of length one where all choices agree."""
        chosen = [what in choice for choice in self.offloads]
        return column(chosen if len(set(chosen)) > 1 else chosen[:1], "offload")

    @cached_property
    def columns(self) -> Chunks:
        """The model chunks of each stage: chunk c of stage i is part c * p + i of the model.

        Under ZB-V the second chunk of stage i is part 2 p - 1 - i.
        """
        return Chunks(self.stage, self.degree("pp"), self.degree("vpp"), self.runs(*TURNED))

    def spans(self, blocks: int) -> list[tuple[Array, Array]]:
        """The first of so many blocks that each model chunk of each stage holds, and the one after its last."""
        return self.columns.spans(self.split, blocks)
