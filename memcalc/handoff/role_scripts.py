"""A job of post-training as the script that starts it: TRL's or verl's own settings, which ``memcalc check`` reads.

Keys are those of verl 0.10 and TRL 1.10 (:mod:`memcalc.convert.formats.verl`, ``preferences`` beside it).
What a framework decides by itself, or has no setting for, is refused, so that no other job is written than was asked
about.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from typing import Any

from memcalc import catalog
from memcalc.api import load_model
from memcalc.convert.formats.base import hub_named
from memcalc.errors import CombinationError, MissingError
from memcalc.posttraining.words import RlJob, completed
from memcalc.serving.engines import number

_ESTIMATORS = {"grpo": "grpo", "dapo": "grpo", "rloo": "rloo", "ppo": "gae"}
_ROLES = "actor_rollout_ref"
_STRATEGIES = {"fsdp1": "fsdp", "fsdp2": "fsdp2"}
"""What shards, by verl's names."""


def role_script(
    *, model: str, gpu: str, gpus: int | str | None = None, node: str | None = None, preset_dirs: Iterable[str] = (),
    **options: Any,
) -> str:  # fmt: skip
    """Return the script of a job that :func:`memcalc.rl` is asked about; the same keywords.

    Raises
    ------
    memcalc.errors.CombinationError
        For what its framework's settings cannot say.
    """
    if gpus is None:
        raise MissingError("on how many GPUs? give --gpus.")
    job = completed(model, gpu, number(gpus, "gpus"), node, options, tuple(preset_dirs), {})
    name = job.toolkit.name.partition("@")[0]
    if name not in ("trl", "verl"):
        raise CombinationError("write", name, "settings are written for trl and verl")
    if job.inputs.critic_model or job.inputs.reward_model:
        raise CombinationError("write", name, "models beside the policy are not written: leave them out")
    lines = _verl(job) if name == "verl" else _trl(job)
    head = f"#!/bin/bash\n# Written by memcalc; check it with: memcalc check FILE\n#MEMCALC --gpu {job.gpu}"
    node_line = f" --node {job.node}" if job.node else ""
    return f"{head}{node_line}\n" + " \\\n    ".join(lines) + "\n"


def _require(job: RlJob, name: str, values: tuple[Any, ...], says: str) -> None:
    """Refuse a word that no setting of the framework says."""
    value = job.training.get(name)
    if value is not None and str(value) not in map(str, values):
        raise CombinationError(name.replace("_", "-"), value, says)


def _hosts(job: RlJob) -> tuple[int, int]:
    """Hosts, and GPUs of each."""
    host = catalog.node(job.node, job.dirs) if job.node else catalog.node_for(catalog.gpu(job.gpu, job.dirs), job.dirs)
    each = min(job.trainer_gpus, host.gpus_per_host)
    if job.trainer_gpus % each:
        raise CombinationError("gpus", job.gpus, f"hosts have {each} GPUs each")
    return job.trainer_gpus // each, each


# ---------------------------------------------------------------- verl


def _verl(job: RlJob) -> list[str]:
    inputs = job.inputs
    if inputs.algorithm not in _ESTIMATORS:
        raise CombinationError("algorithm", inputs.algorithm, f"verl's settings are of {', '.join(_ESTIMATORS)}")
    if inputs.engine_gpus:
        raise CombinationError("engine-gpus", inputs.engine_gpus, "engines are written on the trainer's GPUs alone")
    if job.trainer not in ("fsdp1", "fsdp2"):
        raise CombinationError("trainer", job.trainer, "verl's settings are of fsdp1 and fsdp2")
    asleep = "1" if job.lora else "2"
    if inputs.sleep not in ("0", asleep):
        raise CombinationError("sleep", inputs.sleep, f"verl's engines sleep at level {asleep} here, or not (0)")
    for name, values, says in (
        ("recompute", ("full", "none"), "verl checkpoints every block, or none"),
        ("zero", (3,), "verl shards weights, gradients and states"),
        ("precision", ("bf16-mixed", "bf16"), "verl's weights are fp32 under bf16-mixed, or bf16"),
        ("offload", ("none", "activations", "params"), "verl offloads activations, or all by FSDP's policy (params)"),
        *((name, ("none",), "verl's settings have nothing for it") for name in ("quantize", "kernels")),
        ("optimizer", ("adamw",), "verl's optimizer is AdamW"),
        *((name, (), "verl's settings have nothing for it") for name in _UNSAID),
    ):
        _require(job, name, values, says)
    pairs = _verl_pairs(job)
    return ["python3 -m verl.trainer.main_ppo", *(f"{key}={_verl_value(value)}" for key, value in pairs.items())]


_UNSAID = ("optimizer_impl", "autocast", "adapter_dtype", "attention", "images")
"""Options of training that a framework decides by itself."""


def _verl_value(value: Any) -> str:
    return shlex.quote(str(value))


def _verl_pairs(job: RlJob) -> dict[str, Any]:
    inputs, training = job.inputs, job.training
    actor, rollout, policy = f"{_ROLES}.actor", f"{_ROLES}.rollout", f"{_ROLES}.model"
    hosts, each = _hosts(job)
    recompute = training.get("recompute", job.toolkit.recompute)
    pairs: dict[str, Any] = {
        "algorithm.adv_estimator": _ESTIMATORS[inputs.algorithm],
        "data.max_prompt_length": inputs.prompt,
        "data.max_response_length": inputs.response,
        "data.train_batch_size": inputs.prompts or 1024,
        f"{policy}.path": _named(job),
        f"{policy}.enable_gradient_checkpointing": recompute == "full",
        f"{actor}.strategy": _STRATEGIES[job.trainer],
        f"{actor}.use_kl_loss": job.reference,
        f"{actor}.fsdp_config.param_offload": "params" in job.parks,
        f"{actor}.fsdp_config.optimizer_offload": "optimizer" in job.parks,
        f"{rollout}.name": inputs.engine.partition("@")[0],
        f"{rollout}.tensor_model_parallel_size": inputs.engine_tp,
        f"{rollout}.gpu_memory_utilization": inputs.utilization,
        f"{rollout}.max_num_seqs": inputs.max_seqs,
        f"{rollout}.free_cache_engine": inputs.sleep != "0",
        f"{rollout}.n": max(1, inputs.samples),
        "trainer.n_gpus_per_node": each,
        "trainer.nnodes": hosts,
    }
    pairs |= _verl_batches(job) | _verl_critic(job)
    if job.shard_gpus < job.trainer_gpus:
        pairs[f"{actor}.fsdp_config.fsdp_size"] = job.shard_gpus
    if job.lora:
        rank, _, targets = str(training["lora"]).partition(":")
        if targets not in ("", "all-linear"):
            raise CombinationError("lora", training["lora"], "verl's adapters are written on all-linear")
        pairs[f"{policy}.lora_rank"] = rank
        pairs[f"{policy}.target_modules"] = targets or "default"
    if inputs.logits == "fused":
        pairs[f"{policy}.use_fused_kernels"] = True
    if inputs.entropy:
        pairs[f"{actor}.calculate_entropy"] = True
    if training.get("precision") == "bf16":
        pairs[f"{actor}.fsdp_config.model_dtype"] = "bfloat16"
    return pairs | _verl_offload(str(training.get("offload", "none")))


_MINI_BATCH = 256
"""Prompts of verl's mini-batch, below which a step does not start (workers/config/actor.py@011f972d, validate)."""


def _verl_batches(job: RlJob) -> dict[str, Any]:
    """What a micro-batch and an engine's step hold."""
    inputs = job.inputs
    actor, rollout, policy = f"{_ROLES}.actor", f"{_ROLES}.rollout", f"{_ROLES}.model"
    pairs: dict[str, Any] = {}
    if inputs.mini_batch % max(1, inputs.samples):
        raise CombinationError("mini-batch", inputs.mini_batch, "verl counts prompts: a multiple of --samples")
    if inputs.mini_batch:
        pairs[f"{actor}.ppo_mini_batch_size"] = inputs.mini_batch // max(1, inputs.samples)
    elif 0 < inputs.prompts < _MINI_BATCH:
        pairs[f"{actor}.ppo_mini_batch_size"] = inputs.prompts
    if inputs.padded:
        pairs[f"{policy}.use_remove_padding"] = False
    if inputs.max_batched_tokens:
        pairs[f"{rollout}.max_num_batched_tokens"] = inputs.max_batched_tokens
    if inputs.eager:
        pairs[f"{rollout}.enforce_eager"] = True
    if inputs.micro_tokens:
        pairs |= {f"{actor}.use_dynamic_bsz": True, f"{actor}.ppo_max_token_len_per_gpu": inputs.micro_tokens}
    else:
        pairs[f"{actor}.ppo_micro_batch_size_per_gpu"] = inputs.micro_batch
    readers = [rollout, f"{_ROLES}.ref"] if job.reference else [rollout]
    return pairs | {f"{part}.{name}": value for part in readers for name, value in _verl_reads(job).items()}


def _verl_reads(job: RlJob) -> dict[str, Any]:
    """What a pass of log-probabilities holds; in samples it has no default (utils/config.py, validate_config)."""
    inputs = job.inputs
    if inputs.logprob_tokens:
        dynamic = {} if inputs.micro_tokens else {"log_prob_use_dynamic_bsz": True}
        return {**dynamic, "log_prob_max_token_len_per_gpu": inputs.logprob_tokens}
    if inputs.micro_tokens and not inputs.logprob_batch:
        return {}
    return {"log_prob_micro_batch_size_per_gpu": inputs.logprob_batch or inputs.micro_batch}


def _verl_critic(job: RlJob) -> dict[str, Any]:
    """A critic of the policy's architecture, which verl neither loads nor shards as the actor by itself.

    trainer/config/critic/critic.yaml and dp_critic.yaml: a path, a strategy and 32,768 tokens of its own; what the
    actor offloads it offloads too.
    """
    if not job.recipe.critic:
        return {}
    inputs, training = job.critic.inputs, job.critic.training
    if bool(inputs.micro_tokens) != bool(job.inputs.micro_tokens):
        raise CombinationError("write", "verl", "a critic is written with a budget of tokens where the policy has one")
    pairs: dict[str, Any] = {
        "critic.model.path": _named(job),
        "critic.model.use_remove_padding": job.unpadded,
        "critic.model.enable_gradient_checkpointing": training.get("recompute", job.toolkit.recompute) == "full",
        "critic.strategy": _STRATEGIES[job.trainer],
        **({"critic.fsdp.fsdp_size": job.shard_gpus} if job.shard_gpus < job.trainer_gpus else {}),
    }
    if inputs.micro_tokens:
        return pairs | {"critic.ppo_max_token_len_per_gpu": inputs.micro_tokens}
    return pairs | {"critic.ppo_micro_batch_size_per_gpu": inputs.micro_batch}


def _verl_offload(offload: str) -> dict[str, Any]:
    key = {"activations": "model.enable_activation_offload", "params": "actor.fsdp_config.offload_policy"}.get(offload)
    return {f"{_ROLES}.{key}": True} if key else {}


def _named(job: RlJob) -> str:
    """The model by its name on the Hub, where that is known."""
    return hub_named(job.model, load_model(job.model, job.dirs))


# ---------------------------------------------------------------- TRL


def _trl(job: RlJob) -> list[str]:
    inputs = job.inputs
    scripts = {"dapo": "grpo", "simpo": "cpo", "ppo": "", "sft": "sft"}
    script = scripts.get(inputs.algorithm, inputs.algorithm)
    if not script or inputs.algorithm == "sft":
        raise CombinationError("algorithm", inputs.algorithm, "TRL's settings are written for its other trainers")
    if inputs.micro_tokens or inputs.logprob_batch or inputs.logprob_tokens:
        raise CombinationError("write", "trl", "TRL's trainers have one micro-batch, of samples")
    if job.trainer not in ("deepspeed", "ddp", "hf"):
        raise CombinationError("trainer", job.trainer, "TRL's settings are written for deepspeed, ddp and hf")
    if inputs.mini_batch or inputs.max_batched_tokens or inputs.eager:
        raise CombinationError("write", "trl", "it has no mini-batch, and sets its engine's step and graphs itself")
    if job.parks or inputs.entropy or inputs.engine.partition("@")[0] != "vllm":
        raise CombinationError("write", "trl", "TRL parks nothing, keeps no entropy, and generates by vllm")
    for name, values, says in (
        ("recompute", ("full", "none"), "TRL checkpoints every block, or none"),
        ("precision", ("bf16-mixed", "bf16-autocast"), "TRL's weights are written as fp32 under bf16"),
        *((name, ("none",), "it is not written for TRL") for name in ("quantize", "offload", "kernels")),
        ("optimizer", ("adamw",), "TRL's optimizer is written as AdamW"),
        ("optimizer_impl", ("fused",), "TRL's optimizer is written as fused"),
        *((name, (), "it is not written for TRL") for name in ("autocast", "attention", "images")),
    ):
        _require(job, name, values, says)
    _check_dtypes(job)
    flags = {**_trl_flags(job), **(_trl_rollout(job) if job.recipe.online else _trl_pairs(job))}
    return [
        *_launcher(job),
        f"trl/scripts/{script}.py",
        *(f"--{key} {shlex.quote(str(v))}" for key, v in flags.items()),
    ]


def _check_dtypes(job: RlJob) -> None:
    """Refuse what TRL's defaults do not come to: DeepSpeed casts adapters, and else fp32 is under autocast."""
    deepspeed = job.trainer == "deepspeed"
    wanted = {
        "precision": "bf16-mixed" if deepspeed else "bf16-autocast",
        "optimizer_impl": "fused",
        **({"adapter_dtype": "bf16" if deepspeed else "fp32"} if job.lora else {}),
    }
    usual = {"precision": "bf16-mixed", "optimizer_impl": "fused"} if deepspeed else {}
    if job.lora:
        usual = {**usual, "precision": "", "adapter_dtype": "fp32"}
    for name, expected in wanted.items():
        value = str(job.training.get(name, usual.get(name, "")))
        if value != expected:
            word = name.replace("_", "-")
            raise CombinationError(word, value or "its own", f"TRL has {expected} here: say --{word} {expected}")


def _launcher(job: RlJob) -> list[str]:
    hosts, _ = _hosts(job)
    if job.trainer == "hf":
        return ["python"]
    parts = ["accelerate launch", f"--num_machines {hosts}", f"--num_processes {job.trainer_gpus}"]
    if job.trainer == "deepspeed":
        parts.append(f"--use_deepspeed --zero_stage {job.training.get('zero', job.toolkit.zero)}")
    return [*parts, "--mixed_precision bf16"]


def _trl_flags(job: RlJob) -> dict[str, Any]:
    """What all of its trainers take."""
    flags: dict[str, Any] = {
        "model_name_or_path": _named(job),
        "output_dir": "out",
        "per_device_train_batch_size": job.inputs.micro_batch,
        "bf16": "true",
        "gradient_checkpointing": str(job.training.get("recompute", job.toolkit.recompute) == "full").lower(),
    }
    if job.lora:
        rank, _, targets = str(job.training["lora"]).partition(":")
        flags |= {"use_peft": "true", "lora_r": rank}
        if targets:
            if targets != "all-linear":
                raise CombinationError("lora", job.training["lora"], "TRL's adapters are written on all-linear")
            flags["lora_target_modules"] = targets
    fused, tiled = job.inputs.logits == "fused", job.inputs.algorithm in job.toolkit.fuses
    if fused and not tiled:
        raise CombinationError("logits", "fused", "it is not written for TRL: Liger's kernels change more than logits")
    if tiled and not fused:
        raise CombinationError("logits", "plain", "TRL has none since 1.15: give --framework trl@1.14")
    return flags


def _trl_pairs(job: RlJob) -> dict[str, Any]:
    """Lengths and the reference of preferences."""
    flags: dict[str, Any] = {"max_length": job.length}
    if job.recipe.frozen and not job.reference:
        flags["precompute_ref_log_probs"] = "true"
    return flags


def _trl_steps(job: RlJob) -> dict[str, Any]:
    """Micro-batches of a step and of a generation, which TRL takes as one where it is told the first alone."""
    inputs = job.inputs
    together = inputs.micro_batch * inputs.engine_tp
    if inputs.max_seqs % together:
        raise CombinationError("max-seqs", inputs.max_seqs, f"TRL's engine has a multiple of {together} sequences")
    if not inputs.prompts:
        return {"steps_per_generation": inputs.max_seqs // together or 1}
    samples, each = inputs.prompts * max(1, inputs.samples), inputs.micro_batch * job.trainer_gpus
    if samples % each:
        raise CombinationError("prompts", inputs.prompts, f"a step of TRL has a multiple of {each} samples")
    if inputs.max_seqs * each != samples * together:
        raise CombinationError("max-seqs", inputs.max_seqs, "TRL's engine takes its samples of a step at once")
    return {"gradient_accumulation_steps": samples // each}


def _trl_rollout(job: RlJob) -> dict[str, Any]:
    """Generation: prompts are cut by nobody, and the engine's longest sequence tells how long they are."""
    inputs = job.inputs
    if inputs.engine_gpus:
        raise CombinationError("engine-gpus", inputs.engine_gpus, "TRL's server is a command of its own: not written")
    if inputs.sleep not in ("0", "2"):
        raise CombinationError("sleep", inputs.sleep, "TRL's engine sleeps at level 2, or not (0)")
    return {
        "num_generations": max(1, inputs.samples),
        "max_completion_length": inputs.response,
        **_trl_steps(job),
        "use_vllm": "true",
        "vllm_mode": "colocate",
        "vllm_max_model_length": job.length,
        "vllm_tensor_parallel_size": inputs.engine_tp,
        "vllm_gpu_memory_utilization": inputs.utilization,
        "vllm_enable_sleep_mode": str(inputs.sleep == "2").lower(),
        "beta": 0.04 if job.reference else 0.0,
    }
