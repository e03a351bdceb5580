"""No verdict comes of a crash, a full disk or a closed pipe; bounds hold in a process of limited memory and time."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import pytest

from memcalc.journal import SUFFIX as JOURNAL
from memcalc.specs.block import MOST_LAYERS

MEMORY = 3 << 30
SECONDS = 60
"""A bound for what ends in a second; what is bounded wrongly takes hours."""
JOB = ("--model", "gpt2", "--gpu", "a100-40g")
PINNED = (*JOB, "--gpus", "1", "--recompute", "none", "--offload", "none", "--micro-batch", "1")
"""A search of few strategies, where what is asked is how its answer is written."""
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


def test_help_that_cannot_be_written_is_no_defect() -> None:
    answer = run("--help", before=lambda: filled(1))
    assert answer.returncode == 74
    assert "could not be written" in one_line(answer)


def shut(*streams: int) -> None:
    """Close streams of a child."""
    for stream in streams:
        os.close(stream)


def filled(*streams: int) -> None:
    """Let streams of a child go to a disk that is full."""
    full = os.open("/dev/full", os.O_WRONLY)
    for stream in streams:
        os.dup2(full, stream)


@pytest.mark.parametrize("broken", [shut, filled], ids=["closed", "full"])
def test_sentences_that_nobody_can_read_change_no_exit_code(broken: Callable[..., None], tmp_path: Path) -> None:
    """Python's own 1 would say of wrong input, and of a plan that is saved, that it does not fit."""
    saved = ("plan", *PINNED, "--save", str(tmp_path / "plan.json"))
    for words, code in (("estimate", "--model", "nothing", "--gpu", "h100"), 2), (saved, 0):
        assert run(*words, before=lambda: broken(2)).returncode == code
    assert (tmp_path / "plan.json").is_file()
    assert run("estimate", *JOB, before=lambda: broken(1, 2)).returncode == 74


def test_a_closed_standard_input_is_said() -> None:
    answer = run("triage", "-", "--gpu", "h100", before=lambda: os.close(0))
    assert answer.returncode == 2
    assert "the standard input is closed" in one_line(answer)


def test_an_install_without_its_dependencies_is_no_verdict(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("raise ImportError('\\x1b[31m no typer')\n")
    answer = run("estimate", *JOB, PYTHONPATH=os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])]))
    assert answer.returncode == 70
    assert "no typer" in one_line(answer)
    assert "\x1b" not in answer.stderr


def test_an_error_carries_nothing_that_a_terminal_obeys(tmp_path: Path) -> None:
    path = tmp_path / "a\u202eb\x1b[31m.yaml"
    path.write_text(
        'actor_rollout_ref: {rollout: {name: "\\e[31mx"}, model: {path: x}}\nalgorithm: {adv_estimator: grpo}\n'
    )
    answer = run("check", str(path), *JOB)
    assert answer.returncode in {2, 3}
    assert not set(one_line(answer)) & set("\u202e\x1b")


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


SWEEP = """
sweep.mode = "estimate"
jobs = {model = ["gpt2", "gpt2-medium"], gpu = ["a100-40g", "h100"], gpus = 1, micro_batch = [1, 2]}
"""
WRITERS = {
    "plan --save": ("plan", *PINNED, "--save", "out.json", "--force"),
    "plan --write": ("plan", *PINNED, "--write", "out"),
    "estimate --output": ("estimate", *JOB, "--output", "out.md", "--force"),
    "estimate --chart": ("estimate", *JOB, "--chart", "out.svg", "--force"),
    "report": ("report", *PINNED, "--output", "out.html", "--force"),
    "export": ("export", "saved.json", "--to", "deepspeed", "--output", "out.json", "--force"),
    "sweep": ("sweep", "sweep.toml", "--output", "out.csv", "--jobs", "1", "--force"),
}
"""Commands that write a file."""
KILLS = {
    "report": 20, "estimate --chart": 25, "plan --save": 25, "plan --write": 30, "sweep": 30, "export": 35,
    "estimate --output": 35,
}  # fmt: skip
"""200, fewer of what takes longer."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved plan."""
    path = tmp_path_factory.mktemp("saved") / "saved.json"
    assert run("plan", *PINNED, "--framework", "deepspeed", "--save", str(path)).returncode == 0
    return path


@pytest.fixture
def inputs(saved: Path, tmp_path: Path) -> Path:
    """A folder with what the commands read."""
    (tmp_path / "sweep.toml").write_text(SWEEP)
    shutil.copy(saved, tmp_path)
    return tmp_path


def outputs(folder: Path) -> dict[str, bytes]:
    """What a reader finds: neither what was still being written, nor the journal of what was interrupted."""
    seen = (path for path in folder.rglob("*") if path.is_file() and not _beside(path, folder))
    return {str(path.relative_to(folder)): path.read_bytes() for path in seen if path.name.startswith("out") or
        path.parent.name == "out"}  # fmt: skip


def _beside(path: Path, folder: Path) -> bool:
    """Whether it is a file that was still being written, or a journal."""
    return any(part.startswith(".") for part in path.relative_to(folder).parts) or JOURNAL in path.name


class Forked:
    """Commands that run again and again in a folder, each in a child of a process that has imported all they need."""

    def __init__(self, folder: Path, *commands: tuple[str, ...]) -> None:
        script = Path(__file__).parents[1] / "forked_commands.py"
        self.ready = subprocess.Popen(
            [sys.executable, str(script), json.dumps(commands)],
            cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def __enter__(self) -> Self:
        self.lasted: list[float] = self._answer()
        return self

    def __exit__(self, *_: object) -> None:
        self.ready.communicate()

    def _answer(self) -> Any:
        assert self.ready.stdout is not None
        return json.loads(self.ready.stdout.readline())

    def run(self, *places: int, after: float | None = None) -> list[int]:
        """Run some at once, killed after so many seconds; return their exit codes."""
        assert self.ready.stdin is not None
        print(json.dumps([places, after]), file=self.ready.stdin, flush=True)
        found: list[int] = self._answer()
        return found


@pytest.mark.slow
@pytest.mark.parametrize("name", WRITERS)
def test_a_file_is_whole_or_not_there_however_often_memcalc_is_killed(name: str, inputs: Path) -> None:
    """Killed at moments from start to end; what stands there is what an undisturbed run writes, or nothing."""
    killed = 0
    with Forked(inputs, WRITERS[name]) as command:
        whole = outputs(inputs)
        assert whole
        for step in range(KILLS[name]):
            shutil.rmtree(inputs / "out", ignore_errors=True)
            if step % 2:
                (inputs / next(iter(whole))).unlink(missing_ok=True)
            (code,) = command.run(0, after=command.lasted[0] * 1.1 * step / KILLS[name])
            assert code in (0, -signal.SIGKILL)
            killed += code != 0
            assert outputs(inputs) in (whole, {})
    assert killed
    shutil.rmtree(inputs / "out", ignore_errors=True)
    alone = [sys.executable, "-m", "memcalc", *WRITERS[name]]
    subprocess.run(alone, cwd=inputs, capture_output=True, check=True, timeout=SECONDS)
    assert outputs(inputs) == whole


def small() -> None:
    """Let a child write files of 512 bytes at the most; stands for the full disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (512, 512))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "plan --save" else pytest.mark.slow) for name in WRITERS]
)
def test_a_file_that_no_disk_has_room_for_is_not_there(name: str, inputs: Path) -> None:
    before = {path.name for path in inputs.iterdir()}
    answer = subprocess.run(
        [sys.executable, "-m", "memcalc", *WRITERS[name]],
        cwd=inputs, capture_output=True, text=True, timeout=SECONDS, preexec_fn=small, check=False,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )  # fmt: skip
    assert answer.returncode == 2
    assert answer.stderr.endswith((": File too large.\n", ": disk I/O error.\n"))  # the second is SQLite's
    assert "Traceback" not in answer.stderr
    assert {path.name for path in inputs.iterdir() if JOURNAL not in path.name} == before


@pytest.mark.slow
@pytest.mark.parametrize("name", ["estimate --output", "plan --save", "plan --write"])
def test_writers_of_one_file_leave_that_of_one_of_them(name: str, inputs: Path) -> None:
    others = tuple(word if word != "gpt2" else "gpt2-medium" for word in WRITERS[name])
    wholes = []
    for words in (WRITERS[name], others):
        alone = [sys.executable, "-m", "memcalc", *words]
        subprocess.run(alone, cwd=inputs, capture_output=True, check=True, timeout=SECONDS)
        wholes.append(outputs(inputs))
        shutil.rmtree(inputs / "out", ignore_errors=True)
    with Forked(inputs, WRITERS[name], others) as commands:
        for _ in range(5):
            shutil.rmtree(inputs / "out", ignore_errors=True)
            codes = set(commands.run(0, 1, 0, 1))
            assert 0 in codes <= {0, 2}
            assert outputs(inputs) in wholes
            assert not list(inputs.rglob(".*"))


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"_MEMCALC_COMPLETE": "foo"}, "_MEMCALC_COMPLETE must be complete_SHELL or source_SHELL"),
        ({"_MEMCALC_COMPLETE": "complete_bash"}, "COMP_WORDS must be a line"),
        ({"_MEMCALC_COMPLETE": "complete_bash", "COMP_WORDS": "memcalc pl", "COMP_CWORD": "x"}, "got 'x'"),
    ],
)
def test_completions_that_no_shell_asks_for_are_no_verdict(variables: dict[str, str], said: str) -> None:
    answer = run(**variables)
    assert (answer.returncode, answer.stdout) == (2, "")
    assert said in one_line(answer)


def test_a_shell_is_given_the_commands_that_begin_so() -> None:
    answer = run(_MEMCALC_COMPLETE="complete_bash", COMP_WORDS="memcalc pl", COMP_CWORD=1)
    assert (answer.returncode, answer.stdout) == (0, "plan\n")
