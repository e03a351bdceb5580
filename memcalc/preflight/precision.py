"""The precision of a merged job: its name depends on the runtime, and what torch refuses counts as its edit runs.

Accelerate 1.15: accelerator.py (prepare_model, no_sync), utils/fsdp_utils.py (fsdp2_prepare_model) and
utils/dataclasses.py (set_mixed_precision of both plugins). Transformers 5.23: trainer.py, integrations/deepspeed.py.
DeepSpeed 0.19: runtime/engine.py (_configure_distributed_model).
"""

from __future__ import annotations

from memcalc import catalog
from memcalc.convert.config import Finding
from memcalc.frameworks import habits_of
from memcalc.preflight.job import MergedJob


def set_precision(job: MergedJob) -> bool:
    """Say the precision, and return whether torch's GradScaler meets gradients in fp16, which it refuses.

    FSDP under Accelerate keeps fp32 shards of what it trains, whatever they were loaded in, unless axolotl takes its
    place, and computes and reduces in 16 bits; a frozen base stays as it was loaded. DeepSpeed casts all weights,
    adapters too, and keeps an fp32 master. Else autocast runs over the weights as they are.
    """
    if job.options.get("precision") is not None or not {"mixed", "weights"} & set(job.facts):
        return False
    unscaled = False
    mixed, weights = job.facts.get("mixed", "no"), _weights(job)
    name = str(job.options.get("framework", "")).partition("@")[0]
    fsdp = name in {"fsdp1", "fsdp2"} or (name == "hf" and int(job.options.get("zero", 0)) > 0)
    if mixed == "no":
        job.options["precision"] = weights
    elif name == "deepspeed":
        job.options["precision"] = f"{mixed}-mixed"
    elif fsdp and not (job.options.get("lora") and weights != "fp32") and job.facts.get("casts_shards", True):
        job.options["precision"] = f"{mixed}-mixed"
        if job.options.get("lora"):
            job.settings.setdefault("strategy.frozen_fp32", True)
            _assumed(job)
        if _accelerated(job):
            job.options.setdefault("autocast", True)
    elif weights == "fp32":
        job.options["precision"] = f"{mixed}-autocast"
        _assumed(job)
    else:
        job.options["precision"] = weights
        job.options.setdefault("autocast", True)
        unscaled = mixed == job.facts.get("weights") == "fp16" and not job.options.get("lora")
    if name == "fsdp2" and _accelerated(job) and mixed != "no":
        _upcast(job)
    if fsdp and _accelerated(job):
        _reductions(job, narrow=mixed != "no" or weights != "fp32")
    return unscaled


def load_wider(job: MergedJob, dirs: tuple[str, ...]) -> None:
    """Say that a job whose trained weights are fp16 under ``fp16: true`` stops, and count what its edit loads.

    torch 2.13 amp/grad_scaler.py, _unscale_grads_ ("Attempting to unscale FP16 gradients."), which the Trainer reaches
    before it clips. FSDP 1's ShardedGradScaler takes them, DeepSpeed scales by itself, and PEFT has its adapters in
    fp32 (``autocast_adapter_dtype``). axolotl loads weights in the dtype that it computes in (resolve_dtype).
    """
    origin = next((name for name in ("weights", "mixed") if name in job.origins), None)
    if origin is None:
        return
    config, setting = job.origins[origin]
    if config.format != "axolotl":
        edit = f"{setting.field}: float32" if origin == "weights" else "load them in float32"
        precision = "fp16-autocast"
    elif catalog.gpu(str(job.facts["gpu"]), dirs).supports("bf16"):
        precision, edit = "bf16", "bf16: true"
    else:
        precision, edit = "fp32", "fp16: false and bf16: false, which is fp32"
    job.options["precision"] = precision
    if precision != "bf16":
        job.options.pop("autocast", None)
    message = (
        "fp16: true over weights that are loaded in fp16 stops at the first step, where torch's GradScaler says "
        f'"Attempting to unscale FP16 gradients."; counted is {precision}'
    )
    job.note("error", "MC119", origin, message, edit)


def _upcast(job: MergedJob) -> None:
    """Say which releases hold a frozen base in fp32: no file names the release that runs.

    Accelerate v1.6.0 to v1.12.0 utils/fsdp_utils.py, fsdp2_prepare_model: ``model.to(torch.float32)``; since v1.13.0
    (PR 3848) parameters that require a gradient alone. Quantised weights are left out since 1.14.
    """
    origin = next((name for name in ("mixed", "lora") if name in job.origins), None)
    frozen = job.options.get("lora") and _weights(job) != "fp32" and job.options.get("quantize") in {None, "none"}
    if origin is not None and frozen:
        message = (
            "Accelerate 1.6 to 1.12 casts the frozen weights to fp32 too, under FSDP 2 with mixed precision: 2 bytes "
            "more for each, shared by the ranks. Counted is 1.13 and later, which casts only what is trained"
        )
        job.note("note", "MC004", origin, message, "upgrade accelerate to 1.13")


def _accelerated(job: MergedJob) -> bool:
    """Whether Accelerate wraps the model, as the Trainer lets it."""
    return bool(job.facts.get("accelerated")) or "trainer" in job.engines


def _weights(job: MergedJob) -> str:
    """The dtype of the weights where autocast or FSDP finds them; fp16's arithmetic has the widths of bf16's.

    Under adapters it has its own name, which GPUs without bf16 have: no master stands beside what is frozen.
    """
    weights, lora = str(job.facts.get("weights", "fp32")), job.options.get("lora")
    if job.options.get("quantize") not in {None, "none"}:
        weights = "fp16" if "fp16" in {weights, job.facts.get("mixed")} else "bf16"
    return ("fp16-mixed" if lora else "bf16") if weights == "fp16" else weights


def note_reductions(job: MergedJob) -> None:
    """Say that DDP reduces all gradients after each micro-batch where no_sync is left out, which no time counts."""
    several = int(job.options.get("gpus") or 1) > 1 and int(job.facts.get("accumulation") or 1) > 1
    copied = habits_of(str(job.options.get("framework") or "ddp")).name == "ddp"
    if several and copied and job.facts.get("sync_each_batch") and "sync_each_batch" in job.origins:
        message = "DDP reduces all gradients after each micro-batch with it; counted is one reduction a step"
        job.note("note", "MC002", "sync_each_batch", message, "leave it out: DDP keeps its gradients whole anyhow")


def _assumed(job: MergedJob) -> None:
    """A script of one's own may load 16-bit weights, as from_pretrained() does since Transformers 5.0."""
    if "weights" in job.facts or "script_loads" not in job.origins:
        return
    config, setting = job.origins["script_loads"]
    message = (
        "weight dtype unknown; assuming fp32 with autocast. Since Transformers 5.0 from_pretrained() "
        "defaults to the checkpoint's dtype, usually bf16"
    )
    suggestion = "--precision bf16 --set strategy.autocast=true"
    job.findings.append((config, Finding("note", "MC004", setting.field, message, suggestion)))


def _reductions(job: MergedJob, *, narrow: bool) -> None:
    """Gradients are reduced in the dtype of compute, and by no_sync for a step's last micro-batch alone."""
    job.settings.setdefault("strategy.reduce_dtype", "bf16" if narrow else "fp32")
    if int(job.facts.get("accumulation") or 1) > 1:
        synced = bool(job.facts.get("sync_each_batch"))
        if synced == habits_of(str(job.options["framework"])).whole_accumulation:  # not as it does by itself
            job.settings.setdefault("strategy.whole_accumulation", not synced)
