"""Runs command lines in children of one process that has run them before: what they do, without what Python imports.

``python tests/forked_commands.py COMMANDS``, a JSON list of lists of words. It says how long each lasted, reads lines
of JSON from standard input, the numbers of the commands that run at once and the seconds after which they are killed
or null, and answers each with the exit codes. A folder ``out`` that they write is removed between the first runs.
"""

import json
import os
import select
import shutil
import signal
import sys
import time

from memcalc.cli import main as command_line


def run(words: list[str]) -> int:
    """Run one command in this process."""
    sys.argv = ["memcalc", *words]
    try:
        command_line()
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    return 0


def begin(words: list[str]) -> tuple[int, int]:
    """Fork a child that runs a command; return its number and what can be read once it has ended."""
    ended, alive = os.pipe()
    child = os.fork()
    if not child:
        os.close(ended)
        code = 70
        try:
            code = run(words)
        finally:
            os._exit(code)
    os.close(alive)
    return child, ended


def finish(child: int, ended: int, until: float | None) -> int:
    """Wait for a child to end, or kill it; return its exit code, below zero where it was killed."""
    left = None if until is None else max(0.0, until - time.monotonic())
    if not select.select([ended], [], [], left)[0]:
        os.kill(child, signal.SIGKILL)
    os.close(ended)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main(commands: list[list[str]]) -> None:
    """Run what is asked for until nothing is."""
    answers = os.fdopen(os.dup(1), "w")
    with open(os.devnull, "w") as nothing:  # noqa: PTH123
        for stream in (1, 2):
            os.dup2(nothing.fileno(), stream)
    lasted = []
    for words in commands:  # once for all that is imported and read, once more for the time
        shutil.rmtree("out", ignore_errors=True)
        codes = [run(words)]
        shutil.rmtree("out", ignore_errors=True)
        begun = time.monotonic()
        codes.append(finish(*begin(words), None))
        lasted.append(time.monotonic() - begun)
        if any(codes):
            sys.exit(f"{words}: {codes}")
    print(json.dumps(lasted), file=answers, flush=True)
    for line in sys.stdin:
        places, after = json.loads(line)
        until = None if after is None else time.monotonic() + after
        children = [begin(commands[place]) for place in places]
        print(json.dumps([finish(*child, until) for child in children]), file=answers, flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
