"""Every term of an estimate as a tree: its formula, the values put in, the phases it is alive in, and its source."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from memcalc.errors import InputError, UnknownNameError
from memcalc.report.estimate import (
    answer_of,
    cache_of,
    foot_of,
    inputs_of,
    occasion_lines,
    occasions_table,
    off_gpu_name,
    on_node,
    sized,
    terms,
    warned,
    where_of,
)
from memcalc.report.plan_words import parts_table, stands_on
from memcalc.report.tables import Block, Branch, Leaf, Line, Report, Table, Tree, header, made, percent, said
from memcalc.results.estimates import Components, Estimate, TermFacts
from memcalc.results.names import component_name, phase_range
from memcalc.units import GIB

OFF_GPU = "off-gpu"
_SHOWN = 0.005
"""Share of the total below which a screen does not list a term."""
_MOST = (3, 2, 1)
"""Terms of one component that a screen lists, the largest; what is left is one row. Fewer where rows are too many."""
_ROWS = 10
"""Terms of all components with which an explanation is twenty lines."""
_BRANCHES = (*Components.model_fields, "context", OFF_GPU)
FOLDS = ("others", "none", "all", *_BRANCHES)
"""What may be folded: terms that are not alive at the peak, nothing, everything, or components by name."""


@dataclass(frozen=True)
class Folding:
    """What a tree tells in one line."""

    others: bool = True
    """Terms that are not alive at the peak."""
    branches: frozenset[str] = frozenset()
    """Components, and what lies off the GPU."""


def folding(fold: str | None = None, only: str | None = None) -> Folding:
    """Read what is typed.

    >>> folding(only="activations").branches == set(_BRANCHES) - {"activations"}
    True
    >>> folding("none").others, folding("others,buffers").branches
    (False, frozenset({'buffers'}))
    """
    names = _names("fold", fold or "others", FOLDS)
    if len(names) > 1 and {"none", "all"} & set(names):
        raise InputError("fold", str(fold), "use none or all without other names")
    folded = set(_BRANCHES) if names == ["all"] else {name for name in names if name in _BRANCHES}
    if only is not None:
        folded |= set(_BRANCHES) - set(_names("only", only, _BRANCHES))
    return Folding("none" not in names, frozenset(folded))


def _names(option: str, text: str, known: Sequence[str]) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in known:
            raise UnknownNameError(option, name, f"must be one or several of {', '.join(known)}", known)
    return names


def explanation(result: Estimate, folded: Folding | None = None) -> Report:
    """Return the answer of ``memcalc explain``: every term with formula, values and source, and the parts of a step."""
    beside = (*occasion_lines(result), *((occasions_table(result),) if result.occasions else ()))
    head = answer_of(result)
    blocks = (*head, tree_of(result, folded or Folding()), *cache_of(result), *_time(result), *beside, *foot_of(result))
    screen = () if folded is not None else (*head, *_brief(result))
    return made(result, terms(result), *blocks, screen=screen)


def _brief(result: Estimate) -> Iterator[Block]:
    """Yield the largest terms at the peak as a table, and how to see all that is said of each."""
    table = _at_the_peak(result)
    yield table
    yield from _symbols(str(row[-1]) for row in (table.narrow or table).rows)
    yield from warned(result.warnings)
    away = sum(not _is_listed(term, result) for term in result.terms)
    yield Line(f"{away} more terms, values and sources: -v · one part: --only activations", "faint")


_SYMBOLS = {
    "N": "GPUs sharing", "n": "how many", "w": "bytes each", "E": "elements", "T": "tokens per micro-batch",
    "V": "vocabulary", "h": "hidden size", "f": "MLP width", "f_e": "expert width",
    "q": "query width", "k": "key width", "a·d": "width of heads", "t": "tensor-parallel ranks",
}  # fmt: skip
"""What stands for what in the formulas of a screen; widths stand in brackets there, what else has their letter not."""
_OF_PARTS = {
    "P_block": "a block's", "P_blocks": "all blocks'", "P_head": "the head's", "P_root": "outside blocks",
    "P_max": "the largest tensor's", "P_small": "kept whole", "P_cast": "cast",
}  # fmt: skip
_SYMBOL = re.compile(
    r"(?<![\w·])(?:P_(?:blocks?|head|root|max|small|cast)|[PENnwTVht])(?!\w)|(?<=[(·])(?:h|f_e|a·d|[fqk])(?=[)·/ +])"
)


def _symbols(formulas: Iterable[str]) -> Iterator[Line]:
    """Yield what the symbols of formulas stand for; what is no formula has none."""
    used = {symbol for formula in formulas if re.search("[·/]", formula) for symbol in _SYMBOL.findall(formula)}
    parts = ", ".join(f"{symbol} {text}" for symbol, text in _OF_PARTS.items() if symbol in used)
    counts = [f"P parameters ({parts})" if parts else "P parameters"] if parts or "P" in used else []
    if used:
        yield said("Symbols", *counts, *(f"{symbol} {text}" for symbol, text in _SYMBOLS.items() if symbol in used))


def _is_listed(term: TermFacts, result: Estimate) -> bool:
    return _at_peak(term, result) and term.bytes >= _SHOWN * result.peak.device


def _at_the_peak(result: Estimate) -> Table:
    outside = ("context", [term for term in result.outside if term.bytes])
    groups = [
        (component, [term for term in members if _is_listed(term, result)])
        for component, members in (*_grouped(result), outside)
    ]
    for most in _MOST:
        listed = [(component, *row) for component, members in groups for row in _largest(members, most)]
        if len(listed) <= _ROWS:
            break
    else:  # what lies outside the allocator is one row then
        beyond = result.peak.device - result.peak.reserved
        listed = [row for row in listed if row[0] != "context"]
        listed.append(("context", component_name("context"), beyond, "outside PyTorch's allocator"))
    device, parts = result.peak.device, [row[0] for row in listed]
    rows = [
        (
            "outside" if component == "context" else component_name(component), term, f"{size / GIB:.2f}",
            percent(size, device), formula,
        )
        for component, term, size, formula in listed
    ]  # fmt: skip
    columns = header(f"component | at the peak: {', '.join(where_of(result))} | GiB > | % > | formula")
    table = Table("", columns, tuple(rows), parts=tuple(parts))
    short = tuple((*row[1:3], re.split(", with | where ", row[4])[0]) for row in rows)
    return table._replace(narrow=table.keep((1, 2, 4))._replace(rows=short))


def _largest(members: Sequence[TermFacts], most: int) -> Iterator[tuple[str, int, str]]:
    """Yield name, bytes and formula of the largest terms, and of all others together."""
    few = members if len(members) <= most + 1 else members[:most]
    yield from ((term.name, term.bytes, term.formula) for term in few)
    if left := members[len(few) :]:
        component = left[0].component
        name = f"{len(left)} more of {component_name(component)}"
        yield name, sum(term.bytes for term in left), f"--only {component}"


def _time(result: Estimate) -> Iterator[Block]:
    if result.time is not None:
        yield parts_table(result.time)
        yield stands_on(result.time)


def tree_of(result: Estimate, folded: Folding) -> Tree:
    """Return the terms by component, the largest at the peak first, then what lies off the GPU."""
    sources = list(dict.fromkeys(term.source for term in _shown(result, folded)))
    inside, outside = _branches(result, folded, sources), _outside(result, folded, sources)
    branches = (*inside, *outside, *_off_gpu_branches(result, folded, sources))
    title = f"At the peak ({', '.join(where_of(result))}); % of the total"
    return Tree(branches, terms(result, readable=True), tuple(sources), title, "not allocated at the peak")


def _shown(result: Estimate, folded: Folding) -> Iterator[TermFacts]:
    for component, members in _grouped(result):
        if component not in folded.branches:
            yield from (term for term in members if not folded.others or _at_peak(term, result))
    if "context" not in folded.branches:
        yield from result.outside
    if OFF_GPU not in folded.branches:
        yield from result.off_gpu


def _grouped(result: Estimate) -> list[tuple[str, list[TermFacts]]]:
    """Return terms by component, the allocator's cache last; within one those at the peak first, the largest first."""
    grouped: dict[str, list[TermFacts]] = {}
    for term in sorted(result.terms, key=lambda term: (not _at_peak(term, result), -term.bytes)):
        grouped.setdefault(term.component, []).append(term)
    grouped.setdefault("reserve", [])
    return sorted(grouped.items(), key=lambda item: (item[0] == "reserve", -getattr(result.components, item[0])))


def _at_peak(term: TermFacts, result: Estimate) -> bool:
    return not term.phases or result.peak.phase in term.phases


def _branches(result: Estimate, folded: Folding, sources: Sequence[str]) -> Iterator[Branch]:
    """A component's figure is what stands at the peak, since not all terms are alive at once."""
    device = result.peak.device
    for component, members in _grouped(result):
        size = getattr(result.components, component)
        yield Branch(
            component_name(component), sized(size), tuple(_leaf(term, result, folded, sources) for term in members),
            percent(size, device), component in folded.branches, part=component,
        )  # fmt: skip


def _outside(result: Estimate, folded: Folding, sources: Sequence[str]) -> Iterator[Branch]:
    """What the process holds beside the allocator, and the sum of all."""
    device = result.peak.device
    size = device - result.peak.reserved
    leaves = tuple(_leaf(term, result, folded, sources) for term in result.outside)
    folds = "context" in folded.branches
    yield Branch(component_name("context"), sized(size), leaves, percent(size, device), folds, part="context")
    yield Branch(component_name("device"), sized(device), (), percent(device, device))


def _leaf(term: TermFacts, result: Estimate, folded: Folding, sources: Sequence[str]) -> Leaf:
    alive = _alive(term.phases, result.phases)
    here = _at_peak(term, result)
    aside = folded.others and not here
    phases = alive if here else f"{alive}, not allocated at the peak"
    share = percent(term.bytes, result.peak.device) if here else ""
    return Leaf(term.name, sized(term.bytes), _lines(term, phases, sources), share, alive, aside)


def _alive(phases: Sequence[str], known: Iterable[str]) -> str:
    return phase_range(phases, known) or "all phases"


def _lines(term: TermFacts, when: str, sources: Sequence[str]) -> tuple[str, ...]:
    source = f" [{sources.index(term.source) + 1}]" if term.source in sources else ""
    lines = (f"= {term.formula}", inputs_of(term), f"{term.bytes:,} bytes · {when}{source}")
    return tuple(line for line in lines if line.strip())


def _off_gpu_branches(result: Estimate, folded: Folding, sources: Sequence[str]) -> Iterator[Branch]:
    for tier in sorted({term.tier for term in result.off_gpu}):
        members = sorted((term for term in result.off_gpu if term.tier == tier), key=lambda term: -term.bytes)
        leaves = tuple(
            Leaf(term.name, sized(term.bytes), _lines(term, _alive(term.phases, result.phases), sources))
            for term in members
        )
        says = f"per rank; {sized(on_node(result, tier))} per node"
        total = sum(term.bytes for term in members)
        yield Branch(off_gpu_name(tier), sized(total), leaves, "", OFF_GPU in folded.branches, says)
