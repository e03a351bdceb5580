"""The Slurm plugin of docs/integrations/slurm, on a real controller and a real node.

A job that cannot fit is refused with memcalc's own sentence, one that fits runs; whatever happens to memcalc, the queue
goes on. It needs the packages of a Slurm controller and node, whose daemons it starts by itself.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm.cluster import Cluster, missing, running

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing()), reason=f"no Slurm controller and node here: {missing()} not found"),
]

GPU = "#SBATCH --gres=gpu:1\n"
LARGE = "#MEMCALC --model llama-2-70b --gpu a100-40g --seq-len 2048 --micro-batch 1\n"
SMALL = "#MEMCALC --model pythia-160m --gpu a100-80g --seq-len 1024 --micro-batch 1\n"
BETWEEN = "#MEMCALC --model llama-2-7b --gpu a100-80g --seq-len 2048 --zero 3 --micro-batch 1\n"
"""Fits on eight GPUs, not on one."""
WORK = "echo work is done in $PWD\n"
DOES_NOT_FIT = "memcalc: does not fit: llama-2-70b needs"
UNCHECKED = "unchecked jobs are not let in here"


def script(*lines: str) -> str:
    return "#!/bin/sh\n" + "".join(lines) + WORK


@pytest.fixture(scope="module")
def started() -> Iterator[Cluster]:
    with running() as cluster:
        yield cluster


@pytest.fixture
def cluster(started: Cluster) -> Iterator[Cluster]:
    """Return the cluster with its settings as shipped, the prolog off, and nothing left over."""
    before = leftovers()
    started.mark()
    started.settings("memcalc")
    started.settings("prolog", MODE="off")
    started.settings("client")
    yield started
    assert started.node() == "idle none"
    assert leftovers() == before


def leftovers() -> set[Path]:
    return {path for pattern in ("memcalc-ask.*", "lua_*") for path in Path("/tmp").glob(pattern)}  # noqa: S108


def executable(cluster: Cluster, name: str, text: str) -> str:
    """Write a stand-in for memcalc."""
    path = cluster.folder / name
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(0o755)
    return str(path)


def recorder(cluster: Cluster) -> tuple[str, Path]:
    """Return a stand-in that lets all pass and adds the lines user, folder and script's text to a file."""
    record = cluster.folder / "record"
    record.write_text("", encoding="utf-8")
    record.chmod(0o666)
    text = f'{{ id -u; pwd; cat "$2"; }} >>{record}\necho "memcalc: fits: as far as this stand-in knows"'
    return executable(cluster, "recorder", text), record


def test_a_job_that_cannot_fit_is_refused_with_the_sentence(cluster: Cluster) -> None:
    answer = cluster.submit(script(GPU, LARGE))
    assert answer.code != 0
    assert f"sbatch: error: {DOES_NOT_FIT}" in answer.said
    assert "Batch job submission failed" in answer.said
    assert cluster.command("squeue", "--noheader").stdout == ""
    assert "reject verdict: " + DOES_NOT_FIT in cluster.log()


def test_a_job_that_fits_runs_to_its_end(cluster: Cluster) -> None:
    answer = cluster.submit(script(GPU, SMALL))
    assert answer.code == 0, answer.said
    assert "memcalc" not in answer.said
    assert cluster.wait(answer.job) == ("COMPLETED", f"work is done in {cluster.work}\n")


@pytest.mark.parametrize(("lines", "code"), [((GPU, LARGE), 1), ((GPU, SMALL), 0)])
def test_only_asks_with_test_only(cluster: Cluster, lines: tuple[str, ...], code: int) -> None:
    """As the documents say that an administrator tries it."""
    answer = cluster.submit(script(*lines), "--test-only")
    assert answer.code == code
    assert (DOES_NOT_FIT in answer.said) == bool(code)
    assert cluster.command("squeue", "--noheader").stdout == ""


@pytest.mark.parametrize("option", ["--gres=gpu:{}", "--gpus={}", "--gpus-per-node={}"])
def test_the_command_line_counts_more_than_the_script(cluster: Cluster, option: str) -> None:
    in_script = "#SBATCH " + option.format(8) + "\n"
    assert cluster.submit(script(in_script, BETWEEN), "--test-only").code == 0
    answer = cluster.submit(script(in_script, BETWEEN), option.format(1))
    assert answer.code == 1
    assert "memcalc: does not fit: llama-2-7b" in answer.said


REQUESTS = {
    "--gres=gpu:2": ["--gres=gpu:2", "--gpus-per-node=2"],
    "--gpus=4 --nodes=1": ["--gpus=4", "--nodes=1"],
    "--gres=gpu --nodes=1-3": ["--gres=gpu", "--gpus-per-node=1", "--nodes=1"],
    "--gpus-per-task=2 --ntasks=3": ["--gpus-per-task=2", "--ntasks=3"],
}


@pytest.mark.parametrize("options", REQUESTS)
def test_the_request_is_what_was_asked_for_and_no_default(cluster: Cluster, options: str) -> None:
    asked, record = recorder(cluster)
    for place, conf in (("memcalc", None), ("client", cluster.folder / "etc" / "client" / "slurm.conf")):
        cluster.settings("memcalc", MODE="off")
        cluster.settings(place, MEMCALC=asked)
        record.write_text("", encoding="utf-8")
        cluster.submit(script(), *options.split(), "--test-only", conf=conf)
        lines = record.read_text(encoding="utf-8").splitlines()
        said = [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH ")]
        # sbatch keeps --gres apart from --gpus-per-node, the controller does not
        same = [word for word in REQUESTS[options] if conf is None or not word.startswith("--gpus-per-node")]
        assert said == same


@pytest.mark.parametrize("options", [(), ("--gres=gpu:0",), ("--gres=none",)])
def test_a_job_without_gpus_is_never_asked(cluster: Cluster, options: tuple[str, ...]) -> None:
    asked, record = recorder(cluster)
    cluster.settings("memcalc", MEMCALC=asked)
    answer = cluster.submit(script(LARGE), *options)
    assert cluster.wait(answer.job)[0] == "COMPLETED"
    assert cluster.command("srun", "--gres=gpu:1", "true").returncode == 0  # there is no script
    assert record.read_text(encoding="utf-8") == ""
    cluster.settings("memcalc", MEMCALC=asked, JOBS="all")
    assert cluster.submit(script(LARGE), *options, "--test-only").code == 0
    assert record.read_text(encoding="utf-8") != ""


BROKEN = {
    "crashes": "echo 'Traceback (most recent call last):' >&2; exit 1",
    "says something else": "echo 'memcalc: does not work'; exit 1",
    "says nothing": "exit 0",
    "usage error": "echo 'Usage: memcalc [OPTIONS]' >&2; exit 2",
    "killed": "kill -SEGV $$",
    "hangs": "echo 'memcalc: does not fit: too early to say'; exec sleep 100",
    "hangs with a child": "trap '' TERM HUP; setsid sleep 3 & sleep 100",
    "missing": "",
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_memcalc_blocks_nothing_unless_told_to(cluster: Cluster, how: str) -> None:
    path = executable(cluster, "broken", BROKEN[how]) if BROKEN[how] else "/nonexistent/memcalc"
    cluster.settings("memcalc", MEMCALC=path, TIMEOUT="1", ON_UNKNOWN="reject")
    answer = cluster.submit(script(GPU, LARGE))
    assert answer.code == 0, answer.said
    assert cluster.wait(answer.job)[0] == "COMPLETED"
    cluster.settings("memcalc", MEMCALC=path, TIMEOUT="1", ON_FAILURE="reject")
    answer = cluster.submit(script(GPU, SMALL))
    assert answer.code == 1
    assert UNCHECKED in answer.said
    assert "reject slow" in cluster.log() if "hangs" in how else "reject failed" in cluster.log()


@pytest.mark.parametrize("lost", ["ask.sh", "memcalc.conf"])
def test_a_lost_part_of_the_plugin_lets_jobs_through(cluster: Cluster, lost: str) -> None:
    path = cluster.folder / "etc" / "memcalc" / lost
    away = path.rename(path.with_suffix(".away"))
    try:
        answer = cluster.submit(script(GPU, LARGE))
    finally:
        away.rename(path)
    assert cluster.wait(answer.job)[0] == "COMPLETED"


def test_without_the_module_the_controller_starts_and_jobs_pass(cluster: Cluster) -> None:
    path = cluster.folder / "etc" / "memcalc" / "memcalc.lua"
    away = path.rename(path.with_suffix(".away"))
    try:
        reload(cluster)
        answer = cluster.submit(script(GPU, LARGE))
        assert cluster.wait(answer.job)[0] == "COMPLETED"
    finally:
        away.rename(path)
        reload(cluster)
    assert cluster.submit(script(GPU, LARGE)).code == 1


def reload(cluster: Cluster) -> None:
    """Slurm reads job_submit.lua again when it is newer, in whole seconds, than what was read last."""
    path = cluster.folder / "etc" / "job_submit.lua"
    later = path.stat().st_mtime + 2
    os.utime(path, (later, later))


def test_after_a_hang_the_controller_has_peace(cluster: Cluster) -> None:
    slow = executable(cluster, "slow", "exec sleep 100")
    asked, record = recorder(cluster)
    try:
        cluster.settings("memcalc", MEMCALC=slow, TIMEOUT="1", PAUSE="600")
        assert cluster.submit(script(GPU, SMALL), "--test-only").code == 0
        cluster.settings("memcalc", MEMCALC=asked, PAUSE="600")
        assert cluster.submit(script(GPU, SMALL), "--test-only").code == 0
        assert record.read_text(encoding="utf-8") == ""
        cluster.settings("memcalc", MEMCALC=asked, PAUSE="600", ON_FAILURE="reject")
        assert cluster.submit(script(GPU, SMALL), "--test-only").code == 0
        assert record.read_text(encoding="utf-8") != ""
    finally:
        reload(cluster)


@pytest.mark.parametrize("lines", [(GPU,), (GPU, "#MEMCALC --model no-such-model --gpu a100-80g\n")])
def test_what_cannot_be_judged_passes_unless_told_to(cluster: Cluster, lines: tuple[str, ...]) -> None:
    answer = cluster.submit(script(*lines))
    assert cluster.wait(answer.job)[0] == "COMPLETED"
    assert "pass unknown: memcalc: " in cluster.log()
    cluster.settings("memcalc", ON_UNKNOWN="reject")
    answer = cluster.submit(script(*lines))
    assert answer.code == 1
    assert UNCHECKED in answer.said


def test_what_only_the_controller_may_read_is_not_told(cluster: Cluster) -> None:
    text = "echo 'memcalc: config.yaml, line 1: password=secret' >&2; exit 2"
    cluster.settings("memcalc", MEMCALC=executable(cluster, "talker", text), ON_UNKNOWN="reject")
    answer = cluster.submit(script(GPU))
    assert answer.code == 1
    assert "secret" not in answer.said
    assert "password=secret" in cluster.log()


def test_warning_and_off(cluster: Cluster) -> None:
    cluster.settings("memcalc", MODE="warn")
    answer = cluster.submit(script(GPU, LARGE))
    assert answer.code == 0
    assert DOES_NOT_FIT in answer.said
    asked, record = recorder(cluster)
    cluster.settings("memcalc", MODE="off", MEMCALC=asked, ON_FAILURE="reject")
    assert cluster.submit(script(GPU, LARGE), "--test-only").code == 0
    assert record.read_text(encoding="utf-8") == ""
    assert cluster.wait(answer.job.splitlines()[0])[0] == "COMPLETED"


def test_names_folders_and_scripts_are_never_run(cluster: Cluster) -> None:
    """Each would make the file if a shell ever read it."""
    made = cluster.folder / "made"
    evil = f"'; touch {made}; $(touch {made}) `touch {made}` \" \\"
    folder = cluster.folder / evil.replace("/", "_")
    folder.mkdir()
    asked, record = recorder(cluster)
    cluster.settings("memcalc", MEMCALC=asked)
    text = script(GPU, f"#SBATCH --comment=$(touch${{IFS}}{made})\n", f"# {evil}\n")
    answer = cluster.submit(text, f"--job-name={evil}", f"--chdir={folder}", "--test-only")
    assert answer.code == 0, answer.said
    seen = record.read_text(encoding="utf-8").splitlines()
    assert seen[1] == str(folder)
    assert f"# {evil}" in seen
    two_lines = cluster.folder / "one\ntwo"
    two_lines.mkdir()
    assert cluster.submit(text, f"--chdir={two_lines}", "--test-only").code == 0
    again = record.read_text(encoding="utf-8").splitlines()[len(seen) :]
    assert again[0] == seen[0]
    assert again[2:] == seen[2:]
    assert not made.exists()
    assert not list(folder.iterdir())


def test_a_very_long_script_is_not_asked(cluster: Cluster) -> None:
    answer = cluster.submit(script(GPU, LARGE, "# " + "x" * 2**20 + "\n"), "--test-only")
    assert answer.code == 0, answer.said
    assert "the script is longer than 1048576 bytes" in cluster.log()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can submit as another user")
def test_root_becomes_the_user_before_anything_is_read(cluster: Cluster) -> None:
    asked, record = recorder(cluster)
    cluster.settings("memcalc", MEMCALC=asked)
    daemon = ("setpriv", "--reuid=1", "--regid=1", "--clear-groups")
    assert cluster.submit(script(GPU), "--test-only", prefix=daemon).code == 0
    assert cluster.submit(script(GPU), "--test-only").code == 0
    lines = record.read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if line.isdigit()] == ["1", "0"]
    assert lines[1] == str(cluster.work)


@pytest.fixture
def prolog(cluster: Cluster) -> Cluster:
    """Return the cluster with the check where the job starts, and none where it is submitted."""
    cluster.settings("memcalc", MODE="off")
    cluster.settings("prolog")
    return cluster


def test_prolog_ends_a_job_that_cannot_fit_and_leaves_the_node(prolog: Cluster) -> None:
    answer = prolog.submit(script(GPU, LARGE))
    state, output = prolog.wait(answer.job)
    assert state == "FAILED"
    assert output.startswith(DOES_NOT_FIT)
    assert "work is done" not in output
    assert prolog.facts(answer.job)["Restarts"] == "0"
    assert prolog.node() == "idle none"


def test_prolog_lets_a_job_run_and_asks_once(prolog: Cluster) -> None:
    answer = prolog.submit(script(GPU, SMALL, "srun true\nsrun true\n"))
    state, output = prolog.wait(answer.job)
    assert state == "COMPLETED"
    assert output.splitlines()[0].startswith("memcalc: fits: pythia-160m")
    assert output.splitlines()[-1].startswith("work is done")
    assert output.count("memcalc:") == 1


def test_prolog_knows_the_command_line(prolog: Cluster) -> None:
    for option in ("--gres=gpu:{}", "--gpus={}", "--gpus-per-node={}"):
        text = script("#SBATCH " + option.format(8) + "\n", BETWEEN)
        assert prolog.wait(prolog.submit(text).job)[0] == "COMPLETED"
        state, output = prolog.wait(prolog.submit(text, option.format(1)).job)
        assert state == "FAILED"
        assert output.startswith("memcalc: does not fit: llama-2-7b")


@pytest.mark.parametrize("how", ["crashes", "hangs with a child", "missing"])
def test_prolog_with_a_broken_memcalc(prolog: Cluster, how: str) -> None:
    path = executable(prolog, "broken", BROKEN[how]) if BROKEN[how] else "/nonexistent/memcalc"
    prolog.settings("prolog", MEMCALC=path, TIMEOUT="1")
    assert prolog.wait(prolog.submit(script(GPU, LARGE)).job)[0] == "COMPLETED"
    prolog.settings("prolog", MEMCALC=path, TIMEOUT="1", ON_FAILURE="reject")
    state, output = prolog.wait(prolog.submit(script(GPU, SMALL)).job)
    assert state == "FAILED"
    assert output.startswith("memcalc: no answer")
    assert prolog.node() == "idle none"


def test_prolog_asks_no_job_without_gpus(prolog: Cluster) -> None:
    prolog.settings("prolog", MEMCALC="/nonexistent/memcalc", ON_FAILURE="reject")
    assert prolog.wait(prolog.submit(script(LARGE)).job)[0] == "COMPLETED"


def test_sbatch_itself_refuses(cluster: Cluster) -> None:
    """The filter in sbatch: the controller never hears of the job."""
    conf = cluster.folder / "etc" / "client" / "slurm.conf"
    cluster.settings("memcalc", MODE="off")
    answer = cluster.submit(script(GPU, LARGE), conf=conf)
    assert answer.code != 0
    assert f"sbatch: error: {DOES_NOT_FIT}" in answer.said
    assert "Batch job submission failed" not in answer.said
    answer = cluster.submit(script("#SBATCH --gres=gpu:8\n", BETWEEN), "--gres=gpu:1", conf=conf)
    assert "memcalc: does not fit: llama-2-7b" in answer.said
    answer = cluster.submit(script(GPU, SMALL), conf=conf)
    assert cluster.wait(answer.job)[0] == "COMPLETED"
    cluster.settings("client", MEMCALC="/nonexistent/memcalc")
    assert cluster.submit(script(GPU, LARGE), "--test-only", conf=conf).code == 0
    cluster.settings("client", MEMCALC="/nonexistent/memcalc", ON_FAILURE="reject")
    assert cluster.submit(script(GPU, SMALL), "--test-only", conf=conf).code != 0
    assert cluster.submit(script(SMALL), "--test-only", conf=conf).code == 0
