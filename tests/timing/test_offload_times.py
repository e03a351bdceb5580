"""Time of what is offloaded: an update that passes over host memory, transfers that computation hides or waits for."""

from __future__ import annotations

import numpy as np
import pytest

from memcalc import api, catalog
from memcalc.terms.model_on_grid import ModelOnGrid
from memcalc.timing import rates_for, step_times
from memcalc.timing.times import moved_activations, optimizer_seconds


def host_seconds(gpus: int, **figures: float) -> float:
    """Return what a step with the optimizer on the host takes beyond one with it on the GPU, link left out [s]."""
    single = api.single(
        model="llama-2-7b", gpu="a100-80g", gpus=gpus, framework="deepspeed", zero=2, offload="optimizer", seq_len=512
    )
    census, node = ModelOnGrid(single.job.model, single.grid), single.job.node.model_copy(update=figures)
    return float(np.max(optimizer_seconds(census, node, 1e15, np.float64(1e15))))


def test_the_update_on_the_host_takes_what_cpu_adam_took() -> None:
    """ZeRO-Offload, arXiv:2101.06840, table 4: 2.57 s for 10^10 parameters on the host of a DGX-2 (256 GB/s)."""
    seconds = host_seconds(1, host_memory_bytes_per_s=256e9)
    assert seconds == pytest.approx(2.57 * 6.738e9 / 1e10, rel=0.1)


def test_the_update_follows_the_memory_of_the_host() -> None:
    """Ranks share it: as long on eight GPUs as on one; twice the rate halves it, and so do two hosts for one node."""
    one, eight = (host_seconds(gpus, host_memory_bytes_per_s=256e9) for gpus in (1, 8))
    assert eight == pytest.approx(one, rel=0.01)
    assert host_seconds(8, host_memory_bytes_per_s=512e9) == pytest.approx(one / 2, rel=0.01)
    assert host_seconds(8, host_memory_bytes_per_s=512e9, hosts=2) == pytest.approx(one / 2, rel=0.01)


def offload_of(framework: str, link: float) -> tuple[float, float]:
    """Return the time of activations that are offloaded, and that of their transfers alone [s]."""
    words = {"model": "llama-3.2-1b", "framework": framework, "seq_len": 2048, "offload": "activations"}
    chip = catalog.gpu("a100-80g").model_copy(update={"pcie_bytes_per_s": link})
    single = api.single(gpu=chip, **words)
    census, node = ModelOnGrid(single.job.model, single.grid), single.job.node.model_copy(update={"tiers": ()})
    times = step_times(census, chip, node, rates_for(chip, single.grid))
    return float(np.max(times.offload)), float(np.max(moved_activations(census))) / link


def test_activations_that_move_beside_computation_cost_what_exceeds_it() -> None:
    """Streams of torchtune hide what fits; the FSDP2 script waits for every copy."""
    hidden, _ = offload_of("torchtune", 1e12)
    assert hidden == 0
    (some, transfer), (more, longer) = (offload_of("torchtune", link) for link in (1e8, 5e7))
    assert 0 < some < transfer
    assert more - some == pytest.approx(longer - transfer), "beyond the passes every further second stands"
    waited, transfer = offload_of("fsdp2", 1e12)
    assert waited == pytest.approx(transfer)


def test_gradients_that_are_added_on_the_host_are_waited_for() -> None:
    """Of four micro-batches three are added: two gradients are read and one is written, at the rate of host memory."""
    words = {"model": "llama-3.2-1b", "framework": "fsdp2", "gpus": 8, "seq_len": 2048, "micro_batch": 1}
    found = []
    for rate in (1e18, 100e9):
        update = {"host_memory_bytes_per_s": rate, "tiers": ()}
        node = catalog.node_for(catalog.gpu("a100-80g")).model_copy(update=update)
        single = api.single(gpu="a100-80g", offload="params", global_batch=32, **words)
        census, chip = ModelOnGrid(single.job.model, single.grid), single.job.gpu
        times = step_times(census, chip, node, rates_for(chip, single.grid))
        found.append(float(np.max(times.offload)))
    share = catalog.step_time().value("host_memory", "any")
    gradients = 1_235_814_400 * 4  # of all eight ranks, in fp32
    update = 1_235_814_400 * (12 + 12 + 4)  # weights and moments are read and written, gradients read
    assert found[1] - found[0] == pytest.approx((3 * 3 * gradients + update) / (share * 100e9), rel=0.1)
