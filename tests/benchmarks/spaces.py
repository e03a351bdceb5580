"""Spaces as others report them, of large jobs, and growth from 10^3 to 10^7. ``python tests/benchmarks/spaces.py``.

Calculon (Isaev et al., SC 2023) takes 335 s for 42,064 strategies of a 22B model on 8 GPUs, and about an hour for
467,808 of a 175B model on 64 GPUs. The spaces here are what ``memcalc plan`` searches for the same models and numbers
of GPUs, each strategy with memory and time.
"""

import argparse
import os
import resource
import time
from dataclasses import replace

for _threads in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_threads, "1")

from memcalc import catalog
from memcalc.grid import Grid
from memcalc.planner import axes
from memcalc.planner.request import check_words
from memcalc.planner.search import search

SPACES: tuple[tuple[str, str, str, int, dict[str, object]], ...] = (
    ("22B on 8 GPUs", "megatron-22b", "a100-80g", 8, {"global_batch": 64}),
    ("175B on 64 GPUs", "gpt3-175b", "a100-80g", 64, {"global_batch": 512, "cp": "any"}),
    ("405B on 16,384 GPUs", "llama-3.1-405b", "h100", 16384, {}),
    ("DeepSeek-V3 on 2,048", "deepseek-v3", "h800", 2048, {}),
)
"""Searched under Megatron-LM: what it is, model, GPU, how many, and the words beside."""


def counted(model: str, grids: tuple[Grid, ...], gpu: str) -> tuple[int, int]:
    """Return how many strategies a search goes through, and how many of them it evaluates; the others are bounded."""
    chip = catalog.gpu(gpu)
    found = search(catalog.model(model), grids, chip, catalog.node_for(chip)).values()
    searched = sum(outcome.searched for outcome in found)
    return searched, searched - sum(outcome.bounded for outcome in found)


def timed(name: str, model: str, grids: tuple[Grid, ...], gpu: str, runs: int) -> None:
    """Print the size, the best of several times and the rate."""
    seconds = []
    for _ in range(runs):
        started = time.process_time()
        searched, evaluated = counted(model, grids, gpu)
        seconds.append(time.process_time() - started)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    size = f"{searched:>12,} strategies ({evaluated:>10,} evaluated)"
    print(f"{name:>24}: {size} in {min(seconds):8.4f} s, {searched / min(seconds):>13,.0f}/s, {memory:.2f} GiB in all")


def whole(model: str, gpu: str, gpus: int, beyond: bool = False, **words: object) -> tuple[Grid, ...]:
    """Return the space that ``memcalc plan`` searches."""
    chip = catalog.gpu(gpu)
    request = replace(check_words(words, None, several=True), beyond=beyond)
    return axes.space(request, catalog.model(model), chip, catalog.node_for(chip), gpus)


def main() -> None:
    """Time each space."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    runs = parser.parse_args().runs
    for name, model, gpu, gpus, words in SPACES:
        timed(name, model, whole(model, gpu, gpus, framework="megatron", **words), gpu, runs)
    large = whole("llama-2-70b", "h100", 4096, global_batch=4096, sp="any", cp="any", beyond=True)[0]
    for size in (10**3, 10**4, 10**5, 10**6, 10**7):
        each = large.size // len(large.layouts)
        count = max(min(size // each, len(large.layouts)), 1)
        part = replace(large, layouts=large.layouts[:count])
        if size < each:
            part = replace(part, recomputes=part.recomputes[:2], micro_batches=part.micro_batches[:4])
        timed(f"growth to {size:,}", "llama-2-70b", (part,), "h100", runs)


if __name__ == "__main__":
    main()
