"""Several configs as one job: what each states, which setting counts, and what follows from the runtime."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from memcalc import catalog
from memcalc.convert.config import JOB_KEYS, Config, Finding, Setting
from memcalc.errors import ObjectiveError
from memcalc.frameworks import checkpoints_modules, habits_of, holds_logits
from memcalc.planner.defaults import te_kernel
from memcalc.planner.request import check_words
from memcalc.preflight.job import COMPARED, MergedJob
from memcalc.preflight.names import gpu_named, model_named, preset_like
from memcalc.preflight.roles import stand_in
from memcalc.preflight.settled import (
    fill_in,
    keep_images,
    keep_kernels,
    keep_targets,
    load_wider,
    note_reductions,
    set_precision,
    tell,
)
from memcalc.specs.flat import from_flat
from memcalc.specs.model import Model
from memcalc.specs.options import NUMBERS, SETTINGS
from memcalc.units import parse_count

_ENGINES = ("deepspeed", "fsdp2", "fsdp1", "ddp", "trainer")
"""What decides how states are stored, the most particular first."""
_OF_FSDP: dict[str, Any] = {"recompute": "none", "offload": ()}
_SETTINGS_OF_FSDP = ("strategy.checkpoint", "strategy.reduce_dtype", "strategy.state_dict")
"""What a trainer takes from FSDP's config alone, and does without where one GPU trains plainly."""


def merge(configs: Iterable[Config], given: Mapping[str, Any], dirs: tuple[str, ...] = ()) -> MergedJob:
    """Merge configs; ``given`` are the options that the user typed, with ``settings``.

    Raises :class:`memcalc.errors.MissingError` that names all that must be given.
    """
    job, configs = MergedJob(), tuple(configs)
    for config in configs:
        for setting in config.settings:
            job.take(config, setting)
    job.override({name: value for name, value in given.items() if name != "settings"})
    for name, value in given.get("settings", {}).items():
        if value is None:
            continue
        option = SETTINGS.get(name, name)
        job.origins.pop(option, None)
        (job.settings if option == name and name not in JOB_KEYS else job.table(option))[option] = value
    stand_in(job)
    _checked(job)
    _sequence_parallel(job)
    _counts(job)
    job.fill_accumulation()
    _framework(job)
    _refuse_both(job)
    _sharded(job)
    unscaled = set_precision(job)
    note_reductions(job)
    _by_module(job)
    _of_all_tokens(job)
    _mismatches(job, configs)
    _trimmed(job)
    tell(job, _folder(job), dirs, [config.document.path.name for config in configs])
    if "gpu" in job.origins:
        job.facts["gpu"] = gpu_named(job.facts["gpu"], dirs)
    if unscaled:
        load_wider(job, dirs)
    _replicas(job, dirs)
    if "model" in job.origins:
        job.facts["model"] = _model(job, dirs)
    keep_images(job, dirs)
    keep_kernels(job, dirs)
    keep_targets(job, dirs)
    _attention(job, dirs)
    fill_in(job, dirs)
    _unsharded(job)
    _batch(job)
    _evaluation(job)
    return job


def _evaluation(job: MergedJob) -> None:
    """What a job evaluates at a time, by default what it trains, where its files say that it evaluates."""
    key = "workload.eval_micro_batch"
    size = job.facts.get("eval_micro_batch") or job.options.get("micro_batch")
    if job.facts.get("evaluates") and size and job.settings.get(key) is None:
        job.settings[key] = int(size)


def _checked(job: MergedJob) -> None:
    """Check each option by itself, as an estimate does, before anything is derived from it; texts become numbers."""
    settings = {name: value for name, value in job.settings.items() if value is not None}
    checked = check_words({name: value for name, value in job.options.items() if value is not None}, settings).given
    job.options |= {name: checked[name] for name in (*NUMBERS, "zero") if name in checked}


def _model(job: MergedJob, dirs: tuple[str, ...]) -> str | Model:
    """The model that a file names, or describes by its sizes."""
    model = job.facts["model"]
    if not isinstance(model, Mapping):
        return model_named(str(model), _folder(job), dirs)
    vocab = job.facts.get("model.vocab", model.get("vocab"))
    return preset_like(from_flat({**model, "vocab": parse_count(vocab, "model.vocab")}), dirs)


def _attention(job: MergedJob, dirs: tuple[str, ...]) -> None:
    """The kernel that Transformer Engine picks, where it does."""
    stated = job.options.get("attention") or job.options.get("precision") == "fp32"
    if job.facts.get("attention_library") == "te" and not stated:
        gpu = catalog.gpu(str(job.facts["gpu"]), dirs)
        if gpu.flash_attention:
            job.options["attention"] = te_kernel(gpu)


def _unsharded(job: MergedJob) -> None:
    """Torchtitan on a single data-parallel rank, which FSDP does not shard (``maybe_enable_amp`` until April 2026).

    Split over TP or PP it trains in fp32, and a single GPU under autocast, since June 2025.
    """
    framework, ways = str(job.options.get("framework") or ""), job.ways
    alone = int(job.options.get("cp", 1)) == 1 and int(job.options["gpus"]) <= ways
    if not framework or not alone or not (habits := habits_of(framework)).unsharded_alone:
        return
    if "zero" in job.origins:
        job.options["zero"] = 0
        job.table("strategy.reshard").pop("strategy.reshard", None)
    if job.options.get("precision") == "bf16-mixed" and "precision" in job.origins:
        autocast = ways == 1 and habits.capabilities.precision.needs("bf16-autocast") == ""
        job.options["precision"] = "bf16-autocast" if autocast else "fp32"
        what = "it runs under autocast" if autocast else "it trains in fp32"
        message = f"one data-parallel rank has no FSDP, which alone mixes precision: {what}"
        job.note("note" if autocast else "warning", "MC004", "precision", message, "two data-parallel ranks")


def _folder(job: MergedJob) -> str:
    """Where a path to a model starts: the folder of the file that names it."""
    origin = job.origins.get("model")
    return str(origin[0].document.path.parent) if origin else "."


def _sequence_parallel(job: MergedJob) -> None:
    """Without tensor parallelism a sequence is shared with nobody: frameworks switch it off, and so it counts."""
    if job.options.get("sp") and int(job.options.get("tp", 1)) == 1 and "sp" in job.origins:
        message = "sequence parallelism needs TP of 2 or more; it saves nothing here"
        job.note("warning", "MC107", "sp", message, "tensor parallelism of 2 or more")
        job.options["sp"] = False


def _counts(job: MergedJob) -> None:
    """GPUs in all: as stated, or from nodes and GPUs of each, or from the parts of the batch; or the micro-batch."""
    if job.options.get("gpus") is not None:
        _share(job)
        return
    each, nodes = job.facts.get("gpus_per_node"), job.facts.get("nodes")
    counted = all(not job.origins[name][1].unknown for name in ("gpus_per_node", "nodes") if name in job.origins)
    if each is not None and counted:
        job.options["gpus"] = int(each) * int(nodes or 1)
        _share(job)
        return
    total, micro, steps = job.facts.get("train_batch"), job.options.get("micro_batch"), job.facts.get("accumulation")
    if total and micro and steps and int(total) % (int(micro) * int(steps)) == 0:
        job.options["gpus"] = int(total) // (int(micro) * int(steps)) * job.ways


def _share(job: MergedJob) -> None:
    """The micro-batch where only the total is stated (DeepSpeed 0.19, config.py, _set_batch_related_parameters)."""
    total = job.facts.get("train_batch")
    if total is not None and job.options.get("micro_batch") is None and "micro_batch" not in job.origins:
        ranks = max(int(job.options["gpus"]) // job.ways, 1)
        job.options["micro_batch"] = max(int(total) // ranks // int(job.facts.get("accumulation") or 1), 1)
    elif total is not None and job.facts.get("micro_capped") and job.options.get("micro_batch") is not None:
        share = max(int(total) // max(int(job.options["gpus"]) // job.ways, 1), 1)
        job.options["micro_batch"] = min(int(job.options["micro_batch"]), share)


def _replicas(job: MergedJob, dirs: tuple[str, ...]) -> None:
    """Replicas of the shards, from the ranks that share the states: as stated, or where that is 0 those of a node."""
    shards = job.facts.get("dp_shard")
    if shards is None or job.options.get("dp_replicate") is not None:
        return
    name = job.facts.get("node")
    node = catalog.node(str(name), dirs) if name else catalog.node_for(catalog.gpu(str(job.facts["gpu"]), dirs), dirs)
    each = int(job.facts.get("gpus_per_node") or node.gpus_per_host)
    gpus, group = int(job.options["gpus"]), int(shards) * job.ways
    if group and gpus % group and job.origins["dp_shard"][0].format == "axolotl":  # _get_parallel_config_kwargs
        field, times = job.origins["dp_shard"][1].field, f" × {job.ways} ranks of other degrees" * (job.ways > 1)
        message = f"{field} is {shards}{times}, which does not divide {gpus} GPUs; the job fails at startup"
        job.note("error", "MC106", "dp_shard", message, f"{field} {gpus // job.ways}")
    replicas = gpus // (group or each)
    if replicas > 1:
        job.options["dp_replicate"] = replicas


def _framework(job: MergedJob) -> None:
    """Which runtime stores the states: stated by name, or following from the engines that the files name."""
    if job.options.get("framework") is not None or not job.engines:
        return
    engine = next(name for name in _ENGINES if name in job.engines)
    if job.facts.get("alone_plain") and job.options.get("gpus") is not None and int(job.options["gpus"]) == 1:
        engine = "plain"
        job.options |= {name: none for name, none in _OF_FSDP.items() if name in job.origins}
        job.settings = {name: value for name, value in job.settings.items() if name not in _SETTINGS_OF_FSDP}
    if engine == "fsdp1" and "trainer" in job.engines:
        engine = "hf"
    elif engine == "trainer":
        if "sharing" in job.origins and int(job.options.get("gpus") or 2) > 1:
            return  # a launcher's config says, or the user
        engine = "ddp" if int(job.options.get("gpus") or 1) > 1 else "hf"
    job.options["framework"] = engine
    job.origins.pop("framework", None)  # a script of nobody's asks for it
    if job.engines - {"trainer", "deepspeed"}:
        job.origins.pop("sharing", None)


def _refuse_both(job: MergedJob) -> None:
    """Refuse DeepSpeed's sharding of gradients or weights under what Megatron's arguments describe."""
    origin, stage = job.origins.get("zero"), int(job.options.get("zero") or 0)
    framework = str(job.options.get("framework") or "")
    if origin is not None and origin[0].format == "deepspeed" and framework.startswith("megatron") and stage > 1:
        raise ObjectiveError(
            f"{origin[0].document.path.name} shards by DeepSpeed's ZeRO-{stage} what Megatron's arguments describe: "
            "memcalc has no figures for both together."
        )


def _batch(job: MergedJob) -> None:
    """The global batch, from its parts; a stated total that is not the product of its parts is an error."""
    gpus, micro = int(job.options["gpus"]), int(job.options["micro_batch"])
    ranks = max(gpus // job.ways, 1)
    total, steps = job.facts.get("train_batch"), job.facts.get("accumulation")
    if job.options.get("global_batch") is not None or (total is None and steps is None):
        return
    if total is None:
        job.options["global_batch"] = micro * int(steps or 1) * ranks
        return
    if steps is not None and int(total) != micro * int(steps) * ranks and "train_batch" in job.origins:
        field = job.origins["train_batch"][1].field
        message = (
            f"{field} is {total}, but micro-batch {micro} × accumulation {steps} × {ranks} data-parallel ranks "
            f"= {micro * int(steps) * ranks}; the job fails at startup"
        )
        total = micro * int(steps) * ranks
        job.note("error", "MC106", "train_batch", message, f"{field} {total}")
    if job.facts.get("batch_floored") and (left_over := int(total) % (micro * ranks)) and left_over < int(total):
        message = f"{total} sequences per step are {int(total) - left_over}: whole micro-batches on {ranks} ranks"
        job.note("note", "MC004", "train_batch", message)
        total = int(total) - left_over
    job.options["global_batch"] = int(total)


def _sharded(job: MergedJob) -> None:
    """Say the stage of a runtime that shards over several GPUs and runs plainly on one; 16-bit weights reduce in 16."""
    stage = job.facts.get("sharded")
    if stage is None or job.options.get("gpus") is None:
        return
    several = int(job.options["gpus"]) > 1
    if job.options.get("zero") is None:
        job.options["zero"] = int(stage) if several else 0
    if several and job.options.get("precision") == "bf16":
        job.settings.setdefault("strategy.reduce_dtype", "bf16")


def _by_module(job: MergedJob) -> None:
    """Checkpoints of FSDP 2's own option are of each module of a block in releases of Accelerate: no file names one."""
    framework = str(job.options.get("framework"))
    if not job.facts.get("checkpoints_by_fsdp2") or job.options.get("recompute") != "full":
        return
    if checkpoints_modules(framework):
        job.options["recompute"] = "submodules"
    elif framework == "fsdp2":
        message = (
            "Accelerate 1.8 to 1.14 checkpoints each module of a block apart under FSDP 2 and keeps the inputs of all, "
            "about four times as much. Counted is 1.15; --framework fsdp2@2026-06 counts the older ones"
        )
        job.note("note", "MC104", "checkpoints_by_fsdp2", message, "upgrade accelerate to 1.15")


def _of_all_tokens(job: MergedJob) -> None:
    """The loss of an earlier TRL's SFT, as the Trainer has it: no file names the release that runs."""
    if {"loss", "strategy.tiled_loss"} <= job.origins.keys() and holds_logits(str(job.options.get("framework") or "")):
        job.options["loss"] = "fused-linear" if job.options.get("kernels") == "fused" else "standard"
        job.settings["strategy.tiled_loss"] = False


def _mismatches(job: MergedJob, configs: tuple[Config, ...]) -> None:
    """Values on which a Trainer and its DeepSpeed config must agree: else it stops before the first step."""
    trainer = next((config for config in configs if config.format == "trainer"), None)
    if trainer is None or "deepspeed" not in job.engines:
        return
    for name, formats in COMPARED.items():
        expected = next((setting for setting in trainer.settings if setting.name == name), None)
        for config in configs:
            stated = next((entry for entry in config.settings if entry.name == name and not entry.default), None)
            if expected is None or stated is None or config.format not in formats:
                continue
            if stated.value != expected.value:
                job.findings.append((config, _mismatch(stated, expected, trainer)))


def _trimmed(job: MergedJob) -> None:
    """Take away what a Trainer says of an optimizer that DeepSpeed replaces, or of wrapping where there is no FSDP."""
    if not str(job.options.get("optimizer", "")).endswith("8bit"):
        job.settings.pop("strategy.wide_embedding_moments", None)
    if job.facts.get("trl") and job.options.get("lora") and job.options.get("framework") == "deepspeed":
        _adapters_under_zero3(job)
    if "adapter_dtype" in job.origins and job.options.get("framework"):
        casts = habits_of(str(job.options["framework"])).casts_adapters
        if casts and not str(job.options.get("precision")).endswith("-autocast"):
            job.options.pop("adapter_dtype", None)  # what PEFT makes of them is cast with the rest
    _checkpoints_as_usual(job)
    job.take_older_optimizer()
    job.forget_idle()
    if not job.engines & {"fsdp1", "fsdp2"}:
        job.facts.pop("checkpoints_wrapped", None)


def _checkpoints_as_usual(job: MergedJob) -> None:
    """What a file says of checkpoints that is the framework's habit anyhow is no setting of its own."""
    stated = job.settings.get("strategy.checkpoint")
    if stated is None or "strategy.checkpoint" not in job.origins or job.options.get("framework") is None:
        return
    if stated == ("reentrant" if habits_of(str(job.options["framework"])).reentrant else "non-reentrant"):
        del job.settings["strategy.checkpoint"]


def _adapters_under_zero3(job: MergedJob) -> None:
    """TRL 1.16 makes checkpoints reentrant there, whatever is asked for (sft_trainer.py)."""
    if int(job.options.get("zero", 0)) == 3 and job.options.get("recompute", "none") != "none":
        job.settings["strategy.checkpoint"] = "reentrant"


def _mismatch(stated: Setting, expected: Setting, trainer: Config) -> Finding:
    default = ", its default" if expected.default else ""
    message = (
        f"{stated.field} says {stated.value}, and {expected.field} of {trainer.document.path.name} {expected.value}"
        f"{default}; the Trainer fails at startup"
    )
    return Finding("error", "MC106", stated.field, message, f'"{stated.field}": "auto"', stated.key_path)
