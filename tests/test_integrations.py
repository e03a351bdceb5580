"""What docs/integrations shows can be used as it stands: scripts, workflows and manifests are run, not only read.

Slurm's own part is on a real controller in test_slurm.py.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from slurm.cluster import DOCUMENTS as SLURM
from slurm.cluster import MEMCALC

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "integrations"
SHELL = [*sorted(FOLDER.rglob("*.sh")), FOLDER / "git" / "pre-commit", ROOT / "tests" / "slurm" / "cluster.sh"]
YAML = sorted(FOLDER.rglob("*.y*ml"))

WORDS = "--model llama-2-70b --gpu a100-40g --seq-len 2048 --micro-batch 1"
LARGE = f"#!/bin/sh\n#SBATCH --gres=gpu:1\n#MEMCALC {WORDS}\npython train.py\n"
SMALL = LARGE.replace("llama-2-70b", "pythia-160m").replace("2048", "1024")
SILENT = "#!/bin/sh\n#SBATCH --gres=gpu:1\npython train.py\n"
DOES_NOT_FIT = "memcalc: does not fit: llama-2-70b"
CRASH = "echo Traceback >&2; exit 1"
HANG = "sleep 100"


pytestmark = pytest.mark.slow


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """Return a folder, first on the path, in which `memcalc` is the executable."""
    folder = tmp_path / "tools"
    folder.mkdir()
    (folder / "memcalc").symlink_to(MEMCALC)
    return folder


def replaced(tools: Path, text: str) -> None:
    """Put another program in memcalc's place."""
    (tools / "memcalc").unlink()
    (tools / "memcalc").write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    (tools / "memcalc").chmod(0o755)


def run(
    *words: str | Path, tools: Path, cwd: Path, stdin: str = "", **environment: str
) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("GIT_", "SLURM_"))}
    place = {"PATH": f"{tools}:{os.environ['PATH']}", "HOME": str(tools), "GIT_CONFIG_NOSYSTEM": "1"}
    return subprocess.run(
        [*words], cwd=cwd, env=clean | place | environment, input=stdin, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("path", SHELL, ids=name)
def test_shell_scripts_are_sound(path: Path) -> None:
    """As their shell reads them; with shellcheck's eyes where it is installed."""
    shell = path.read_text(encoding="utf-8").partition("\n")[0].rpartition("/")[2].split()[-1]
    assert subprocess.run([shell, "-n", path], check=False).returncode == 0
    assert path.stat().st_mode & 0o111
    if shutil.which("shellcheck"):
        result = subprocess.run(["shellcheck", "-x", path], capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("path", sorted(FOLDER.rglob("*.lua")), ids=name)
def test_lua_is_read_by_the_oldest_and_the_newest(path: Path) -> None:
    compilers = [found for version in ("5.1", "5.3", "5.4", "") if (found := shutil.which(f"luac{version}"))]
    if not compilers:
        pytest.skip("no Lua compiler here")
    for compiler in compilers:
        assert subprocess.run([compiler, "-p", path], check=False).returncode == 0


@pytest.mark.parametrize("page", sorted(FOLDER.rglob("*.md")), ids=name)
def test_shell_blocks_are_read(page: Path) -> None:
    for block in re.findall(r"^```sh\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
        result = subprocess.run(["sh", "-n"], input=block, text=True, capture_output=True, check=False)
        assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("path", YAML, ids=name)
def test_yaml_is_read(path: Path) -> None:
    for document in yaml.safe_load_all(path.read_text(encoding="utf-8")):
        assert isinstance(document, dict)


def test_every_setting_is_read_and_every_file_shown() -> None:
    """A setting that nothing reads, or a file that no page leads to, would mislead."""
    names = re.findall(r"^([A-Z_]+)=", (SLURM / "memcalc.conf").read_text(encoding="utf-8"), re.MULTILINE)
    readers = "".join((SLURM / one).read_text(encoding="utf-8") for one in ("ask.sh", "prolog.sh", "memcalc.lua"))
    assert [one for one in names if not re.search(rf"\${one}\b|set\.{one}\b", readers)] == []
    for folder in FOLDER.iterdir():
        files = folder.iterdir() if folder.is_dir() else []
        page = (folder / "README.md").read_text(encoding="utf-8") if folder.is_dir() else ""
        assert [path.name for path in files if path.name not in page and path.name != "README.md"] == []


# Slurm's script, without Slurm


@pytest.fixture
def ask(tmp_path: Path) -> Path:
    place = tmp_path / "slurm"
    shutil.copytree(SLURM, place)
    return place / "ask.sh"


def answer(ask: Path, script: str, request: str = "", directory: str = "", **settings: str) -> str:
    """Return the line with which ask.sh answers."""
    lines = {"MEMCALC": str(MEMCALC), "TIMEOUT": "10"} | settings
    text = "".join(f"{key}='{value}'\n" for key, value in lines.items())
    (ask.parent / "memcalc.conf").write_text(text, encoding="utf-8")
    result = run(ask, tools=ask.parent, cwd=ask.parent, stdin=f"{directory}\n\n{request}\n{script}")
    assert result.returncode == result.stdout.startswith("reject ")
    assert result.stdout.count("\n") == 1
    return result.stdout.strip()


def program(ask: Path, text: str) -> str:
    path = ask.with_name("program")
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (LARGE, "reject verdict: " + DOES_NOT_FIT),
        (SMALL, "pass verdict: memcalc: "),
        (SILENT, "pass unknown: memcalc: "),
        (LARGE.replace("llama-2-70b", "no-such-model"), "pass unknown: memcalc: "),
    ],
)
def test_ask_answers(ask: Path, script: str, expected: str) -> None:
    assert answer(ask, script).startswith(expected)


def test_ask_takes_words_from_the_administrator(ask: Path) -> None:
    assert answer(ask, SILENT, OPTIONS=f"{WORDS} --framework fsdp2").startswith("reject verdict: " + DOES_NOT_FIT)


def test_warning_mode_never_rejects(ask: Path) -> None:
    assert answer(ask, LARGE, MODE="warn").startswith("warn verdict: " + DOES_NOT_FIT)
    assert answer(ask, SILENT, MODE="warn", ON_UNKNOWN="reject").startswith("warn unknown: ")
    assert answer(ask, SMALL, MODE="warn", ON_FAILURE="reject", MEMCALC="/nonexistent").startswith("warn failed: ")
    assert answer(ask, LARGE, MODE="off") == "pass verdict: memcalc: off"


@pytest.mark.parametrize(
    ("text", "kind"),
    [(CRASH, "failed"), (HANG, "slow"), ("kill -KILL $$", "slow"), ("exec yes memcalc: much to say", "failed")],
)
def test_ask_tells_a_failure_from_a_verdict(ask: Path, text: str, kind: str) -> None:
    broken = program(ask, text)
    assert answer(ask, LARGE, MEMCALC=broken, TIMEOUT="1").startswith(f"pass {kind}: memcalc: no answer")
    refused = answer(ask, SMALL, MEMCALC=broken, TIMEOUT="1", ON_FAILURE="reject")
    assert refused.startswith(f"reject {kind}: memcalc: no answer")


def test_ask_bounds_memory(ask: Path) -> None:
    greedy = program(ask, f"exec python3 -c 'x = bytearray({3 * 2**30}); print(\"memcalc: fits\")'")
    assert answer(ask, SMALL, MEMCALC=greedy).startswith("pass failed: ")


def test_ask_shows_one_harmless_line(ask: Path) -> None:
    text = r"printf 'memcalc: does not fit: \033[31m%s\r\nmore\n' 'a' ; exit 1"
    assert answer(ask, LARGE, MEMCALC=program(ask, text)) == "reject verdict: memcalc: does not fit: [31ma"


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        (
            "#!/bin/sh\n#SBATCH -N 1\n\n# a\necho\n#SBATCH -N 3\n",
            "#!/bin/sh\n#SBATCH -N 1\n\n# a\n+echo\n#SBATCH -N 3\n",
        ),
        ("#!/bin/sh\n", "#!/bin/sh\n+"),
    ],
    ids=["before the first command", "at the end"],
)
def test_the_true_request_stands_where_sbatch_reads_it_last(ask: Path, before: str, expected: str) -> None:
    """Behind the script's own #SBATCH lines, before the first command."""
    seen = ask.with_name("seen")
    reader = program(ask, f'cp "$2" {seen}; pwd >>{seen}; echo "memcalc: fits"')
    answer(ask, before, "--nodes=2 --gres=gpu:8", str(ask.parent), MEMCALC=reader)
    request = "#SBATCH --nodes=2\n#SBATCH --gres=gpu:8\n"
    assert seen.read_text(encoding="utf-8") == expected.replace("+", request) + f"{ask.parent}\n"


def test_a_folder_that_cannot_be_entered_is_no_failure(ask: Path) -> None:
    assert answer(ask, SMALL, directory="/nonexistent/'$(false)").startswith("pass verdict: ")


# Git


@pytest.fixture
def repository(tmp_path: Path, tools: Path) -> Path:
    """Return a repository with the hook, one script that fits and a config file that it names."""
    folder = tmp_path / "a repository"
    folder.mkdir()
    git(tools, folder, "init", "--quiet")
    git(tools, folder, "config", "user.name", "A")
    git(tools, folder, "config", "user.email", "a@example.com")
    shutil.copy(FOLDER / "git" / "pre-commit", folder / ".git" / "hooks" / "pre-commit")
    write(folder, "jobs/a job.sbatch", SMALL + "# --config config.json\n")
    write(folder, "jobs/config.json", "{}")
    git(tools, folder, "add", ".")
    assert commit(tools, folder).returncode == 0
    return folder


def write(folder: Path, path: str, text: str) -> None:
    (folder / path).parent.mkdir(exist_ok=True)
    (folder / path).write_text(text, encoding="utf-8")


def git(tools: Path, folder: Path, *words: str) -> str:
    result = run("git", *words, tools=tools, cwd=folder)
    assert result.returncode == 0, result.stderr
    return result.stdout


def commit(tools: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    return run("git", "commit", "--quiet", "--message", "x", tools=tools, cwd=folder)


def commits(tools: Path, folder: Path) -> int:
    return int(git(tools, folder, "rev-list", "--count", "HEAD"))


def test_hook_refuses_a_job_that_does_not_fit(repository: Path, tools: Path) -> None:
    write(repository, "jobs/large job's.sbatch", LARGE)
    git(tools, repository, "add", ".")
    result = commit(tools, repository)
    assert result.returncode != 0
    assert f"jobs/large job's.sbatch: {DOES_NOT_FIT}" in result.stderr
    assert commits(tools, repository) == 1


def test_hook_checks_what_is_staged(repository: Path, tools: Path) -> None:
    """Not what lies in the working folder, whose scripts change until the commit."""
    write(repository, "jobs/new.sbatch", SMALL)
    git(tools, repository, "add", ".")
    write(repository, "jobs/new.sbatch", LARGE)
    assert commit(tools, repository).returncode == 0
    git(tools, repository, "add", ".")
    write(repository, "jobs/new.sbatch", SMALL)
    assert commit(tools, repository).returncode != 0
    assert commits(tools, repository) == 2


def test_hook_checks_the_scripts_that_name_a_changed_config(repository: Path, tools: Path) -> None:
    record = repository.parent / "record"
    replaced(tools, f'echo "$2" >>"{record}"; echo "memcalc: fits"')
    write(repository, "jobs/other.json", "{}")
    git(tools, repository, "add", ".")
    assert commit(tools, repository).returncode == 0
    assert not record.exists()
    write(repository, "jobs/config.json", "[]")
    write(repository, "notes.txt", "")
    git(tools, repository, "add", ".")
    assert commit(tools, repository).returncode == 0
    assert record.read_text(encoding="utf-8") == "./jobs/a job.sbatch\n"
    git(tools, repository, "rm", "--quiet", "jobs/a job.sbatch")
    assert commit(tools, repository).returncode == 0
    assert commits(tools, repository) == 4


@pytest.mark.parametrize(
    ("text", "setting"), [("", "onFailure"), (CRASH, "onFailure"), ("echo 'memcalc: what?' >&2; exit 3", "onUnknown")]
)
def test_hook_lets_through_what_it_cannot_tell(repository: Path, tools: Path, text: str, setting: str) -> None:
    replaced(tools, text)
    for answer_wanted, code in (("pass", 0), ("reject", 1)):
        git(tools, repository, "config", f"memcalc.{setting}", answer_wanted)
        write(repository, "jobs/new.sbatch", LARGE + answer_wanted)
        git(tools, repository, "add", ".")
        result = commit(tools, repository)
        assert result.returncode == code
        assert "jobs/new.sbatch: not " in result.stderr


def test_hook_takes_settings(repository: Path, tools: Path) -> None:
    git(tools, repository, "config", "memcalc.scripts", "*.job")
    git(tools, repository, "config", "memcalc.options", f"{WORDS} --framework fsdp2")
    write(repository, "jobs/new.sbatch", LARGE)
    git(tools, repository, "add", ".")
    assert commit(tools, repository).returncode == 0
    write(repository, "jobs/new.job", SILENT)
    git(tools, repository, "add", ".")
    assert DOES_NOT_FIT in commit(tools, repository).stderr


# GitHub Actions


def steps(path: str) -> list[dict[str, Any]]:
    workflow = yaml.safe_load((FOLDER / "github" / path).read_text(encoding="utf-8"))
    assert workflow[True]  # YAML 1.1 reads the key `on` so
    assert workflow["permissions"]["contents"] == "read"
    found: list[dict[str, Any]] = workflow["jobs"]["fits"]["steps"]
    return found


def action(text: str, tools: Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a step as the runner does for `shell: bash`."""
    path = tools / "step"
    path.write_text(text, encoding="utf-8")
    return run("bash", "--noprofile", "--norc", "-eo", "pipefail", path, tools=tools, cwd=cwd, **environment)


@pytest.mark.parametrize(
    ("script", "code", "said"),
    [
        (SMALL, 0, ""),
        (LARGE, 1, "::error file="),
        (SILENT, 0, "::notice::"),
        (LARGE.replace("a100-40g", "no-such-gpu"), 1, ""),
    ],
)
def test_workflow_fails_for_what_does_not_fit(repository: Path, tools: Path, script: str, code: int, said: str) -> None:
    write(repository, "jobs/new.sbatch", script)
    git(tools, repository, "add", ".")
    result = action(steps("memcalc.yml")[-1]["run"], tools, repository, OPTIONS="")
    assert result.returncode == code, result.stdout
    assert said in result.stdout


def test_workflow_passes_with_a_warning_without_memcalc(repository: Path, tools: Path) -> None:
    replaced(tools, CRASH)
    result = action(steps("memcalc.yml")[-1]["run"], tools, repository, OPTIONS="")
    assert result.returncode == 0
    assert "::warning::memcalc gave no answer (exit 1)" in result.stdout


def test_sarif_workflow_uploads_what_the_check_writes(repository: Path, tools: Path) -> None:
    found = steps("memcalc-sarif.yml")
    check, upload = found[-2], found[-1]
    write(repository, "new.sbatch", LARGE)
    assert action(check["run"], tools, repository, SCRIPT="new.sbatch").returncode == 0
    assert json.loads((repository / upload["with"]["sarif_file"]).read_text(encoding="utf-8"))["version"] == "2.1.0"
    (repository / upload["with"]["sarif_file"]).unlink()
    replaced(tools, CRASH)
    assert action(check["run"], tools, repository, SCRIPT="new.sbatch").returncode != 0


# Kubernetes


@pytest.fixture
def manifest() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the ConfigMap's files and the Job's spec."""
    config, job = yaml.safe_load_all((FOLDER / "kubernetes" / "job.yaml").read_text(encoding="utf-8"))
    return config["data"], job["spec"]


def test_manifest_mounts_the_same_config_twice(manifest: tuple[dict[str, Any], dict[str, Any]]) -> None:
    data, spec = manifest
    pod = spec["template"]["spec"]
    before, train = pod["initContainers"][0], pod["containers"][0]
    assert before["volumeMounts"] == train["volumeMounts"]
    assert before["workingDir"] == train["workingDir"] == before["volumeMounts"][0]["mountPath"]
    rule = spec["podFailurePolicy"]["rules"][0]["onExitCodes"]
    assert (rule["containerName"], pod["restartPolicy"]) == (before["name"], "Never")
    assert f"exit {rule['values'][0]}" in before["args"][0]
    assert f"--gpus {train['resources']['limits']['nvidia.com/gpu']} " in before["args"][0]
    assert all(json.loads(text) for text in data.values())


@pytest.mark.parametrize(
    ("text", "change", "settings", "code", "reason"),
    [
        (None, ("", ""), {}, 0, "memcalc: fits"),
        (None, ("--gpus 8", "--gpus 1"), {}, 42, "memcalc: does not fit: llama-2-7b"),
        (None, ("--model llama-2-7b", ""), {}, 0, "memcalc: "),
        (None, ("--model llama-2-7b", ""), {"ON_UNKNOWN": "reject"}, 42, "memcalc: "),
        (CRASH, ("", ""), {}, 0, "Traceback"),
        (CRASH, ("", ""), {"ON_FAILURE": "reject"}, 42, "Traceback"),
        (HANG, ("KILL 60", "KILL 1"), {}, 0, ""),
        (HANG, ("KILL 60", "KILL 1"), {"ON_FAILURE": "reject"}, 42, ""),
    ],
)
def test_init_container_fails_only_by_verdict(
    manifest: tuple[dict[str, Any], dict[str, Any]],
    tools: Path,
    tmp_path: Path,
    text: str | None,
    change: tuple[str, str],
    settings: dict[str, str],
    code: int,
    reason: str,
) -> None:
    data, spec = manifest
    container = spec["template"]["spec"]["initContainers"][0]
    for file, content in data.items():
        (tmp_path / file).write_text(content, encoding="utf-8")
    if text is not None:
        replaced(tools, text)
    said = tmp_path / "reason"
    environment = {one["name"]: one["value"] for one in container["env"]} | {"REASON": str(said)} | settings
    assert change[0] in container["args"][0]
    words = [*container["command"], container["args"][0].replace(*change)]
    assert run(*words, tools=tools, cwd=tmp_path, **environment).returncode == code
    assert said.read_text(encoding="utf-8").startswith(reason)
