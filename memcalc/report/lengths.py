"""What an estimate says of sequences that differ in length, as lines."""

from __future__ import annotations

from collections.abc import Iterator

from memcalc.report.tables import Line, gib
from memcalc.results.details import LengthFacts
from memcalc.results.estimates import Verdict


def length_lines(facts: LengthFacts | None, verdict: Verdict) -> Iterator[Line]:
    """Yield the data, the longest micro-batch, what the allocator reserves over others, and how many steps fit."""
    if facts is None:
        return
    lengths = (
        f"{facts.lengths}: {facts.sequences:,} sequences, median {facts.median:,}, p99 {facts.p99:,}, longest "
        f"{facts.longest:,} tokens"
    )
    batches = (
        f"longest micro-batch {facts.rows:,} × {facts.tokens:,} = {facts.rows * facts.tokens:,} tokens, mean "
        f"{facts.mean_tokens:,.0f} (batching {facts.batching})"
    )
    yield _line("Lengths", lengths, batches)
    if facts.replayed:
        run = f"{facts.replayed} micro-batches of {facts.shapes} shapes simulated, then the longest (seed {facts.seed})"
        yield _line("Allocator", run, reserved_text(facts))
    yield _line("Steps", *steps_texts(facts, verdict))


def reserved_text(facts: LengthFacts) -> str:
    """What is reserved over the run, beside what the longest micro-batch takes alone."""
    more = ", more with each new shape" * facts.grows
    return f"{gib(facts.in_sequence)} GiB reserved{more}; {gib(facts.alone)} GiB where every micro-batch is the longest"


def steps_texts(facts: LengthFacts, verdict: Verdict) -> tuple[str, ...]:
    """How many steps fit; "all" is said of the longest micro-batch, and so of every step there can be."""
    if facts.fitting == 1:
        after = "" if verdict == "fits" else ", some after the allocator has given its cache back"
        return (f"fits for all steps, the longest micro-batch among them{after}",)
    limit = f"micro-batches of up to {facts.fitting_tokens:,} tokens fit" if facts.fitting_tokens else "none fits"
    fits = f"fits for {share_text(facts.fitting)} of {facts.steps:,} simulated steps, {share_text(facts.running)}"
    return f"{fits} without the 95% margin", limit


def share_text(share: float) -> str:
    """A share that is never rounded up to all, nor down to nothing.

    >>> share_text(0.99984), share_text(0.5), share_text(1.0), share_text(0.0004)
    ('99.9%', '50.0%', '100%', '<0.1%')
    """
    if share in {0.0, 1.0}:
        return f"{share:.0%}"
    return f"{int(share * 1000) / 10:.1f}%" if share >= 0.001 else "<0.1%"


def _line(label: str, *texts: str) -> Line:
    return Line(f"{label}: {'; '.join(texts)}.", label=label, items=texts)
