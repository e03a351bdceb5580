"""Blocks written as the operators that a framework runs, executed symbolically under autograd's own rules."""

from __future__ import annotations

import sys

from memcalc.trace.tape import ALONE, Size, Tape, Tensor


def counts_references() -> bool:
    """Whether this interpreter ends an object with its last reference, and counts those to a storage as CPython does.

    A call must hand over an argument that its caller has no name for, so that the function can let it go.
    """

    def run(x: Tensor) -> bool:
        alone = sys.getrefcount(x.storage) <= ALONE
        view = x.view()
        shared = sys.getrefcount(x.storage) > ALONE
        del x, view
        return alone and shared and tape.events == [0, ~0]

    tape = Tape()
    return run(tape.new("tensor", Size(1, 1)))


if not counts_references():
    raise ImportError(
        "memcalc reads the lifetimes of tensors off Python's reference counts, and this interpreter does not keep them"
        " as CPython 3.11 to 3.13 does, so that every figure would be wrong: run memcalc with one of these."
    )
