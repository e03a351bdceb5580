"""Start-up logs of vLLM: what they print beside what is predicted of it, and why an engine did not start.

Lines have the form of vLLM 0.19's ``v1/worker/gpu_worker.py`` and its neighbours; figures are those of the published
logs in presets/serving/logs.toml.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from engines import Log, logs
from typer.testing import CliRunner

import memcalc
from memcalc.cli.app import app
from memcalc.errors import CombinationError, MissingError
from memcalc.probe.triage.engine_lines import engine_lines, is_engine_log
from memcalc.results.serving import EngineLog
from memcalc.results.triage import Triage
from memcalc.units import GIB

CONFIG = (
    "INFO 04-24 10:11:12 [core.py:58] Initializing a V1 LLM engine (v{version}.1) with config: model='{model}', "
    "dtype=torch.bfloat16, max_seq_len={max_len}, tensor_parallel_size={tp}, pipeline_parallel_size={pp}, "
    "quantization=None, enforce_eager=False, kv_cache_dtype=auto\n"
    "INFO non-default args: {{'gpu_memory_utilization': {utilization}, 'max_num_seqs': {max_seqs}, "
    "'max_num_batched_tokens': {max_batched_tokens}}}\n"
)
FIGURES = (
    "(EngineCore pid=1) INFO [gpu_model_runner.py:4879] Model loading took {weights} GiB memory and 31.6 seconds\n"
    "(EngineCore pid=1) INFO [gpu_worker.py:358] Available KV cache memory: {cache} GiB\n"
    "(EngineCore pid=1) INFO [kv_cache_utils.py:1305] GPU KV cache size: {tokens:,} tokens\n"
)
REFUSED = (
    "ValueError: Free memory on device cuda:0 (31.05/79.19 GiB) on startup is less than desired GPU memory utilization "
    "(0.6, 47.51 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes.\n"
)
SERVED = {
    "version": "0.19", "model": "meta-llama/Llama-3.1-8B-Instruct", "max_len": 8192, "tp": 1, "pp": 1,
    "utilization": 0.95, "max_seqs": 1024, "max_batched_tokens": 8192,
}  # fmt: skip


def published(id_: str) -> Log:
    return next(log for log in logs() if log.id == id_)


def text_of(log: Log, **changes: Any) -> str:
    """Return a published log's figures as vLLM prints them."""
    told = {name: log.told[name] for name in ("max_len", "tp", "pp", "utilization", "max_seqs", "max_batched_tokens")}
    head = CONFIG.format(**told, version=log.told["engine"].partition("@")[2], model=log.served or log.model)
    return head + FIGURES.format(**{**log.logged, "tokens": int(log.logged["tokens"]), **changes})


def answer(text: str, **options: Any) -> EngineLog:
    result = memcalc.triage(text, **{"gpu": "h100", **options})
    assert isinstance(result, EngineLog)
    return result


def test_a_published_log_is_as_predicted() -> None:
    log = published("log017")  # Llama-3.1-8B on an H100
    result = answer(text_of(log))
    assert (result.failure, result.differs, result.unknown) == ("", "", ())
    assert {term.name for term in result.terms} == {
        "weights", "KV cache", "activations and outside PyTorch", "tokens of the cache",
    }  # fmt: skip
    assert result.served.model.name == "llama-3.1-8b"
    assert (result.served.max_seqs, result.served.utilization) == (log.told["max_seqs"], log.told["utilization"])


def test_the_term_that_differs_is_named_and_not_the_cache_that_it_leaves() -> None:
    log = published("log017")
    heavy = answer(text_of(log, weights=log.logged["weights"] + 5, cache=log.logged["cache"] - 5))
    assert heavy.differs == "weights"
    term = next(term for term in heavy.terms if term.name == "weights")
    assert term.logged - term.predicted == pytest.approx(5 * GIB, abs=0.4 * GIB)
    assert answer(text_of(log, cache=log.logged["cache"] - 5)).differs == "activations and outside PyTorch"


def test_what_activations_take_is_read_where_it_is_printed() -> None:
    """The sentence of vLLM 0.8 and 0.9 (worker.py, determine_num_available_blocks)."""
    text = (
        "Initializing a V1 LLM engine (v0.8.5) with config: model='Qwen/Qwen3-8B', max_seq_len=4096\n"
        "the current vLLM instance can use total_gpu_memory (44.35GiB) x gpu_memory_utilization (0.42) = 18.63GiB "
        "model weights take 8.32GiB; non_torch_memory takes 0.34GiB; PyTorch activation peak memory takes 1.20GiB; the "
        "rest of the memory reserved for KV Cache is 8.77GiB."
    )
    lines = engine_lines(text)
    assert {name: round(size / GIB, 2) for name, size in lines.figures.items()} == {
        "weights": 8.32, "activations": 1.2, "outside PyTorch": 0.34, "KV cache": 8.77,
    }  # fmt: skip
    assert (lines.settings["utilization"], lines.settings["total"]) == ("0.42", "44.35")


def test_a_refusal_says_what_was_free_and_what_starts() -> None:
    result = answer(CONFIG.format(**SERVED) + REFUSED)
    assert result.failure.startswith("refused to start")
    assert "more than the 31.05 GiB that are free" in result.causes[0]
    share = float(result.changes[0].split()[1])
    assert 0.3 < share <= 31.05 / 79.19


@pytest.mark.parametrize(
    ("line", "failure", "change"),
    [
        (
            "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`.",
            "nothing was left for the cache",
            "or more, which holds one sequence",
        ),
        (
            "ValueError: To serve (16.00 GiB KV cache is needed, which is larger than the available (9.12 GiB).",
            "holds no sequence of the longest length",
            "--max-model-len",
        ),
        (
            "RuntimeError: CUDA out of memory occurred when warming up sampler with 1024 dummy requests.",
            "warmed up its sampler",
            "--max-num-seqs below 1024",
        ),
        (
            "AssertionError: Expandable segments are not compatible with memory pool.",
            "expandable segments",
            "as verl switches it",
        ),
        (
            '  File "/vllm/device_allocator/cumem.py", line 236, in sleep\n    cpu_backup_tensor = torch.empty(',
            "host memory as it fell asleep",
            "sleep level 2",
        ),
    ],
)
def test_the_usual_failures_have_a_cause_and_a_change(line: str, failure: str, change: str) -> None:
    result = answer(CONFIG.format(**SERVED) + line)
    assert failure in result.failure
    assert result.causes
    assert any(change in text for text in result.changes)


def test_host_memory_of_sleep_level_1_is_the_weights_of_all_ranks() -> None:
    line = '  File "/vllm/device_allocator/cumem.py", line 236, in sleep\n    cpu_backup_tensor = torch.empty('
    result = answer(CONFIG.format(**{**SERVED, "tp": 2}) + line)
    assert result.causes[0].startswith("sleep level 1 copies the weights of 2 ranks, 15.")


def test_what_sleep_left_is_shown() -> None:
    line = "INFO [gpu_worker.py:81] Sleep mode freed 20.50 GiB memory, 1.15 GiB memory is still in use.\n"
    result = answer(text_of(published("log017")) + line)
    assert "asleep it gave 20.50 GiB back, and 1.15 GiB stayed in use" in result.causes[0]


def test_a_trainer_that_ran_out_beside_an_engine_is_no_engine_log() -> None:
    oom = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.19 "
        "GiB of which 1.00 GiB is free. Including non-PyTorch memory, this process has 70.00 GiB memory in use. Of the "
        "allocated memory 65.00 GiB is allocated by PyTorch, and 3.00 GiB is reserved by PyTorch but unallocated.\n"
    )
    assert isinstance(memcalc.triage(text_of(published("log017")) + oom), Triage)
    assert not is_engine_log(oom)


def test_what_a_log_does_not_name_is_asked_for() -> None:
    with pytest.raises(MissingError, match="give --model"):
        memcalc.triage("INFO [gpu_worker.py:358] Available KV cache memory: 8.77 GiB\n", gpu="h100")
    with pytest.raises(MissingError, match="give --gpu"):
        memcalc.triage(CONFIG.format(**SERVED) + REFUSED)
    with pytest.raises(CombinationError, match="an engine's log takes model, gpu, tp and pp"):
        answer(CONFIG.format(**SERVED) + REFUSED, micro_batch=2)


@pytest.mark.parametrize(
    "line",
    [
        "Available KV cache memory: " + "9" * 400 + " GiB",
        "GPU KV cache size: " + "9" * 400 + " tokens",
        "GPU KV cache size: 419,01.50 tokens",
        "total_gpu_memory (1.2.3 GiB)",
        "total_gpu_memory (0 GiB)",
        REFUSED.replace("31.05/79.19", "1.2.3/4.5.6"),
        REFUSED.replace("31.05/79.19", "31.05/."),
        REFUSED.replace("(31.05/79.19 GiB) ", ""),
        "Sleep mode freed 9,9,9 GiB memory, -9 GiB memory is still in use.",
    ],
)
def test_a_number_that_is_no_size_is_passed_over(line: str) -> None:
    """A log of a line cut in two, or of another release, has an answer all the same."""
    assert answer(f"{CONFIG.format(**SERVED)}{line}\n").served.max_len == 8192


PUMPED = (
    "cumem_allocator ", "CUDA Error: out of memory at ", "Free memory on device ", "Model loading took 1", "1", "1,",
    "weights memory: ", "with config: model='", "GPU memory\n", "total_gpu_memory (", "'model': '", "version ", "  ",
)  # fmt: skip


def test_a_log_of_one_thing_over_and_over_takes_a_time_that_grows_with_its_length() -> None:
    """Two megabytes of each in one line, in a process with a bound on its processor time; squares take hours."""
    program = (
        "import resource; resource.setrlimit(resource.RLIMIT_CPU, (10, 10))\n"
        "from memcalc.probe.triage.engine_lines import engine_lines, is_engine_log\n"
        f"for text in {PUMPED!r}:\n"
        "    log = text * ((2 << 20) // len(text)) + ' Available KV cache memory: 5 GiB'\n"
        "    assert is_engine_log(log) and engine_lines(log).figures\n"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=300, check=False).returncode == 0


def test_the_command_shows_it(tmp_path: Path) -> None:
    path = tmp_path / "engine.log"
    path.write_text(text_of(published("log017")), encoding="utf-8")
    shown = CliRunner().invoke(app, ["triage", str(path), "--gpu", "h100"])
    assert shown.exit_code == 0
    assert shown.stdout.startswith("started · as predicted")
    data = CliRunner().invoke(app, ["triage", str(path), "--gpu", "h100", "--format", "json"])
    assert json.loads(data.stdout)["schema"] == "memcalc.engine-log/1"


SGLANG = (
    "[2025-03-25 16:36:40] server_args=ServerArgs(model_path='meta-llama/Meta-Llama-3.1-8B-Instruct', "
    "quantization=None, context_length=None, mem_fraction_static=0.88, chunked_prefill_size=8192, tp_size=1)\n"
    "[2025-03-25 16:37:06 TP0] Load weight end. type=LlamaForCausalLM, dtype=torch.bfloat16, avail mem=63.48 GB, "
    "mem usage=15.11 GB.\n"
    "[2025-03-25 16:37:06 TP0] KV Cache is allocated. #tokens: 442750, K size: 27.02 GB, V size: 27.02 GB\n"
)
"""Figures of a log in sgl-project/sglang's pull request on tests of Flash Attention 3, on an H100."""


def test_a_log_of_sglang_is_as_predicted() -> None:
    """Its share is of the 78.59 GiB that were free before the weights: 0.88 of them less 15.11 are its pool."""
    result = answer(SGLANG)
    assert (result.failure, result.differs, result.served.engine) == ("", "", "sglang@0.5")
    assert {term.name for term in result.terms} == {"weights", "KV cache", "tokens of the cache"}
    cache = next(term for term in result.terms if term.name == "KV cache")
    assert cache.logged / GIB == pytest.approx(54.04)
    assert cache.predicted / GIB == pytest.approx(0.88 * 78.59 - 15.11, abs=0.3)


def test_heavier_weights_of_sglang_are_named() -> None:
    heavy = SGLANG.replace("63.48 GB, mem usage=15.11", "58.48 GB, mem usage=20.11").replace("27.02", "24.52")
    assert answer(heavy).differs == "weights"


@pytest.mark.parametrize(
    ("line", "failure", "change"),
    [
        (
            "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.",
            "nothing was left",
            "or more",
        ),
        ("Exception: Capture cuda graph failed: CUDA out of memory.", "captured CUDA graphs", "--cuda-graph-max-bs"),
    ],
)
def test_failures_of_sglang(line: str, failure: str, change: str) -> None:
    result = answer(SGLANG.replace("0.88", "0.15") + line)
    assert failure in result.failure
    assert any(change in text for text in result.changes)


def test_a_log_of_sglang_without_its_share_is_asked_about() -> None:
    with pytest.raises(MissingError, match="mem_fraction_static"):
        answer(SGLANG.replace("mem_fraction_static=0.88, ", ""))
