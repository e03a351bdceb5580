"""Print an estimate of every preset model, one a line, which ``.ci/run`` compares between interpreters."""

from __future__ import annotations

import json
import sys
from itertools import cycle

import memcalc
from memcalc import catalog
from memcalc.errors import InputError

JOBS = (
    {"framework": "fsdp2", "recompute": "none"},
    {"framework": "hf", "recompute": "full", "precision": "bf16-autocast"},
    {"framework": "megatron", "recompute": "selective-core-attn", "tp": 2},
    {"framework": "deepspeed", "zero": 3, "recompute": "full"},
)


def main() -> None:
    """Print the figures of each model under one of the jobs, in turn, or why there are none."""
    for name, job in zip(catalog.names("model"), cycle(JOBS), strict=False):
        try:
            answer = memcalc.estimate(model=name, gpu="h100", gpus=8, **job)
            figures = {"peak": answer.peak.model_dump(), "terms": {t.name: t.bytes for t in answer.terms}}
        except InputError as error:
            figures = {"refused": str(error)}
        sys.stdout.write(json.dumps([name, job, figures]) + "\n")


if __name__ == "__main__":
    main()
