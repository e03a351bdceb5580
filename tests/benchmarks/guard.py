"""What the guard costs a step: real steps on the CPU with and without it. ``python tests/benchmarks/guard.py``.

Steps with and without it alternate, so that a busy machine slows both alike; the ratio is taken window by window, of
processor time. The guard's own calls are also counted by themselves, since the noise of a busy machine is larger than
they are. With recomputation of all blocks, JSON lines and gauges of Prometheus, it does in such a window all that it
ever does, except what needs a GPU: there a window reads the allocator's statistics and records two events for each
block of one step.
"""

import os

os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")

import argparse
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from prometheus_client import CollectorRegistry
from transformers import GPT2Config, GPT2LMHeadModel

import memcalc
from memcalc.probe.guard import Reading

EVERY, ROWS, TOKENS = 10, 4, 128


class Meter:
    """Readings that cost nothing, as those of a GPU would be had for a call."""

    def read(self) -> Reading:
        """Return the same at all times."""
        return Reading(1, 1, 1, 1)

    def reset_peaks(self) -> None:
        """Do nothing."""

    def release(self) -> None:
        """Do nothing."""


class Loop:
    """A small Transformers model, trained with recomputation of all blocks."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        config = GPT2Config(n_layer=4, n_embd=128, n_head=4, vocab_size=1024, n_positions=TOKENS, use_cache=False)
        self.model = GPT2LMHeadModel(config)
        self.model._activation_checkpointing_enable({"use_reentrant": False})
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.batch = torch.randint(0, 1024, (ROWS, TOKENS))

    def step(self, watch: Any) -> float:
        """Train for a step, guarded or not, and return its processor time [s]."""
        started = time.process_time()
        for part in self.batch.split(ROWS // 2) if watch is None else watch.split(self.batch):
            (self.model(input_ids=part, labels=part).loss / 2).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if watch is not None:
            watch.step_done()
        return time.process_time() - started


def window(loop: Loop, watch: Any) -> tuple[float, float]:
    """Return the processor time of a window's guarded steps, and of as many between them without the guard [s]."""
    guarded, plain, timer = 0.0, 0.0, watch._timer
    for place in range(EVERY):
        for first in (True, False):
            if first == (place % 2 == 0):
                guarded += loop.step(watch)
                continue
            armed = timer.armed
            timer.remove()
            plain += loop.step(None)
            timer.install()
            timer.armed = armed
    return guarded, plain


def alone(watch: Any, batch: torch.Tensor, rounds: int) -> float:
    """Return what the guard's own calls take for a step, without a model [s]."""
    started = time.process_time()
    for _ in range(rounds):
        for _part in watch.split(batch):
            pass
        watch.step_done()
    return (time.process_time() - started) / rounds


def main() -> None:
    """Print the share of a step that the guard takes, both ways."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--windows", type=int, default=25)
    windows = parser.parse_args().windows
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    job = {"model": "gpt2", "gpu": "a100-40g", "gpus": 1, "framework": "hf", "global_batch": ROWS}
    plans = memcalc.plan(**job, micro_batch=2, recompute="full", top=1)
    loop = Loop()
    with tempfile.TemporaryDirectory() as folder:
        words: dict[str, Any] = {"every": EVERY, "meter": Meter(), "registry": CollectorRegistry()}
        words |= {"jsonl": str(Path(folder) / "guard.jsonl"), "model": loop.model}
        with memcalc.guard(plans, **words) as watch:
            loop.step(None)
            timer = watch._timer
            rounds = [window(loop, watch) for _ in range(windows)]
            alone(watch, loop.batch, EVERY)
            own = statistics.median(alone(watch, loop.batch, 20 * EVERY) for _ in range(9))
            timer.arm()
            again = timer.timed(lambda: None)
            started = time.process_time()
            for _ in range(10_000):
                again()
            span = (time.process_time() - started) / 10_000
    ratios, step = (
        sorted(guarded / plain - 1 for guarded, plain in rounds),
        statistics.median(r[1] for r in rounds) / EVERY,
    )
    low, high = ratios[windows // 4], ratios[-1 - windows // 4]
    print(f"a step: {1e3 * step:.1f} ms of processor time, {windows} windows of {EVERY} steps")
    print(f"guarded beside not: {statistics.median(ratios):+.2%} (half of the windows {low:+.2%} to {high:+.2%})")
    print(f"its own calls alone: {1e6 * own:.1f} µs a step, reports included: {own / step:.3%} of this step")
    print(f"a span around a block that is computed again: {1e6 * span:.2f} µs, in one step of {EVERY}")


if __name__ == "__main__":
    main()
