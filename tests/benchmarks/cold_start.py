"""Cold start of a plan beside the bare import of its dependencies. ``python tests/benchmarks/cold_start.py``."""

import argparse
import statistics
import subprocess
import sys
import time

PLAN = [sys.executable, "-m", "memcalc", "plan", "--model", "7b", "--gpu", "a100-40g"]
BARE = [sys.executable, "-c", "import typer, rich, pydantic, tabulate, numpy"]
USED = """
import numpy, tabulate, typer.main, typer._adapters
from rich.console import Console
from rich.table import Table
from pydantic import BaseModel
"""
IMPORTS = [sys.executable, "-c", USED]
"""typer, rich and pydantic import next to nothing until a name is used: the names that any program of theirs uses."""


def seconds(command: list[str]) -> float:
    """Return the wall-clock time of one run in a process of its own."""
    started = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - started


def main() -> None:
    """Print both medians and their ratio; runs alternate, so that a busy machine slows both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=11)
    runs = parser.parse_args().runs
    commands = (PLAN, IMPORTS, BARE)
    for command in commands:
        seconds(command)
    rounds = [[seconds(command) for command in commands] for _ in range(runs)]
    plan, imports, bare = (statistics.median(column) for column in zip(*rounds, strict=True))
    print(f"plan {plan:.3f} s; core dependencies {imports:.3f} s: {plan / imports:.2f} x, medians of {runs} runs")
    print(f"bare import statements, of which three are lazy, {bare:.3f} s: {plan / bare:.2f} x")


if __name__ == "__main__":
    main()
