"""A module's own steps as a document: the peak and its parts, the phases, what each module keeps for backward."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from memcalc.report.render import Report
from memcalc.report.tables import Block, Branch, Code, Column, Document, Leaf, Line, Table, Tree, percent
from memcalc.results.module import ModuleProbe, SavedTensor
from memcalc.units import GIB, KIB, MIB, format_bytes, format_count

__all__ = ["report"]

_SIZE = Column("bytes", right=True)
_TENSORS = (
    Column("part"),
    Column("module", priority=1),
    Column("kept by"),
    Column("shape", priority=2),
    Column("dtype", priority=2),
    _SIZE,
)


def report(result: ModuleProbe) -> Report:
    """Return the answer of ``memcalc probe --device fake``."""
    table = Table("Kept for backward", _TENSORS, tuple(_row(one) for one in result.tensors))
    tables = _components(result), _phases(result), _parts(result), _tree(result, table)
    blocks = (*_head(result), *tables, *_foot(result))
    return Report(Document(blocks, table), result.model_dump(mode="json", by_alias=True))


def _head(result: ModuleProbe) -> Iterator[Line]:
    yield Line(f"{_sized(result.peak)} allocated at the peak, in {result.peak_phase} ({result.peak_at})", "verdict")
    size = f"{result.module}, {format_count(result.parameters)} trained parameters"
    batch = f"micro-batch {result.micro_batch}" + (f" of {result.seq_len} tokens" if result.seq_len > 1 else "")
    yield Line(f"{size}: {result.precision}, recompute {result.recompute}, {result.optimizer}, {batch}", "title")
    yield Line(f"Second of two steps on fake tensors (torch {result.torch}); the loss is {result.loss}.", "faint")


def _components(result: ModuleProbe) -> Table:
    rows = tuple(
        (name, str(size), percent(size, result.peak)) for name, size in result.components.model_dump().items() if size
    )
    return Table("At the peak", (Column("component"), _SIZE, Column("share", right=True, priority=1)), rows)


def _phases(result: ModuleProbe) -> Table:
    columns = (Column("phase"), Column("first step", "bytes", right=True), Column("second step", "bytes", right=True))
    rows = tuple((name, str(result.first_phases[name]), str(size)) for name, size in result.phases.items())
    return Table("Largest sum of live tensors", columns, rows)


def _parts(result: ModuleProbe) -> Table:
    sizes = Column("parameters", right=True), Column("kept", "bytes", right=True)
    columns = (Column("part"), Column("class", priority=1), *sizes)
    rows = tuple((part.path, part.name, str(part.parameters), str(part.saved)) for part in result.parts)
    return Table("Parts", columns, rows)


def _tree(result: ModuleProbe, table: Table) -> Tree:
    """What is kept, by module, of the first block of each kind and of what stands outside the blocks."""
    shown = {part.path for part in result.parts if not part.name}
    alike: set[tuple[str, int]] = set()
    for part in result.parts:
        if part.name and (part.name, part.saved) not in alike:
            alike.add((part.name, part.saved))
            shown.add(part.path)
    grouped: dict[str, list[SavedTensor]] = {}
    for one in result.tensors:
        if (one.part or "the module") in {*shown, "embedding", "between", "head"}:
            grouped.setdefault(one.module or one.part or "the module", []).append(one)
    branches = tuple(
        Branch(module, _sized(sum(one.bytes for one in members)), tuple(_leaf(one) for one in members))
        for module, members in grouped.items()
    )
    return Tree(branches, table)


def _leaf(one: SavedTensor) -> Leaf:
    shape = "x".join(map(str, one.shape)) or "scalar"
    copy = (f"a copy of {one.weight}",) if one.weight else ()
    return Leaf(one.node, f"{one.bytes} bytes", (f"{shape} {one.dtype}", *copy))


def _row(one: SavedTensor) -> tuple[str, ...]:
    return one.part, one.module, one.node, "x".join(map(str, one.shape)), one.dtype, str(one.bytes)


def _foot(result: ModuleProbe) -> Iterator[Block]:
    yield Line(f"One micro-batch keeps {_sized(result.saved)} for backward, weights and their copies left out.")
    for note in result.notes:
        yield Line(f"Note: {note}.", "warning")
    if result.file:
        yield Line(f"The recorded model is in {result.file}.")
        command = f"memcalc plan --model {shlex.quote(result.file)} --gpu a100-80g --gpus 8"
        yield Code("Plan it, also where there is no torch", command)


def _sized(size: int) -> str:
    """Return a size in the binary unit that suits it."""
    unit = next((unit for unit, scale in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)) if size >= scale / 10), "B")
    return format_bytes(size, unit).replace(",", "")
