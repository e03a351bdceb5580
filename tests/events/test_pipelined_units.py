"""FSDP 2 on a pipeline: against PyTorch's own stages and roots, hand-counted shares, and the closed form."""

from __future__ import annotations

import random
import weakref
from typing import Any

import numpy as np
import pytest

from memcalc import api
from memcalc.errors import InputError
from memcalc.events import step_events
from memcalc.events.log import GATHER, REDUCE, ROOT
from memcalc.ledger import Ledger
from memcalc.terms.build import build_ledger
from memcalc.terms.model_on_grid import ModelOnGrid
from memcalc.terms.overhead import Workspaces

TITAN: dict[str, Any] = {
    "model": "llama-3.1-8b", "gpu": "h100", "framework": "torchtitan@2025-08", "gpus": 16, "pp": 4, "zero": 2,
    "seq_len": 4096, "micro_batch": 1, "global_batch": 32, "recompute": "full", "loss": "standard",
}  # fmt: skip


def ours(**words: Any) -> tuple[ModelOnGrid, Ledger]:
    single = api.single(**{**TITAN, **words})
    census = ModelOnGrid(single.job.model, single.grid)
    return census, build_ledger(census, Workspaces(0, 0))


def live(census: ModelOnGrid, ledger: Ledger, stage: int) -> dict[str, int]:
    """Return the most bytes that are asked for in each phase."""
    most: dict[str, int] = {}
    sizes: dict[int, int] = {}
    total, phase = 0, "start"
    for kind, key, size, _, name in step_events(census, ledger, stage, observed=False):
        if kind == "alloc":
            sizes[key] = size
            total += size
        elif kind == "free":
            total -= sizes.pop(key, 0)
        elif kind == "mark":
            phase = name
        most[phase] = max(most.get(phase, 0), total)
    return most


# ---------------------------------------------------------------------------------------- what PyTorch itself refers to


@pytest.mark.parametrize("schedule", ["Schedule1F1B", "ScheduleGPipe", "ScheduleInterleaved1F1B"])
def test_a_stage_refers_to_logits_until_their_backward_is_done(schedule: str) -> None:
    """A module before the head has its backward after the loss's, and the stage's name of the output is still there."""
    torch = pytest.importorskip("torch")
    from torch.distributed import pipelining
    from torch.distributed.pipelining import PipelineStage

    alive: list[bool] = []
    logits: list[Any] = []

    class Head(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.out = torch.nn.Linear(8, 8), torch.nn.Linear(8, 32)

        def forward(self, x: Any) -> Any:
            hidden = self.block(x)
            hidden.register_hook(lambda _: alive.append(logits[0]() is not None))
            made = self.out(hidden)
            logits[:] = [weakref.ref(made.untyped_storage())] if not torch.compiler.is_compiling() else []
            return made

    def loss(made: Any, wanted: Any) -> Any:
        return torch.nn.functional.cross_entropy(made.float() * 1, wanted)

    from autograd.parallel import fake_ranks

    with fake_ranks(1):
        stage = PipelineStage(Head(), 0, 1, torch.device("cpu"))
        kind = getattr(pipelining, schedule)
        stages: Any = [stage] if schedule == "ScheduleInterleaved1F1B" else stage
        plan = kind(stages, n_microbatches=1, loss_fn=loss)
        plan.step(torch.randn(4, 8), target=torch.randint(32, (4,)), losses=[], return_outputs=False)
    assert alive[-1:] == [True]


def test_each_root_communicates_by_itself() -> None:
    """Chunks of a stage are roots of FSDP 2, and torchtitan does not call ``share_comm_ctx``."""
    torch = pytest.importorskip("torch")
    from autograd.parallel import fake_ranks
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with fake_ranks(2):
        mesh = init_device_mesh("cpu", (2,))
        chunks = [fully_shard(torch.nn.Linear(8, 8), mesh=mesh) for _ in range(2)]
        first, second = (chunk._get_fsdp_state()._comm_ctx for chunk in chunks)
    assert first is not second


def test_chunks_gather_in_pools_of_their_own() -> None:
    """Each of two chunks has four of the stage's blocks: two flat buffers of 16-bit weights, and a shard that is cast.

    On one stage alone there is one such pool.
    """
    block = 218_112_000
    for words, streams in (({"pp_schedule": "interleaved", "vpp": 2}, {GATHER, GATHER + ROOT}), ({}, {GATHER})):
        census, ledger = ours(**words)
        sizes: dict[int, tuple[int, int]] = {}
        total, most = dict.fromkeys(streams, 0), dict.fromkeys(streams, 0)
        for kind, key, size, stream, name in step_events(census, ledger, 1, observed=False):
            if kind == "alloc" and name in ("all-gather output", "shard, cast"):
                sizes[key] = size, stream
                total[stream] += size
                most[stream] = max(most[stream], total[stream])
            elif kind == "free" and key in sizes:
                freed, pool = sizes.pop(key)
                total[pool] -= freed
        assert list(most.values()) == [pytest.approx(2 * 2 * block + 2 * block / 4, rel=0.001)] * len(streams)
    several, one = (np.asarray(ours(**words)[1].reserved()).reshape(-1)[1] for words in (
        {"pp_schedule": "interleaved", "vpp": 2}, {}
    ))  # fmt: skip
    peaks = [np.asarray(ours(**words)[1].peak()).reshape(-1)[1] for words in (
        {"pp_schedule": "interleaved", "vpp": 2}, {}
    )]  # fmt: skip
    assert (several - peaks[0]) - (one - peaks[1]) == pytest.approx(4.5 * block, rel=0.01)


def test_experts_are_shared_out_over_ranks_of_their_own() -> None:
    """Of 8 data-parallel ranks with EP 4 two share an expert's weights; gradients are fp32 shards in both figures."""
    census, ledger = ours(model="qwen3-30b-a3b", gpus=8, pp=1, ep=4, global_batch=8)
    experts, total = 48 * 128 * 3 * 2048 * 768, 30_532_122_624
    share = 4 * (experts // 4 // 2 + (total - experts) // 8)
    reduced, seen = 0, False
    for kind, _, size, stream, name in step_events(census, ledger, 0, observed=False):
        seen = seen or (kind == "mark" and name == "step")
        reduced += size * (kind == "alloc" and name == "sharded gradients" and not seen)
        assert name != "sharded gradients" or stream == REDUCE
    assert reduced == pytest.approx(share, rel=0.001)
    assert live(census, ledger, 0)["step"] == pytest.approx(int(np.max(ledger.phase("step"))), rel=0.001)


# --------------------------------------------------------------------------------------- the closed form and the replay


CHOICES: dict[str, list[Any]] = {
    "model": ["llama-3.1-8b", "llama-3.2-1b", "olmo-2-7b", "qwen2.5-7b", "starcoder2-3b"],
    "framework": ["torchtitan@2024-12", "torchtitan@2025-08", "torchtitan@2026-02"],
    "gpus": [16, 32], "pp": [2, 4], "tp": [1, 2], "zero": [2, 3], "seq_len": [512, 2048, 4096], "micro_batch": [1, 2],
    "recompute": ["none", "full", "selective-ops", "every-2"],
}  # fmt: skip


def test_both_say_the_same_of_random_pipelines() -> None:
    """The closed form has a first stage's gradients together with what all but one of its micro-batches keep."""
    draw = random.Random(20_261_201)  # noqa: S311 - a seeded choice of test cases
    differences: list[float] = []
    while len(differences) < 60:
        words = {name: draw.choice(values) for name, values in CHOICES.items()}
        words["global_batch"] = words["micro_batch"] * words["gpus"] // words["pp"] // words["tp"] * draw.choice([4, 8])
        try:
            census, ledger = ours(**words)
        except InputError:
            continue
        closed = np.asarray(ledger.peak()).reshape(-1)
        for stage in {0, len(closed) - 1}:
            phases = live(census, ledger, stage)
            phases.pop("start")
            differences.append(closed[stage] / max(phases.values()) - 1)
            assert -0.01 < differences[-1] < 0.07, (words, stage)
    assert float(np.median(np.abs(differences))) < 0.001
