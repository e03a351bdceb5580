"""What a probe measures beside training steps: logic with the device's functions replaced, all else on this CPU."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
import torch.distributed as dist

from memcalc import api
from memcalc.allocator import replay
from memcalc.convert.huggingface import from_huggingface
from memcalc.events import step_events
from memcalc.probe.live import machine, ranks, rates
from memcalc.probe.live.machine import SCENES, Seen, differences, played, sizes, watch
from memcalc.probe.live.rates import sizes_of
from memcalc.probe.measure.planning import CPU, CUDA, machine_jobs
from memcalc.specs.runs import Communicator, Probe, Rate, Run
from memcalc.units import KIB, MIB
from memcalc.validation import job_of, predict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PROBE = {"id": "p", "gpu": "h100", "name": "a GPU", "date": "2026-01-02", "torch": "2.13.0", "memcalc": "0"}


# ---------------------------------------------------------------------------------------------------------- allocator

BY_HAND = {
    # c10/cuda/CUDACachingAllocator.cpp: kMinBlockSize 512, kSmallSize 1 MiB, kSmallBuffer 2 MiB, kLargeBuffer 20 MiB,
    # kMinLargeAlloc 10 MiB, kRoundLarge 2 MiB; should_split: in the large pool a rest above 1 MiB
    "rounding of a small request": [(512, 2 * MIB), (512 + 1024, 2 * MIB)],
    "the largest small request": [(MIB, 2 * MIB), (2 * MIB, 2 * MIB), (2 * MIB + 512, 4 * MIB)],
    "the smallest large request": [(MIB + 512, 20 * MIB), (10 * MIB + 512, 20 * MIB), (20 * MIB, 20 * MIB)],
    "the largest request in a shared segment": [(10 * MIB - 512, 20 * MIB)],
    "the smallest request with a segment of its own": [(10 * MIB, 10 * MIB)],
    "rounding of a segment": [(10 * MIB + 512, 12 * MIB)],
    "a large rest of 1 MiB": [(12 * MIB, 12 * MIB), (0, 12 * MIB), (12 * MIB, 12 * MIB)],
    "a large rest above 1 MiB": [(12 * MIB, 12 * MIB), (0, 12 * MIB), (11 * MIB - 512, 12 * MIB)],
    "best fit": [
        (16 * MIB, 16 * MIB), (28 * MIB, 28 * MIB), (12 * MIB, 28 * MIB), (0, 28 * MIB), (12 * MIB, 28 * MIB),
        (28 * MIB, 28 * MIB),
    ],
}  # fmt: skip
"""Allocated and reserved after each step of a scene."""


class _Counters:
    """Stands for torch.cuda: an allocator that counts what a list says, above what was there before."""

    def __init__(self, table: dict[str, list[tuple[int, int]]]) -> None:
        self.script = [pair for scene in SCENES for pair in ((0, 0), *table[scene.name])]
        self.at = 0
        self.streams = 0

    def Stream(self) -> int:  # noqa: N802
        self.streams += 1
        return self.streams

    def memory_allocated(self) -> int:
        return 7 * MIB + self.script[self.at][0]

    def memory_reserved(self) -> int:
        self.at += 1
        return 40 * MIB + self.script[self.at - 1][1]

    def get_allocator_backend(self) -> str:
        return "native"

    def memory_snapshot(self) -> list[dict[str, Any]]:
        return [{"is_expandable": False}]


def seen_by(table: dict[str, list[tuple[int, int]]]) -> list[Seen]:
    return watch(lambda *_: object(), _Counters(table))


def test_the_scenes_show_the_constants_of_pytorch() -> None:
    """Derived by hand from its source, and the same in the replay."""
    assert {scene.name: list(played(scene, expandable=False)) for scene in SCENES} == BY_HAND
    seen = seen_by(BY_HAND)
    assert [one.counters for one in seen] == [tuple(pairs) for pairs in BY_HAND.values()]
    assert differences(seen, expandable=False) == []
    assert sizes(seen) == {
        "rounding": 512,
        "small_segment": 2 * MIB,
        "large_segment": 20 * MIB,
        "segment_of_10_mib_and_1": 12 * MIB,
    }


def test_an_allocator_that_does_something_else_is_told() -> None:
    """A larger segment, as large_segment_size_mb makes it, shows in each scene that needs one."""
    wide = BY_HAND | {
        "the smallest large request": [(MIB + 512, 32 * MIB), (10 * MIB + 512, 32 * MIB), (19 * MIB, 32 * MIB)]
    }
    found = machine.MachineRecord()
    machine.allocator(found, _Counters(wide), lambda *_: object())
    assert found.allocator["large_segment"] == 32 * MIB
    (said,) = found.notes
    assert said.startswith("structural: the smallest large request: after step 1")
    assert f"{32 * MIB} reserved" in said
    assert f"and {20 * MIB}" in said


def test_another_allocator_is_not_compared() -> None:
    found, counters = machine.MachineRecord(), _Counters(BY_HAND)
    counters.get_allocator_backend = lambda: "cudaMallocAsync"  # type: ignore[method-assign]
    machine.allocator(found, counters, lambda *_: object())
    assert not found.allocator
    assert "cudaMallocAsync" in found.notes[0]


# ------------------------------------------------------------------------------------------- context and workspaces


class _Device:
    """Stands for torch.cuda around real products on the CPU; `held` is read one by one."""

    def __init__(self, held: list[int], capability: tuple[int, int] = (9, 0)) -> None:
        self.held, self.capability, self.reserved = held, capability, 0

    def memory_allocated(self) -> int:
        return self.held.pop(0)

    def memory_reserved(self) -> int:
        return self.reserved

    def get_device_capability(self) -> tuple[int, int]:
        return self.capability

    def synchronize(self) -> None:
        pass

    def Stream(self) -> object:  # noqa: N802
        return object()

    def stream(self, _: object) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


HANDLE, LT = 32 * MIB, MIB
HELD = [1, 1 + HANDLE, 1 + 2 * HANDLE, 1 + 2 * HANDLE + LT, 1 + 3 * HANDLE + LT]
"""Before all products, and after each."""


class _Readings:
    """Stands for a meter."""

    source = "a test"

    def __init__(self, *held: Any) -> None:
        self.left = list(held)

    def begin(self) -> None:
        pass

    def in_use(self) -> int | None:
        value = self.left.pop(0)
        if isinstance(value, Exception):
            raise value
        return value


@pytest.fixture
def clearing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)


@pytest.mark.usefixtures("clearing")
def test_workspaces_are_told_apart_by_where_products_first_run() -> None:
    kept, cleared = machine.workspaces(torch.bfloat16, _Device([*HELD, 1 + LT]), "cpu")
    assert kept == {"first": HANDLE, "second_stream": HANDLE, "with_bias": LT, "backward_thread": HANDLE}
    assert cleared == 3 * HANDLE


@pytest.mark.slow
@pytest.mark.usefixtures("clearing")
def test_a_probe_has_context_and_workspaces() -> None:
    found, device = machine.MachineRecord(), _Device([*HELD, 1])
    machine.contexts(found, _Readings(400 * MIB, 900 * MIB), device, "cpu")  # type: ignore[arg-type]
    probe = Probe.model_validate(PROBE | found.fields())
    assert (probe.bare_context, probe.context, probe.blas_workspace) == (400 * MIB, 900 * MIB, HANDLE)
    assert probe.allocator == {"blas_second_stream": HANDLE, "blas_with_bias": LT, "blas_backward_thread": HANDLE}
    assert probe.comment == "context: a test"


@pytest.mark.usefixtures("clearing")
@pytest.mark.parametrize(
    ("readings", "said"),
    [
        ((machine.UnsteadyError("device memory changed by 5 bytes"), 900 * MIB), "changed by 5 bytes"),
        ((400 * MIB, None), "nvidia-smi does not show"),
    ],
)
def test_a_context_that_cannot_be_read_is_absent(
    readings: tuple[Any, ...], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The workspaces are read all the same."""
    monkeypatch.setattr(machine, "load", lambda *_: None)
    found = machine.MachineRecord()
    machine.contexts(found, _Readings(*readings), _Device([*HELD, 1]), "cpu")  # type: ignore[arg-type]
    fields = found.fields()
    assert not {"context", "bare_context"} & set(fields)
    assert fields["blas_workspace"] == HANDLE
    assert said in fields["comment"]


def test_a_cpu_has_no_context_and_no_allocator() -> None:
    """Absent, never zero: a calibration would take a zero for a figure."""
    fields = machine.run_machine({"device": "cpu", "kind": "machine", "id": "machine"})["machine"]
    assert set(fields) == {"comment"}


def test_a_figure_that_moves_by_itself_is_refused() -> None:
    with pytest.raises(machine.UnsteadyError, match="1024 bytes"):
        machine.steady(iter((MIB, MIB, MIB + KIB)).__next__, pause=0)
    assert machine.steady(lambda: MIB, pause=0) == MIB


class _Card:
    """Stands for torch.cuda on a GPU of 80 MiB."""

    def __init__(self, *free: int, reserved: int = 4 * MIB) -> None:
        self.free, self.reserved = list(free), reserved

    def mem_get_info(self) -> tuple[int, int]:
        return (self.free.pop(0) if len(self.free) > 1 else self.free[0]), 80 * MIB

    def memory_reserved(self) -> int:
        return self.reserved

    def synchronize(self) -> None:
        pass


def test_what_stands_beside_the_allocator() -> None:
    assert machine.outside(_Card(60 * MIB), pause=0) == 16 * MIB


def test_a_communicator_is_what_its_first_use_leaves() -> None:
    """Three readings before agree, three after agree; what the allocator took meanwhile is none of it."""
    card = _Card(*[60 * MIB] * 3, *[50 * MIB] * 3)
    assert ranks.appeared(lambda: setattr(card, "reserved", 6 * MIB), "cuda", card) == 8 * MIB


def test_a_rank_goes_on_where_another_process_moves_memory() -> None:
    """The collective runs all the same: the other ranks wait in it."""
    used: list[int] = []
    assert ranks.appeared(lambda: used.append(1), "cuda", _Card(60 * MIB, 59 * MIB, 58 * MIB)) is None
    assert ranks.appeared(lambda: used.append(2), "cpu") is None
    assert used == [1, 2]


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program that answers like nvidia-smi, from two files."""
    program = tmp_path / "nvidia-smi"
    program.write_text(
        f'#!/bin/sh\ncase "$1" in *compute-apps*) cat {tmp_path}/apps;; *) cat {tmp_path}/cards;; esac\n'
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(machine, "own_uuid", lambda _: "GPU-2")
    (tmp_path / "apps").write_text("")
    cards(tmp_path, 1000)
    return tmp_path


def cards(folder: Path, used: int) -> None:
    rows = (f"GPU-{i}, NVIDIA H100, 570.1, 81559, {used if i == 2 else 5}\n" for i in (1, 2))
    (folder / "cards").write_text("".join(rows))


def test_nvidia_smi_names_this_process(smi: Path) -> None:
    meter = machine.Meter(_Card(0), pause=0)
    meter.begin()
    (smi / "apps").write_text(f"{os.getpid()}, GPU-1, 999\n{os.getpid()}, GPU-2, 416\n1, GPU-2, 50\n")
    assert meter.in_use() == 416 * MIB
    assert "of the process" in meter.source


def test_in_a_container_the_growth_of_the_gpu_stands_for_it(smi: Path) -> None:
    meter = machine.Meter(_Card(0), pause=0)
    meter.begin()
    assert meter.in_use() is None, "nothing grew: nvidia-smi shows another GPU"
    cards(smi, 1416)
    assert meter.in_use() == 416 * MIB
    assert "growth" in meter.source


# -------------------------------------------------------------------------------------------------------------- rates


def test_rates_on_this_cpu() -> None:
    """The same code times tiny operations; the work of each is derived by hand."""
    found = [Rate.model_validate({"probe": "p", **rate}) for rate in rates.run_rates({"device": "cpu"})["rates"]]
    work = {(rate.kind, tuple(rate.shape.values())): rate.work for rate in found}
    assert work["matmul", (128, 96, 64)] == 2 * 128 * 96 * 64
    # batch, heads, seq, head_dim: two products over seq × seq, of which a causal kernel leaves half out
    forward = 2 * 2 * (2 * 2) * 32 * 32 * 16 / 2
    assert work["attention", (2, 2, 32, 16)] == forward
    assert work["attention-backward", (2, 2, 32, 16)] == forward * 5 / 2, "five products where forward has two"
    assert work["memory", (MIB, 1, 1)] == 2 * MIB
    assert work["memory", (MIB, 2, 1)] == 3 * MIB
    assert {rate.kind for rate in found} == {"matmul", "attention", "attention-backward", "memory"}


@pytest.mark.parametrize(("capability", "dtypes"), [((9, 0), 3), ((7, 5), 2)])
def test_a_gpu_is_timed_from_small_to_large(
    capability: tuple[int, int], dtypes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the end of the time, or of the memory, cuts the largest; bf16 only where the GPU multiplies it."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    listed = sizes_of("cuda", {"copies": [1, 2]})
    assert len(listed.dtypes) == dtypes
    work = [m * n * k for m, n, k in listed.products]
    assert work == sorted(work)
    assert min(work) < 1e7, "a launch bounds it on any GPU"
    assert max(work) == 8192 * 32000 * 4096, "it fills any GPU for milliseconds"
    assert list(listed.memory) == sorted(listed.memory)
    assert listed.copies == (1, 2)
    largest = max(rates.CACHE, 4 * (8192 * 32000 + 4096 * (8192 + 32000))) + 4 * 8192 * 32000
    job = next(job for job in machine_jobs("cuda", 1) if job.kind == "rates")
    assert max(3 * listed.memory[-1], largest) < job.memory


class _Clock:
    """A clock that only operations move."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def run(self, seconds: list[float]) -> Callable[[int], None]:
        return lambda i: setattr(self, "now", self.now + seconds[i % len(seconds)])


def test_a_sample_is_long_enough_and_the_median_counts() -> None:
    clock = _Clock()
    timer = rates.Timer("cpu", sample=0.004, samples=3, clock=clock)
    assert timer.seconds(clock.run([1e-5])) == pytest.approx(1e-5)
    assert clock.now > 3 * 0.004
    slow = iter([1.0, 1.0, 5.0, 1.0, 9.0, 1.0])  # two to warm up, one to learn the length, three samples
    timer = rates.Timer("cpu", sample=0.004, samples=3, clock=clock)
    assert timer.seconds(lambda _: clock.run([next(slow)])(0)) == pytest.approx(1.0)


class _Events:
    """Stands for torch.cuda's events: recorded at the clock of a stream."""

    def __init__(self) -> None:
        self.now = 0.0
        self.waits = 0

    def Event(self, *, enable_timing: bool) -> Any:  # noqa: N802
        assert enable_timing
        outer = self

        class Event:
            at = 0.0

            def record(self) -> None:
                self.at = outer.now

            def elapsed_time(self, later: Any) -> float:
                return (later.at - self.at) * 1000

        return Event()

    def synchronize(self) -> None:
        self.waits += 1


def test_a_gpu_is_timed_by_its_own_clock() -> None:
    """Milliseconds become seconds; the host waits before the first and after the last operation alone."""
    cuda = _Events()
    timer = rates.Timer("cuda", cuda=cuda, clock=lambda: pytest.fail("the host's clock was read"))
    assert timer.batch(lambda _: setattr(cuda, "now", cuda.now + 0.25), 8) == pytest.approx(2.0)
    assert cuda.waits == 2


def test_rates_end_with_their_time_and_with_the_memory() -> None:
    clock = _Clock()
    timer = rates.Timer("cpu", sample=0, samples=1, clock=clock)

    def operations(fails: bool) -> Iterator[rates.Operation]:
        for size in range(1, 100):
            if fails and size == 3:
                raise torch.OutOfMemoryError("no memory")
            yield rates.Operation("memory", "fp32", {"bytes": size}, size, clock.run([1.0]))

    assert [rate["work"] for rate in rates._timed(operations(fails=True), timer, 1000)] == [1, 2]
    assert [rate["work"] for rate in rates._timed(operations(fails=False), timer, 5)] == [1, 2], "4 s each"


# ----------------------------------------------------------------------------------------------------- several ranks


@pytest.mark.parametrize("world", [2, 4, 5])
def test_every_rank_makes_the_same_groups(world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or they would wait for each other for ever; each uses one that it is in."""
    made = []
    for rank in range(world):
        calls: list[tuple[int, ...]] = []
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        new_group = lambda members, calls=calls: calls.append(tuple(members)) or tuple(members)  # noqa: E731
        for group in ranks.groups_of(world, new_group):
            members = group.group or tuple(range(world))
            assert (rank in members and len(members) == group.ranks) or rank == 4, "a fifth rank is in neither half"
            if rank in members:
                record = {"probe": "p", "kind": group.kind, "ranks": group.ranks, "gpus": world}
                Communicator.model_validate(record | {"collective": group.collective, "bytes": 1})
        made.append(calls)
    assert all(calls == made[0] for calls in made)


@pytest.mark.parametrize(("device", "gpus"), [("cpu", 2), ("cuda", 8)])
def test_jobs_of_several_ranks_can_be_predicted(device: str, gpus: int) -> None:
    """Their runs are complete without figures."""
    jobs = machine_jobs(device, gpus)
    assert len({job.id for job in jobs}) == len(jobs)
    rows = [job for job in jobs if job.kind == "sharded"]
    assert len(rows) == len(CUDA if device == "cuda" else CPU)
    for job in rows:
        run = run_of(job.settings, job.id)
        assert run.gpus == job.ranks == gpus
        assert predict(run).peak.allocated > 0


def run_of(settings: dict[str, Any], name: str, **figures: Any) -> Run:
    stated = {"id": name, "source": "a test", "grade": "B", "gpu": "h100"}
    return Run.model_validate(stated | settings["run"] | figures)


SCRIPT = """
import json, os, sys
from memcalc.probe.live.ranks import run_collectives
from memcalc.probe.live.ranks import run_sharded
from memcalc.probe.live.ranks import joined

jobs = json.load(open(sys.argv[1]))
kinds = {"collectives": run_collectives, "sharded": run_sharded}
with joined("cpu"):
    found = [kinds[job["kind"]]({**job["settings"], "device": "cpu"}) for job in jobs]
if os.environ["RANK"] == "0":
    with open(sys.argv[2], "w") as stream:
        json.dump(found, stream)
os._exit(0)
"""
WITHIN = 0.01


@pytest.mark.slow
def test_two_ranks_with_gloo(tmp_path: Path) -> None:
    """All collectives run, and real FSDP2 and DDP steps have the estimated peaks."""
    jobs = [job for job in machine_jobs("cpu", 2) if job.ranks == 2]
    (tmp_path / "run.py").write_text(SCRIPT)
    (tmp_path / "jobs.json").write_text(json.dumps([{"kind": job.kind, "settings": job.settings} for job in jobs]))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    subprocess.run(
        [*launcher, tmp_path / "run.py", tmp_path / "jobs.json", tmp_path / "found.json"],
        check=True, timeout=300, capture_output=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2]), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    collectives, *sharded = json.loads((tmp_path / "found.json").read_text())
    assert collectives["communicators"] == [], "a CPU has no device memory"
    sent = {(rate["kind"], rate["shape"]["bytes"]): rate["work"] for rate in collectives["rates"]}
    # what one of two ranks sends in a ring: half of it forth and half of it back, or half of it
    assert sent["all-reduce", 4096] == 4096
    assert sent["all-gather", 4096] == sent["reduce-scatter", 4096] == 2048
    for job, found in zip(jobs[1:], sharded, strict=True):
        compare(run_of(job.settings, job.id, **found["run"]), job.settings["config"])


def compare(run: Run, config: dict[str, Any]) -> None:
    """Assert that the second step's peaks are those of the estimate, by the closed form and by the replay."""
    from memcalc.terms.build import build_ledger
    from memcalc.terms.model_on_grid import ModelOnGrid
    from memcalc.terms.overhead import Workspaces

    words, settings = job_of(run)
    single = api.single(model=from_huggingface(config), gpu=run.gpu, settings=settings, **words)
    census = ModelOnGrid(single.job.model, single.grid)
    ledger = build_ledger(census, Workspaces(0, 0))
    measured = max(run.phases.values())
    assert int(ledger.peak().max()) == pytest.approx(measured, rel=WITHIN), run.id
    played = replay(step_events(census, ledger, 0, observed=False)).peak_requested
    assert played == pytest.approx(measured, rel=WITHIN), run.id
    assert run.phases["step"] == pytest.approx(run.first_phases["step"]), "the states are made in the first step"
    assert run.rank == "max"


def test_the_rank_that_needs_most_counts() -> None:
    every = [
        {"measured": {"allocated": 5}, "phases": {"forward": 5, "step": 2}, "software": "torch", "seconds": 1.0},
        {"measured": {"allocated": 7}, "phases": {"forward": 4, "step": 7}, "software": "torch", "seconds": 1.5},
    ]
    largest = ranks.largest_of(every)
    assert largest["phases"] == {"forward": 5, "step": 7}
    assert largest["seconds"] == 1.5
    assert largest["comment"] == "allocated of rank 0: 5"
