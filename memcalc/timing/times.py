"""From work and rates to the seconds of a step and its parts.

Time of what leaves the device: transfers over the host's link and the slower tier, and an optimizer on the host.

No published run validates it: the rates are those of links, tiers and host memory, and of one table of a paper.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from memcalc import catalog
from memcalc.formulas import offload as off
from memcalc.formulas.bubbles import WHOLE, bubble, bubble_1f1b
from memcalc.formulas.flops import kernel_seconds, slower
from memcalc.formulas.optimizer_states import master_bytes
from memcalc.specs.strategy import SCHEDULES
from memcalc.terms.activations import groups_of
from memcalc.terms.adapters import trained
from memcalc.terms.moments import optimizer_moments, updated_elements
from memcalc.terms.states import gradient_elements, offloaded_states, parameter_elements
from memcalc.timing.experts import exchange_seconds
from memcalc.timing.messages import message_seconds, slowing
from memcalc.timing.rates import ANY, SLOWEST_LINK, hardware_of
from memcalc.timing.work import work_of

if TYPE_CHECKING:
    from memcalc.formulas import Array
    from memcalc.grid import Grid
    from memcalc.specs.hardware import GPU, Node
    from memcalc.terms.model_on_grid import ModelOnGrid
    from memcalc.timing.messages import Message, Messages
    from memcalc.timing.rates import Hardware, Rates
    from memcalc.timing.work import Part, Pipeline, Work

    class Seconds(Protocol):
        """The time of a message."""

        def __call__(self, message: Message, *, wide: bool = False) -> Array:
            """Of a message; ``wide`` of large ones that stream [s]."""
            ...


class Times(NamedTuple):
    """Seconds of one optimizer step by part; each spans only the axes that it depends on, the stage axis reduced."""

    compute: Array
    """Forward and backward of the slowest stage."""
    host: Array
    """What the device waits for launches, and what a step takes beside its micro-batches and its update."""
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

    @property
    def parts(self) -> tuple[Array, ...]:
        """What adds up to the step."""
        return tuple(self)

    @property
    def step(self) -> Array:
        """The whole step: the sum of its parts, small ones first."""
        on_device = self.optimizer + self.host + self.compute
        return on_device + self.recompute + self.communication + self.bubble + self.offload


def step_times(census: ModelOnGrid, gpu: GPU, node: Node, rates: Rates) -> Times:
    """The times of every strategy of a grid."""
    return with_offload(resident_times(census, gpu, node, rates), census, gpu, node)


def resident_times(census: ModelOnGrid, gpu: GPU, node: Node, rates: Rates) -> Times:
    """The times of a grid's strategies where nothing is offloaded."""
    return seconds(work_of(census, node), hardware_of(gpu, node, census.grid), rates)


def with_offload(times: Times, census: ModelOnGrid, gpu: GPU, node: Node) -> Times:
    """The same where the grid's offload choices take their time."""
    if not any(census.grid.offloads):
        return times
    on_device = 1 - offloaded_states(census.grid)
    # The host's link is free while the device computes, and while it waits for other ranks
    beside = times.compute + times.host + times.communication
    offload = offload_part(census, gpu, node, beside)
    return times._replace(optimizer=times.optimizer * on_device, offload=offload)


def seconds(work: Work, hardware: Hardware, rates: Rates) -> Times:
    """The times of work whose data stays on the device."""
    alone = np.asarray(work.alone) > 0
    if alone.all():
        return one_process(work, hardware, rates)
    many = several_processes(work, hardware, rates)
    if not alone.any():
        return many
    parts = zip(one_process(work, hardware, rates).parts, many.parts, strict=True)
    return Times(*(np.where(alone, *pair) for pair in parts))


def one_process(work: Work, hardware: Hardware, rates: Rates) -> Times:
    """Of one process, whose device waits for no other, and whose host waits for it once a step, to read the loss."""
    m, nothing = work.micro_batches, np.zeros((1,) * 7)
    first, again = (device_seconds(part, hardware, rates) for part in (work.once, work.again))
    waits, waits_again = (rates.wait * part.waits for part in (work.once, work.again))
    optimizer = rates.step_passes * work.updated / hardware.bandwidth
    host_again = rates.relaunch * launch_seconds(work.again, rates)
    without, total = (
        rates.launch * rates.loop + _ahead(work, rates, (first + waits, device), ahead, optimizer)
        for device, ahead in ((nothing, nothing), (again + waits_again, host_again))
    )
    host = without - m * first - optimizer
    return Times(m * first, host, total - without, nothing, nothing, optimizer, nothing)


def _ahead(work: Work, rates: Rates, device: tuple[Array, Array], again: Array, optimizer: Array) -> Array:
    """Passes and update [s] where a host runs ahead of its device, or behind it: whichever is slower from there on.

    Python launches forward more slowly than autograd's engine does backward: a device that has waited there does not
    catch up. ``device`` is a micro-batch's first computation and what is computed again, launched in ``again``.
    """
    m, visits = work.micro_batches, rates.launch * rates.visit * work.tensors
    forward = rates.launch * work.once.launches
    host, busy = launch_seconds(work.once, rates) + again, sum(device)
    behind = off.exposed_offload_seconds(forward, device[0] / 3)
    behind = behind + (m - 1) * off.exposed_offload_seconds(host, busy)
    passes = slower(m * busy + behind, m * host)
    return np.where(work.awaited, passes + slower(optimizer, visits), slower(passes + optimizer, m * host + visits))


def several_processes(work: Work, hardware: Hardware, rates: Rates) -> Times:
    """Of processes that wait for each other in every step.

    One host thread launches kernels and collectives alike: where it is the slower, it hides what messages take too.
    """
    m, messages = work.micro_batches, work.messages
    first, again = (device_seconds(part, hardware, rates) for part in (work.once, work.again))
    host, host_again = launch_seconds(work.once, rates), rates.relaunch * launch_seconds(work.again, rates)
    waits, waits_again = rates.wait * work.once.waits, rates.wait * work.again.waits

    def of(message: Message, *, wide: bool = False) -> Array:
        return message_seconds(message, hardware, rates, wide=wide)

    local = rates.exposed_tensor * (of(messages.tensor) + rates.hidden * of(messages.tensor_beside))
    local = local + exchange_seconds(messages.expert, first, hardware, rates)
    local = local + _pipeline_exposed(messages, work.pipeline, m, of(messages.pipeline), hardware, rates)
    local = local + of(messages.context_waited)
    local = local + _ring_exposed(of(messages.context, wide=True), attention_seconds(work.once, hardware, rates), rates)
    compute = slower(first, host) + waits
    talking = slower(first + local, host) + waits
    local_again = local + rates.exposed_tensor * of(messages.tensor_again)
    local_again = local_again + exchange_seconds(messages.expert_again, again, hardware, rates)
    busy = slower(first + again + local_again, host + host_again) + waits + waits_again
    device, alone, spoken, top = largest(first), largest(compute), largest(talking), largest(busy)
    forward = alone / 3
    backward = top - forward
    sharding = _sharding_exposed(messages, forward, backward, of, hardware, rates)
    group = np.minimum(work.pipeline.stages, m)
    chunks = np.where(messages.chunks_beside * group > 1, work.pipeline.chunks, 1)
    gradients = _step_exposed(
        messages.gradients, messages.gradients_between, backward, (chunks, group), of, hardware, rates
    )
    beside = forward * messages.gathers_beside
    parameters = _step_exposed(messages.parameters, None, beside, (chunks, group), of, hardware, rates)
    parameters = parameters + rates.broadcast * messages.broadcasts
    return Times(
        compute=m * device,
        host=m * (alone - device) + rates.fixed,
        recompute=m * (top - spoken),
        communication=m * (spoken - alone + sharding) + gradients + parameters,
        offload=np.zeros((1,) * 7),
        optimizer=largest(rates.step_passes * work.updated / hardware.bandwidth),
        bubble=idle(work.pipeline, m, *(others(t, largest(t), work.weights) for t in (talking, busy))),
    )


def _pipeline_exposed(
    messages: Messages, pipeline: Pipeline, micro_batches: Array, taken: Array, hardware: Hardware, rates: Rates
) -> Array:
    """What messages between stages add: all, or beside other micro-batches what fills and drains the pipeline.

    A stage has ``chunks * stages - 1`` chunks in flight on average before the first backward (Megatron-LM d98e8a64
    ``core/pipeline_parallel/schedules.py``: ``get_pp_rank_microbatches``).
    """
    chunks = pipeline.chunks
    filling = np.minimum(1.0, (chunks * pipeline.stages - 1) / (micro_batches * chunks))
    beside = filling + (1 - filling) * slowing(messages.pipeline, hardware, rates)
    return np.asarray(
        taken * np.where(messages.chunks_beside * messages.pipeline_beside * (chunks > 1) > 0, beside, 1.0)
    )


def _ring_exposed(ring: Array, attention: Array, rates: Rates) -> Array:
    """What a ring of keys and values takes beyond the attention that runs beside it, and slows of it."""
    over = off.exposed_offload_seconds(ring, attention)
    return np.asarray(over + rates.hidden * (ring - over))


def _sharding_exposed(
    messages: Messages, forward: Array, backward: Array, of: Seconds, hardware: Hardware, rates: Rates
) -> Array:
    """What gathers and reductions of one micro-batch add: gathers hide behind forward, both behind backward.

    What is hidden slows kernels all the same: a collective takes multiprocessors and memory. Nothing runs beside the
    first unit's gather and the last one's reduction.
    """
    repeats = messages.repeats
    gather, reduction = (largest(of(message, wide=True)) for message in (messages.gather, messages.reduction))
    reduction = reduction + largest(of(messages.between, wide=True))
    before, after = repeats.forward * gather, repeats.backward * gather + repeats.reductions * reduction
    over = off.exposed_offload_seconds(before, forward) + off.exposed_offload_seconds(after, backward)
    ends = (before + after / 2) / np.maximum(largest(messages.gather.calls), 1)
    return np.asarray(over + slowing(messages.gather, hardware, rates) * (before + after - over) + ends)


def _step_exposed(
    message: Message,
    joined: Message | None,
    window: Array,
    interleaved: tuple[Array, Array],
    of: Seconds,
    hardware: Hardware,
    rates: Rates,
) -> Array:
    """What a step's reductions or gathers add: all but the last bucket may hide behind one micro-batch's pass.

    Of ``interleaved`` chunks all but one hide behind the next chunk's pass of a group of micro-batches (Megatron-LM
    d98e8a64 ``core/pipeline_parallel/schedules.py``: ``grad_sync_func``, ``param_sync_func``).
    """
    chunks, group = interleaved
    total = largest(of(message, wide=True)) + (largest(of(joined, wide=True)) if joined is not None else 0)
    able = total - total / np.maximum(largest(message.calls), 1)
    window = rates.window * window
    alone, behind = (
        part - off.exposed_offload_seconds(part, beside) for part, beside in ((able, window), (total, group * window))
    )
    hidden = np.where(chunks > 1, (1 - 1 / chunks) * behind, alone)
    return np.asarray(total - (1 - slowing(message, hardware, rates)) * hidden)


def idle(pipeline: Pipeline, micro_batches: Array, once: Array, busy: Array) -> Array:
    """What the slowest stage waits for the others [s]; ``busy`` is a micro-batch, ``once`` what is not computed again.

    Forward, the gradients of inputs and those of weights take a third of that each, and recomputation comes before the
    second.
    """
    names = np.asarray(SCHEDULES)[pipeline.schedule.astype(np.int64)]
    unsplit = np.isin(names, WHOLE)
    plain = bubble_1f1b(pipeline.stages, busy, 0, 0, np.where(unsplit, pipeline.chunks, 1))
    if unsplit.all():
        return np.asarray(plain)
    third = once / 3
    passes = third, busy - 2 * third, third
    return np.where(unsplit, plain, bubble(names, pipeline.stages, micro_batches, pipeline.chunks, *passes))


def device_seconds(part: Part, hardware: Hardware, rates: Rates) -> Array:
    """Time of a part's kernels on the device [s]."""
    narrow = rates.matmul * rates.float8 * hardware.peak
    blocks = kernel_seconds(part.linear, narrow, rates.operand_passes * rates.casts * part.operands, hardware.bandwidth)
    plain = kernel_seconds(
        part.plain, rates.matmul * hardware.plain_peak, rates.passes * part.written, hardware.bandwidth
    )
    unaligned = kernel_seconds(part.unaligned, rates.matmul * hardware.vector_peak)
    copies = kernel_seconds(0, 1, part.dequantised, rates.dequantisation * hardware.bandwidth)
    return np.asarray(blocks + plain + unaligned + copies + attention_seconds(part, hardware, rates))


def attention_seconds(part: Part, hardware: Hardware, rates: Rates) -> Array:
    """Time of a part's fused attention on the device [s]."""
    return np.asarray(kernel_seconds(part.attention, rates.attention * hardware.plain_peak))


def launch_seconds(part: Part, rates: Rates) -> Array:
    """Time of the host in which it launches a part's kernels [s]."""
    kernels = part.launches + rates.launch_backward * part.launches_backward + rates.dispatch * part.dispatched
    return np.asarray(rates.launch * (kernels + rates.hook * part.hooked))


def largest(array: Array) -> Array:
    """The slowest stage."""
    return array if array.shape[1] == 1 else np.max(array, axis=1, keepdims=True)


def others(busy: Array, top: Array, weights: Array) -> Array:
    """The mean over all stages but the slowest: what a fill or drain of the pipeline waits for."""
    stages = np.sum(weights, axis=1, keepdims=True)
    return (np.sum(busy * weights, axis=1, keepdims=True) - top) / np.maximum(stages - 1, 1)


SLOWEST_HOST = 256e9
"""Of a node whose preset has no rate of host memory [bytes/s]: 12 channels of DDR4-2666, as in a DGX-2."""


def offload_part(census: ModelOnGrid, gpu: GPU, node: Node, compute: Array) -> Array:
    """Seconds that offloading adds to a step: transfers that compute does not hide, then the optimizer's own time.

    Weights are fetched ahead and gradients leave as they are made, so what fits beside a pass is hidden; activations do
    so where the framework moves them on a stream of their own. Gradients that are added on the host to those of earlier
    micro-batches are waited for (``_fsdp_collectives.py`` of torch 2.13, ``foreach_reduce``).
    """
    grid = census.grid
    link, tier = link_rate(gpu), tier_rate(grid, gpu, node)
    # Each over its own axes, so that only their sum spans the space
    parts = (_parameters(census), _gradients(census), moved_activations(census))
    weights, gradients, activations = (off.offload_seconds(slowest(part), tier) for part in parts)
    beside = grid.habits.offload_streams
    streamed = (weights + beside * activations) / 2  # as much in forward as in backward
    forward = compute / 3
    backward = compute - forward
    last = off.exposed_offload_seconds(backward, streamed) / grid.accumulation  # the last micro-batch's
    exposed = off.exposed_offload_seconds(streamed, forward) + off.exposed_offload_seconds(streamed, backward)
    exposed = exposed + off.exposed_offload_seconds(gradients, last) + (1 - beside) * activations
    exposed = exposed + (grid.accumulation - 1) * (gradients + slowest(_added_seconds(census, node)))
    return exposed + slowest(optimizer_seconds(census, node, link, tier)) * offloaded_states(grid)


def slowest(part: Array) -> Array:
    """The largest over the stages."""
    return np.max(part, axis=1, keepdims=True) if np.ndim(part) else part


def link_rate(gpu: GPU) -> float:
    """Rate between GPU and host, one direction [bytes/s]."""
    return gpu.host_link_bytes_per_s or SLOWEST_LINK


def tier_rate(grid: Grid, gpu: GPU, node: Node) -> Array:
    """Rate of one GPU to the tier that it offloads to: that of its link, or its share of the tier [bytes/s]."""
    tier = node.tier("host" if grid.fixed.offload_to == "cpu" else grid.fixed.offload_to)
    if tier is None:
        return np.float64(link_rate(gpu))
    sharing = np.minimum(grid.degree("gpus"), node.gpus_per_host)
    return np.minimum(link_rate(gpu), tier.bandwidth_bytes_per_s / node.hosts / sharing)


def optimizer_seconds(census: ModelOnGrid, node: Node, link: float, tier: Array) -> Array:
    """The update on the host: its pass over host memory, states in and out of a slower tier, new weights to the device.

    The ranks of a host share its memory: an update does a few operations on each byte that it moves.
    """
    updated, grid = trained(census), census.grid
    local = updated_elements(updated)
    states = master_bytes(local, updated.width("master")) + optimizer_moments(updated)
    master, weights = updated.width("master"), local * updated.width("compute")
    # Where the weight itself is what is updated, it is read and written
    written = np.where(master > 0, weights, 2 * local * updated.width("parameter"))
    moved = off.optimizer_swap_bytes(states) + off.optimizer_offload_bytes(local * updated.width("gradient"), written)
    sharing = np.minimum(grid.degree("gpus"), node.gpus_per_host)
    update = off.offload_seconds(moved * sharing, host_rate(node))
    back = off.offload_seconds(weights, link)
    if grid.fixed.offload_to == "cpu":
        return np.asarray(update + back)
    return np.asarray(update + back + off.offload_seconds(off.optimizer_swap_bytes(states), tier))


def host_rate(node: Node) -> float:
    """Rate at which an optimizer on one host passes over its memory [bytes/s]."""
    share = catalog.step_time().value("host_memory", ANY)
    return share * (node.host_memory_bytes_per_s or SLOWEST_HOST) / node.hosts


def _gradients(census: ModelOnGrid) -> Array:
    """Gradients on their way out, once a step [bytes]."""
    updated = trained(census)
    return np.asarray(gradient_elements(updated) * updated.width("gradient") * offloaded_states(census.grid))


def _added_seconds(census: ModelOnGrid, node: Node) -> Array:
    """Adding one micro-batch's gradients to earlier ones: two are read and one is written."""
    sharing = np.minimum(census.grid.degree("gpus"), node.gpus_per_host)
    return np.asarray(off.offload_seconds(3 * _gradients(census) * sharing, host_rate(node)))


def _parameters(census: ModelOnGrid) -> Array:
    """Weights that each pass of each micro-batch fetches [bytes]."""
    grid = census.grid
    local = parameter_elements(census) * grid.width("compute")
    return np.asarray(off.parameter_offload_bytes(local, grid.accumulation) * grid.offloaded("params"))


def moved_activations(census: ModelOnGrid) -> Array:
    """What blocks keep, out in forward and back for backward [bytes]."""
    grid = census.grid
    if not any("activations" in choice for choice in grid.offloads):
        return np.int64(0)
    saved = sum((group.kept for group in groups_of(census)), np.int64(0))
    return np.asarray(off.activation_offload_bytes(saved, grid.accumulation) * grid.offloaded("activations"))
