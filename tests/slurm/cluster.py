"""A Slurm cluster of one node for tests, started from installed packages, with the documents' plugin in place."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
DOCUMENTS = HERE.parents[1] / "docs" / "integrations" / "slurm"
MEMCALC = Path(sys.executable).with_name("memcalc")
"""The executable that the plugin calls."""
PLACE = "/etc/slurm/memcalc"
"""Where the documents put the plugin's files."""
NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol")
SEARCH = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY"}
PATIENCE = 60.0
DEFAULTS = {"MEMCALC": str(MEMCALC), "TIMEOUT": "10", "PAUSE": "0"}


def missing() -> str:
    """Return why no cluster can be started here, or nothing."""
    absent = [name for name in NEEDED if shutil.which(name, path=SEARCH) is None]
    lua = list(Path("/usr").glob("lib*/**/job_submit_lua.so"))
    return ", ".join(absent + ([] if lua else ["job_submit_lua.so"]))


@dataclass
class Submission:
    """What sbatch said."""

    code: int
    said: str
    job: str


@dataclass
class Cluster:
    """A running controller and node; `folder` has etc/memcalc (submission), etc/prolog and etc/client (cli_filter)."""

    folder: Path
    work: Path = field(init=False)
    marked: int = 0

    def __post_init__(self) -> None:
        self.work = self.folder / "work"
        self.work.mkdir(mode=0o777)

    @property
    def environment(self) -> dict[str, str]:
        """The environment of Slurm's commands."""
        return {"PATH": SEARCH, "SLURM_CONF": str(self.folder / "etc" / "slurm.conf"), "HOME": str(self.folder)}

    def settings(self, place: str = "memcalc", /, **values: str) -> None:
        """Write memcalc.conf of one place anew."""
        path = self.folder / "etc" / place / "memcalc.conf"
        lines = [f"{name}='{value}'" for name, value in {**DEFAULTS, **values}.items()]
        path.with_suffix(".new").write_text("\n".join(lines) + "\n", encoding="utf-8")
        path.with_suffix(".new").replace(path)

    def command(
        self, *words: str, prefix: tuple[str, ...] = (), cwd: Path | None = None, conf: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run one of Slurm's commands."""
        environment = self.environment | ({"SLURM_CONF": str(conf)} if conf else {})
        return subprocess.run(
            [*prefix, *words], env=environment, cwd=cwd or self.work, capture_output=True, text=True, check=False
        )

    def submit(
        self,
        script: str,
        *options: str,
        prefix: tuple[str, ...] = (),
        cwd: Path | None = None,
        conf: Path | None = None,
    ) -> Submission:
        """Submit a batch script; its output goes to JOB.out in the working folder."""
        path = self.folder / "job.sbatch"
        path.write_text(script, encoding="utf-8")
        output = f"--output={self.work}/%j.out"
        result = self.command("sbatch", "--parsable", output, *options, str(path), prefix=prefix, cwd=cwd, conf=conf)
        return Submission(result.returncode, result.stdout + result.stderr, result.stdout.strip())

    def facts(self, job: str) -> dict[str, str]:
        """What the controller knows of a job."""
        text = self.command("scontrol", "--oneliner", "show", "job", job).stdout
        return dict(word.split("=", 1) for word in text.split() if "=" in word)

    def wait(self, job: str) -> tuple[str, str]:
        """Wait for the end of a job; return its state and its output."""
        until = time.monotonic() + PATIENCE
        while (state := self.facts(job).get("JobState", "")) not in ENDED:
            assert time.monotonic() < until, f"job {job} is {state}: {self.facts(job).get('Reason')}"
            time.sleep(0.1)
        path = self.work / f"{job}.out"
        return state, path.read_text(encoding="utf-8") if path.exists() else ""

    def node(self) -> str:
        """Wait until the node has no job, and return its state and the reason of one that is not idle."""
        until = time.monotonic() + PATIENCE
        while (state := self.command("sinfo", "--noheader", "--format=%T %E").stdout.strip()) != "idle none":
            if time.monotonic() > until or "drain" in state or "down" in state:
                break
            time.sleep(0.1)
        return state

    def log(self) -> str:
        """Return the controller's log since the mark."""
        return (self.folder / "log" / "slurmctld.log").read_bytes()[self.marked :].decode(errors="replace")

    def mark(self) -> None:
        """Read the log from here on."""
        self.marked = (self.folder / "log" / "slurmctld.log").stat().st_size


def _install(etc: Path) -> None:
    """Put the documents' files where they belong, once for submission, once for the prolog, once for sbatch alone."""
    for place in ("memcalc", "prolog", "client"):
        shutil.copytree(DOCUMENTS, etc / place)
    for name, place, target in (
        ("job_submit.lua", "memcalc", etc / "job_submit.lua"),
        ("cli_filter.lua", "client", etc / "client" / "cli_filter.lua"),
    ):
        text = (DOCUMENTS / name).read_text(encoding="utf-8")
        assert PLACE in text
        target.write_text(text.replace(PLACE, str(etc / place)), encoding="utf-8")
    (etc / "more.conf").write_text(f"TaskProlog={etc}/prolog/prolog.sh\n", encoding="utf-8")


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


@contextmanager
def running() -> Iterator[Cluster]:
    """Start a cluster; every daemon ends with the block, or with this process."""
    with tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp", ignore_cleanup_errors=True) as name:
        cluster = Cluster(Path(name))  # the path of munged's socket must be short
        cluster.folder.chmod(0o755)
        cluster.work.chmod(0o777)
        _install(cluster.folder / "etc")
        for place in ("memcalc", "prolog", "client"):
            cluster.settings(place)
        ports = [str(port) for port in _free_ports(2)]
        script = subprocess.Popen(
            [HERE / "cluster.sh", name, *ports], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert script.stdin is not None
        assert script.stdout is not None
        try:
            assert script.stdout.readline() == "ready\n", _logs(cluster.folder)
            client = (cluster.folder / "etc" / "slurm.conf").read_text(encoding="utf-8")
            client = client.replace("JobSubmitPlugins=lua\n", "") + "CliFilterPlugins=cli_filter/lua\n"
            (cluster.folder / "etc" / "client" / "slurm.conf").write_text(client, encoding="utf-8")
            yield cluster
        finally:
            script.stdin.close()
            script.wait(timeout=PATIENCE)
            script.stdout.close()


def _logs(folder: Path) -> str:
    """Return the last lines of every log, for a cluster that did not start."""
    logs = sorted((folder / "log").glob("*.log"))
    return "\n".join(
        f"{path.name}:\n" + "\n".join(path.read_text(encoding="utf-8").splitlines()[-20:]) for path in logs
    )
