"""Cold start of a plan beside the bare import of its dependencies. ``python tests/benchmarks/cold_start.py``."""

import argparse
import statistics
import subprocess
import sys
import time

PLAN = [sys.executable, "-m", "memcalc", "plan", "--model", "7b", "--gpu", "a100-40g"]
IMPORTS = [sys.executable, "-c", "import typer, rich, pydantic, tabulate, numpy"]


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
    seconds(PLAN)
    pairs = [(seconds(PLAN), seconds(IMPORTS)) for _ in range(runs)]
    plan, imports = (statistics.median(column) for column in zip(*pairs, strict=True))
    print(f"plan {plan:.3f} s, imports {imports:.3f} s, medians of {runs} runs: {plan / imports:.2f} x")


if __name__ == "__main__":
    main()
