"""What measured runs say of a kind of job: shipped errors of its kind, or of the nearest kind, and in what it differs.

The errors stand in ``presets/evidence.toml``, which the script that writes docs/accuracy.md writes too, so that an
answer can tell how right it is without comparing all runs again.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from memcalc import catalog
from memcalc.results.details import Evidence, FigureErrors
from memcalc.specs.step_time import Kind, KindErrors

if TYPE_CHECKING:
    from memcalc.results.estimates import Estimate
    from memcalc.specs.strict import Figure

NEAR = {"fsdp2": "torchtitan"}
"""A framework that stands on another one's sharding, whose runs are the nearest where its own were not measured."""
_TRAITS = {
    "adapters": ("all weights trained", "adapters trained"),
    "experts": ("dense", "mixture of experts"),
    "offload": ("nothing offloaded", "offloaded"),
}


def kind_of(estimate: Estimate) -> Kind:
    """Return the kind of job that an estimate is about."""
    strategy, model = estimate.strategy, estimate.model
    return Kind(
        framework=strategy.framework.partition("@")[0],
        adapters=bool(strategy.lora),
        experts=model.active_parameters < model.parameters,
        offload=bool(strategy.offload),
    )


def words_of(kind: Kind) -> str:
    """Return a kind of job in a few words.

    >>> words_of(Kind(framework="hf", adapters=True))
    'hf, adapters trained, dense, nothing offloaded'
    """
    return ", ".join([kind.framework, *(texts[getattr(kind, name)] for name, texts in _TRAITS.items())])


@cache
def errors_by_kind() -> tuple[KindErrors, ...]:
    """Return the shipped errors, one entry for each kind with a measured run."""
    table = catalog.read_toml(catalog.shipped() / "evidence.toml")
    return tuple(catalog.validated(KindErrors, row, "kind") for row in table["kind"])


def evidence_for(estimate: Estimate, known: tuple[KindErrors, ...] | None = None) -> Evidence:
    """Return what measured runs say of an estimate's kind of job; `known` are the shipped errors when left out."""
    kind = kind_of(estimate)
    entry = _nearest(kind, errors_by_kind() if known is None else known)
    reserve = catalog.reserve(estimate.interval.allocator, estimate.interval.kind)
    counts = ("runs", "ran", "false_rejects", "ran_out", "false_fits")
    return Evidence(
        kind=kind,
        nearest=None if entry is None else Kind.model_validate(entry.model_dump(include=set(Kind.model_fields))),
        differs=() if entry is None else tuple(_differences(kind, entry)),
        figures=() if entry is None else tuple(_summary(name, errors) for name, errors in sorted(entry.errors.items())),
        **{name: 0 if entry is None else getattr(entry, name) for name in counts},
        allocator=reserve.name,
        ranged_kind=reserve.kind,
        **{name: getattr(reserve, name) for name in ("low", "high", "coverage", "crossed")},
        ranged=reserve.figures,
        documents=reserve.sources,
    )


def _nearest(kind: Kind, known: tuple[KindErrors, ...]) -> KindErrors | None:
    """Return the kind's own entry, or of its framework, then of the one near to it, that which differs least."""
    for framework in (kind.framework, NEAR.get(kind.framework)):
        alike = [entry for entry in known if entry.framework == framework and entry.runs]
        if alike:
            return min(alike, key=lambda entry: [getattr(entry, name) != getattr(kind, name) for name in _TRAITS])
    return None


def _differences(kind: Kind, entry: Kind) -> list[str]:
    framework = [] if entry.framework == kind.framework else [entry.framework]
    others = [texts[getattr(entry, n)] for n, texts in _TRAITS.items() if getattr(entry, n) != getattr(kind, n)]
    return framework + others


def _summary(figure: Figure, errors: tuple[float, ...]) -> FigureErrors:
    from memcalc.validation import summary_of

    known: dict[str, Any] = summary_of([(error, "") for error in errors]) | {"worst_id": None}
    return FigureErrors(figure=figure, **known)
