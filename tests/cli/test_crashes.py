"""No verdict comes of a crash, a full disk or a closed pipe; bounds hold in a process of limited memory and time."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from memcalc.specs.block import MOST_LAYERS

MEMORY = 3 << 30
SECONDS = 60
"""A bound for what ends in a second; what is bounded wrongly takes hours."""
JOB = ("--model", "gpt2", "--gpu", "a100-40g")
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 512, "intermediate_size": 1024,
    "num_hidden_layers": 8, "num_attention_heads": 8, "vocab_size": 32000,
}  # fmt: skip


def bounded() -> None:
    """Give a child a bound on its memory."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))


def run(*words: str, before: Callable[[], None] = bounded, **options: object) -> subprocess.CompletedProcess[str]:
    """Run memcalc in a process of its own."""
    environment = {**os.environ, **{key: str(value) for key, value in options.items()}}
    return subprocess.run(
        [sys.executable, "-m", "memcalc", *words],
        capture_output=True, text=True, timeout=SECONDS, preexec_fn=before, env=environment, check=False,
    )  # fmt: skip


def one_line(answer: subprocess.CompletedProcess[str]) -> str:
    """The sentence of a failure."""
    assert "Traceback" not in answer.stderr
    assert answer.stderr.count("\n") == 1
    return answer.stderr


@pytest.mark.parametrize(
    "text",
    [
        "a0: &a0 {}\n" + "".join(f"a{i}: &a{i} {{<<: [{','.join([f'*a{i - 1}'] * 10)}]}}\n" for i in range(1, 13)),
        "a: &a {<<: *a}\n",
    ],
    ids=["merges of merges", "a table that brings in itself"],
)
def test_yaml_that_brings_in_tables_without_end_is_refused(text: str, tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    (tmp_path / "job.yaml").write_text(text)
    answer = run("check", str(tmp_path / "job.yaml"), *JOB)
    assert answer.returncode == 2
    assert "must" in one_line(answer)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"num_hidden_layers": 10**9}, f"from 1 to {MOST_LAYERS}"),
        ({"hidden_size": 2**31 - 8}, "must have at most 1e+16 parameters"),
    ],
)
def test_a_size_that_no_model_has_is_refused(changed: dict[str, int], said: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **changed}))
    answer = run("estimate", "--model", str(tmp_path), "--gpu", "h100")
    assert answer.returncode == 2
    assert said in one_line(answer)


def test_the_deepest_model_is_answered(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": MOST_LAYERS}))
    assert run("estimate", "--model", str(tmp_path), "--gpu", "h100").returncode == 1


def test_a_micro_batch_that_64_bits_cannot_count_is_refused() -> None:
    answer = run(
        "estimate", "--model", "llama-3.1-405b", "--gpu", "h100", "--seq-len", "99000000", "--micro-batch", "1000000"
    )
    assert answer.returncode == 2
    assert "seq-len" in one_line(answer)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is always full is Linux's")
def test_an_answer_that_cannot_be_written_is_no_verdict() -> None:
    with Path("/dev/full").open("w") as full:
        answer = subprocess.run(
            [sys.executable, "-m", "memcalc", "estimate", *JOB],
            stdout=full, stderr=subprocess.PIPE, text=True, timeout=SECONDS, check=False,
        )  # fmt: skip
    assert answer.returncode == 74
    assert "could not be written" in one_line(answer)


def test_a_closed_standard_output_is_no_verdict() -> None:
    answer = run("estimate", *JOB, before=lambda: os.close(1))
    assert answer.returncode == 74
    assert "could not be written" in one_line(answer)


def test_a_crash_has_a_code_of_its_own_and_says_where_to_go(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import memcalc.api\ndef estimate(*_, **__):\n    raise ZeroDivisionError('of a test')\n"
        "memcalc.api.estimate = estimate\n"
    )
    paths = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    answer = run("estimate", *JOB, PYTHONPATH=paths)
    assert answer.returncode == 70
    assert "ZeroDivisionError: of a test (sitecustomize.py:3)" in one_line(answer)
    shown = run("estimate", *JOB, PYTHONPATH=paths, MEMCALC_TRACEBACK=1)
    assert "Traceback" in shown.stderr


def test_seven_bytes_are_no_reason_to_ask_for_gigabytes(tmp_path: Path) -> None:
    (tmp_path / "snapshot.json").write_text('{"a":1}')
    answer = run("triage", str(tmp_path / "snapshot.json"))
    assert answer.returncode == 3
    assert "MemoryError" not in one_line(answer)


def test_a_terminal_of_a_hundred_million_columns_is_drawn_as_a_wide_one() -> None:
    answer = run("estimate", *JOB, COLUMNS=99_999_999)
    assert answer.returncode == 0
    assert max(map(len, answer.stdout.splitlines())) <= 1000


KILLED = {
    "plan --save": ("plan", *JOB, "--gpus", "1", "--save", "out.json", "--force"),
    "plan --write": ("plan", *JOB, "--gpus", "1", "--write", "out"),
    "estimate --output": ("estimate", *JOB, "--output", "out.md", "--force"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", KILLED)
def test_a_file_is_whole_or_not_there_however_often_memcalc_is_killed(name: str, tmp_path: Path) -> None:
    """Killed at 40 moments from start to end; what stands there is what an undisturbed run writes, or nothing."""

    def files() -> dict[str, bytes]:
        seen = (path for path in tmp_path.rglob("*") if path.is_file() and not _beside(path, tmp_path))
        return {str(path.relative_to(tmp_path)): path.read_bytes() for path in seen}

    command = [sys.executable, "-m", "memcalc", *KILLED[name]]
    subprocess.run(command, cwd=tmp_path, capture_output=True, check=True, timeout=SECONDS)
    whole = files()
    assert whole
    for step in range(40):
        if name == "plan --write":
            subprocess.run(["rm", "-rf", str(tmp_path / "out")], check=True)
        child = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            child.wait(0.2 + 0.04 * step)
        except subprocess.TimeoutExpired:
            child.send_signal(signal.SIGKILL)
            child.wait()
        assert files() in (whole, {})


def _beside(path: Path, folder: Path) -> bool:
    """Whether it is a file that was still being written."""
    return any(part.startswith(".") for part in path.relative_to(folder).parts)


def test_a_file_that_no_disk_has_room_for_is_not_there(tmp_path: Path) -> None:
    """RLIMIT_FSIZE stands for the full disk."""

    def small() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (512, 512))

    path = tmp_path / "out.json"
    answer = run("plan", *JOB, "--gpus", "1", "--save", str(path), before=small, PYTHONDONTWRITEBYTECODE=1)
    assert answer.returncode == 2
    assert "cannot be written" in answer.stderr
    assert not list(tmp_path.iterdir())
