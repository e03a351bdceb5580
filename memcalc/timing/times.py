"""From work and rates to the seconds of a step and its parts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from memcalc.formulas import communication as comm
from memcalc.formulas.bubbles import WHOLE, bubble, bubble_1f1b
from memcalc.formulas.kernels import kernel_seconds, slower
from memcalc.specs.strategy import SCHEDULES
from memcalc.terms.states import offloaded_states
from memcalc.timing.offload import offload_part
from memcalc.timing.rates import hardware_of
from memcalc.timing.work import work_of

if TYPE_CHECKING:
    from memcalc.formulas.types import Array
    from memcalc.specs.hardware import GPU, Node
    from memcalc.terms import Census
    from memcalc.timing.messages import Message
    from memcalc.timing.rates import Hardware, Rates
    from memcalc.timing.work import Part, Pipeline, Work


@dataclass(frozen=True)
class Times:
    """Seconds of one optimizer step by part; each spans only the axes that it depends on, the stage axis reduced."""

    compute: Array
    """Forward and backward of the slowest stage."""
    recompute: Array
    """What the slowest stage does more because of recomputation, its messages included."""
    communication: Array
    """Messages that computation does not hide."""
    offload: Array
    """Transfers that computation does not hide, and an optimizer on the host."""
    optimizer: Array
    """The step on the device."""
    bubble: Array
    """What the slowest stage waits for the others."""

    PARTS: ClassVar = ("compute", "recompute", "communication", "offload", "optimizer", "bubble")

    @property
    def parts(self) -> tuple[Array, ...]:
        """What adds up to the step."""
        return tuple(getattr(self, name) for name in self.PARTS)

    @property
    def step(self) -> Array:
        """The whole step: the sum of its parts, small ones first."""
        return self.optimizer + self.communication + self.compute + self.recompute + self.bubble + self.offload


def step_times(census: Census, gpu: GPU, node: Node, rates: Rates) -> Times:
    """The times of every strategy of a grid."""
    return with_offload(resident_times(census, gpu, node, rates), census, gpu, node, rates)


def resident_times(census: Census, gpu: GPU, node: Node, rates: Rates) -> Times:
    """The times of a grid's strategies where nothing is offloaded."""
    return seconds(work_of(census, node), hardware_of(gpu, node, census.grid), rates)


def with_offload(times: Times, census: Census, gpu: GPU, node: Node, rates: Rates) -> Times:
    """The same where the grid's offload choices take their time."""
    if not any(census.grid.offloads):
        return times
    on_device = 1 - offloaded_states(census.grid)
    return replace(
        times, optimizer=times.optimizer * on_device, offload=offload_part(census, gpu, node, times.compute, rates)
    )


def seconds(work: Work, hardware: Hardware, rates: Rates) -> Times:
    """The times of work whose data stays on the device."""
    m, messages = work.micro_batches, work.messages
    first, again = (device_seconds(part, hardware, rates) for part in (work.once, work.again))
    host, host_again = rates.launch * work.once.launches, rates.launch * work.again.launches
    compute = slower(first, host) + rates.blocking * host
    both = slower(first + again, host + host_again) + rates.blocking * (host + host_again)

    def of(message: Message) -> Array:
        return message_seconds(message, hardware, rates)

    local = of(messages.tensor) + of(messages.expert) + of(messages.pipeline)
    local = local + (1 - rates.overlap) * (of(messages.context) + of(messages.tensor_beside))
    busy = both + local + of(messages.tensor_again) + of(messages.expert_again)
    alone, talking, top = largest(compute), largest(compute + local), largest(busy)
    sharding = comm.exposed_seconds(largest(of(messages.sharding)), alone, rates.overlap)
    gradients = comm.exposed_seconds(largest(of(messages.gradients)), alone, rates.overlap_step)
    return Times(
        compute=m * alone,
        recompute=m * (top - talking),
        communication=m * (talking - alone + sharding) + gradients,
        offload=np.zeros((1,) * 7),
        optimizer=largest(rates.step_passes * work.updated / hardware.bandwidth),
        bubble=idle(work.pipeline, m, *(others(t, largest(t), work.weights) for t in (compute + local, busy))),
    )


def idle(pipeline: Pipeline, micro_batches: Array, once: Array, busy: Array) -> Array:
    """What the slowest stage waits for the others [s]; ``busy`` is a micro-batch, ``once`` what is not computed again.

    Forward, the gradients of inputs and those of weights take a third of that each, and recomputation comes before the
    second.
    """
    names = np.asarray(SCHEDULES)[pipeline.schedule.astype(np.int64)]
    whole = np.isin(names, WHOLE)
    plain = bubble_1f1b(pipeline.stages, busy, 0, 0, np.where(whole, pipeline.chunks, 1))
    if whole.all():
        return np.asarray(plain)
    third = once / 3
    passes = third, busy - 2 * third, third
    return np.where(whole, plain, bubble(names, pipeline.stages, micro_batches, pipeline.chunks, *passes))


def device_seconds(part: Part, hardware: Hardware, rates: Rates) -> Array:
    """Time of a part's kernels on the device [s]."""
    narrow = rates.matmul * rates.float8 * hardware.peak
    blocks = kernel_seconds(part.linear, narrow, rates.operand_passes * part.operands, hardware.bandwidth)
    plain = kernel_seconds(
        part.plain, rates.matmul * hardware.plain_peak, rates.passes * part.written, hardware.bandwidth
    )
    unaligned = kernel_seconds(part.unaligned, rates.matmul * hardware.vector_peak)
    return np.asarray(
        blocks + plain + unaligned + kernel_seconds(part.attention, rates.attention * hardware.plain_peak)
    )


def message_seconds(message: Message, hardware: Hardware, rates: Rates) -> Array:
    """Time of one kind of traffic where nothing hides it [s]."""
    inside, between = rates.inside * hardware.inside, rates.between * hardware.between
    rate = comm.group_bandwidth(inside, between, message.ranks, message.in_node)
    return np.asarray(comm.transfer_seconds(message.volume, rate, rates.latency, message.calls * message.ranks))


def largest(array: Array) -> Array:
    """The slowest stage."""
    return array if array.shape[1] == 1 else np.max(array, axis=1, keepdims=True)


def others(busy: Array, top: Array, weights: Array) -> Array:
    """The mean over all stages but the slowest: what a fill or drain of the pipeline waits for."""
    stages = np.sum(weights, axis=1, keepdims=True)
    return (np.sum(busy * weights, axis=1, keepdims=True) - top) / np.maximum(stages - 1, 1)
