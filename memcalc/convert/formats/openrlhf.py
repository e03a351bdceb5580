"""Arguments of OpenRLHF's commands: train_dpo and train_rm, and train_ppo_ray where all roles share the GPUs.

OpenRLHF 0.11 (3c3be623): cli/train_dpo.py, train_rm.py, train_ppo_ray.py; utils/deepspeed. The names of older releases'
arguments have no dots: those releases were not read, and are declined.
"""

from __future__ import annotations

from memcalc.convert.config import Config, ConfigReader
from memcalc.convert.document import Document
from memcalc.convert.formats.base import Format
from memcalc.errors import ObjectiveError, cut

_OFFLINE = {"train_dpo": "dpo", "train_rm": "reward"}
_ESTIMATORS = {
    "gae": "ppo", "reinforce": "rloo", "reinforce_baseline": "rloo", "rloo": "rloo", "group_norm": "grpo",
    "dr_grpo": "grpo",
}  # fmt: skip
"""By `algo.advantage.estimator` an algorithm with the same roles."""
_OLDER = ("pretrain", "micro_train_batch_size", "zero_stage", "max_len", "colocate_all_models")
_HARMLESS = (
    "data.", "eval.", "ckpt.", "logger.", "algo.", "adam.", "muon.", "lr_scheduler", "lr_warmup_ratio", "min_lr_ratio",
    "max_norm", "local_rank", "use_ms", "command", "train.", "rollout.", "critic.", "reward.", "ref.",
    "actor.num_nodes", "actor.num_gpus_per_node", "actor.adam.", "actor.muon.", "actor.optim", "actor.eps_clip",
    "actor.eps_clip_low_high", "actor.dual_clip", "actor.policy_loss_type", "actor.aux_loss_coef", "actor.lr_scheduler",
    "actor.gradient_checkpointing_reentrant", "actor.max_norm", "actor.lr_warmup_ratio", "actor.min_lr_ratio",
    "model.beta", "model.ipo_enable", "model.label_smoothing", "model.nll_loss_coef", "model.aux_loss_coef",
    "model.gradient_checkpointing_reentrant", "model.loss_type", "vllm.num_engines", "vllm.sync_backend",
    "vllm.sync_with_ray", "vllm.enable_prefix_caching", "ds.lora.alpha", "ds.lora.dropout", "ds.packing_samples",
    "ds.use_universal_ckpt", "ds.experts_implementation", "ds.grad_accum_dtype", "ds.param_dtype",
    "ds.ring_attn_head_stride",
)  # fmt: skip
_NOT_MODELLED = {
    "ds.tensor_parallel_size": "weights are shared by tensor-parallel ranks; counted as whole",
    "ds.ring_attn_size": "a sequence is shared by several ranks; counted as whole",
    "ds.zpg": "a second copy of the shards on each node (ZeRO++)",
    "ds.use_liger_kernel": "fused kernels are counted as plain ones",
    "ds.overlap_comm": "two buckets of gradients at once",
    "train.enable_ema": "an average of the weights, in host memory",
    "vllm.enforce_eager": "the engine has no CUDA graphs; it is counted with them",
    "rollout.max_tokens_per_gpu": "log-probabilities have a budget of their own; counted with that of training",
    "ref.offload": "the reference is in host memory between its phases",
    "reward.offload": "the reward model is in host memory between its phases",
    "optim": "the optimizer is counted as AdamW",
    "actor.optim": "the optimizer is counted as AdamW",
}


def read(document: Document) -> Config:
    """Return what a command's arguments say of a job."""
    reader = ConfigReader(document, "openrlhf", "OpenRLHF 0.11")
    command, name = reader.text("command"), document.path.name
    older = next((key for key in _OLDER if key in document.data), "")
    if older:
        raise ObjectiveError(
            f"{name} has --{older}, an argument of OpenRLHF before 0.11, which was not read: give memcalc rl what it "
            "trains."
        )
    reader.set("rl.framework", "openrlhf", "command")
    for setting, key in (("zero", "ds.zero_stage"), ("rl.logprob_batch", "rollout.micro_batch_size")):
        if reader.has(key):
            reader.set(setting, reader.integer(key), key)
    if command in _OFFLINE:
        _offline(reader, _OFFLINE[command])
    elif command == "train_ppo_ray":
        _online(reader)
    else:
        raise ObjectiveError(
            f"{name} starts OpenRLHF's {cut(command)}, whose arguments are not read: give memcalc estimate what it "
            "trains."
        )
    _trained(reader)
    reader.not_modelled(_NOT_MODELLED, unless=(False, None, 0, 1, "", "adam"))
    reader.harmless(*_HARMLESS)
    return reader.finish()


def _offline(reader: ConfigReader, algorithm: str) -> None:
    """Pairs: prompt and response are cut together."""
    reader.set("rl.algorithm", algorithm, "command")
    reader.set_integer("seq_len", "data.max_len", 512)
    reader.set_integer("micro_batch", "train.micro_batch_size", 8 if algorithm == "dpo" else 1)
    _model(reader, "model")


def _online(reader: ConfigReader) -> None:
    """Generation where all roles share the GPUs: else each has GPUs of its own, which is not modelled."""
    if not reader.flag(key := "train.colocate_all"):
        raise ObjectiveError(
            f"{reader.document.path.name} gives each role GPUs of its own (no --{key}): memcalc rl answers for roles "
            "that share them, and for engines apart."
        )
    key = "algo.advantage.estimator"
    reader.set("rl.algorithm", reader.one_of(key, _ESTIMATORS, "ppo"), key)
    longest = reader.integer("data.max_len", 2048, low=2) or 2048
    response = min(reader.integer("rollout.max_new_tokens", low=1) or longest // 2, longest - 1)
    reader.set("rl.prompt", longest - response, "data.max_len")
    reader.set("rl.response", response, "data.max_len")
    if reader.flag("train.dynamic_batch_enable"):
        budget = reader.integer(key := "train.max_tokens_per_gpu", 16192, low=1) or 16192
        reader.set("rl.micro_tokens", max(budget, longest), key)  # a longer sample is a micro-batch of its own
    else:
        reader.set_integer("micro_batch", "train.micro_batch_size", 1)
    reader.set_integer("rl.prompts", "rollout.batch_size", 1024)
    reader.set_integer("rl.samples", "rollout.n_samples_per_prompt", 1)
    reader.set_integer("nodes", "actor.num_nodes", 1)
    reader.set_integer("gpus_per_node", "actor.num_gpus_per_node", 8)
    key = "algo.kl.init_coef"
    reader.set("rl.reference", bool(reader.number(key, 0.01)), key)
    _model(reader, "actor")
    for word, key in (("critic_model", "critic"), ("reward_model", "reward")):
        if reader.has(key := f"{key}.model_name_or_path"):
            reader.set(f"rl.{word}", reader.text(key), key)
    _rollout(reader)


def _rollout(reader: ConfigReader) -> None:
    """Engines, which sleep at level 1, and DeepSpeed's states, of which weights alone stay (deepspeed_utils.py)."""
    reader.set_integer("rl.engine_tp", "vllm.tensor_parallel_size", 1)
    key = "vllm.gpu_memory_utilization"
    reader.set("rl.utilization", reader.number(key, 0.95), key)
    reader.set("rl.sleep", "1" if reader.flag(key := "vllm.enable_sleep") else "0", key)
    reader.set("rl.park", "optimizer" if reader.flag(key := "ds.enable_sleep") else "none", key)
    if reader.has(key := "actor.entropy_coef"):
        reader.set("rl.entropy", True, key)


def _model(reader: ConfigReader, part: str) -> None:
    key = f"{part}.model_name_or_path"
    if reader.has(key):
        reader.set("model", reader.text(key), key)
    reader.set("recompute", "full" if reader.flag(key := f"{part}.gradient_checkpointing_enable") else "none", key)


def _trained(reader: ConfigReader) -> None:
    """How weights are kept and trained, by DeepSpeed."""
    if reader.flag(key := "ds.adam_offload"):
        reader.set("offload", ("optimizer",), key)
    if reader.text(key := "ds.attn_implementation", "flash_attention_2") == "eager":
        reader.set("attention", "eager", key)
    if rank := reader.integer(key := "ds.lora.rank", 0):
        everywhere = reader.text("ds.lora.target_modules", "all-linear") == "all-linear"
        reader.set("lora", f"{rank}:all-linear" if everywhere else str(rank), key)
    if reader.flag(key := "ds.load_in_4bit"):
        reader.set("quantize", "nf4", key)


FORMAT = Format("openrlhf", "OpenRLHF's arguments", "OpenRLHF 0.11", lambda _: False, read, kind="flags")
"""A command's arguments, which a launch hands over."""
