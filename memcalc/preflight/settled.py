"""What follows from a merged job once its runtime and model are known: images, layers, sizes and name; its precision.

The precision's name depends on the runtime, and what torch refuses counts as its edit runs.
Accelerate 1.15: accelerator.py (prepare_model, no_sync), utils/fsdp_utils.py (fsdp2_prepare_model) and
utils/dataclasses.py (set_mixed_precision of both plugins). Transformers 5.23: trainer.py, integrations/deepspeed.py.
DeepSpeed 0.19: runtime/engine.py (_configure_distributed_model).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from memcalc import catalog
from memcalc.convert.config import ROLE_KEYS, Finding
from memcalc.errors import MemcalcError, MissingError, ObjectiveError
from memcalc.frameworks import defers_reductions, habits_of
from memcalc.planner.adapted_layers import NEWEST, OF_EXPERTS, WITHOUT_OUT_PROJ, converts_names, linear_targets
from memcalc.preflight.job import MergedJob
from memcalc.preflight.names import found_layers, model_named
from memcalc.preflight.roles import generates, lacking_roles
from memcalc.specs.options import FIELDS

if TYPE_CHECKING:
    from memcalc.specs.model import Model


def keep_images(job: MergedJob, dirs: tuple[str, ...]) -> None:
    """Drop what says nothing: for a model or a job without images, or where the processor has no limit of pixels."""
    names = [name for name in ("vision", "workload.image_pixels") if job.value(name) is not None]
    model = job.facts.get("model")
    if not names or model is None:
        return
    images, alone = _loaded(model, dirs).images, job.value("images") == 0
    for name in names:
        limit = name == "workload.image_pixels"
        if images is None or (limit and (alone or images.rule != "scaled")):
            job.origins.pop(name, None)
            del job.table(name)[name]


def keep_kernels(job: MergedJob, dirs: tuple[str, ...]) -> None:
    """Count a text model beside a vision tower with its own kernels, where files name fused ones: nothing has both."""
    model = job.facts.get("model")
    if job.options.get("kernels") != "fused" or "kernels" not in job.origins or model is None or job.algorithm:
        return
    if _loaded(model, dirs).images is not None:
        message = "fused kernels of the text model are not counted beside a vision tower: they save memory"
        job.note("warning", "MC002", "kernels", message)
        job.options["kernels"] = "model"


PEFT_FORMATS = ("axolotl", "foundry", "llamafactory", "swift", "trainer")
"""Formats whose adapters are PEFT's."""
LISTING = {"axolotl": "0.19", "llamafactory": "0.18", "swift": "0.20"}
"""Formats whose framework lists all linear layers by name for PEFT, and the newest PEFT that it allows.

axolotl 067b021c loaders/adapter.py (``find_all_linear_names``) and pyproject.toml; LLaMA-Factory ff6d4d12
model_utils/misc.py (``find_all_linear_modules``); ms-swift 3602360a utils/transformers_utils.py (``find_all_linears``).
"""


def keep_targets(job: MergedJob, dirs: tuple[str, ...]) -> None:
    """Drop layers, and casts of experts, that the model has not, as the framework passes over them.

    litgpt 26857050, lora.py: ``lora_mlp`` counts for fc and proj of GptNeoxMLP as for the three of LLaMAMLP. PEFT
    005fdd53, tuners_utils.py, ``inject_adapter``: it refuses only where none of the layers is found.
    """
    rank, _, targets = str(job.options.get("lora") or "").partition(":")
    named, model = targets.split(","), job.facts.get("model")
    if not targets or model is None:
        return
    if not _loaded(model, dirs).is_moe:
        job.settings.pop("strategy.kbit_experts", None)
    read_by = job.origins["lora"][0].format if "lora" in job.origins else ""
    if read_by == "swift" and targets == "all-linear":
        _listed_by_swift(job, rank, _loaded(model, dirs))
    if read_by in LISTING and job.settings.get("strategy.peft") is None:
        _found(job, read_by, named, _loaded(model, dirs))
    if targets in {"all", "all-linear"}:
        return
    if job.facts.get("adapts_what_is_there"):
        gated = any(getattr(group.block.mlp, "gated", True) for group in _loaded(model, dirs).groups)
        adapted = [name for name in named if gated or name != "gate"]
    elif read_by in PEFT_FORMATS:
        habits, peft = habits_of(str(job.options.get("framework", "hf"))), job.settings.get("strategy.peft") or NEWEST
        names = job.facts.get("adapted_names")
        adapted, absent = found_layers(named, names, _loaded(model, dirs), habits, str(peft))
        if adapted and absent:
            message = f"the model has no layer {', '.join(absent)}: PEFT passes over it"
            job.note("warning", "MC001", "lora", message)
    else:
        return
    if adapted:
        job.options["lora"] = f"{rank}:{','.join(adapted)}"


def _listed_by_swift(job: MergedJob, rank: str, model: Model) -> None:
    """Leave out what PEFT refuses, as ms-swift does (pipelines/train/tuner.py, _drop_mamba_incompatible_targets)."""
    if model.architecture in WITHOUT_OUT_PROJ:
        linear = linear_targets(model, habits_of(str(job.options.get("framework", "hf"))))
        job.options["lora"] = f"{rank}:{','.join(linear)}"


def _found(job: MergedJob, read_by: str, named: list[str], model: Model) -> None:
    """Say which linear layers a framework lists for PEFT where the experts are stacked: theirs are not among them."""
    habits = habits_of(str(job.options.get("framework", "hf")))
    if not converts_names(model, habits) or named[0].startswith("experts_"):
        return
    job.settings["strategy.peft"] = LISTING[read_by]
    if named != ["all-linear"]:
        return
    linear = linear_targets(model, habits)
    job.options["lora"] = ":".join((str(job.options["lora"]).partition(":")[0], ",".join(linear)))
    moved = converts_names(model, habits, LISTING[read_by]) and {*linear} & {*OF_EXPERTS}
    those = "PEFT adapts them by the names of other MLPs, which get none" if moved else "they hold no adapter"
    message = (
        f"the linear layers of {model.name} are {', '.join(linear)}; its experts are stacked parameters since "
        f"Transformers 5.0, which is taken: {those}; --framework hf@4.49 counts a layer for each expert"
    )
    job.note("note", "MC004", "lora", message)


def fill_in(job: MergedJob, dirs: tuple[str, ...]) -> None:
    """Sizes that are `auto`: from the model's width (Accelerate 1.15, accelerator.py, hidden_size_based_keys)."""
    fields = job.facts.get("filled_in")
    if not fields or job.facts.get("model") is None:
        return
    hidden = _loaded(job.facts["model"], dirs).hidden
    sizes = {
        "strategy.reduce_bucket_size": hidden * hidden,
        "strategy.zero_prefetch_bucket": int(0.9 * hidden * hidden),
        "strategy.persistence_threshold": 10 * hidden,
    }
    for field in fields:
        if field in sizes and (field == "strategy.reduce_bucket_size" or int(job.options.get("zero", 0)) == 3):
            job.settings.setdefault(field, sizes[field])


def unnamed(job: MergedJob, folder: str, dirs: tuple[str, ...]) -> str:
    """Why the model that the files name has to be given, as it stands behind the option; empty where it is known."""
    model = job.facts.get("model")
    if not isinstance(model, str) or "model" not in job.origins:
        return ""
    try:
        model_named(model, folder, dirs)
    except MissingError as error:
        return f" ({str(error).removeprefix('the files name ').rpartition('; give --model')[0]})"
    return ""


def unsized(job: MergedJob, folder: str, dirs: tuple[str, ...]) -> bool:
    """Whether the model's tokens depend on the size of its images, which nothing says."""
    model = job.facts.get("model")
    if job.algorithm or not isinstance(model, str) or job.value("image_size") or str(job.value("images")) == "0":
        return False
    try:
        images = _loaded(model_named(model, folder, dirs), dirs).images
    except MemcalcError:  # the model is asked for
        return False
    return images is not None and images.rule != "unknown" and images.depends_on_size


def refuse_images(job: MergedJob, folder: str, dirs: tuple[str, ...]) -> None:
    """Refuse post-training of a model whose tokens depend on its images, before anything is asked for."""
    model = job.facts.get("model")
    if not job.algorithm or not isinstance(model, str) or str(job.value("images")) == "0":
        return
    try:
        images = _loaded(model_named(model, folder, dirs), dirs).images
    except MemcalcError:  # the model is asked for, with what else is missing
        return
    if images is not None and images.depends_on_size:
        alone = "" if generates(job.algorithm) else "; for text alone give --images 0"
        raise ObjectiveError(
            f"the files train {model} by {job.algorithm.upper()}, and its tokens depend on the size of its images: "
            f"memcalc has no figures for this{alone}."
        )


def _loaded(model: str | Model, dirs: tuple[str, ...]) -> Model:
    from memcalc.api import load_model

    return load_model(model, dirs) if isinstance(model, str) else model


# ------------------------------------------------------------------------------------------------------ what is missing


_NEEDED_OPTIONS = ("model", "gpu", "gpus", "seq_len", "micro_batch")
"""Each changes the answer by as much as the job is large."""
_FEW = 2
"""Files that a sentence names."""
_GIVEN_AS = {
    "gpus_per_node": "gpus", "nodes": "gpus", "accumulation": "global_batch", "train_batch": "global_batch",
    "sharing": "zero", "own_arguments": "model",
}  # fmt: skip
"""What files count, and the option of check that says it."""


def tell(job: MergedJob, folder: str = ".", dirs: tuple[str, ...] = (), files: Sequence[str] = ()) -> None:
    """Ask at once for all that no file says and no default can stand for, an unknown model among it.

    The sentence names the ``files`` where they are few: of two jobs beside one another each has its own.
    """
    refuse_images(job, folder, dirs)
    known = {**job.options, **job.facts}
    missing: dict[str, str] = {}
    for name, (config, setting) in job.origins.items():
        option = _asked_as(name, job)
        if name.startswith("rl.") and name != "rl.algorithm" and not job.algorithm:
            continue
        if name == "precision" and job.engines - {"trainer"}:  # its launcher's config is there
            continue
        if setting.unknown and (option == name or known.get(option) is None):
            why = setting.reason or f"is {setting.unknown!r}, known only at run time"
            where = f"{setting.field} {why}"
            missing.setdefault(_flag(option), f" (line of {config.document.path.name}: {where})")
    for name in _NEEDED_OPTIONS:
        sized = name == "seq_len" and "--set rl.algorithm=…" in missing  # by prompt and response, once that is said
        if known.get(name) is None and name not in job.origins and not sized:
            missing.setdefault(_flag(name), "")
    missing |= {_flag(name): f" ({why})" for name, why in lacking_roles(job)}
    if unsized(job, folder, dirs):
        missing["--image-size"] = " (WIDTHxHEIGHT of the images, before any resizing; --images 0 for text alone)"
    sizes = job.facts.get("model")
    if isinstance(sizes, Mapping) and sizes.get("vocab") is None and known.get("model.vocab") is None:
        missing["--set model.vocab=…"] = " (the tokenizer's)"
    if missing and (why := unnamed(job, folder, dirs)):
        missing.setdefault("--model", why)
    if missing:
        listed = ", ".join(flag + why for flag, why in missing.items())
        raise MissingError(f"not in {_called(files)}: {listed}. Pass {'them' if len(missing) > 1 else 'it'}.")


def _asked_as(name: str, job: MergedJob) -> str:
    """The option that says what a file leaves open: of ranks that share the runtime first, and DeepSpeed's stage."""
    if name == "sharing" and not str(job.options.get("framework") or "").startswith("deepspeed"):
        return "framework"
    return _GIVEN_AS.get(name, name)


def _called(files: Sequence[str]) -> str:
    """Return what files are called.

    >>> _called(["a.yaml", "ds.json", "a.yaml"]), _called(list("abcd"))
    ('a.yaml or ds.json', 'the files')
    """
    names = tuple(dict.fromkeys(files))
    return " or ".join(names) if 0 < len(names) <= _FEW else "the files"


def _flag(name: str) -> str:
    return f"--set {name}=…" if name in FIELDS or name in ROLE_KEYS else f"--{name.replace('_', '-')}"


# ------------------------------------------------------------------------------------------------------- precision


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
        if name in {"hf", "ddp"} and job.options.get("lora"):  # whose switch a file leaves off
            job.options.setdefault("autocast", False)
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
        synced = bool(job.facts.get("sync_each_batch")) or not defers_reductions(str(job.options["framework"]))
        if synced == habits_of(str(job.options["framework"])).whole_accumulation:  # not as it does by itself
            job.settings.setdefault("strategy.whole_accumulation", not synced)
