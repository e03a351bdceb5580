"""Time of what leaves the device: transfers over the host's link and the slower tier, and an optimizer on the host.

No published run validates it: the rates are those of links, tiers and host memory, and of one table of a paper.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from memcalc import catalog
from memcalc.formulas import offload as off
from memcalc.formulas.optimizer_states import master_bytes
from memcalc.terms.activations import groups_of
from memcalc.terms.adapters import trained
from memcalc.terms.moments import optimizer_moments, updated_elements
from memcalc.terms.states import gradient_elements, offloaded_states, parameter_elements
from memcalc.timing.rates import ANY, SLOWEST_LINK

if TYPE_CHECKING:
    from memcalc.formulas.types import Array
    from memcalc.grid import Grid
    from memcalc.specs.hardware import GPU, Node
    from memcalc.terms import ModelOnGrid

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
