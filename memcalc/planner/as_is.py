"""Models that are trained as their class is: which frameworks do so, and what would change a recording or a mixer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.errors import CombinationError, UncountedError
from memcalc.formulas.optimizer import OPTIMIZERS
from memcalc.formulas.recompute import parse_policy
from memcalc.planner.optimizers import named_in
from memcalc.specs.mixers import Mamba
from memcalc.terms.parameters import refuse_counted

if TYPE_CHECKING:
    from collections.abc import Mapping

    from memcalc.planner.request import Request
    from memcalc.specs.model import Model
    from memcalc.specs.recorded import Mode


FRAMEWORKS = ("hf", "fsdp2", "fsdp1", "ddp", "deepspeed", "plain")
"""Those that train any module as it is."""
DEGREES = ("tp", "pp", "cp", "ep")
USUAL = ("none", "model", None, False)
OF_PYTORCH = frozenset({"efficient", "math", "sdpa", "cudnn"})
"""Kernels behind PyTorch's ``scaled_dot_product_attention``."""


def refuse_told(request: Request, reasons: Mapping[str, str]) -> None:
    """Refuse the first option that is told anything but what it is by itself, with the reason."""
    for name, reason in reasons.items():
        choice = request.choices.get(name)
        value = choice.text if choice is not None else request.given.get(name)
        if value not in (*USUAL, *((1,) if name in DEGREES else ())):
            raise UncountedError(name.replace("_", "-"), value if isinstance(value, int) else str(value), reason)


def check_framework(request: Request, default: str, model: str) -> None:
    """Refuse a framework that has classes of its own for ``model``, a sentence's subject."""
    named = str(request.given.get("framework", default))
    if named.partition("@")[0] not in FRAMEWORKS:
        raise UncountedError("framework", named, f"{model} is modelled under {', '.join(FRAMEWORKS)}")


def check_class(request: Request, model: Model) -> None:
    """Refuse what would change a recording or a mixer; note of an encoder of text that it predicts nothing."""
    check_recorded(request, model)
    check_mixers(request, model)
    reads = {lookup.index for ends in model.ends for lookup in ends.lookups}
    if not (model.head or model.tail.classes) and "token" in reads and len(model.ends) == 1:
        request.assumptions["head"] = "none (masked words need that of a config.json of their class)"


# ----------------------------------------------------------------------------------------------------- recorded modules


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


def check_kernel(kernel: str | None, model: Model) -> None:
    """Refuse a kernel of attention that the model's own class does not take: the run would stop at its start.

    Source: Transformers 5.24 ``modeling_utils.py``, ``_sdpa_can_dispatch`` and ``_flash_attn_can_dispatch``, which
    raise by the class's ``_supports_sdpa`` and ``_supports_flash_attn``.

    Raises
    ------
    CombinationError
        If the class has no such kernel.
    """
    kinds = model.attentions
    if kernel in OF_PYTORCH | {"flash"} and not all(kind.fused for kind in kinds):
        raise CombinationError("attention", kernel, f"the class of {model.name} has no fused attention; use eager")
    if kernel in OF_PYTORCH and not all(kind.sdpa for kind in kinds):
        allowed = f"the class of {model.name} has none of PyTorch's kernels; use eager or flash"
        raise CombinationError("attention", kernel, allowed)


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


# ------------------------------------------------------------------------------------------------ blocks of other kinds


KERNELS = {
    "gated delta net": "flash-linear-attention and causal-conv1d",
    "delta attention": "flash-linear-attention and causal-conv1d",
    "Mamba-2 mixer": "mamba-ssm and causal-conv1d",
    "Mamba mixer": "mamba-ssm and causal-conv1d",
}
"""Packages whose kernels a class takes where they are installed; its own code in their place keeps far more."""


def check_mixers(request: Request, model: Model) -> None:
    """Refuse what is not modelled beside such blocks, and pin what is therefore not searched."""
    gated = any(attention.output_gate or attention.head_gate for attention in model.attentions)
    chunked = any(attention.chunked or attention.scaled_queries for attention in model.attentions)
    normed = any(attention.value_norm for attention in model.attentions)
    kinds = [
        *model.mixer_kinds,
        *["gated attention"] * gated,
        *["chunked attention"] * chunked,
        *["norms of values"] * normed,
        *[model.unlisted_experts] * bool(model.unlisted_experts),
    ]
    if model.unlisted_experts:
        experts = model.unlisted_experts
        unquantised = f"{experts} are parameters that quantisation of linear layers leaves as they are: not modelled"
        refuse_told(request, {"ep": f"expert parallelism is not modelled for {experts}", "quantize": unquantised})
        request.given.update(ep=1)
    if normed:
        refuse_told(request, {"kernels": "Liger 0.8 has none for some operators of a model with norms of values"})
    if kinds:
        _check_kinds(request, model, " and ".join(kinds))


def _check_kinds(request: Request, model: Model, kinds: str) -> None:
    reasons = {
        "tp": f"tensor parallelism is not modelled for {kinds}",
        "cp": f"context parallelism is not modelled for {kinds}",
        "compile": f"torch.compile is not modelled for {kinds}",
    }
    refuse_told(request, reasons)
    check_framework(request, "fsdp2", f"a model with {kinds}")
    if model.mixers and request.given.get("kernels") == "te":
        raise UncountedError("kernels", "te", f"TransformerEngine's modules are not modelled for {kinds}")
    request.given.update(tp=1, cp=1)
    if any(mixer.kind == "Mamba-2 mixer" for mixer in model.mixers):
        refuse_told(request, {"quantize": "the kernel of Mamba-2 mixers reads the output projection's weight itself"})
    _check_scans(request, model)
    packages = dict.fromkeys(KERNELS[mixer.kind] for mixer in model.mixers if mixer.kind in KERNELS)
    if packages:
        request.assumptions["mixer kernels"] = f"{', '.join(packages)} installed"


def _check_scans(request: Request, model: Model) -> None:
    """Refuse what the kernels of Mamba mixers cannot do, and what is not modelled beside them."""
    scans = [mixer for mixer in model.mixers if isinstance(mixer, Mamba)]
    if not scans:
        return
    reason = "the kernels of Mamba mixers read weights of their linear layers themselves"
    refuse_told(request, {"lora": f"adapters are not modelled: {reason}", "quantize": reason})
    if any(mixer.bias and mixer.norms != "learned" for mixer in scans):
        allowed = "its output's bias cannot be trained: MambaInnerFn of mamba-ssm gives it a gradient without a shape"
        raise CombinationError("model", model.name, allowed)
    precision = str(request.given.get("precision", ""))
    if precision and not scannable(model, [precision]):
        raise CombinationError("precision", precision, AUTOCAST)


AUTOCAST = "autocast leaves normalised B and C in fp32, which the scan of mamba-ssm refuses beside 16-bit channels"


def known_precisions(model: Model, able: list[str]) -> list[str]:
    """Of some precisions those in which a model runs, or was recorded."""
    return recorded_precisions(model, scannable(model, able))


def scannable(model: Model, precisions: list[str]) -> list[str]:
    """Of some precisions those in which the scans of a model run: learned norms on B and C widen them under autocast.

    Source: mamba e9594ce ``csrc/selective_scan/selective_scan.cpp``, which wants one dtype.
    """
    normed = any(isinstance(mixer, Mamba) and mixer.norms == "learned" for mixer in model.mixers)
    return [name for name in precisions if not (normed and name.endswith("-autocast"))]
