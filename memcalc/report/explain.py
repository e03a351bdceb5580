"""Every term of an estimate as a tree: what stands at the peak first, the largest first, what is folded in one line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from memcalc.errors import InputError, UnknownNameError
from memcalc.report.estimate import foot_of, head_of, inputs_of, made, off_gpu_name, on_node, sized, terms
from memcalc.report.render import Report
from memcalc.report.tables import Branch, Leaf, Tree, percent
from memcalc.results import Components, Estimate, TermFacts

__all__ = ["FOLDS", "Folding", "explanation", "folding"]

OFF_GPU = "off-gpu"
_BRANCHES = (*(name for name in Components.model_fields if name != "reserve"), OFF_GPU)
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
        raise InputError("fold", str(fold), "none and all stand alone")
    folded = set(_BRANCHES) if names == ["all"] else {name for name in names if name in _BRANCHES}
    if only is not None:
        folded |= set(_BRANCHES) - set(_names("only", only, _BRANCHES))
    return Folding("none" not in names, frozenset(folded))


def _names(option: str, said: str, known: Sequence[str]) -> list[str]:
    names = [name.strip() for name in said.split(",")]
    for name in names:
        if name not in known:
            raise UnknownNameError(option, name, f"must be one or several of {', '.join(known)}", known)
    return names


def explanation(result: Estimate, folded: Folding | None = None) -> Report:
    """Return the answer of ``memcalc explain``: every term with formula, values, phases and source."""
    return made(result, *head_of(result), tree_of(result, folded or Folding()), *foot_of(result))


def tree_of(result: Estimate, folded: Folding) -> Tree:
    """Return the terms by component, the largest at the peak first, then what lies off the GPU."""
    sources = list(dict.fromkeys(term.source for term in _shown(result, folded)))
    branches = (*_branches(result, folded, sources), *_sums(result), *_off_gpu(result, folded, sources))
    title = f"At the peak, in {result.peak.phase}; share of the device figure"
    return Tree(branches, terms(result), tuple(sources), title, "not at the peak")


def _shown(result: Estimate, folded: Folding) -> Iterator[TermFacts]:
    """Yield the terms whose sources are told."""
    for component, members in _grouped(result):
        if component not in folded.branches:
            yield from (term for term in members if not folded.others or _at_peak(term, result))
    if OFF_GPU not in folded.branches:
        yield from result.off_gpu


def _grouped(result: Estimate) -> list[tuple[str, list[TermFacts]]]:
    """Return terms by component; within one those at the peak first, the largest first."""
    grouped: dict[str, list[TermFacts]] = {}
    for term in sorted(result.terms, key=lambda term: (not _at_peak(term, result), -term.bytes)):
        grouped.setdefault(term.component, []).append(term)
    return sorted(grouped.items(), key=lambda item: -getattr(result.components, item[0]))


def _at_peak(term: TermFacts, result: Estimate) -> bool:
    return not term.phases or result.peak.phase in term.phases


def _branches(result: Estimate, folded: Folding, sources: Sequence[str]) -> Iterator[Branch]:
    """A component's figure is what stands at the peak, since not all terms are alive at once."""
    device = result.peak.device
    for component, members in _grouped(result):
        size = getattr(result.components, component)
        yield Branch(
            component, sized(size), tuple(_leaf(term, result, folded, sources) for term in members),
            percent(size, device), component in folded.branches,
        )  # fmt: skip


def _sums(result: Estimate) -> Iterator[Branch]:
    """What stands beside the terms, and the whole."""
    peak, device = result.peak, result.peak.device
    sizes = {"reserve": result.components.reserve, "context": device - peak.reserved, "device": device}
    for name, size in sizes.items():
        yield Branch(name, sized(size), (), percent(size, device))


def _leaf(term: TermFacts, result: Estimate, folded: Folding, sources: Sequence[str]) -> Leaf:
    alive = _alive(term.phases, result.phases)
    here = _at_peak(term, result)
    aside = folded.others and not here
    told = alive if here else f"{alive}, not at the peak"
    share = percent(term.bytes, result.peak.device) if here else ""
    return Leaf(term.name, sized(term.bytes), _lines(term, told, sources), share, alive, aside)


def _alive(phases: Sequence[str], known: Iterable[str]) -> str:
    if not phases or set(known) <= set(phases):
        return "in every phase"
    return f"in {', '.join(phases)}"


def _lines(term: TermFacts, when: str, sources: Sequence[str]) -> tuple[str, ...]:
    source = f" [{sources.index(term.source) + 1}]" if term.source in sources else ""
    lines = (f"= {term.formula}", inputs_of(term), f"{term.bytes} bytes, {when}{source}")
    return tuple(line for line in lines if line.strip())


def _off_gpu(result: Estimate, folded: Folding, sources: Sequence[str]) -> Iterator[Branch]:
    """What one rank keeps off the GPU, by the memory that it lies in."""
    for tier in sorted({term.tier for term in result.off_gpu}):
        members = sorted((term for term in result.off_gpu if term.tier == tier), key=lambda term: -term.bytes)
        leaves = tuple(
            Leaf(term.name, sized(term.bytes), _lines(term, _alive(term.phases, result.phases), sources))
            for term in members
        )
        says = f"of one rank; {sized(on_node(result, tier))} a node"
        whole = sum(term.bytes for term in members)
        yield Branch(off_gpu_name(tier), sized(whole), leaves, "", OFF_GPU in folded.branches, says)
