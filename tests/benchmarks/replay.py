"""Events a second of the allocator's replay, on one core. ``python tests/benchmarks/replay.py``."""

import argparse
import random
import time
from collections import deque
from collections.abc import Iterator

from memcalc.allocator import replay

MIB = 2**20
Plain = tuple[str, int, int, int, str]


def training_step(blocks: int, tensors: int, seed: int) -> list[Plain]:
    """Return two steps of a model, blocks forward and backward, after a load that leaves a free segment behind."""
    draw = random.Random(seed)  # noqa: S311  # the same sizes in every run
    sizes = [draw.choice([4096, 300_000, 3 * MIB, 16 * MIB, 45 * MIB, 90 * MIB]) for _ in range(tensors)]
    events: list[Plain] = [("alloc", -1, 1024 * MIB, 1, ""), ("free", -1, 0, 0, "")]
    keys = iter(range(10**9))
    for step in range(2):
        kept = [next(keys) for _ in range(blocks)]
        events.append(("mark", 0, 0, 0, f"forward {step}"))
        for key in kept:
            events += [("alloc", key, 64 * MIB, 0, ""), *passed(sizes, keys, 3)]
        events.append(("mark", 0, 0, 0, f"backward {step}"))
        for key in reversed(kept):
            events += [*passed(sizes, keys, len(sizes)), ("free", key, 0, 0, "")]
    return events


def passed(sizes: list[int], keys: Iterator[int], live: int) -> Iterator[Plain]:
    """Yield one pass over a block, in which at most so many tensors are live."""
    held: deque[int] = deque()
    for size in sizes:
        if len(held) == live:
            yield ("free", held.popleft(), 0, 0, "")
        held.append(next(keys))
        yield ("alloc", held[-1], size, 0, "")
    yield from (("free", key, 0, 0, "") for key in reversed(held))


def main() -> None:
    """Print the rate for each way of holding segments, the best of several runs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=80)
    parser.add_argument("--tensors", type=int, default=84)
    parser.add_argument("--runs", type=int, default=7)
    options = parser.parse_args()
    events = training_step(options.blocks, options.tensors, seed=1)
    free = replay(events).peak_reserved
    for label, capacity, expandable in (
        ("no limit", None, False),
        ("card of 99 % of the peak", free * 99 // 100, False),
        ("expandable segments", None, True),
    ):
        seconds = []
        for _ in range(options.runs):
            started = time.process_time()
            found = replay(events, capacity=capacity, expandable=expandable)
            seconds.append(time.process_time() - started)
        rate = len(events) / min(seconds)
        end = "out of memory" if found.out_of_memory else f"{found.retries} retries"
        told = f"{found.peak_reserved / 2**30:.2f} GiB reserved, {end}"
        print(f"{label:>25}: {len(events):,} events in {min(seconds):.4f} s, {rate:,.0f}/s ({told})")


if __name__ == "__main__":
    main()
