"""``memcalc probe``: the suite, its needs, the worker, phases, journal, runs file and report.

What needs a GPU is run here as far as it is memcalc's own: the steps of the suite on fake and on real CPU tensors, the
reading of torch's figures on stand-ins, and every name of ``torch.cuda`` that is used is looked up.
"""

from __future__ import annotations

import ast
import dataclasses
import gc
import json
import multiprocessing
import os
import random
import stat
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self
from unittest import mock

import pytest

pytest.importorskip("transformers")

import torch
import transformers
from typer.testing import CliRunner

from memcalc import catalog, validation
from memcalc.cli.app import app
from memcalc.convert.huggingface import flat_table, from_huggingface
from memcalc.errors import CombinationError, InputError, MissingError
from memcalc.journal import SUFFIX as JOURNAL
from memcalc.probe.live import steps as live
from memcalc.probe.live.cuda_like import cuda_like
from memcalc.probe.live.step_models import build
from memcalc.probe.measure import driver, environment, planning, process, smi, suite
from memcalc.probe.measure.environment import Environment
from memcalc.probe.measure.planning import Planned, Target, plan_jobs, run_without_figures
from memcalc.probe.measure.process import ProbeJob
from memcalc.probe.measure.records import PHASES
from memcalc.probe.measure.suite import CPU, CUDA, SHAPES, Row, config_of, rows_of
from memcalc.runs import read_runs
from memcalc.specs.flat import from_flat
from memcalc.terms.parameters import model_count
from memcalc.units import GIB, MIB

LIVE = Path(live.__file__).parent
H100 = Environment(
    torch="2.13.0", cuda="13.0", transformers="5.23.0", peft="0.21.2", name="NVIDIA H100 80GB HBM3",
    memory=catalog.gpu("h100").memory_bytes, driver="580.1", settings={"PYTORCH_CUDA_ALLOC_CONF": "x:1"},
)  # fmt: skip


def target(gpu: str, **known: Any) -> Target:
    return Target("cuda", catalog.gpu(gpu), Environment(**known))


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a suite of few rows: planning all of them takes seconds."""
    kept = [row for row in CUDA if row.lora or row.grows == "layers" or row.seq_len == 8192]
    monkeypatch.setattr(planning, "rows_of", lambda *_: kept)


# --------------------------------------------------------------------------------------------------------------- suite


@pytest.mark.parametrize("name", SHAPES)
def test_inline_models_are_the_classes_of_transformers(name: str) -> None:
    """The row's table says what Transformers' own config says, and has as many parameters as the class."""
    fields = config_of(name)
    with mock.patch.object(transformers.PreTrainedModel, "initialize_weights"), torch.device("meta"):
        config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
        model = transformers.AutoModelForCausalLM.from_config(config)
    ours, theirs = from_flat(flat_table(config_of(name))), from_huggingface(config.to_dict())
    assert (ours.groups, ours.ends, ours.tied, ours.vocab) == (theirs.groups, theirs.ends, theirs.tied, theirs.vocab)
    assert model_count(ours).total == sum(parameter.numel() for parameter in model.parameters())


def test_suite_covers_every_factor_early() -> None:
    assert len(CUDA) >= 60
    assert len({row.id for row in CUDA}) == len(CUDA)
    assert sum(row.meant_to_fail for row in CUDA) == 2
    telling = suite.TELLING
    for field in ("precision", "recompute", "optimizer_impl"):
        assert {getattr(row, field) for row in telling} == {getattr(row, field) for row in CUDA}, field
    assert {SHAPES[row.model]["model_type"] for row in telling} >= {"llama", "gpt2", "qwen2", "mixtral", "olmoe"}
    assert any(row.lora for row in telling)


@pytest.mark.slow
@pytest.mark.parametrize("gpu", ["rtx-3090", "h100"])
def test_most_of_the_suite_runs_on_one_card(gpu: str) -> None:
    """Rows that fill the card come near to their share and not beyond; those meant to fail are predicted above it."""
    here = target(gpu)
    planned = plan_jobs("steps", here, 1)
    run = [one for one in planned if not one.skip]
    assert len(run) >= 60
    assert sum(one.job.seconds for one in run) < 3600
    assert all(one.job.memory <= here.capacity for one in run if not one.meant_to_fail)
    assert all(one.job.memory > here.capacity for one in run if one.meant_to_fail)
    check_shares(run, here)


def check_shares(run: list[Planned], here: Target) -> None:
    """Hold that rows which fill the card come near to their share of it, and not beyond."""
    shares = {row.id: row.fill for row in CUDA if row.grows and not row.meant_to_fail}
    grown = [one for one in run if one.job.id in shares]
    assert grown
    for one in grown:
        assert shares[one.job.id] - 0.15 < one.job.memory / here.capacity <= shares[one.job.id], one.job.id


@pytest.mark.usefixtures("few")
def test_rows_that_do_not_fit_beside_others_are_left_out() -> None:
    alone, shared = (plan_jobs("steps", target("rtx-3090", used=used), 1) for used in (0, 12 * GIB))
    left = [one for one, other in zip(shared, alone, strict=True) if one.skip and not other.skip]
    assert left
    assert all(one.job.memory > 23.69 * GIB - 12 * GIB for one in left)
    assert "others hold 12.0" in left[0].skip
    check_shares(alone, target("rtx-3090"))


def test_what_the_environment_changes_is_in_every_run() -> None:
    settings = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "CUBLAS_WORKSPACE_CONFIG": ":16:8"}
    run = plan_jobs("small", target("h100", settings=settings), 1)[1].run
    assert run is not None
    assert run.strategy["expandable_segments"] is True
    assert run.strategy["blas_workspace"] == 16 * 8 * 1024


def test_adapters_need_peft(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "rows_of", lambda *_: [CUDA[0], *(row for row in CUDA if row.lora)])
    skips = {one.job.id: one.skip for one in plan_jobs("steps", target("h100", torch="2.13"), 1)}
    assert {"needs peft: pip install peft"} == {skips[row.id] for row in CUDA if row.lora}
    assert "" in skips.values()


# ------------------------------------------------------------------------------------------- real steps, fake and real


def job_of(row: Row, layers: int | None = None) -> tuple[ProbeJob, Any]:
    """Return a row's job and what memcalc predicts, without workspaces, which fake tensors have not."""
    here = Target("cpu", catalog.gpu("h100"), Environment(transformers=transformers.__version__))
    config = config_of(row.model, layers)
    run = {
        "model": flat_table(config),
        "workload": row.workload(),
        "strategy": row.strategy(here.environment.framework),
    }
    job = ProbeJob("step", row.id, {"config": config, "run": run})
    return job, validation.predict(run_without_figures(job, here))


def fake_step(row: Row, layers: int | None = None) -> tuple[dict[str, Any], Any]:
    """Run the very code of a row on fake tensors that take CUDA's paths."""
    job, estimate = job_of(row, layers)
    with (
        cuda_like("auto" if row.attention == "flash" else row.attention),
        mock.patch.object(transformers.PreTrainedModel, "initialize_weights"),
    ):
        return live.run_step({**job.settings, "device": "cpu"})["run"], estimate


KINDS = {
    "every-2": Row("llama-130m", "bf16", "every-2", "flash", "foreach", 2, 256),
    "selective": Row("llama-130m", "bf16", "selective-ops", "flash", "fused", 4, 512),
    "experts": Row("mixtral-blocks", "bf16-autocast", "full", "flash", "loop", 2, 256),
    "adapters": Row("llama-130m", "bf16", "none", "flash", "fused", 2, 512, lora="16:q,k,v,o"),
    "accumulated": Row("gpt2", "bf16", "none", "eager", "fused", 2, 256, 2),
}


SLOW_KINDS = {"every-2", "accumulated", "adapters"}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] if kind in SLOW_KINDS else []) for kind in KINDS]
)
def test_rows_train_what_they_say(kind: str) -> None:
    """A row's step, on fake tensors, against the estimate of its words: a wrong kernel or checkpoint would show."""
    if kind == "adapters":
        pytest.importorskip("peft")
    read, estimate = fake_step(KINDS[kind], 2)
    assert estimate.peak.allocated == pytest.approx(read["measured"]["allocated"], rel=0.01)
    for phase, size in read["phases"].items():
        if phase != "forward":
            assert max(estimate.phases[name] for name in PHASES[phase]) == pytest.approx(size, rel=0.02), phase


@pytest.mark.slow
@pytest.mark.parametrize("row", [row for row in CUDA if not row.grows][::7], ids=lambda row: row.id)
def test_rows_of_the_suite_as_they_stand(row: Row) -> None:
    if row.lora:
        pytest.importorskip("peft")
    read, estimate = fake_step(row)
    assert estimate.peak.allocated == pytest.approx(read["measured"]["allocated"], rel=0.012)


def test_a_cpu_step_holds_what_is_predicted() -> None:
    """Real tensors, real values: the weights move, and the peak is the estimate's."""
    row = Row("tiny-llama", "fp32", "full", "eager", "fused", 2, 16)
    job, estimate = job_of(row, 1)
    with mock.patch.object(live, "build", side_effect=build) as building:
        read = live.run_step({**job.settings, "device": "cpu"})["run"]
    assert building.call_count == 1
    assert set(read["measured"]) == {"allocated"}, "a CPU has no allocator whose reserve could be read"
    assert estimate.peak.allocated == pytest.approx(read["measured"]["allocated"], rel=0.01)
    assert read["first_phases"]["forward"] < read["phases"]["forward"], "the first step has no optimizer states"
    assert read["measured"]["allocated"] == max(read["phases"].values())
    assert gc.isenabled()


# -------------------------------------------------------------------------------------------------------------- phases


class Script:
    """A meter whose figures are told beforehand."""

    def __init__(self, *peaks: int) -> None:
        self.left, self.begun = list(peaks), list[str]()

    def begin(self, phase: str) -> None:
        """Note it."""
        self.begun.append(phase)

    def peaks(self) -> dict[str, int]:
        """Tell the next."""
        return {"allocated": self.left.pop(0), "reserved": 100 + len(self.begun)}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class Toy(torch.nn.Module):
    """Two blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)])
        self.head = torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run."""
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def toy(micro_batches: int, loss: Callable[[Toy], torch.Tensor]) -> Any:
    model = Toy()
    blocks = {f"layers.{place}": layer for place, layer in enumerate(model.layers)}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return SimpleNamespace(
        model=model,
        blocks=blocks,
        loss=lambda: loss(model),
        optimizer=optimizer,
        scaler=torch.amp.GradScaler("cpu", enabled=False),
        micro_batches=micro_batches,
    )


def test_phases_of_micro_batches_are_the_larger() -> None:
    """Two micro-batches: forward, loss, backward, twice; then one step. The overall peak is the largest of all."""
    meter = Script(10, 20, 90, 70, 15, 25, 40, 11, 21, 31, 41, 51, 61, 71)
    phases = live.train(toy(2, lambda model: model(torch.ones(3, 4)).sum()), meter, lambda steps: steps >= 2)
    micro = ["forward", "loss", "backward"]
    assert meter.begun == [*micro, *micro, "step"] * 2
    assert phases.of(1, "allocated") == {"forward": 70, "loss": 20, "backward": 90, "step": 40}
    assert phases.of(2, "allocated") == {"forward": 41, "loss": 51, "backward": 61, "step": 71}
    assert phases.largest("allocated") == 90
    assert phases.of(2, "reserved")["step"] == 114


def test_what_backward_computes_again_is_no_forward() -> None:
    """The last block runs again in backward; the border of the head is passed once."""
    from torch.utils.checkpoint import checkpoint

    def loss(model: Toy) -> torch.Tensor:
        return checkpoint(model, torch.ones(3, 4, requires_grad=True), use_reentrant=False).sum()

    meter = Script(1, 2, 3, 4)
    live.train(toy(1, loss), meter, lambda steps: steps >= 1)
    assert meter.begun == ["forward", "loss", "backward", "step"]


class Allocator:
    """Stands for torch.cuda: peaks fall to what is live at a reset; what is reserved never falls."""

    def __init__(self) -> None:
        self.resets = self.waits = 0

    def reset_peak_memory_stats(self) -> None:
        """Count it."""
        self.resets += 1

    def max_memory_allocated(self) -> int:
        """Tell which reset it was."""
        return 1000 + self.resets

    def max_memory_reserved(self) -> int:
        """Grow with every reset."""
        return 2 * MIB * (1 + self.resets)

    def synchronize(self) -> None:
        """Count it."""
        self.waits += 1

    def empty_cache(self) -> None:
        """Refuse it in the middle."""
        assert not self.resets, "the cache is emptied before the first step alone"

    def memory_stats(self) -> dict[str, int]:
        """Tell of retries."""
        return {"num_alloc_retries": 3}

    def current_device(self) -> int:
        """Be the first."""
        return 0

    def get_device_properties(self, _: int) -> Any:
        """Tell the name that nvidia-smi has too."""
        return SimpleNamespace(uuid="aa-bb")


def test_cuda_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step resets four times; five steps, of which three are timed; the device figure is the growth."""
    fake, used = Allocator(), iter((2 * GIB, 5 * GIB))
    for name in (name for name in vars(Allocator) if not name.startswith("_")):
        monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    monkeypatch.setattr(smi, "cards", lambda: [smi.Card("GPU-aa-bb", "x", "1", 80 * GIB, next(used))])
    monkeypatch.setattr(smi, "used_by_process", lambda *_: None)
    monkeypatch.setattr(live, "TIMED_S", 0.0)
    training = toy(1, lambda model: model(torch.ones(3, 4)).sum())
    monkeypatch.setattr(live, "build", lambda _, device: training if device == "cuda" else None)
    read = live.run_step({"device": "cuda"})["run"]
    steps = live.COUNTED_STEPS + live.TIMED_AT_LEAST
    assert fake.resets == 4 * steps
    assert fake.waits == steps + 1, "once before the first step, then after each"
    assert read["measured"] == {"allocated": 1000 + 4 * steps, "reserved": 2 * MIB * (1 + 4 * steps), "device": 3 * GIB}
    assert read["first_phases"] == {"forward": 1001, "loss": 1002, "backward": 1003, "step": 1004}
    assert read["phases"]["step"] == 1008
    assert read["reserved_phases"]["step"] == 18 * MIB
    assert read["seconds"] > 0
    assert "growth" in read["comment"]
    assert "3 times" in read["comment"]


def test_every_name_of_torch_that_cuda_needs_exists() -> None:
    """Where there is no GPU, a misspelt name would not show."""
    seen = set()
    for path in LIVE.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) in {"torch.cuda", "torch.backends.cuda"}:
                seen.add((ast.unparse(node.value), node.attr))
    assert ("torch.cuda", "max_memory_reserved") in seen
    modules = {"torch.cuda": torch.cuda, "torch.backends.cuda": torch.backends.cuda}
    assert [name for name in seen if not hasattr(modules[name[0]], name[1])] == []
    assert callable(torch.backends.cuda.enable_cudnn_sdp), "asked for by name where it exists"


# ------------------------------------------------------------------------------------------------------------- machine


@pytest.mark.parametrize(
    ("name", "gib", "preset"),
    [
        ("NVIDIA GeForce RTX 3090", 23.69, "rtx-3090"),
        ("NVIDIA A100-SXM4-80GB", 79.25, "a100-80g"),
        ("NVIDIA A100-SXM4-40GB", 39.39, "a100-40g"),
        ("NVIDIA A100 80GB PCIe", 79.25, "a100-pcie-80g"),
        ("NVIDIA H100 80GB HBM3", 79.11, "h100"),
        ("NVIDIA H100 PCIe", 79.1, "h100-pcie"),
        ("NVIDIA H100 NVL", 93.0, "h100-nvl"),
        ("NVIDIA H200", 139.8, "h200"),
        ("NVIDIA GH200 480GB", 94.5, "gh200"),
        ("Tesla V100-SXM2-32GB", 31.74, "v100-32g"),
        ("Tesla V100-PCIE-16GB", 15.77, "v100-pcie-16g"),
        ("Tesla T4", 14.58, "t4"),
        ("NVIDIA RTX 6000 Ada Generation", 47.5, "rtx-6000-ada"),
        ("NVIDIA GeForce RTX 2080 Ti", 10.75, "rtx-2080ti"),
    ],
)
def test_the_drivers_name_leads_to_a_preset(name: str, gib: float, preset: str) -> None:
    """Names as torch.cuda.get_device_name gives them in public logs."""
    assert environment.preset_of(name, int(gib * GIB)).name == preset


@pytest.mark.parametrize(("name", "gib"), [("NVIDIA A100-SXM4-80GB MIG 3g.40gb", 39.0), ("NVIDIA H100 80GB HBM3", 40)])
def test_a_gpu_that_is_no_preset_is_asked_for(name: str, gib: float) -> None:
    """A part of a GPU is none, nor is one of another size."""
    with pytest.raises(MissingError, match=r"give --gpu NAME, such as .*[ah]100") as caught:
        environment.preset_of(name, int(gib * GIB))
    assert caught.value.exit_code == 3


SMI = """#!/bin/sh
case "$1" in
*memory.total*) echo 'GPU-aa, NVIDIA H100 80GB HBM3, 580.1, 81559, 1024'; echo 'GPU-bb, NVIDIA X, 580.1, [N/A], 1';;
*compute-apps*) echo "17, GPU-aa, 530"; echo "18, GPU-aa, [N/A]";;
*) exit 9;;
esac
"""


def test_nvidia_smi_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(SMI)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert smi.cards() == [smi.Card("GPU-aa", "NVIDIA H100 80GB HBM3", "580.1", 81559 * MIB, 1024 * MIB)]
    assert [smi.used_by_process(pid, "GPU-aa") for pid in (17, 18, 19)] == [530 * MIB, None, None]
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert smi.cards() == []


def test_a_worker_that_fails_is_a_result() -> None:
    """In a real process: an error inside the job, and one whose time is up."""
    failed = process.run_job(ProbeJob("nonsense", "x", {}), "cpu", 60)
    assert failed == {"ok": False, "outcome": "crash", "message": "KeyError: 'nonsense'"}
    late = process.run_job(ProbeJob("look", "x", {}), "cpu", 0.01)
    assert late["outcome"] == "crash"
    assert late["message"].startswith("stopped after 0 s")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere each job is an interpreter of its own")
def test_jobs_are_forked_from_one_process() -> None:
    """One that fails, one whose time is up and one that answers have processes of their own, and the next begins."""
    with process.Forks() as start:
        failed = process.run_job(ProbeJob("nonsense", "x", {}), "cpu", 120, start)
        assert failed == {"ok": False, "outcome": "crash", "message": "KeyError: 'nonsense'"}
        late = process.run_job(ProbeJob("look", "x", {}), "cpu", 0.0, start)
        assert late["message"].startswith("stopped after 0 s")
        assert process.run_job(ProbeJob("look", "x", {}), "cpu", 120, start)["look"]["gpus"] == 0
        parent = start._parent
        assert parent is not None
        parent.kill()
        parent.wait()
        assert process.run_job(ProbeJob("look", "x", {}), "cpu", 120, start)["ok"], "another takes its place"
    assert start._parent.poll() is not None, "nothing is left behind"


def test_a_rank_that_fails_tells_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rank waits for it and never writes: torchrun ends it where another ended with 1."""
    job, result = tmp_path / "job.json", tmp_path / "result.json"
    job.write_text(json.dumps({"kind": "step", "fails": True}))
    monkeypatch.setenv("RANK", "1")

    def maybe(job: dict[str, Any]) -> dict[str, Any]:
        if job["fails"]:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return {"run": {}}

    monkeypatch.setattr(process, "_function", lambda _: maybe)
    monkeypatch.setattr(process, "_end_with_parent", lambda: None)
    assert process.main([str(job), str(result)]) == 1
    assert json.loads(result.read_text())["outcome"] == "oom"
    result.unlink()
    job.write_text(json.dumps({"kind": "step", "fails": False}))
    assert process.main([str(job), str(result)]) == 0
    assert not result.exists(), "of ranks that succeed the first writes alone"


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "oom"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "oom"),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), "crash"),
        (ValueError("out of memory"), "crash"),
    ],
)
def test_out_of_memory_is_told_from_a_crash(error: Exception, outcome: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: Any) -> Any:
        raise error

    monkeypatch.setattr(process, "_function", lambda _: fails)
    result = process.result_of({"kind": "step"})
    assert (result["ok"], result["outcome"]) == (False, outcome)


# -------------------------------------------------------------------------------------------------------------- driver


class Machine:
    """Runs jobs without running them: a table of results, by what the job's name holds."""

    def __init__(self, **said: dict[str, Any]) -> None:
        self.said, self.ran = said, list[str]()

    def __call__(self, job: ProbeJob, device: str, limit: float, *_: Any) -> dict[str, Any]:
        """Give a job's result."""
        assert device == "cuda"
        assert limit > job.seconds
        self.ran.append(job.id)
        for word, result in self.said.items():
            if word in job.id:
                return result
        if job.kind == "machine":
            return {"ok": True, "machine": {"context": 300 * MIB, "allocator": {"rounding": 512}}}
        if job.kind == "rates":
            rate = {"kind": "matmul", "dtype": "bf16", "shape": {"m": 8}, "work": 1e9, "seconds": 1e-3}
            return {"ok": True, "rates": [rate]}
        sizes = {"allocated": 9 * GIB, "reserved": 10 * GIB, "device": 11 * GIB}
        phases = dict.fromkeys(PHASES, 8 * GIB)
        run = {"measured": sizes, "phases": phases, "seconds": 0.5, "software": "torch 2.13", "comment": "said"}
        return {"ok": True, "run": run}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Machine]:
    """Return what puts a stand-in for an H100 in the place of this machine."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(driver, "look", lambda _: H100)

    def put(**said: dict[str, Any]) -> Machine:
        made = Machine(**said)
        monkeypatch.setattr(driver, "run_job", made)
        return made

    return put


OOM = {"ok": False, "outcome": "oom", "message": "CUDA out of memory.\nmore"}
CRASH = {"ok": False, "outcome": "crash", "message": "ended by SIGSEGV"}


def test_a_probe_becomes_a_runs_file(machine: Callable[..., Machine]) -> None:
    """One that runs out of memory and one that crashes are rows, and the rest goes on."""
    machine(gpt2=OOM, mixtral=CRASH)
    found = driver.probe(suite="small", output="runs.toml")
    assert found.counts == {"measured": 6, "oom": 1, "failed": 1}
    runs = read_runs(["runs.toml"])
    by_id = {run.id.partition("/")[2]: run for run in runs.run}
    assert len(by_id) == suite.SMALL - 1
    oom = by_id[next(row.id for row in CUDA if row.model == "gpt2")]
    assert (oom.outcome, oom.measured.figures, oom.comment) == ("oom", {}, "CUDA out of memory.")
    (mark,) = {run.probe for run in runs.run}
    probe = runs.probe[0]
    assert (probe.id, probe.gpu, probe.driver, probe.context) == (mark, "h100", "580.1", 300 * MIB)
    assert probe.settings == {"PYTORCH_CUDA_ALLOC_CONF": "x:1"}
    assert [rate.probe for rate in runs.rate] == [mark]
    assert [entry.reason for entry in runs.left_out] == ["ended by SIGSEGV"]
    first = by_id[CUDA[0].id]
    assert (first.measured.device, first.phases["loss"], first.grade) == (11 * GIB, 8 * GIB, "A")
    assert first.strategy["framework"] == "hf@5.23"
    answer = validation.validate(runs)
    assert answer.not_modelled == ()
    assert {score.figure for score in answer.runs} == {"allocated", "reserved", "device"}
    ours = next(job for job in found.jobs if job.id == CUDA[0].id)
    theirs = {score.figure: score.error for score in answer.runs if score.id == first.id}
    assert {figure.name: figure.error for figure in ours.figures if figure.name in theirs} == theirs
    assert found.commands == ("memcalc validate runs.toml", "memcalc calibrate runs.toml")


def test_an_interrupted_probe_goes_on(machine: Callable[..., Machine]) -> None:
    """What is in the journal is not run again; a finished one is not begun again without --force."""
    first = machine(mixtral=CRASH)
    driver.probe(suite="small", output="runs.toml")
    assert Path("runs.toml" + JOURNAL).exists(), "a job that failed may be run again"
    again = machine()
    found = driver.probe(suite="small", output="runs.toml")
    assert again.ran == [name for name in first.ran if "mixtral" in name]
    assert (found.resumed, found.counts) == (7, {"measured": 8})
    assert not Path("runs.toml" + JOURNAL).exists()
    with pytest.raises(InputError, match="--force"):
        driver.probe(suite="small", output="runs.toml")
    anew = machine()
    driver.probe(suite="small", output="runs.toml", force=True)
    assert len(anew.ran) == 8


def test_a_probe_goes_on_only_in_the_same_environment(
    machine: Callable[..., Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An out-of-memory is an answer, as a measured row is; jobs are known by what they measure."""
    first = machine(mixtral=CRASH)
    driver.probe(suite="small", output="runs.toml")
    job = ProbeJob("step", "a", {"n": 1})
    assert job.digest == ProbeJob("step", "b", {"n": 1}).digest != ProbeJob("step", "a", {"n": 2}).digest
    second = machine()
    monkeypatch.setattr(driver, "look", lambda _: dataclasses.replace(H100, torch="2.99"))
    with pytest.raises(CombinationError, match="begun with another torch; give --force to begin anew"):
        driver.probe(suite="small", output="runs.toml")
    assert second.ran == []
    driver.probe(suite="small", output="runs.toml", force=True)
    assert len(second.ran) == len(first.ran)


def test_interrupt_keeps_what_was_measured(machine: Callable[..., Machine], monkeypatch: pytest.MonkeyPatch) -> None:
    ready = machine()

    def stop(job: ProbeJob, *others: Any) -> dict[str, Any]:
        if len(ready.ran) == 3:
            raise KeyboardInterrupt
        return ready(job, *others)

    monkeypatch.setattr(driver, "run_job", stop)
    said = CliRunner().invoke(app, ["probe", "--suite", "small", "--output", "r.toml"])
    assert said.exit_code == 130
    assert "interrupted after 3 jobs; run the same command to resume." in said.output
    assert not Path("r.toml").exists()
    rest = machine()
    assert driver.probe(suite="small", output="r.toml").resumed == 3
    assert len(rest.ran) == 5


@pytest.mark.slow
def test_a_kill_loses_the_job_at_work_alone(machine: Callable[..., Machine], monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed at moments drawn at random: what has a result is not run again, and the runs file has all or is not."""
    ready, draw, fork = machine(), random.Random(20_261_130), multiprocessing.get_context("fork")  # noqa: S311 - moments
    ran = Path("ran")
    ran.touch()

    def logged(job: ProbeJob, *others: Any) -> dict[str, Any]:
        with ran.open("a") as log:
            log.write(f"{job.id}\n")
        time.sleep(0.02)
        return ready(job, *others)

    def jobs() -> Counter[str]:
        return Counter(ran.read_text().split())

    monkeypatch.setattr(driver, "run_job", logged)
    for more in (1, 2, 1, 2):
        child = fork.Process(target=driver.probe, kwargs={"suite": "small", "output": "r.toml"})
        begun = jobs().total() + more
        child.start()
        while jobs().total() < begun:
            time.sleep(0.001)
        time.sleep(draw.uniform(0, 0.03))
        child.kill()
        child.join()
        assert not Path("r.toml").exists()
    assert driver.probe(suite="small", output="r.toml").counts == {"measured": 8}
    assert len(jobs()) == 8
    assert jobs().total() - 8 <= 4
    assert not Path("r.toml" + JOURNAL).exists()


def test_minutes_cut_the_tail(machine: Callable[..., Machine]) -> None:
    """The stand-in takes no time, so that only a job whose own need is beyond the budget waits."""
    machine()
    found = driver.probe(suite="small", minutes="0.5", output="r.toml")
    for job in found.jobs:
        assert job.status == ("measured" if job.need < 30 else "waiting"), job
    assert Counter(job.status for job in found.jobs)["waiting"] > 0
    cut = driver.probe(suite="small", gpu="h100", dry_run=True, minutes=1)
    assert 0 < cut.need <= 60
    assert [job.id for job in cut.jobs if job.status == "waiting"] == ["rates"], "45 s after 40 or more"


def test_a_result_that_is_no_record_costs_itself_alone(machine: Callable[..., Machine]) -> None:
    machine(**{"llama-1b": {"ok": True, "run": {"measured": {"allocated": "many"}}}})
    found = driver.probe(suite="small", output="r.toml")
    wrong = next(job for job in found.jobs if job.status == "failed")
    assert "no record" in wrong.reason
    assert found.counts["measured"] == 7


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"device": "cud"}, "unknown device 'cud': must be cuda, cpu or (for a module) fake"),
        ({"suite": "ful"}, "did you mean 'full'?"),
        ({"minutes": "soon"}, "minutes 'soon': must be a number above 0."),
        ({"gpu": "h10"}, "did you mean"),
        ({"output": "no/such/place.toml"}, "the directory no/such must exist"),
    ],
)
def test_wrong_words_are_told(machine: Callable[..., Machine], words: dict[str, Any], said: str) -> None:
    machine()
    with pytest.raises(InputError) as caught:
        driver.probe(**words)
    assert said in str(caught.value)


def test_without_a_gpu_one_sentence_says_what_can_be_done(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {"torch": "2.13", "cuda": "", "transformers": "5.23", "peft": "", "gpus": 0}
    monkeypatch.setattr(environment, "run_job", lambda *_: {"ok": True, "look": dict(seen)})
    said = CliRunner().invoke(app, ["probe"])
    assert said.exit_code == 2
    assert "no CUDA device is visible; --device cpu" in said.output
    assert len(said.output.splitlines()) == 1
    seen |= {"transformers": "4.57.1"}
    assert "needs Transformers 5 or newer, and 4.57.1 is" in CliRunner().invoke(app, ["probe"]).output
    monkeypatch.setattr(environment, "find_spec", lambda name: None if name == "torch" else object())
    assert "it needs torch: pip install 'memcalc[probe]'" in CliRunner().invoke(app, ["probe"]).output


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_dry_run_needs_no_torch(device: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nor does it leave anything behind."""
    monkeypatch.chdir(tmp_path)
    for name in ("torch", "transformers"):
        monkeypatch.setitem(sys.modules, name, None)
    words = ["probe", "--dry-run", "--gpu", "rtx-3090", "--suite", "small", "--device", device]
    said = CliRunner().invoke(app, words, env={"COLUMNS": "100"})
    assert said.exit_code == 0, said.output
    assert "would run" in said.output
    assert rows_of("small", device, catalog.gpu("rtx-3090"))[0].id in said.output
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("form", ["rich", "markdown", "csv", "json", "latex", "html"])
def test_every_format(form: str, machine: Callable[..., Machine]) -> None:
    machine(gpt2=OOM)
    said = CliRunner().invoke(app, ["probe", "--suite", "small", "--format", form, "--output", "r.toml", "--force"])
    assert said.exit_code == 0, said.output
    assert "mixtral" in said.output
    assert "out of memory" in said.output
    if form == "json":
        answer = json.loads(said.output)
        assert answer["schema"] == "memcalc.probe/1"
        assert answer["counts"] == {"measured": 7, "oom": 1}


# ----------------------------------------------------------------------------------------------------------- end to end


@pytest.mark.slow
def test_a_probe_of_this_processor_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real processes, real steps, the runs file, and validate on it."""
    monkeypatch.setattr(suite, "CPU", (CPU[1], CPU[2]))
    monkeypatch.chdir(tmp_path)
    run = CliRunner().invoke(app, ["probe", "--device", "cpu", "--format", "json"])
    assert run.exit_code == 0, run.output
    answer = json.loads(run.output)
    assert answer["counts"] == {"measured": 2}
    said = CliRunner().invoke(app, ["validate", "probe.toml", "--format", "json"])
    scores = json.loads(said.output)["runs"]
    assert {score["figure"] for score in scores} == {"allocated"}
    assert all(abs(score["error"]) < 0.01 for score in scores)
    assert not read_runs(["probe.toml"]).probe, "a processor says nothing of a GPU's overheads"


def test_the_quick_look_is_the_beginning() -> None:
    card = catalog.gpu("h100")
    assert rows_of("small", "cuda", card) == CUDA[: suite.SMALL]
    assert rows_of("machine", "cuda", card) == ()
    assert isinstance(plan_jobs("machine", target("h100"), 1)[0], Planned)


def test_a_gpu_without_bf16_is_given_what_it_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """V100: no bf16, no flash attention; each kind of row still stands, in fp16 under autocast; a third are planned."""
    rows = rows_of("full", "cuda", catalog.gpu("v100-32g"))
    assert {row.precision for row in rows} == {"fp16-autocast", "fp32"}
    assert "flash" not in {row.attention for row in rows}
    assert len({row.id for row in rows}) == len(rows) >= 60
    assert {row.model for row in rows} == {row.model for row in CUDA}
    monkeypatch.setattr(planning, "rows_of", lambda *_: rows[::3])
    planned = plan_jobs("steps", target("v100-32g"), 1)
    assert len(planned) >= 20
    assert not [one.skip for one in planned if one.skip and "needs" not in one.skip]


def test_fp16_scales_its_loss() -> None:
    """Gradients are unscaled before the step, and the weights move."""
    row = Row("tiny-llama", "fp16-autocast", "none", "eager", "foreach", 1, 16)
    run = {"strategy": row.strategy("plain"), "workload": row.workload()}
    training = build({"run": run, "config": config_of("tiny-llama", 1)}, "cpu")
    before = [parameter.detach().clone() for parameter in training.model.parameters()]
    (loss := training.scaler.scale(training.loss())).backward()
    assert loss.item() > 1000, "the loss of random weights is about 9"
    training.scaler.step(training.optimizer)
    moved = [(old - new).abs().max() for old, new in zip(before, training.model.parameters(), strict=True)]
    assert max(moved) > 0
