"""Cold start of commands beside the import of what they need. ``python tests/benchmarks/cold_start.py``.

Runs alternate, so that a busy machine slows all alike; processor time is steadier there than the clock. Bytecode is
cached, as an installed package has it, whatever PYTHONDONTWRITEBYTECODE says: compiling 150 modules at every start
costs more than a tenth of a second.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

IMPORTS = """
import numpy, tabulate, typer.main, typer._adapters
from rich.console import Console
from rich.table import Table
from pydantic import BaseModel
"""
"""typer, rich and pydantic import next to nothing until a name is used: the names that any program of theirs uses."""
SPARED = """
import gc, os
os.environ.update(PYDANTIC_DISABLE_PLUGINS="__all__", OPENBLAS_NUM_THREADS="1")
gc.set_threshold(1_000_000)
"""
"""What the command line spares itself (memcalc/cli/__init__.py)."""
OWN = SPARED + IMPORTS + "import memcalc.cli.app, memcalc.api, memcalc.report.plan, memcalc.report.terminal"
CONFIG = '{"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true}, "zero_optimization": {"stage": 3}}'
CHECKED = ("--model", "7b", "--gpu", "a100-80g", "--gpus", "8", "--seq-len", "4096", "--brief")
RUN = (sys.executable, "-m", "memcalc")
COMMANDS = {
    "plan": [*RUN, "plan", "--model", "7b", "--gpu", "a100-40g"],
    "plan for 8 GPUs": [*RUN, "plan", "--model", "7b", "--gpu", "a100-40g", "--gpus", "8"],
    "estimate": [*RUN, "estimate", "--model", "7b", "--gpu", "a100-80g", "--gpus", "8", "--zero", "3"],
    "check of one config": [*RUN, "check", "CONFIG", *CHECKED],
    "list of commands": [*RUN, "--help"],
    "plan's modules imported, nothing computed": [sys.executable, "-c", OWN],
    "core dependencies imported": [sys.executable, "-c", IMPORTS],
    "python alone": [sys.executable, "-c", "pass"],
}


def spent(command: list[str], environment: dict[str, str]) -> tuple[float, float]:
    """Return wall-clock and processor time of one run in a process of its own [s]."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, check=True, capture_output=True, env=environment)
    wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Print both times of each command, and how many times those of importing the dependencies they are."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=11)
    runs = parser.parse_args().runs
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "ds_config.json"
        config.write_text(CONFIG, encoding="utf-8")
        COMMANDS["check of one config"][len(RUN) + 1] = str(config)
        environment = {**os.environ, "PYTHONPYCACHEPREFIX": folder, "PYTHONDONTWRITEBYTECODE": ""}
        for command in COMMANDS.values():
            spent(command, environment)
        rounds = [[spent(command, environment) for command in COMMANDS.values()] for _ in range(runs)]
    found = dict(zip(COMMANDS, zip(*rounds, strict=True), strict=True))
    imports = found["core dependencies imported"]
    for name, times in found.items():
        wall, busy = (statistics.median(column) for column in zip(*times, strict=True))
        clock, share = (statistics.median(p[i] / d[i] for p, d in zip(times, imports, strict=True)) for i in (0, 1))
        told = f"{wall:.3f} s, {busy:.3f} s of processor, fastest {min(b for _, b in times):.3f} s"
        print(f"{name:>42}: {told}; {clock:.2f} x and {share:.2f} x")


if __name__ == "__main__":
    main()
