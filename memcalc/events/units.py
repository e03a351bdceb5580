"""Where weights are whole: the units that FSDP gathers for compute and reduces after backward."""

from __future__ import annotations

from dataclasses import dataclass, field

from memcalc.events.log import COMPUTE, GATHER, REDUCE, ROOT, UPLOAD, Log


@dataclass(frozen=True)
class Sizes:
    """Bytes of one unit on a rank."""

    whole: int
    """Its weights in the width of compute."""
    shard_copy: int
    """The rank's shard cast for the all-gather."""
    reduce_input: int
    """The flat gradients that are reduced."""
    reduced: int
    """The rank's shard of the gradients."""
    reduce_output: int
    """The same in the width of the reduction."""


@dataclass
class Whole:
    """Without sharding: weights are always there, and gradients stay until the step."""

    log: Log
    sizes: list[Sizes]
    gradients: dict[int, list[int]] = field(default_factory=dict)

    def wrap(self, units: list[list[int]]) -> None:
        """As the model is made ready for training: bytes of the weights of each unit, the root's last."""

    def begin(self) -> None:
        """Before the first forward of a step."""

    def enter(self, unit: int, following: int | None, /, *, backward: bool = False) -> None:
        """Before a unit computes; ``following`` is the one after it."""

    def forwarded(self) -> None:
        """After a micro-batch's forward."""

    def leave_forward(self, unit: int) -> None:
        """After a unit's forward."""

    def hand_over(self, unit: int, /) -> None:
        """Where the logits of the head's unit leave the model for the loss."""

    def recomputed(self, unit: int) -> None:
        """After a checkpoint has run the unit's forward again."""

    def accumulates(self, unit: int, /) -> bool:
        """Whether a unit's gradients are added to those of an earlier micro-batch as they are made."""
        return unit in self.gradients

    def leave_backward(self, unit: int, gradients: list[int], last: int = 0) -> None:  # noqa: ARG002
        """After a unit's backward, with its weights' gradients; ``last`` is that of the unit's last weight."""
        self.gradients.setdefault(unit, []).extend(gradients)

    def finish(self) -> None:
        """After a micro-batch's backward."""

    def end(self) -> None:
        """After the last micro-batch's backward."""

    def update(self) -> None:
        """Before the optimizer steps."""

    def zero_grad(self) -> None:
        """After the step."""
        for keys in self.gradients.values():
            self.log.free_all(keys)
        self.gradients.clear()


@dataclass
class Flattened(Whole):
    """The local DDP of Megatron-LM in 2021, and the gradients of the optimizer's own parameters.

    The gradients of the step before go when those of this one are complete, which are then copied into one tensor for
    their all-reduce. The optimizer's fp32 gradients are made one by one, each before that of the last step goes.
    Source: Megatron-LM b4bc51b megatron/model/distributed.py (allreduce_gradients) and megatron/optimizer/optimizer.py
    (_copy_model_grads_to_main_grads, zero_grad).
    """

    flat: int = 0
    """Bytes of the tensor that is reduced."""
    main: list[int] = field(default_factory=list)
    """Bytes of the optimizer's gradient of each weight."""
    before: list[int] = field(default_factory=list)
    copied: list[int] = field(default_factory=list)

    def end(self) -> None:
        """Let go of the gradients of the step before, and reduce a copy of the new ones."""
        self.log.free_all(self.before)
        self.log.free(self.log.alloc(self.flat, COMPUTE, "gradients, flattened for their all-reduce"))

    def update(self) -> None:
        """Copy the gradients to those of the optimizer."""
        past, self.copied = self.copied, []
        for index, size in enumerate(self.main):
            self.copied.append(self.log.alloc(size, COMPUTE, "gradients of the optimizer's parameters"))
            self.log.free(past[index] if past else 0)

    def zero_grad(self) -> None:
        """Drop the first reference alone."""
        self.before = [key for keys in self.gradients.values() for key in keys]
        self.gradients.clear()


@dataclass
class Partitioned(Whole):
    """Whole weights, gradients of which each rank keeps its share (none where they live elsewhere)."""

    def accumulates(self, _: int, /) -> bool:
        """No: new gradients are whole until they are reduced."""
        return False

    def leave_backward(self, unit: int, gradients: list[int], last: int = 0) -> None:  # noqa: ARG002
        """Reduce the gradients."""
        share = self.log.alloc(self.sizes[unit].reduced, COMPUTE, "share of the gradients")
        self.log.free_all(gradients)
        if unit in self.gradients:
            self.log.free(share)
        else:
            self.gradients[unit] = [share]


@dataclass
class PerParameter(Partitioned):
    """FSDP 2: a flat all-gather buffer in its own stream, copied out to whole weights in the compute stream.

    Source: torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py (wait_for_unshard), _fsdp_collectives.py
    (foreach_all_gather) and _fsdp_state.py (_post_forward), torch 2.13: the buffer of a unit is freed in forward once
    the next one was copied out, or forward ends, in backward at once; the reduce-scatter's input when the next is made.
    """

    roots: tuple[int, ...] = ()
    """The model chunk of each unit: a root of its own (:attr:`memcalc.events.stage.Stage.roots`)."""
    keep: frozenset[int] = frozenset()
    """Units that are not freed after forward."""
    plain: bool = False
    """Parameters are gathered one by one in the compute stream, without flat buffers (SimpleFSDP)."""
    copies: bool = False
    """The gradient is another tensor than what was reduced: cast, or on the host."""
    replicated: bool = False
    """What was reduced is kept for an all-reduce between replicas."""
    flat: dict[int, int] = field(default_factory=dict)
    whole: dict[int, int] = field(default_factory=dict)
    passed: list[int] = field(default_factory=list)
    reducing: list[int] = field(default_factory=list)
    replicating: list[int] = field(default_factory=list)

    def enter(self, unit: int, following: int | None, /, *, backward: bool = False) -> None:
        """Gather a unit (unless it is there), then issue the next one where backward prefetches."""
        self._gather(unit)
        if unit not in self.whole:
            self.whole[unit] = self.log.alloc(self.sizes[unit].whole, COMPUTE, "gathered weights")
            self.log.free_all(self.passed)
            self.passed.append(self.flat.pop(unit))
            if backward:
                self.log.free_all(self.passed)
        if following is not None:
            self._gather(following)

    def forwarded(self) -> None:
        """The root frees the last buffer of forward."""
        self.log.free_all(self.passed)

    def _gather(self, unit: int) -> None:
        if unit in self.whole or unit in self.flat:
            return
        size, stream = self.sizes[unit], GATHER + ROOT * self.roots[unit]
        copy = self.log.alloc(size.shard_copy, COMPUTE if self.plain else stream, "shard, cast")
        self.flat[unit] = self.log.alloc(0 if self.plain else size.whole, stream, "all-gather output")
        self.log.free(copy)

    def leave_forward(self, unit: int) -> None:
        """Free the whole weights."""
        if unit not in self.keep:
            self.log.free(self.whole.pop(unit))

    def hand_over(self, unit: int, /) -> None:
        """A root that reshards is freed before the loss, and with it the last buffer of forward."""
        if unit not in self.keep:
            self.leave_forward(unit)
            self.forwarded()

    def leave_backward(self, unit: int, gradients: list[int], last: int = 0) -> None:
        """Free the whole weights, and reduce the gradients."""
        self.log.free(self.whole.pop(unit, 0))
        self.reduce(unit, gradients, last)

    def reduce(self, unit: int, gradients: list[int], last: int = 0) -> None:
        """Copy gradients into the flat input of a reduction, whose result stays.

        A name of ``foreach_reduce`` refers to the last weight's gradient until it returns (since torch 2.6), and what
        was reduced lives until it is cast, or added to the gradient.
        """
        self.log.free_all(self.reducing)
        size, stream = self.sizes[unit], COMPUTE if self.plain else REDUCE + ROOT * self.roots[unit]
        self.reducing.append(self.log.alloc(size.reduce_input, COMPUTE, "reduce-scatter input"))
        self.log.free_all([key for key in gradients if key != last or self.plain])
        again = unit in self.gradients
        apart = not self.plain and (self.copies or again)
        output = self.log.alloc(size.reduce_output * apart, stream, "reduce-scatter output")
        share = self.log.alloc(size.reduced * (self.plain or self.copies or not again), stream, "sharded gradients")
        if again:
            self.log.free(share)
        else:
            self.gradients[unit] = [share]
        if self.replicated:
            self.replicating.append(output)
        else:
            self.log.free(output)
        if not self.plain:
            self.log.free(last)

    def finish(self) -> None:
        """The root's last callback waits for the reductions and drops all buffers."""
        self.log.free_all(self.reducing)
        self.log.free_all(self.replicating)
        self.log.free_all(self.passed)


@dataclass
class Pipelined(PerParameter):
    """FSDP 2 under a pipeline: after backward weights stay whole, and gradients add up until the last micro-batch.

    Forward alone shards weights again, where it is told to. Source: torch/distributed/pipelining/stage.py, torch 2.13:
    ``backward_maybe_with_nosync`` (set_reshard_after_backward).
    """

    sums: dict[int, list[int]] = field(default_factory=dict)

    def leave_backward(self, unit: int, gradients: list[int], last: int = 0) -> None:  # noqa: ARG002
        """Add the gradients up in the width of the reduction."""
        if unit not in self.sums:
            self.sums[unit] = [self.log.alloc(self.sizes[unit].reduce_input, COMPUTE, "gradients, added up")]
        self.log.free_all(gradients)

    def finish(self) -> None:
        """A micro-batch is done: only the gathers' buffers go."""
        self.log.free_all(self.passed)

    def end(self) -> None:
        """The last micro-batch is done: reduce all units."""
        for unit in list(self.sums):
            self.log.free(self.whole.pop(unit, 0))
            self.reduce(unit, self.sums.pop(unit))
        super().finish()


@dataclass
class FlatParameter(Partitioned):
    """FSDP 1: the whole flat parameter lives in the all-gather stream; the CPU runs ahead by two units.

    Source: torch/distributed/fsdp/_runtime_utils.py (``_unshard``, ``_post_backward_hook``) and _limiter_utils.py
    (two all-gathers in flight), torch 2.13.
    """

    keep: frozenset[int] = frozenset()
    ahead: bool = False
    """Backward gathers the next unit beside the running one."""
    casts: bool = False
    """Gradients are reduced in another width than they are computed in."""
    ranks: int = 0
    """Those that have a shard of each unit on their host; 0 where shards are on the GPU."""
    whole: dict[int, list[int]] = field(default_factory=dict)
    waiting: list[list[int]] = field(default_factory=list)
    stale: list[int] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)
    """Shards that came from the host and are being gathered."""

    def wrap(self, units: list[list[int]]) -> None:
        """A unit's weights, their flat copy and, where it leaves for the host, its shard are there together.

        Source: torch/distributed/fsdp/_init_utils.py (``_init_param_handle_from_module``: weights move to the GPU;
        ``_init_param_handle_from_params``: the shard is cut out of the flat copy), in the compute stream, torch 2.13.
        """
        for weights in units:
            flat = sum(weights)
            sizes = [*weights, flat, -(-flat // self.ranks) if self.ranks else 0]
            self.log.free_all([self.log.alloc(size, COMPUTE, "unit, as it is wrapped") for size in sizes])

    def enter(self, unit: int, following: int | None, /, *, backward: bool = False) -> None:  # noqa: ARG002
        """Gather a unit, and the one after it where backward does; what was freed two units ago is free by now."""
        self._gather(unit)
        if self.ahead and following is not None:
            self._gather(following)

    def _gather(self, unit: int) -> None:
        if unit in self.whole:
            return
        size = self.sizes[unit]
        while len(self.waiting) > IN_FLIGHT:
            self.log.collect(self.waiting.pop(0))
        width = 1 + bool(size.shard_copy)  # of what is cast in fp32, and so twice as wide
        shard = self.log.alloc(-(-width * size.whole // self.ranks) if self.ranks else 0, UPLOAD, "shard, uploaded")
        self.log.collect(self.sent)
        self.log.drop_all([shard])
        self.sent.append(shard)
        self.whole[unit] = [
            self.log.alloc(size.shard_copy, GATHER, "shard, cast"),
            self.log.alloc(size.whole, GATHER, "gathered flat parameter"),
        ]

    def leave_forward(self, unit: int) -> None:
        """Free the whole weights, once the compute stream is done with them."""
        if unit not in self.keep:
            self._leave(self.whole.pop(unit))

    def _leave(self, keys: list[int]) -> None:
        """Let go of tensors that the compute stream still has; a full card is given them before that (``drop``)."""
        self.log.drop_all(keys)
        self.waiting.append(keys)

    def recomputed(self, unit: int) -> None:
        """A checkpoint that wraps the unit has run its forward again: it is freed, and gathered for its backward."""
        self.leave_forward(unit)
        self._gather(unit)

    def leave_backward(self, unit: int, gradients: list[int], last: int = 0) -> None:  # noqa: ARG002
        """Free the whole weights; the flat gradient is cast and reduced in the post-backward stream."""
        self._leave(self.whole.pop(unit, []))
        size = self.sizes[unit]
        flat = self.log.alloc(size.whole, COMPUTE, "flat gradient") if gradients else 0
        self.log.free_all(gradients)
        wide = self.log.alloc(size.reduce_input, REDUCE, "flat gradient, cast") if flat and self.casts else 0
        share = self.log.alloc(size.reduced, REDUCE, "sharded gradients")
        self.log.free_all([wide, flat])
        if unit in self.gradients:
            self.log.free(share)
        else:
            self.gradients[unit] = [share]

    def finish(self) -> None:
        """The compute stream is done with all units."""
        for keys in self.waiting:
            self.log.collect(keys)
        self.waiting.clear()

    def zero_grad(self) -> None:
        """The sharded gradients outlive ``zero_grad``: they go when the next forward starts."""
        self.stale = [key for keys in self.gradients.values() for key in keys]
        self.gradients = {}

    def begin(self) -> None:
        """The next forward starts."""
        self.log.free_all(self.stale)


IN_FLIGHT = 2
"""Freed units that are still waited for while the next one is gathered: torch/distributed/fsdp/_limiter_utils.py,
``_max_num_inflight_all_gathers``."""
