"""Sweeps: every row is a call of the library, whatever runs it and however often it is interrupted."""

from __future__ import annotations

import csv
import io
import json
import multiprocessing
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import sweep_workers
from typer.testing import CliRunner

import memcalc
from memcalc import sweeps
from memcalc.cli.app import app
from memcalc.errors import InputError, MemcalcError
from memcalc.journal import SUFFIX as JOURNAL
from memcalc.journal import Progress
from memcalc.sweeps import space as spaces
from memcalc.sweeps.executors import backend_for
from memcalc.sweeps.rows import COLUMNS, rows_of
from memcalc.sweeps.space import space_of

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "docs" / "examples" / "sweep.toml"
LENGTHS = [128, 256, 384, 512, 640, 768]
ONE = {"sweep": {"mode": "estimate"}, "jobs": {"model": "gpt2", "gpu": "a100-40g", "gpus": 1, "seq_len": LENGTHS}}
TOML = """
[sweep]
mode = "estimate"
[jobs]
model = ["gpt2", "bert-large"]
gpu = ["a100-40g", "v100-16g"]
gpus = 1
seq_len = [64, 128, 160, 192, 256, 320, 352, 384, 448, 512]
framework = "ddp"
"""


def words(**changes: Any) -> dict[str, Any]:
    """Return the small sweep with other words."""
    jobs = {**ONE["jobs"], **changes}
    return {**ONE, "jobs": {name: value for name, value in jobs.items() if value is not None}}


def cli(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["sweep", *arguments], prog_name="memcalc")


# ------------------------------------------------------------------------------------------------------ rows and order


def test_rows_of_plans_are_those_of_direct_calls() -> None:
    sweep = {"jobs": {"model": ["gpt2", "7b"], "gpu": "a100-40g", "gpus": [2, 8], "recompute": "full", "zero": "3"}}
    answer = memcalc.sweep(sweep, jobs=1)
    asked = [(model, gpus) for model in ("gpt2", "7b") for gpus in (2, 8)]
    assert [(row["model"], row["gpus"]) for row in answer.rows] == asked
    for row, (model, gpus) in zip(answer.rows, asked, strict=True):
        found = memcalc.plan(model=model, gpu="a100-40g", gpus=gpus, recompute="full", zero=3, top=1, advice=False)
        plan = found.plans[0]
        assert row["status"] == plan.verdict
        assert (row["allocated_bytes"], row["reserved_bytes"], row["device_bytes"]) == (
            plan.peak.allocated, plan.peak.reserved, plan.peak.device,
        )  # fmt: skip
        assert (row["step_s"], row["mfu"]) == (plan.time.step, plan.time.mfu)
        assert row["tokens_per_second_per_gpu"] == plan.time.tokens_per_second_per_gpu
        assert (row["searched"], row["feasible"]) == (found.searched, found.feasible)
        dumped = plan.strategy.model_dump(mode="json")
        for name in ("framework", "precision", "zero", "dp", "tp", "sp", "pp", "recompute", "micro_batch"):
            assert row[name] == dumped[name], name
        assert row["offload"] == (",".join(dumped["offload"]) or "none")
        assert row["command"] == plan.command
        assert row["accumulation_steps"] * row["micro_batch"] * row["dp"] == row["global_batch"] == plan.global_batch


def test_rows_of_estimates_are_those_of_direct_calls() -> None:
    for row, seq_len in zip(memcalc.sweep(ONE, jobs=1).rows, LENGTHS, strict=True):
        found = memcalc.estimate(model="gpt2", gpu="a100-40g", gpus=1, seq_len=seq_len)
        assert (row["seq_len"], row["status"], row["device_bytes"]) == (seq_len, found.verdict, found.peak.device)
        assert (row["device_low_bytes"], row["device_high_bytes"]) == (found.interval.low, found.interval.high)
        assert row["step_s"] is None


def test_the_first_word_varies_slowest_and_exclusions_leave_no_gap() -> None:
    sweep = words(gpus=[1, 2], seq_len=[128, 256, 384])
    sweep["exclude"] = [{"gpus": 1, "seq_len": [128, 384]}, {"gpus": 2, "seq_len": 256}]
    rows = memcalc.sweep(sweep, jobs=1).rows
    assert [(row["job"], row["gpus"], row["seq_len"]) for row in rows] == [(1, 1, 256), (2, 2, 128), (3, 2, 384)]
    assert rows[0]["asked"] == "gpus=1 seq_len=256"


def test_fields_below_set_reach_the_call_and_have_columns() -> None:
    table = {"strategy": {"reduce_dtype": ["fp32", "bf16"]}}
    sweep = words(model="llama-3.2-1b", gpus=2, zero=2, seq_len=1024, set=table)
    rows = memcalc.sweep(sweep, jobs=1).rows
    assert [row["set.strategy.reduce_dtype"] for row in rows] == ["fp32", "bf16"]
    for row in rows:
        settings = {"strategy.reduce_dtype": row["set.strategy.reduce_dtype"]}
        found = memcalc.estimate(
            model="llama-3.2-1b", gpu="a100-40g", gpus=2, zero=2, seq_len=1024, settings=settings
        )  # fmt: skip
        assert row["allocated_bytes"] == found.peak.allocated
    quoted = words(model="llama-3.2-1b", gpus=2, zero=2, seq_len=1024, set={"strategy.reduce_dtype": ["fp32", "bf16"]})
    assert memcalc.sweep(quoted, jobs=1).rows == rows


def test_a_job_that_cannot_be_is_a_row_and_not_the_end() -> None:
    rows = memcalc.sweep(words(seq_len=[512, 4096], tp=[1, 5], gpus=5, framework="megatron"), jobs=1).rows
    assert [row["status"] == "error" for row in rows] == [False, True, True, True]
    assert "heads" in rows[1]["reason"]
    assert (rows[1]["tp"], rows[1]["gpus"], rows[1]["seq_len"]) == (5, 5, 512), "an error row says what was asked"
    assert "learned positions for 1024 tokens" in rows[2]["reason"]
    assert rows[2]["device_bytes"] is None
    with pytest.raises(InputError) as error:
        memcalc.estimate(model="gpt2", gpu="a100-40g", gpus=5, seq_len=4096, tp=1, framework="megatron")
    assert rows[2]["reason"] == str(error.value)


def test_a_fault_of_the_program_is_a_row_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(**words: Any) -> Any:
        if words["seq_len"] == LENGTHS[1]:
            raise ZeroDivisionError("division by zero")
        return estimate(**words)

    estimate = memcalc.estimate
    monkeypatch.setattr("memcalc.api.estimate", broken)
    rows = memcalc.sweep(ONE, jobs=1).rows
    assert [row["status"] == "error" for row in rows] == [False, True, False, False, False, False]
    assert rows[1]["reason"] == "unexpected ZeroDivisionError: division by zero"


@pytest.mark.slow
def test_where_nothing_fits_the_row_has_the_reason() -> None:
    job = {"model": "llama-2-70b", "gpu": "v100-16g", "gpus": 1, "framework": "hf", "seq_len": 4096}
    job["global_batch"] = "64k tokens"
    row = memcalc.sweep({"jobs": job}, jobs=1).rows[0]
    found = memcalc.plan(**job)
    assert row["status"] == "does-not-fit"
    assert found.too_large.rstrip(".") in row["reason"]
    assert found.nearest[0].change in row["reason"]
    assert (row["global_batch"], row["feasible"], row["device_bytes"]) == (16, 0, None)  # 64 x 1024 of 4096


def test_an_era_and_a_batch_of_tokens_are_kept_as_asked() -> None:
    sweep = words(framework=["hf@4.45", "hf"], seq_len=512, global_batch=["8192 tokens", 32])
    rows = memcalc.sweep(sweep, jobs=1).rows
    assert [row["global_batch"] for row in rows] == [16, 32, 16, 32]
    assert rows[0]["asked"] == "framework=hf@4.45 global_batch='8192 tokens'"


# ------------------------------------------------------------------------------------------------------------- tables


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the path of a sweep with a fitting row, one that does not, and an error."""
    path = tmp_path_factory.mktemp("mixed") / "mixed.toml"
    path.write_text(
        '[sweep]\nmode = "estimate"\n[jobs]\nmodel = ["gpt2", "llama-2-7b"]\ngpu = "v100-16g"\ngpus = 1\n'
        'precision = "fp16-mixed"\nseq_len = [512, 2048]\n'
    )
    return path


def test_formats_agree(mixed: Path, tmp_path: Path) -> None:
    rows = [dict(row) for row in memcalc.sweep(mixed, jobs=1).rows]
    assert {row["status"] for row in rows} == {"fits", "does-not-fit", "error"}
    for ending in ("csv", "json", "jsonl"):
        memcalc.sweep(mixed, jobs=1, output=tmp_path / f"t.{ending}")
    assert json.loads((tmp_path / "t.json").read_text())["rows"] == rows
    assert [json.loads(line) for line in (tmp_path / "t.jsonl").read_text().splitlines()] == rows
    kinds = {column.name: column.kind for column in COLUMNS}
    read = {"text": str, "whole": int, "number": float, "flag": lambda text: text == "true"}
    listed = list(csv.DictReader(io.StringIO((tmp_path / "t.csv").read_text())))
    for cells, row in zip(listed, rows, strict=True):
        assert {name: read[kinds[name]](cell) if cell else None for name, cell in cells.items()} == {
            name: None if value == "" else value for name, value in row.items()
        }
    shown = cli(str(mixed), "--format", "csv")
    assert shown.stdout == (tmp_path / "t.csv").read_text(), "the screen has the bytes of the file"
    assert json.loads(cli(str(mixed), "--format", "json").stdout) == json.loads((tmp_path / "t.json").read_text())


@pytest.mark.skipif(find_spec("pyarrow") is None, reason="pyarrow is not installed")
def test_parquet_has_the_same_rows_and_typed_columns(mixed: Path, tmp_path: Path) -> None:
    from pyarrow import parquet

    memcalc.sweep(mixed, jobs=1, output=tmp_path / "t.parquet")
    table = parquet.read_table(tmp_path / "t.parquet")
    assert table.to_pylist() == [dict(row) for row in memcalc.sweep(mixed, jobs=1).rows]
    kinds = {"text": "string", "whole": "int64", "number": "double", "flag": "bool"}
    assert {field.name: str(field.type) for field in table.schema} == {c.name: kinds[c.kind] for c in COLUMNS}


def test_the_screen_counts_and_gives_each_reason_once(mixed: Path) -> None:
    text = cli(str(mixed), "--top", "3").stdout
    assert "4 jobs (2 model × 2 seq-len), estimate of each" in text
    assert "1 fits, 2 do not fit, 1 error" in text
    assert "#2: seq-len 2048:" in text
    assert "#3: needs 127.5 of 15.8 GiB per GPU." in text
    assert "3 of 4 rows (more: --top N; all: --output FILE)" in text


def test_missing_pyarrow_is_said_before_anything_is_computed(
    mixed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memcalc.sweeps.rows.find_spec", lambda _: None)
    result = cli(str(mixed), "--output", str(tmp_path / "t.parquet"))
    assert (result.exit_code, list(tmp_path.iterdir())) == (2, [])
    assert "pip install 'memcalc[parquet]'" in result.stderr


def test_missing_dask_is_said(mixed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memcalc.sweeps.executors.find_spec", lambda _: None)
    result = cli(str(mixed), "--scheduler", "local")
    assert result.exit_code == 2
    assert "pip install 'memcalc[distributed]'" in result.stderr


def test_columns_are_documented() -> None:
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    assert [column.name for column in COLUMNS if f"`{column.name}`" not in page] == []


def test_the_page_shows_the_example_file() -> None:
    assert EXAMPLE.read_text(encoding="utf-8") in (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")


# ----------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('[job]\nmodel = "gpt2"', "did you mean 'jobs'?"),
        ('model = "gpt2"\ngpu = "h100"', "key 'model': belongs below [jobs]"),
        ('[sweep]\ngpus = [1, 2]\n[jobs]\nmodel = "gpt2"', "key 'gpus': belongs below [jobs]"),
        ('[sweep]\nmod = "plan"\n[jobs]\nmodel = "gpt2"', "[sweep]: unknown key 'mod': must be one of mode"),
        ('[sweep]\nmode = "guess"\n[jobs]\nmodel = "gpt2"', "mode 'guess': must be 'plan' or 'estimate'"),
        ('[jobs]\nmodel = "gpt2"\ngpu = "h100"\ngpus = 1\nseqlen = 1', "unknown jobs key 'seqlen'"),
        ('[jobs]\nmodel = "gpt2"\ngpu = "h100"\ngpus = 1\nseqlen = 1', "did you mean 'seq_len'?"),
        ('[jobs]\nmodel = "gpt2"\ngpu = "h100"', "jobs key 'gpus' is missing"),
        ('[jobs]\nmodel = "gptt2"\ngpu = "h100"\ngpus = 1', "did you mean 'gpt2'?"),
        ('[jobs]\nmodel = ["gpt2", "lama-2-7b"]\ngpu = "h100"\ngpus = 1', "did you mean 'llama-2-7b'?"),
        ('[jobs]\nmodel = "gpt2"\ngpu = "h10O"\ngpus = 1', "did you mean 'h100'?"),
        ('[jobs]\nmodel = "gpt2"\ngpu = "h100"\ngpus = [1, 0]', "gpus 0:"),
        ('[jobs]\nmodel = "gpt2"\ngpu = "h100"\ngpus = [1, true]', "gpus True:"),
        ('[jobs]\nmodel = "gpt2"\ngpu = "h100"\ngpus = [1, 1]', "each value may occur once"),
        ('[jobs]\nmodel = "gpt2"\ngpu = "h100"\ngpus = []', "jobs.gpus"),
        ('[jobs]\nmodel = "gpt2"\ngpu = "h100"\ngpus = 1979-05-27', "jobs.gpus"),
        ('[jobs]\nmodel = 7\ngpu = "h100"\ngpus = 1', "must be the name of a preset"),
        ('[jobs]\nmodel = "gpt2"\ngpu = "h100"\ngpus = 1\nprecision = "bf16-mixd"', "did you mean 'bf16-mixed'?"),
        ('[jobs]\nmodel = "gpt2"\ngpu = "h100"\ngpus = 1\nglobal_batch = "many"', "global_batch 'many':"),
        ('[jobs]\nmodel = "gpt2"\ngpu = "h100"\ngpus = 1\ntp = { of = 2 }', "tp"),
        ('[jobs]\nmodel = "gpt2"\ngpu = "h100"\ngpus = 1\nset.strategy.zeroo = 1', "did you mean 'strategy.zero'?"),
        ('[jobs]\nmodel = "gpt2"\ngpu = "h100"\ngpus = 1\nset.a.b.c = 1', "set.a.b"),
        ('[jobs]\nmodel = "gpt2"\ngpu = "h100"\ngpus = 1\n[[exclude]]\ntp = 1', "unknown exclude key 'tp'"),
        ('[jobs]\nmodel = "gpt2"\ngpu = "h100"\ngpus = [1, 2]\n[[exclude]]\ngpus = 4', "exclude gpus 4:"),
        ('[jobs]\nmodel = "gpt2"\ngpu = "h100"\ngpus = 1\n[[exclude]]\ngpus = 1', "must leave at least one job"),
        ('[jobs]\nmodel = "gpt2"\ngpu = "h100"\ngpus = 1\n[[exclude]]\n', "must name the words"),
        ("- model: gpt2\n- gpu: h100\n", "must be TOML"),
        ("x = " + "[" * 100_000, "must be TOML"),
        ("a" + ".a" * 500_000 + " = 1", "must have at most 500 dots in a line"),
        ("#" * (1 << 21), "must be at most 1 MiB"),
    ],
)
def test_a_wrong_file_is_one_sentence(content: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(content)
    result = cli(str(path))
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stderr.count("\n") == 1
    assert "wrong.toml" in result.stderr


def test_the_product_is_bounded_and_printed(tmp_path: Path) -> None:
    lists = {"gpus": list(range(1, 1025)), "seq_len": list(range(1, 1001))}
    with pytest.raises(InputError, match=r"jobs 1024000: 1024 gpus × 1000 seq_len must give at most 1,000,000 jobs"):
        memcalc.sweep(words(**lists))
    lists["seq_len"] = lists["seq_len"][:20]
    with pytest.raises(InputError, match="must be given for more than 10,000 jobs, and these are 20,480"):
        memcalc.sweep(words(**lists))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["absent", "folder", "device", "latin"])
def test_what_is_no_file_of_text_is_one_sentence(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "sweep.toml"
    if kind == "folder":
        path.mkdir()
    if kind == "device":
        path.symlink_to("/dev/zero")
    if kind == "latin":
        path.write_bytes("[jobs] # größer".encode("utf-16"))
    result = cli(str(path))
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1), repr(result.exception)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--jobs", "0"), "--jobs '0':"),
        (("--jobs", "2000"), "from 1 to 1,024"),
        (("--output", "t.xlsx"), "must be one of .csv, .json, .jsonl, .parquet"),
        (("--output", "t.jsn"), "did you mean '.json'?"),
        (("--output", "no/where/t.csv"), "must exist"),
        (("--format", "yaml"), "must be one of rich"),
        (("--top", "x"), "--top 'x':"),
    ],
)
def test_wrong_options_are_one_sentence(
    mixed: Path, arguments: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = cli(str(mixed), *arguments)
    assert result.exit_code == 2
    assert said in result.stderr
    assert not [path for path in tmp_path.iterdir() if path.suffix != JOURNAL[-6:]]


# ------------------------------------------------------------------------------------------- interrupted and continued


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    """Return a sweep of 40 jobs, and its table from one process that nothing has disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "sweep.toml").write_text(TOML)
    memcalc.sweep(folder / "sweep.toml", jobs=1, output=folder / "t.csv")
    return folder / "sweep.toml", (folder / "t.csv").read_bytes()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    """Return the same for a sweep of 8 jobs."""
    folder = tmp_path_factory.mktemp("small")
    (folder / "sweep.toml").write_text(TOML.replace("64, 128, 160, 192, 256, 320, 352, 384,", ""))
    memcalc.sweep(folder / "sweep.toml", jobs=1, output=folder / "t.csv")
    return folder / "sweep.toml", (folder / "t.csv").read_bytes()


class _StopError(Exception):
    """Ends a sweep from within its progress."""


def stopped_after(rows: int) -> Any:
    def listen(state: Progress) -> None:
        if state.done >= rows:
            raise _StopError

    return listen


def test_an_interrupted_sweep_goes_on_to_the_same_bytes(whole: tuple[Path, bytes], tmp_path: Path) -> None:
    path, expected = whole
    output = tmp_path / "t.csv"
    with pytest.raises(_StopError):
        memcalc.sweep(path, jobs=1, output=output, on_progress=stopped_after(10))
    journal = tmp_path / f"t.csv{JOURNAL}"
    assert not output.exists()
    with sqlite3.connect(journal) as database:
        (rows,) = database.execute("SELECT COUNT(*) FROM entry").fetchone()
    database.close()
    states: list[Progress] = []
    memcalc.sweep(path, jobs=1, output=output, on_progress=states.append)
    assert states[0].done == states[0].resumed == rows >= 10
    assert states[-1] == Progress(40, 40, states[0].resumed)
    assert output.read_bytes() == expected
    assert list(tmp_path.iterdir()) == [output], "the journal is gone"


def test_another_sweep_does_not_go_on_with_a_journal(small: tuple[Path, bytes], tmp_path: Path) -> None:
    path, _ = small
    output, journal = tmp_path / "t.csv", tmp_path / f"t.csv{JOURNAL}"
    with pytest.raises(_StopError):
        memcalc.sweep(path, jobs=1, output=output, on_progress=stopped_after(4))
    other = tmp_path / "other.toml"
    other.write_text(TOML.replace("448, 512", "448, 500"))
    result = cli(str(other), "--output", str(output), "--force")
    assert result.exit_code == 2
    assert "it belongs to another sweep; delete it, or name another --output" in result.stderr
    with sqlite3.connect(journal) as database:
        database.execute("UPDATE head SET job = replace(job, ?, '9.9.9')", (memcalc.__version__,))
    database.close()
    assert "of memcalc 9.9.9 and not" in cli(str(path), "--output", str(output)).stderr


def test_a_changed_preset_is_another_sweep(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    preset = tmp_path / "models" / "mine.toml"
    preset.write_text((ROOT / "presets" / "models" / "gpt2.toml").read_text())
    before = space_of(words(model="mine"), (str(tmp_path),)).fingerprint
    assert space_of(words(model="mine"), (str(tmp_path),)).fingerprint == before
    preset.write_text(preset.read_text() + "\n# a comment changes nothing\n")
    assert space_of(words(model="mine"), (str(tmp_path),)).fingerprint == before
    preset.write_text(preset.read_text().replace("50257", "50304"))
    assert space_of(words(model="mine"), (str(tmp_path),)).fingerprint != before


def test_two_sweeps_do_not_write_one_journal(small: tuple[Path, bytes], tmp_path: Path) -> None:
    pytest.importorskip("fcntl")
    said: list[str] = []

    def second(_: Progress) -> None:
        if not said:
            said.append(cli(str(small[0]), "--output", str(tmp_path / "t.csv")).stderr)

    memcalc.sweep(small[0], jobs=1, output=tmp_path / "t.csv", on_progress=second)
    assert "another sweep is writing it" in said[0]


def test_a_table_is_replaced_only_by_force(small: tuple[Path, bytes], tmp_path: Path) -> None:
    path, expected = small
    output = tmp_path / "t.csv"
    output.write_text("mine")
    assert cli(str(path), "--output", str(output)).exit_code == 2
    assert output.read_text() == "mine"
    result = cli(str(path), "--output", str(output), "--force", "--jobs", "1")
    assert (result.exit_code, output.read_bytes()) == (0, expected)
    assert f"Writtento{output}" in "".join(result.stdout.split())


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


SOME_ROWS = 6 * 4096
"""Bytes of a journal that has rows of two commits or more: without rows it has four pages."""


def started(path: Path, output: Path) -> subprocess.Popen[bytes]:
    """Return a sweep in a process of its own, with two workers, that has written some rows."""
    line = [sys.executable, "-m", "memcalc", "sweep", str(path), "--output", str(output), "--jobs", "2"]
    process = subprocess.Popen(
        line,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        # a shell's background jobs ignore it, and their children with them
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # noqa: PLW1509
    )
    journal = output.with_name(output.name + JOURNAL)
    while process.poll() is None and (not journal.exists() or journal.stat().st_size < SOME_ROWS):
        time.sleep(0.01)
    return process


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the children of a process in /proc")
def test_a_killed_sweep_goes_on_to_the_same_bytes_and_leaves_no_worker(
    whole: tuple[Path, bytes], tmp_path: Path
) -> None:
    path, expected = whole
    output = tmp_path / "t.csv"
    process = started(path, output)
    workers = children(process.pid)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert len(workers) >= 2
    deadline = time.monotonic() + 60
    while any(
        Path(f"/proc/{pid}/cmdline").exists() and b"spawn" in Path(f"/proc/{pid}/cmdline").read_bytes()
        for pid in workers
    ):
        assert time.monotonic() < deadline, "workers outlive their parent"
        time.sleep(0.05)
    states: list[Progress] = []
    memcalc.sweep(path, jobs=2, output=output, on_progress=states.append)
    assert 0 < states[0].resumed < 40
    assert output.read_bytes() == expected


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")
def test_an_interrupt_says_how_to_go_on(whole: tuple[Path, bytes], tmp_path: Path) -> None:
    path, expected = whole
    for attempt in range(5):
        output = tmp_path / f"{attempt}.csv"
        process = started(path, output)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=120)
        if process.returncode:  # on a busy machine a sweep may have ended before the signal came
            break
    assert process.returncode == 130
    assert b"run the same command to resume" in said
    assert said.count(b"\n") == 1
    memcalc.sweep(path, jobs=1, output=output)
    assert output.read_bytes() == expected


# ------------------------------------------------------------------------------------------------------------ workers


def test_two_processes_give_the_bytes_of_one(whole: tuple[Path, bytes], tmp_path: Path) -> None:
    path, expected = whole
    memcalc.sweep(path, jobs=2, output=tmp_path / "t.csv")
    assert (tmp_path / "t.csv").read_bytes() == expected


@pytest.mark.slow
def test_a_killed_worker_loses_nothing(whole: tuple[Path, bytes], tmp_path: Path) -> None:
    path, expected = whole
    killed: list[int] = []

    def kill(state: Progress) -> None:
        if 0 < state.done < 40 and not killed:
            worker = multiprocessing.active_children()[0]
            killed.append(state.done)
            os.kill(worker.pid or 0, signal.SIGKILL)

    memcalc.sweep(path, jobs=2, output=tmp_path / "t.csv", on_progress=kill)
    assert killed
    assert (tmp_path / "t.csv").read_bytes() == expected


DYING = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
"""CPython's pool ends the other processes of one that died while a submission may start a new one, and its own thread
ends with an error, once every future has its exception (concurrent/futures/process.py, terminate_broken)."""


@pytest.mark.slow
@DYING
def test_a_worker_that_dies_once_costs_no_row(
    whole: tuple[Path, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, expected = whole
    monkeypatch.setattr(sweeps, "rows_of", sweep_workers.killed_once)
    monkeypatch.setenv(sweep_workers.FLAG, str(tmp_path / "flag"))
    memcalc.sweep(path, jobs=2, output=tmp_path / "t.csv")
    assert (tmp_path / "flag").exists()
    assert (tmp_path / "t.csv").read_bytes() == expected


@DYING
def test_a_process_that_outlives_its_pool_is_ended() -> None:
    """A process started while the pool ends the others waits for work for ever, and the pool for it."""
    with backend_for(2, None, 2) as backend:
        pool = backend.executor
        assert isinstance(pool, ProcessPoolExecutor)
        pids = {future.result() for future in [pool.submit(sweep_workers.paused) for _ in range(2)]}
        processes = list(pool._processes.values())
        assert {process.pid for process in processes} == pids  # both were started
        processes[1].terminate = lambda: None  # type: ignore[method-assign]  # as one that the pool does not know yet
        waiting = pool.submit(sweep_workers.paused)
        os.kill(processes[0].pid or 0, signal.SIGKILL)
        with pytest.raises(BrokenProcessPool):
            waiting.result()
        restart = threading.Thread(target=backend.restart, daemon=True)
        restart.start()
        restart.join(60)
        stuck = restart.is_alive()
        processes[1].kill()  # so that a failure ends too
        restart.join()
    assert not stuck


@pytest.mark.slow
@DYING
def test_a_job_that_kills_its_worker_again_and_again_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The jobs that were in flight beside it are not blamed."""
    monkeypatch.setattr(sweeps, "rows_of", sweep_workers.killed_by_one_job)
    monkeypatch.setattr(sweeps, "_FIRST_JOBS", 2)
    lengths = [128, 256, sweep_workers.DEADLY, 384, 512, 640]
    answer = memcalc.sweep(words(model="opt-125m", seq_len=lengths), jobs=2)
    assert [row["status"] == "error" for row in answer.rows] == [length == sweep_workers.DEADLY for length in lengths]
    assert "worker process died 3 times" in answer.rows[2]["reason"]
    assert answer.rows[2]["seq_len"] == sweep_workers.DEADLY


def test_a_script_without_a_guard_is_told_so(tmp_path: Path) -> None:
    """Spawned processes read the script again; without the guard each would start a sweep of its own."""
    script = tmp_path / "script.py"
    script.write_text(f"import memcalc\nmemcalc.sweep({words(seq_len=LENGTHS)!r}, jobs=2)\n")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 1
    assert "if __name__ == '__main__'" in done.stderr.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.skipif(find_spec("distributed") is None, reason="distributed is not installed")
@pytest.mark.filterwarnings("default")
def test_dask_gives_the_same_bytes_although_a_worker_is_killed(whole: tuple[Path, bytes], tmp_path: Path) -> None:
    path, expected = whole
    killed: list[int] = []

    def kill(state: Progress) -> None:
        if 0 < state.done < 40 and not killed:
            workers = [child for child in multiprocessing.active_children() if "Dask Worker" in child.name]
            killed.append(workers[0].pid or 0)
            os.kill(killed[0], signal.SIGKILL)

    memcalc.sweep(path, jobs=2, scheduler="local", output=tmp_path / "t.csv", on_progress=kill)
    assert killed
    assert (tmp_path / "t.csv").read_bytes() == expected


@pytest.mark.slow
@pytest.mark.skipif(find_spec("distributed") is None, reason="distributed is not installed")
@pytest.mark.filterwarnings("default")
def test_dask_by_the_address_of_its_scheduler_and_a_job_that_kills(monkeypatch: pytest.MonkeyPatch) -> None:
    import dask
    from distributed import LocalCluster

    monkeypatch.setattr(sweeps, "rows_of", sweep_workers.killed_by_one_job)
    monkeypatch.setattr(sweeps, "_FIRST_JOBS", 2)
    monkeypatch.setattr(sweeps, "_DEATHS", 1)
    lengths = [128, 256, sweep_workers.DEADLY, 384]
    # Dask waits for ever, now and then, for a result that a task has killed on its next worker
    never_twice = dask.config.set({"distributed.scheduler.allowed-failures": 0})
    with (
        never_twice,
        LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None) as cluster,
    ):
        answer = memcalc.sweep(words(model="opt-125m", seq_len=lengths), scheduler=cluster.scheduler_address)
    assert [row["status"] == "error" for row in answer.rows] == [length == sweep_workers.DEADLY for length in lengths]


def test_workers_that_are_lost_are_one_sentence_and_cost_no_row(
    small: tuple[Path, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the scheduler of a cluster ends: its client raises OSError, whatever it is asked."""
    path, expected = small
    calls: list[int] = []

    def lost(task: Any) -> Any:
        calls.append(len(task.jobs))
        if len(calls) == 2:
            raise ConnectionResetError("the scheduler is gone")
        return rows_of(task)

    monkeypatch.setattr(sweeps, "rows_of", lost)
    monkeypatch.setattr("memcalc.sweeps.executors._Here.width", 0.5)  # one task at a time
    output = tmp_path / "t.csv"
    with pytest.raises(
        MemcalcError, match=r"the workers were lost .the scheduler is gone.; the same call resumes from the journal"
    ):
        memcalc.sweep(path, jobs=1, output=output)
    states: list[Progress] = []
    memcalc.sweep(path, jobs=1, output=output, on_progress=states.append)
    assert states[0].resumed == calls[0]
    assert output.read_bytes() == expected


@pytest.mark.skipif(find_spec("distributed") is None, reason="distributed is not installed")
@pytest.mark.parametrize("address", ["nonsense://x", "tcp://127.0.0.1:99999"])
@pytest.mark.filterwarnings("default")
def test_a_wrong_scheduler_is_one_sentence(mixed: Path, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memcalc.sweeps.executors._CONNECT_S", 1)
    result = cli(str(mixed), "--scheduler", address)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1), repr(result.exception)
    assert "must be `local` or the address of a scheduler" in result.stderr


# --------------------------------------------------------------------------------------------------- numbers and bars


def test_numbers_of_jobs_are_those_of_the_product() -> None:
    """A job's words, found from its number, are those of nested loops."""
    sweep = words(model=["gpt2", "opt-125m"], gpus=[1, 2, 4], seq_len=LENGTHS, zero=[0, 3])
    space = space_of(sweep)
    loops = [(m, g, s, z) for m in ("gpt2", "opt-125m") for g in (1, 2, 4) for s in LENGTHS for z in (0, 3)]
    named = ("model", "gpus", "seq_len", "zero")
    assert [tuple(space.job(place).options[name] for name in named) for place in range(space.size)] == loops
    assert ["gpt2" if model == 0 else "opt-125m" for model in space.models()] == [loop[0] for loop in loops]


def test_a_file_of_a_model_is_found_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.toml").write_text((ROOT / "presets" / "models" / "gpt2.toml").read_text())
    monkeypatch.chdir(tmp_path)
    job = space_of(words(model="mine.toml")).job(0)
    assert (job.options["model"], job.presets["model"]) == (str(tmp_path / "mine.toml"), "mine.toml")


def test_a_million_jobs_are_counted_without_being_written_out() -> None:
    space = space_of(words(gpus=list(range(1, 1001)), seq_len=list(range(1, 1001))))
    assert space.size == spaces.MOST_JOBS
    assert space.job(999_999).options["seq_len"] == 1000


def test_the_bar_is_drawn_on_a_terminal_alone() -> None:
    from rich.console import Console

    from memcalc.report.progress import bar

    for terminal in (True, False):
        stream = io.StringIO()
        with bar(Console(file=stream, force_terminal=terminal, width=100)) as listen:
            listen(Progress(10, 40, 10))
            listen(Progress(40, 40, 10))
        assert ("40/40" in stream.getvalue()) is terminal
        assert ("10 from the journal" in stream.getvalue()) is terminal
