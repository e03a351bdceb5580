"""One of two ranks of a guarded run, on gloo: memory is short on the second alone. Run by tests/probe/test_guard.py.

It writes what happened to the folder that is named on its command line.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import memcalc
from memcalc.errors import RestartNeeded
from memcalc.probe.guard import Reading
from memcalc.probe.live.guard_torch import Switch
from memcalc.specs.strategy import Strategy

GIB = 2**30
FOLDER, RANK = Path(os.environ.get("FOLDER", ".")), int(os.environ.get("RANK", "0"))


class Meter:
    """Plenty of room on the first rank, none on the second."""

    def read(self) -> Reading:
        """Return the same at all times."""
        reserved = (1, 10)[RANK] * GIB
        return Reading(reserved, reserved, reserved, reserved)

    def reset_peaks(self) -> None:
        """Do nothing."""

    def release(self) -> None:
        """Do nothing."""


def model() -> DistributedDataParallel:
    """Return a model of four blocks, the same on both ranks."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(4)]
    return DistributedDataParallel(nn.Sequential(*blocks).double())


def train(watch: Any, net: DistributedDataParallel, steps: int) -> list[tuple[str, int]]:
    """Train on the rank's own share, and return the plan of each step."""
    torch.manual_seed(1 + RANK)
    optimizer, seen = torch.optim.SGD(net.parameters(), lr=0.1), []
    try:
        for _ in range(steps):
            batch = torch.randn(8, 8, dtype=torch.float64)
            seen.append((watch.plan.strategy.recompute, watch.micro_batch))
            for part in watch.split(batch):
                (net(part).square().mean() / watch.accumulation_steps).backward()
            optimizer.step()
            optimizer.zero_grad()
            watch.step_done()
    except RestartNeeded:
        pass
    return seen


def weights(net: nn.Module) -> torch.Tensor:
    """Return all parameters in one row."""
    return torch.cat([one.detach().flatten() for one in net.parameters()])


def sharded() -> nn.Module:
    """Return a model of four blocks under FSDP2, with dropout."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.1)) for _ in range(4)]
    net, mesh = nn.Sequential(*blocks).double(), init_device_mesh("cpu", (2,))
    for block in (*blocks, net):
        fully_shard(block, mesh=mesh)
    return net


def trained_sharded(net: nn.Module, policies: tuple[str, ...]) -> torch.Tensor:
    """Train a step under each policy, and return the rank's own weights."""
    switch, optimizer = Switch(net, None, Strategy()), torch.optim.SGD(net.parameters(), lr=0.1)
    for seed, policy in enumerate(policies):
        switch.apply(policy)
        torch.manual_seed(2 * seed + RANK)
        net(torch.randn(4, 8, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([one.detach().to_local().flatten() for one in net.parameters()])


def main() -> None:
    """Run guarded, run again without steps, and write what both came to."""
    distributed.init_process_group("gloo", init_method=f"file://{FOLDER}/meeting", rank=RANK, world_size=2)
    net, other = model(), model()
    words: dict[str, Any] = {"threshold": "9 GiB", "every": 2, "meter": Meter(), "jsonl": str(FOLDER / "guard.jsonl")}
    plan, restart = str(FOLDER / "plan.json"), str(FOLDER / "restart")
    with memcalc.guard(plan, model=net, on_pressure="step", restart_dir=restart, prometheus=True, **words) as watch:
        seen = train(watch, net, 40)
    with memcalc.guard(plan, every=1000, meter=Meter()) as quiet:
        train(quiet, other, len(seen))
    moved = trained_sharded(sharded(), ("none", "every-2", "full", "none"))
    first = weights(net).clone()
    distributed.broadcast(first, 0)
    told = {
        "plans": seen,
        "restart": str(watch.restart and watch.restart.command),
        "step": watch.step,
        "alike": bool(torch.equal(first, weights(net))),
        "sharded_as_quiet": bool(torch.equal(moved, trained_sharded(sharded(), ("none",) * 4))),
        "as_quiet": bool(torch.allclose(weights(net), weights(other), rtol=1e-9, atol=1e-12)),
    }
    (FOLDER / f"told{RANK}.json").write_text(json.dumps(told), encoding="utf-8")
    distributed.barrier()
    if RANK == 0:
        from prometheus_client import CollectorRegistry, generate_latest
        from prometheus_client.multiprocess import MultiProcessCollector

        registry = CollectorRegistry()
        MultiProcessCollector(registry)
        (FOLDER / "metrics.txt").write_bytes(generate_latest(registry))
    distributed.barrier()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may keep a process from ending
