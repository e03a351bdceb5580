"""Arguments of OpenRLHF's commands: train_dpo and train_rm, and train_ppo_ray where all roles share the GPUs.

OpenRLHF 0.11 (3c3be623): cli/train_dpo.py, train_rm.py, train_ppo_ray.py; utils/deepspeed. The same of 0.6 to 0.10.1,
whose arguments have no dots in their names.
"""

from __future__ import annotations

from dataclasses import dataclass

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
_OLDER: dict[str, str] = {
    "actor.model_name_or_path": "pretrain", "model.model_name_or_path": "pretrain",
    "actor.gradient_checkpointing_enable": "gradient_checkpointing",
    "model.gradient_checkpointing_enable": "gradient_checkpointing", "critic.model_name_or_path": "critic_pretrain",
    "reward.model_name_or_path": "reward_pretrain", "train.micro_batch_size": "micro_train_batch_size",
    "train.dynamic_batch_enable": "use_dynamic_batch", "train.max_tokens_per_gpu": "train_max_tokens_per_gpu",
    "train.colocate_all": "colocate_all_models", "train.async_enable": "async_train", "train.enable_ema": "enable_ema",
    "rollout.micro_batch_size": "micro_rollout_batch_size", "rollout.batch_size": "rollout_batch_size",
    "rollout.n_samples_per_prompt": "n_samples_per_prompt", "rollout.max_new_tokens": "max_new_tokens",
    "rollout.max_tokens_per_gpu": "rollout_max_tokens_per_gpu", "data.max_len": "max_len",
    "actor.num_nodes": "actor_num_nodes", "actor.num_gpus_per_node": "actor_num_gpus_per_node",
    "actor.entropy_coef": "entropy_loss_coef", "algo.advantage.estimator": "advantage_estimator",
    "algo.kl.init_coef": "init_kl_coef", "vllm.num_engines": "vllm_num_engines",
    "vllm.tensor_parallel_size": "vllm_tensor_parallel_size", "vllm.enable_sleep": "vllm_enable_sleep",
    "vllm.gpu_memory_utilization": "vllm_gpu_memory_utilization", "vllm.enforce_eager": "enforce_eager",
    "ds.zero_stage": "zero_stage", "ds.adam_offload": "adam_offload", "ds.enable_sleep": "deepspeed_enable_sleep",
    "ds.attn_implementation": "attn_implementation", "ds.lora.rank": "lora_rank",
    "ds.lora.target_modules": "target_modules", "ds.load_in_4bit": "load_in_4bit", "ds.zpg": "zpg",
    "ds.tensor_parallel_size": "ds_tensor_parallel_size", "ds.ring_attn_size": "ring_attn_size",
    "ds.use_liger_kernel": "use_liger_kernel", "ds.overlap_comm": "overlap_comm",
    "ref.offload": "ref_reward_offload", "reward.offload": "ref_offload",
}  # fmt: skip
"""What arguments were called until 0.10.1 (April 2026); logits are the same since 0.6 (models/actor.py)."""
_UNTIL = ("pretrain", "micro_train_batch_size", "zero_stage", "max_len", "colocate_all_models")
"""Arguments that tell an older release."""
_HARMLESS_UNTIL = """
    actor_init_on_gpu actor_learning_rate adam_betas agent_func_path apply_chat_template async_queue_size aux_loss_coef
    best_metric_key beta bf16 chosen_key ckpt_path colocate_actor_ref colocate_critic_reward compute_fp32_loss
    critic_learning_rate critic_num_gpus_per_node critic_num_nodes dataloader_num_workers dataset dataset_probs
    dataset_split disable_ds_ckpt disable_fast_tokenizer disable_trace_cache dual_clip dynamic_filtering
    dynamic_filtering_reward_range ema_beta enable_prefix_caching enable_vllm_is_correction eps_clip eps_clip_low_high
    eval_dataset eval_n_samples_per_prompt eval_split eval_steps eval_temperature flash_attn freezing_actor_steps
    full_determinism gamma generate_max_len grad_accum_dtype gradient_checkpointing_use_reentrant input_key
    input_template ipo kl_estimator kl_horizon kl_target l2 label_key label_smoothing lambd learning_rate
    load_checkpoint local_rank logging_steps lora_alpha lora_dropout loss lr_scheduler lr_warmup_ratio margin_loss
    max_ckpt_mem max_ckpt_num max_epochs max_norm max_samples min_lr_ratio nll_loss_coef no_advantage_std_norm
    normalize_reward num_episodes overlong_buffer_len overlong_penalty_factor packing_samples param_dtype
    partial_rollout perf policy_loss_type prompt_data prompt_data_probs prompt_key prompt_max_len prompt_split
    ref_num_gpus_per_node ref_num_nodes ref_pretrain rejected_key remote_rm_url reward_clip_range
    reward_num_gpus_per_node reward_num_nodes ring_head_stride save_hf_ckpt save_path save_steps save_value_network
    seed stop_properly_penalty_coef temperature tokenizer_chat_template top_p train_batch_size train_split
    use_ds_universal_ckpt use_kl_estimator_k3 use_kl_loss use_ms use_tensorboard use_wandb value_clip
    value_head_prefix vllm_enable_is_correction vllm_generate_batch_size vllm_is_correction_type
    vllm_is_truncated_threshold vllm_num_engines vllm_sync_backend vllm_sync_with_ray wandb_group wandb_org
    wandb_project wandb_run_name
"""
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
    "rollout.max_tokens_per_gpu": "log-probabilities have a budget of their own; counted with that of training",
    "ref.offload": "the reference is in host memory between its phases",
    "reward.offload": "the reward model is in host memory between its phases",
    "optim": "the optimizer is counted as AdamW",
    "deepcompile": "a compiled step",
    "torch_compile": "a compiled step",
    "actor.optim": "the optimizer is counted as AdamW",
}


def read(document: Document) -> Config:
    """Return what a command's arguments say of a job."""
    until = next((key for key in _UNTIL if key in document.data), "")
    if until and any(isinstance(value, dict) for value in document.data.values()):
        raise ObjectiveError(
            f"{document.path.name} has --{until}, of OpenRLHF before 0.10.2, beside names with dots, which no "
            "release takes together."
        )
    software = "OpenRLHF until 0.10.1" if until else "OpenRLHF 0.11"
    return _Command(ConfigReader(document, "openrlhf", software), until=bool(until)).read()


@dataclass(frozen=True)
class _Command:
    """A command's arguments, under the names that its release has."""

    reader: ConfigReader
    until: bool
    """Whether it is a release before the names with dots."""

    def key(self, name: str) -> str:
        """How the command's release calls an argument."""
        return _OLDER.get(name, name) if self.until else name

    def read(self) -> Config:
        """What they say of a job."""
        reader, name = self.reader, self.reader.document.path.name
        command = reader.text("command")
        reader.set("rl.framework", "openrlhf", "command")
        for setting, key in (("zero", "ds.zero_stage"), ("rl.logprob_batch", "rollout.micro_batch_size")):
            if reader.has(key := self.key(key)):
                reader.set(setting, reader.integer(key), key)
        if command in _OFFLINE:
            self.set_offline(_OFFLINE[command])
        elif command == "train_ppo_ray":
            self.set_online(name)
        else:
            raise ObjectiveError(
                f"{name} starts OpenRLHF's {cut(command)}, whose arguments are not read: give memcalc estimate what it "
                "trains."
            )
        self.set_trained()
        unless = (False, None, 0, 1, "", "adam")
        reader.not_modelled({self.key(key): says for key, says in _NOT_MODELLED.items()}, unless=unless)
        reader.harmless(*_HARMLESS, *(_HARMLESS_UNTIL.split() if self.until else ()))
        return reader.finish()

    def set_offline(self, algorithm: str) -> None:
        """Pairs: prompt and response are cut together."""
        self.reader.set("rl.algorithm", algorithm, "command")
        self.reader.set_integer("seq_len", self.key("data.max_len"), 512)
        self.reader.set_integer("micro_batch", self.key("train.micro_batch_size"), 8 if algorithm == "dpo" else 1)
        self.set_model("model")

    def set_online(self, name: str) -> None:
        """Generation where all roles share the GPUs: else each has GPUs of its own, which is not modelled."""
        reader = self.reader
        if not reader.flag(key := self.key("train.colocate_all")):
            raise ObjectiveError(
                f"{name} gives each role GPUs of its own (no --{key}): memcalc rl answers for roles that share them, "
                "and for engines apart."
            )
        key = self.key("algo.advantage.estimator")
        reader.set("rl.algorithm", reader.one_of(key, _ESTIMATORS, "ppo"), key)
        longest = self.set_lengths()
        if reader.flag(self.key("train.dynamic_batch_enable")):
            budget = reader.integer(key := self.key("train.max_tokens_per_gpu"), 16192, low=1) or 16192
            reader.set("rl.micro_tokens", max(budget, longest), key)  # a longer sample is a micro-batch of its own
        else:
            reader.set_integer("micro_batch", self.key("train.micro_batch_size"), 4 if self.until else 1)
        reader.set_integer("rl.prompts", self.key("rollout.batch_size"), 1024)
        reader.set_integer("rl.samples", self.key("rollout.n_samples_per_prompt"), 1)
        reader.set_integer("nodes", self.key("actor.num_nodes"), 1)
        reader.set_integer("gpus_per_node", self.key("actor.num_gpus_per_node"), 8)
        key = self.key("algo.kl.init_coef")
        reader.set("rl.reference", bool(reader.number(key, 0.01)), key)
        self.set_model("actor")
        for word, key in (("critic_model", "critic"), ("reward_model", "reward")):
            if reader.has(key := self.key(f"{key}.model_name_or_path")):
                reader.set(f"rl.{word}", reader.text(key), key)
        self.set_rollout()

    def set_lengths(self) -> int:
        """Set the longest prompt and response, and return their sum [tokens]: before 0.9.10 each is said by itself."""
        reader, key = self.reader, self.key("data.max_len")
        if self.until and not reader.has(key):
            reader.set_integer("rl.prompt", "prompt_max_len", 1024)
            reader.set_integer("rl.response", "generate_max_len", 1024)
            return sum(reader.integer(f"{part}_max_len", 1024) or 1024 for part in ("prompt", "generate"))
        longest = reader.integer(key, 2048, low=2) or 2048
        response = min(reader.integer(self.key("rollout.max_new_tokens"), low=1) or longest // 2, longest - 1)
        reader.set("rl.prompt", longest - response, key)
        reader.set("rl.response", response, key)
        return longest

    def set_rollout(self) -> None:
        """Engines, which sleep at level 1, and DeepSpeed's states, of which weights alone stay (deepspeed_utils.py)."""
        reader = self.reader
        reader.set_integer("rl.engine_tp", tensor := self.key("vllm.tensor_parallel_size"), 1)
        key = self.key("vllm.gpu_memory_utilization")
        reader.set("rl.utilization", reader.number(key, 0.95), key)
        reader.set("rl.sleep", "1" if reader.flag(key := self.key("vllm.enable_sleep")) else "0", key)
        reader.set("rl.park", "optimizer" if reader.flag(key := self.key("ds.enable_sleep")) else "none", key)
        if reader.has(key := self.key("actor.entropy_coef")):
            reader.set("rl.entropy", True, key)
        if reader.flag(key := self.key("vllm.enforce_eager")):
            reader.set("rl.eager", True, key)
        if reader.flag(key := self.key("train.async_enable")):  # colocate_all is then of DeepSpeed's models alone
            engines = reader.integer(self.key("vllm.num_engines"), 1, low=1) or 1
            reader.set("rl.apart", True, key)
            reader.set("rl.engine_gpus", engines * (reader.integer(tensor, 1, low=1) or 1), key)

    def set_model(self, part: str) -> None:
        """The model that is trained, and whether its blocks are checkpointed."""
        if self.reader.has(key := self.key(f"{part}.model_name_or_path")):
            self.reader.set("model", self.reader.text(key), key)
        checkpointed = self.reader.flag(key := self.key(f"{part}.gradient_checkpointing_enable"))
        self.reader.set("recompute", "full" if checkpointed else "none", key)

    def set_trained(self) -> None:
        """How weights are kept and trained, by DeepSpeed."""
        reader = self.reader
        if reader.flag(key := self.key("ds.adam_offload")):
            reader.set("offload", ("optimizer",), key)
        if reader.text(key := self.key("ds.attn_implementation"), "flash_attention_2") == "eager":
            reader.set("attention", "eager", key)
        if self.until and not any(map(reader.has, (key, "flash_attn", "packing_samples"))):
            says = "is not given: counted with FlashAttention, which OpenRLHF has by default since August 2025"
            reader.note("note", "MC004", "flash_attn", f"flash_attn {says}")
        if rank := reader.integer(key := self.key("ds.lora.rank"), 0):
            targets = reader.text(self.key("ds.lora.target_modules"), "all-linear")
            reader.set("lora", f"{rank}:all-linear" if targets == "all-linear" else str(rank), key)
        if reader.flag(key := self.key("ds.load_in_4bit")):
            reader.set("quantize", "nf4", key)


FORMAT = Format("openrlhf", "OpenRLHF's arguments", "OpenRLHF 0.11", lambda _: False, read, kind="flags")
"""A command's arguments, which a launch hands over."""
