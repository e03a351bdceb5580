"""Throw words and files at all of memcalc: `python tests/fuzz.py --minutes 5 [--seed N] [--only NAME] [--replay LINE]`.

In one process with a bound on its memory and on the time of each case, from the small seeds that are committed
(tests/fuzz_cases.py): every command but `probe`, every request of the page and its HTTP, every reader of configs. Each
gets the same time, so that most cases are of what answers soonest. Whatever comes, a command ends with 0 to 3 and,
where it refuses, with one line; its JSON is JSON; it opens no socket, starts no process and writes nowhere but where
it was told. A case that does not is printed as one line that `--replay` takes, each kind of failure once.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import os
import resource
import shlex
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fuzz_readers
from fuzz_cases import Case, Cases

from memcalc.cli.registry import Group
from memcalc.ui.answers import Reply, reply
from memcalc.ui.app import App

LONGEST_S = 30
"""Processor time of one case; what takes longer hangs."""
MOST_MEMORY = 4 << 30
"""Address space of the process [bytes]."""
MOST_RESIDENT = 1 << 30
"""What stays of it over all cases [bytes]."""
CODES = frozenset({0, 1, 2, 3})
STATUSES = frozenset({200, 403, 404, 413, 414, 421, 422})
UNSEEN = ("\u202e", "\x00")
"""Characters that no terminal should see."""
FORBIDDEN = ("os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "os.fork", "socket.connect", "socket.bind")


def run(words: Sequence[str]) -> tuple[int, str, str]:
    """Run a command line in this process; its exit code and what it wrote."""
    import typer.main

    from memcalc.cli.app import app

    group: Group = typer.main.get_command(app)  # type: ignore[assignment]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = group.main(list(words), prog_name="memcalc", standalone_mode=False) or 0
        except SystemExit as end:
            code = int(end.code or 0)
    return code, out.getvalue(), err.getvalue()


def _of_command(words: Sequence[str]) -> str:
    code, out, err = run(words)
    if code not in CODES:
        return f"exit code {code}"
    if code in {2, 3} and err.count("\n") > 1:
        return f"more than one line: {err[:200]!r}"
    as_json = words[-2:] == ["--format", "json"] and code in {0, 1} and "--help" not in words
    if as_json and words[0] not in {"sweep", "export"}:
        json.loads(out, parse_constant=_no_number)
    elif any(letter in out for letter in UNSEEN):
        return "a character that no terminal should see"
    return ""


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no JSON")


def _of_page(words: Sequence[str]) -> str:
    request, text = words
    answer = reply(request, text)
    if answer.status not in {200, 422}:
        return f"status {answer.status}"
    if answer.kind == "application/json":
        json.loads(answer.body, parse_constant=_no_number)
    return ""


def _of_http(words: Sequence[str]) -> str:
    """Ask the application, with an answer that costs nothing behind it."""
    method, path, query, headers, body = words
    sent: list[dict[str, Any]] = []
    scope = {
        "type": "http", "method": method, "path": path, "query_string": query.encode(),
        "headers": [(name.encode(), value.encode("utf-8", "surrogateescape")) for name, value in
            json.loads(headers).items()],
    }  # fmt: skip

    async def answering(*_: str) -> Reply:
        return Reply(200, "application/json", b"{}")

    parts = [body.encode("utf-8", "surrogateescape")]

    async def receive() -> dict[str, Any]:
        if not parts:
            await asyncio.sleep(LONGEST_S)  # the browser waits for the answer
        return {"type": "http.request", "body": parts.pop(), "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    asyncio.run(App("<p>", "default-src 'none'", answering)(scope, receive, send))
    status = sent[0]["status"]
    return "" if status in STATUSES else f"status {status}"


def _of_reader(words: Sequence[str]) -> str:
    name, path = words
    fuzz_readers.read_all(name, Path(path).absolute())
    return ""


TARGETS = {"command": _of_command, "page": _of_page, "http": _of_http, "read": _of_reader}


def fault(case: Case) -> str:
    """What is wrong with how a case ends; nothing where it is as it must be."""
    for name, content in case.files.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_bytes(content)
    signal.setitimer(signal.ITIMER_PROF, LONGEST_S)
    try:
        return TARGETS[case.target](case.words)
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is the finding
        return f"{type(error).__name__}: {traceback.format_exc(limit=-2)}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _late(*_: object) -> None:
    raise TimeoutError(f"longer than {LONGEST_S} s")


def forbid(seen: Counter[str], folder: str) -> None:
    """Count what no case may do: sockets, processes, files that are written outside of a folder."""
    scratch = tempfile.gettempdir()

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in FORBIDDEN and "fc-list" not in str(arguments):  # Matplotlib asks it for fonts
            seen[f"{event} {str(arguments)[:80]}"] += 1
        elif event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR) and isinstance(arguments[0], str):
            path = os.path.abspath(arguments[0])  # noqa: PTH100 - a hook of every file
            if not path.startswith((folder, scratch)) and path != os.devnull:
                seen[f"writes {path[:80]}"] += 1

    sys.addaudithook(hook)


class Tally:
    """What was tried."""

    def __init__(self, names: Sequence[str]) -> None:
        self.spent = dict.fromkeys(names, 0.0)
        self.ran, self.failed = Counter[str](), Counter[str]()
        self.longest, self.slowest = 0.0, ""

    def least(self) -> str:
        """The maker that has had the least time."""
        return min(self.spent, key=self.spent.__getitem__)

    def add(self, name: str, case: Case, seconds: float, wrong: str) -> None:
        """Count a case, and print it where it is the first of its kind to fail."""
        self.ran[name] += 1
        self.spent[name] += seconds
        if seconds > self.longest:
            self.longest, self.slowest = seconds, f"{name}: {shlex.join(case.words)[:200]}"
        if not wrong:
            return
        kind = wrong[:60] + wrong[-160:] if "Traceback" in wrong else wrong[:60]
        self.failed[kind] += 1
        if self.failed[kind] == 1:
            sys.stdout.write(f"{wrong}\n  {shlex.join(case.words)[:300]}\n  {case.line()}\n")
            sys.stdout.flush()

    def text(self) -> str:
        """Counts by maker, and in all."""
        rows = (f"  {name}: {self.ran[name]:,} in {self.spent[name]:.0f} s\n" for name in self.spent)
        return f"{''.join(rows)}slowest: {self.longest:.1f} s, {self.slowest}\n"


def main() -> int:
    """Run cases until the time is up, or an interrupt; the exit code says whether any failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="a maker of cases, or the beginning of several names")
    parser.add_argument("--replay", default="")
    given = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
    signal.signal(signal.SIGPROF, _late)
    seen, ended = Counter[str](), list[bool]()
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"XDG_CONFIG_HOME": folder, "MPLCONFIGDIR": folder}
        os.chdir(folder)
        if given.replay:
            sys.stdout.write(f"{fault(Case.of(given.replay)) or 'as it must be'}\n")
            return 0
        run(("plan", "--model", "gpt2", "--gpu", "a100-40g", "--gpus", "2", "--save", "seed.json"))
        makers = Cases(given.seed, Path("seed.json").read_bytes()).makers()
        makers = {name: make for name, make in makers.items() if name.startswith(given.only)}
        forbid(seen, folder)
        tally, end = Tally(list(makers)), time.monotonic() + given.minutes * 60
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: ended.append(True))
        while not ended and time.monotonic() < end:
            name = tally.least()
            case, begun = makers[name](), time.process_time()
            wrong = fault(case)
            tally.add(name, case, time.process_time() - begun, wrong)
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    failed = sum(tally.failed.values())
    sys.stdout.write(
        f"{tally.text()}{sum(tally.ran.values()):,} cases, {failed} failed in {len(tally.failed)} ways, "
        f"{resident >> 20} MiB at the most, forbidden: {dict(seen) or 'nothing'}\n"
    )
    return int(bool(failed or seen) or resident > MOST_RESIDENT)


if __name__ == "__main__":
    sys.exit(main())
