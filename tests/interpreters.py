"""Print an estimate of every preset model, one a line, which ``.ci/run`` compares between interpreters."""

from __future__ import annotations

import json
import sys
from itertools import cycle

import memcalc
from memcalc import catalog
from memcalc.errors import MemcalcError, MissingError

JOBS = (
    {"framework": "fsdp2", "recompute": "none"},
    {"framework": "hf", "recompute": "full", "precision": "bf16-autocast"},
    {"framework": "megatron", "recompute": "selective-core-attn", "tp": 2},
    {"framework": "deepspeed", "zero": 3, "recompute": "full"},
)


def estimated(name: str, job: dict[str, object]) -> dict[str, object]:
    """Return the figures of one model under `job`, with images of a usual size where it needs one, or the refusal."""
    try:
        try:
            answer = memcalc.estimate(model=name, gpu="h100", gpus=8, **job)
        except MissingError:
            answer = memcalc.estimate(model=name, gpu="h100", gpus=8, image_size="1024x768", **job)
    except MemcalcError as error:
        return {"refused": str(error)}
    return {"peak": answer.peak.model_dump(), "terms": {term.name: term.bytes for term in answer.terms}}


def main() -> None:
    """Print the figures of each model under one of the jobs, in turn, or why there are none."""
    for name, job in zip(catalog.names("model"), cycle(JOBS), strict=False):
        sys.stdout.write(json.dumps([name, job, estimated(name, job)]) + "\n")


if __name__ == "__main__":
    main()
