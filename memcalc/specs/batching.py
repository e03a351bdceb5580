"""How batches are made where sequences differ in length, as options of a job."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from memcalc.specs.option import JOB, Option
from memcalc.specs.strict import Frozen

Batching = Literal[
    "pad", "pad-max", "grouped", "flatten", "bfd", "bfd-split", "wrapped", "multipack", "max-tokens", "token-budget"
]


class BatchInputs(Frozen):
    """The lengths of the data, and what is made of them; without lengths every sequence is the longest."""

    # fmt: off
    lengths: Annotated[
        str,
        Option("Lengths of the sequences: a file (numbers by line, JSON, CSV, .npy), or a log-normal by its median, "
            "99th percentile and largest, in tokens.", panel=JOB, metavar="FILE|P50:P99:MAX", group="", step=18),
    ] = ""
    batching: Annotated[
        Batching,
        Option("How --lengths become micro-batches.", panel=JOB, metavar="NAME", help="How --lengths become "
            "micro-batches: {values}.", group="", step=18),
    ] = "pad"
    token_budget: Annotated[
        int,
        Option("Tokens of a micro-batch, under the batching max-tokens or token-budget.", "tokens", JOB, "N", group="",
            most=100_000_000, step=18),
        Field(ge=0),
    ] = 0
    pad_multiple: Annotated[
        int,
        Option("What padded lengths are rounded up to a multiple of.", "tokens", JOB, "N", group="", step=18),
        Field(gt=0),
    ] = 1
    # fmt: on
