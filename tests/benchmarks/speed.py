"""Strategies a second on one core: memory and step time of a large space. ``python tests/benchmarks/speed.py``."""

import argparse
import cProfile
import os
import pstats
import time

for _threads in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_threads, "1")

from memcalc import catalog
from memcalc.grid import Grid
from memcalc.planner.pipelines import layouts_for
from memcalc.planner.search import search
from memcalc.specs.options import SharedSettings

RECOMPUTES = (
    *("none", "full", "sqrt", "attention", "mlp", "selective-ops", "selective-core-attn"),
    *("every-2", "every-3", "every-4", "every-8"),
    *("segments-2", "segments-4", "segments-8"),
    *("block-4", "block-8", "block-16", "block-24"),
    *("uniform-2", "uniform-4"),
)
OFFLOADS = ((), ("optimizer",), ("params",), ("activations",), ("optimizer", "activations"), ("params", "activations"))


def large_space(name: str, gpus: int) -> Grid:
    """Return the space of all layouts of a number of GPUs with every precision, policy, stage, offload and batch."""
    model = catalog.model(name)
    powers = [1 << k for k in range(gpus.bit_length())]
    layouts = layouts_for(model, gpus, (powers[:4], powers[:6], powers[:5], [1]), 4096, sp=None)
    layouts += layouts_for(model, gpus, (powers[1:4], powers[:6], powers[:5], [1]), 4096, sp=False)
    precisions = ("bf16-mixed", "bf16-autocast", "fp32", "bf16")
    micro_batches = tuple(1 << k for k in range(8))
    return Grid(
        SharedSettings(framework="fsdp2", seq_len=4096, global_batch=1024),
        tuple(layouts),
        precisions,
        RECOMPUTES,
        (3, 2),
        OFFLOADS,
        micro_batches,
    )


def main() -> None:
    """Print the rate, the best of several runs, and on request where the time goes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama-2-7b")
    parser.add_argument("--gpus", type=int, default=512)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    model, gpu = catalog.model(options.model), catalog.gpu("a100-80g")
    node, grid = catalog.node_for(gpu), large_space(options.model, options.gpus)
    seconds, found = [], {}
    profile = cProfile.Profile()
    for _ in range(options.runs):
        started = time.process_time()
        found = search(model, (grid,), gpu, node)
        seconds.append(time.process_time() - started)
    if options.profile:
        profile.runcall(search, model, (grid,), gpu, node)
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)
    rate = grid.size / min(seconds)
    result = found[options.gpus]
    evaluated = result.searched - result.bounded
    print(f"{grid.size:,} strategies ({len(grid.layouts)} layouts), {evaluated:,} evaluated, {result.feasible:,} fit")
    print(f"best of {options.runs}: {min(seconds):.3f} s, {rate:,.0f} strategies/s on one core")


if __name__ == "__main__":
    main()
