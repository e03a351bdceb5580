"""What can be asked of a recorded model: its blocks are as they ran, so that nothing can be changed inside them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.errors import CombinationError
from memcalc.formulas.optimizer import OPTIMIZERS
from memcalc.formulas.recompute import parse_policy
from memcalc.planner.as_is import check_framework, refuse_told
from memcalc.planner.optimizers import named_in
from memcalc.terms.parameters import refuse_counted

if TYPE_CHECKING:
    from memcalc.planner.request import Request
    from memcalc.specs.model import Model
    from memcalc.specs.recorded import Mode

USUAL_SAMPLES = 256
"""Global batch of a model that has no sequence length, where none is told."""
WHOLE = {
    "tp": "not supported for --module",
    "pp": "not supported for --module",
    "cp": "not supported for --module",
    "ep": "not supported for --module",
}
LEFT_OUT = {
    "sp": "not supported for --module",
    "quantize": "quantize inside the factory",
    "lora": "add adapters inside the factory",
    "attention": "attention is recorded as the module calls it",
    "kernels": "kernels are recorded as the module calls them",
    "loss": "the loss is recorded as the module computes it",
    "compile": "a recording is of the module as it runs without torch.compile",
    "compress_activations": "a recording is of the module as it runs without hooks",
    "autocast": "of a recording the precision says whether autocast is on: give --precision bf16-autocast",
    "also_train": "what is trained is what the factory leaves with requires_grad",
}


def check_recorded(request: Request, model: Model) -> None:
    """Refuse what a recorded or a counted model cannot be asked, and pin what is therefore not searched."""
    refuse_counted(model, "--module runs its own class on fake tensors instead")
    if model.recording is None:
        return
    refuse_told(request, {**WHOLE, **LEFT_OUT})
    check_framework(request, "fsdp2", "a recorded module")
    _check_checkpoints(request)
    for name in named_in(request, "optimizer"):
        _check_optimizer(name)
    for policy in named_in(request, "recompute"):
        check_policy(policy, model)
    request.given.update(dict.fromkeys(WHOLE, 1))
    if not model.recording.per_sequence:
        _check_samples(request)


def _check_checkpoints(request: Request) -> None:
    form = str(request.given["fields"].get("checkpoint", ""))
    if form.startswith("reentrant"):
        raise CombinationError("strategy.checkpoint", form, "checkpoints were recorded in their other form")


def _check_optimizer(name: str) -> None:
    """Refuse an optimizer whose states follow from the shapes of tensors."""
    if OPTIMIZERS[name].states is not None:
        raise CombinationError("optimizer", name, "its states need the shapes of all tensors: a recording has sizes")


def recorded_optimizers(model: Model, optimizer: tuple[str, ...]) -> tuple[str, ...]:
    """Of all optimizers those that a model can have."""
    return optimizer if model.recording is None else tuple(n for n in optimizer if OPTIMIZERS[n].states is None)


def check_policy(name: str, model: Model) -> None:
    """Whole blocks are computed again or not; of several kinds of blocks all, or none."""
    kind = parse_policy(name).kind
    if kind in {"parts", "selective-ops"}:
        allowed = "recorded blocks are computed again as a whole: none, full or every-K"
        raise CombinationError("recompute", name, allowed)
    if kind not in {"none", "full"} and len(model.groups) > 1:
        raise CombinationError("recompute", name, "of blocks that are not alike all are computed again or none")


def _check_samples(request: Request) -> None:
    if request.given.get("seq_len") not in {None, 1}:
        raise CombinationError("seq-len", request.given["seq_len"], "the module's inputs do not depend on a length")
    if "global_batch" not in request.choices:
        request.get("global_batch", USUAL_SAMPLES, f"{USUAL_SAMPLES} samples")
        request.given.setdefault("global_batch", USUAL_SAMPLES)


def policies_for(model: Model, usual: list[str]) -> list[str]:
    """Of the policies that a search tries those that a model can have."""
    if model.recording is None:
        return usual
    if len(model.groups) > 1:
        return ["none", "full"]
    return [name for name in usual if parse_policy(name).kind not in {"parts", "selective-ops"} or name == "none"]


def mode_of(precision: str) -> Mode:
    """How a module was recorded for a precision."""
    if precision.endswith("-autocast"):
        return "autocast"
    return "fp32" if precision == "fp32" else "half"


def recorded_precisions(model: Model, able: list[str]) -> list[str]:
    """Of some precisions those that a model was recorded in."""
    if model.recording is None:
        return able
    modes = {run.mode for run in model.recording.entry.runs}
    return [name for name in able if mode_of(name) in modes and not name.startswith("fp8")]


def notes_of(model: Model, precision: str, recompute: str, micro_batch: int) -> list[str]:
    """What the recording says of one strategy: its notes are about micro-batches of one sequence."""
    if model.recording is None or micro_batch > 1:
        return []
    run = f"({mode_of(precision)}, recompute {parse_policy(recompute).treatment})"
    return [f"{note}." for note in model.recording.notes if run in note]
