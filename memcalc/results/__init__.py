"""What the library answers: typed records whose ``model_dump(mode="json")`` is the published JSON.

Bytes are integers, times are seconds. Field names are fixed (``memcalc.estimate/1``, ``memcalc.plan/1``).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memcalc.results.calibrate import Calibrated, CalibratedFigure
    from memcalc.results.check import Check, CheckDefault, CheckedFile, CheckEdit, CheckFinding, CheckFix
    from memcalc.results.comparison import (
        ErrorGroup,
        ErrorSummary,
        RunReason,
        RunScore,
        RunUnknown,
        RunVerdict,
        TargetResult,
        Validation,
        ValidationSummary,
    )
    from memcalc.results.diff import (
        Diff,
        DiffComponents,
        DiffCost,
        DiffField,
        DiffFigures,
        DiffSide,
        DiffStep,
        DiffTerm,
    )
    from memcalc.results.estimates import (
        Budget,
        Components,
        Estimate,
        HardwareFacts,
        Interval,
        ModelFacts,
        OffGpuTerm,
        Peak,
        Saved,
        StagePeak,
        TermFacts,
        Timeline,
        TimelinePart,
        Verdict,
        WorkloadFacts,
    )
    from memcalc.results.inverse import CurvePoint, Fit, Inverse, Miss
    from memcalc.results.plans import Nearest, Plan, PlanPeak, Plans, RecipeStep, Remedy, StepTime
    from memcalc.results.probe import Probed, ProbedJob, ProbeFigure
    from memcalc.results.saved import SavedJob, SavedPlan
    from memcalc.results.sweep import Swept
    from memcalc.results.triage import (
        GpuProcess,
        Triage,
        TriageCause,
        TriageChange,
        TriageComparison,
        TriageFailure,
        TriageGrowth,
        TriageMemory,
        TriageShare,
        TriageSite,
    )

__all__ = [
    "Budget",
    "Calibrated",
    "CalibratedFigure",
    "Check",
    "CheckDefault",
    "CheckEdit",
    "CheckFinding",
    "CheckFix",
    "CheckedFile",
    "Components",
    "CurvePoint",
    "Diff",
    "DiffComponents",
    "DiffCost",
    "DiffField",
    "DiffFigures",
    "DiffSide",
    "DiffStep",
    "DiffTerm",
    "ErrorGroup",
    "ErrorSummary",
    "Estimate",
    "Fit",
    "GpuProcess",
    "HardwareFacts",
    "Interval",
    "Inverse",
    "Miss",
    "ModelFacts",
    "Nearest",
    "OffGpuTerm",
    "Peak",
    "Plan",
    "PlanPeak",
    "Plans",
    "ProbeFigure",
    "Probed",
    "ProbedJob",
    "RecipeStep",
    "Remedy",
    "RunReason",
    "RunScore",
    "RunUnknown",
    "RunVerdict",
    "Saved",
    "SavedJob",
    "SavedPlan",
    "StagePeak",
    "StepTime",
    "Swept",
    "TargetResult",
    "TermFacts",
    "Timeline",
    "TimelinePart",
    "Triage",
    "TriageCause",
    "TriageChange",
    "TriageComparison",
    "TriageFailure",
    "TriageGrowth",
    "TriageMemory",
    "TriageShare",
    "TriageSite",
    "Validation",
    "ValidationSummary",
    "Verdict",
    "WorkloadFacts",
]

_HOMES = {
    "calibrate": ("Calibrated", "CalibratedFigure"),
    "check": ("Check", "CheckDefault", "CheckEdit", "CheckFinding", "CheckFix", "CheckedFile"),
    "comparison": (
        "ErrorGroup",
        "ErrorSummary",
        "RunReason",
        "RunScore",
        "RunUnknown",
        "RunVerdict",
        "TargetResult",
        "Validation",
        "ValidationSummary",
    ),
    "diff": (
        "Diff",
        "DiffComponents",
        "DiffCost",
        "DiffField",
        "DiffFigures",
        "DiffSide",
        "DiffStep",
        "DiffTerm",
    ),
    "estimates": (
        "Budget",
        "Components",
        "Estimate",
        "HardwareFacts",
        "Interval",
        "ModelFacts",
        "OffGpuTerm",
        "Peak",
        "Saved",
        "StagePeak",
        "TermFacts",
        "Timeline",
        "TimelinePart",
        "Verdict",
        "WorkloadFacts",
    ),
    "inverse": ("CurvePoint", "Fit", "Inverse", "Miss"),
    "plans": ("Nearest", "Plan", "PlanPeak", "Plans", "RecipeStep", "Remedy", "StepTime"),
    "probe": ("ProbeFigure", "Probed", "ProbedJob"),
    "saved": ("SavedJob", "SavedPlan"),
    "sweep": ("Swept",),
    "triage": (
        "GpuProcess",
        "Triage",
        "TriageCause",
        "TriageChange",
        "TriageComparison",
        "TriageFailure",
        "TriageGrowth",
        "TriageMemory",
        "TriageShare",
        "TriageSite",
    ),
}
"""The records of each module, imported on first use: an estimate needs few of them."""


def __getattr__(name: str) -> Any:
    """A record, from the module that has it."""
    home = next((module for module, names in _HOMES.items() if name in names), None)
    if home is None:
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)
    return getattr(import_module(f"{__name__}.{home}"), name)
