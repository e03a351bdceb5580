"""ms-swift's `megatron sft` and `megatron pt`, as flags or YAML, read and written: version 4.6.0.dev0 (3602360a).

Sources: swift/megatron/arguments/megatron_args.py and megatron_base_args.py. They are named as Megatron-LM's flags are,
each with a value, over a model of the Hub; what Megatron-LM turns off by a flag is on here by default.

verl's workers that train by Megatron-LM have the same settings under keys of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from memcalc.convert.config import Config, ConfigReader
from memcalc.convert.document import Document
from memcalc.convert.formats import megatron
from memcalc.convert.formats.base import ConfigJob, Format, hub_name, key_table
from memcalc.convert.formats.megatron_flags import KEYS, Flags
from memcalc.convert.formats.megatron_strategy import run_flags, set_float8, set_states, set_time
from memcalc.convert.formats.preferences import refuse_preferences
from memcalc.convert.objectives import refuse_task
from memcalc.errors import ObjectiveError, cut
from memcalc.specs.adapters import lora_of

LAYERS = {
    "linear_qkv": "qkv", "linear_proj": "o", "linear_fc1": "gate_up", "linear_fc2": "down", "linear_q_proj": "q",
    "linear_q_down_proj": "q_a", "linear_q_up_proj": "q_b", "linear_kv_down_proj": "kv_a",
    "linear_kv_up_proj": "kv_b",
}  # fmt: skip
"""Megatron-LM's layers (core/models/gpt/gpt_layer_specs.py) and memcalc's words for them."""
RENAMED = {
    "num_virtual_stages_per_pipeline_rank": "virtual_pipeline_model_parallel_size",
    "microbatch_group_size_per_virtual_pipeline_stage": "microbatch_group_size_per_vp_stage",
}
"""Flags of Megatron-LM, and ms-swift's arguments of another name."""
_WRITTEN_DTYPES = {"bf16-mixed": "bfloat16", "fp8-mixed": "bfloat16", "fp16-mixed": "float16", "fp32": "float32"}
_CLASSES = frozenset({
    "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "DeepseekV4ForCausalLM", "Gemma4ForConditionalGeneration",
    "Glm4ForCausalLM", "Glm4MoeForCausalLM", "Glm4MoeLiteForCausalLM", "Glm4vForConditionalGeneration",
    "Glm4vMoeForConditionalGeneration", "GptOssForCausalLM", "HYV3ForCausalLM", "InternVLForConditionalGeneration",
    "LlamaForCausalLM", "MiniMaxM2ForCausalLM", "NemotronHForCausalLM", "OlmoeForCausalLM", "Qwen2ForCausalLM",
    "Qwen2MoeForCausalLM", "Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration", "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM", "Qwen3NextForCausalLM", "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration", "Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration",
})  # fmt: skip
"""Transformers' classes whose models mcore-bridge 1.6.5 builds (model/gpts, model/mm_gpts: ``register_model``)."""
_ABSENT = (
    "bf16", "fp16", "no_create_attention_mask_in_dataloader", "no_gradient_accumulation_fusion",
    "moe_flex_dispatcher_backend", "no_overlap_p2p_communication",
)  # fmt: skip
"""Flags that ms-swift has not, or that stand under another argument here."""


def write(job: ConfigJob) -> dict[str, Any]:
    """Return the arguments that run a job; the data, without which ms-swift does not start, stands for the user's."""
    plan = job.strategy
    job.require(job.framework == "megatron", "framework", "ms-swift's Megatron is for --framework megatron")
    _require_said(job)
    flags = {RENAMED.get(name, name): value for name, value in run_flags(job).items() if name not in _ABSENT}
    return {
        "model": hub_name(job),
        "dataset": ["DATASET"],
        "torch_dtype": _WRITTEN_DTYPES[plan.precision],
        "max_length": job.seq_len,
        "packing": True,
        **_adapter_arguments(job),
        **flags,
        "optimizer": "dist_muon" if plan.optimizer == "muon" and plan.zero == 1 else flags["optimizer"],
        # what ms-swift has on by itself, and Megatron-LM's flags leave out where it is off
        "use_distributed_optimizer": plan.zero == 1 and plan.optimizer != "muon",
        "cross_entropy_loss_fusion": plan.loss in ("fused-kernel", "triton"),
        "gradient_accumulation_fusion": plan.wgrad_fusion,
        "overlap_p2p_comm": plan.overlap_p2p if plan.vpp > 1 else None,
        "recompute_granularity": flags.get("recompute_granularity") or "none",
        "moe_enable_deepep": True if plan.moe_dispatcher == "deepep" else None,
        "expert_tensor_parallel_size": (plan.etp or plan.tp) if job.spec is not None and job.spec.is_moe else None,
    }


def _require_said(job: ConfigJob) -> None:
    plan = job.strategy
    job.require(plan.dp_replicate == 1, "dp-replicate", "ms-swift's Megatron has one instance of the optimizer")
    job.require(plan.cuda_graphs == "none", "cuda-graphs", "ms-swift's Megatron has none")
    job.require(not plan.ep_overlap, "ep-overlap", "ms-swift's Megatron does not overlap the exchange of tokens")
    narrow = plan.reduce_dtype == "fp32" or plan.precision_aware
    job.require(narrow, "strategy.reduce_dtype", "ms-swift has 16-bit gradients beside strategy.precision_aware alone")
    job.require(plan.optimizer in ("adamw", "sgd-momentum", "muon"), "optimizer", "ms-swift has adamw, sgd, muon")
    hides = plan.zero == 0 and plan.overlap_comm is not False and plan.dp * plan.cp > 1
    alone = "ms-swift's muon over whole states overlaps no reduction: --zero 1, or --set strategy.overlap_comm=false"
    job.require(plan.optimizer != "muon" or not hides, "zero", alone)
    shared = plan.precision != "fp8-mixed" or plan.float8 != "mxfp8" or not plan.float8_all_gather
    buffer = "ms-swift gathers weights in MXFP8 into a buffer that stays: --set strategy.float8_all_gather=false"
    job.require(shared, "strategy.float8_all_gather", buffer)
    packs = "ms-swift's packed sequences take no attention that is written out: --attention flash or cudnn"
    job.require(plan.attention != "eager", "attention", packs)
    gathered = "ms-swift's sequences vary in length, which the dispatcher allgather does not take: alltoall"
    job.require(plan.moe_dispatcher != "allgather" or not job.sized().is_moe, "moe-dispatcher", gathered)
    named, bridge = job.spec is None or job.spec.hf_class in _CLASSES, "mcore-bridge, by which ms-swift builds models"
    job.require(named, "model", f"{bridge} for Megatron, has no such class: --to megatron")


def _adapter_arguments(job: ConfigJob) -> dict[str, Any]:
    plan = job.strategy
    lora = lora_of(plan.lora)
    if lora is None:
        return {"tuner_type": "full"}
    allowed = "ms-swift has adapters of its own: --set strategy.lora_classes=swift"
    job.require(plan.lora_classes == "swift", "strategy.lora_classes", allowed)
    names = {word: name for name, word in LAYERS.items()} | {"up": "linear_fc1"}
    return {
        "tuner_type": "lora",
        "lora_rank": lora.rank,
        "lora_alpha": 4 * lora.rank,
        "lora_dropout": plan.lora_dropout,
        "target_modules": [names[target] for target in lora.targets],
    }


_SOFTWARE = "ms-swift 4.6.0.dev0"
_KEYS = key_table("swift_megatron")
_DEFAULTS: dict[str, Any] = _KEYS.tables["defaults"]
_POSITIVE = {
    "no_gradient_accumulation_fusion": "gradient_accumulation_fusion",
    "no_overlap_p2p_communication": "overlap_p2p_comm",
    "no_masked_softmax_fusion": "masked_softmax_fusion",
}  # fmt: skip
"""Flags of Megatron-LM that turn something off, and the argument that has it on."""
_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_LAYERS = {"all-linear": "all-linear", **LAYERS}
_TUNERS = {name: name for name in ("full", "lora", "lora_llm")}  # the last of its example with a vision part


@dataclass
class _Arguments(Flags):
    """Megatron-LM's flags by the names and defaults of ms-swift's arguments."""

    def key(self, name: str) -> str:
        """Where the setting stands."""
        return RENAMED.get(name, _POSITIVE.get(name, name))

    def integer(self, name: str, default: int | None = None, low: int = 0) -> int | None:
        """A whole number."""
        return super().integer(name, _DEFAULTS.get(name, default), low)

    def on(self, name: str) -> bool:
        """Whether an argument is true; for a flag that turns something off, whether it is false."""
        if name in _POSITIVE:
            return self.reader.flag(self.key(name), True) is False
        return bool(self.reader.flag(self.key(name), _DEFAULTS.get(name, False)))

    def one_of(self, name: str, names: dict[str, Any], default: Any = None) -> Any:
        """What one of the known names stands for."""
        if name == "recompute_granularity":
            names = {**names, "none": "none"}
        return super().one_of(name, names, names.get(_DEFAULTS.get(name, ""), default))


def read(document: Document) -> Config:
    """Return what arguments of ms-swift's Megatron say of a job."""
    reader = ConfigReader(document, "swift_megatron", _SOFTWARE)
    refuse_preferences(reader)
    refuse_task(document.path.name, reader.text("task_type", "causal_lm"))
    flags = _Arguments(reader)
    flags.set("framework", "megatron", "tensor_model_parallel_size")
    if reader.has("model"):
        flags.set("model", flags.text("model"), "model")
    _precision(flags)
    megatron.set_optimizer(flags)
    _muon(flags)
    megatron.set_parallelism(flags)
    if flags.count("tensor_model_parallel_size") > 1 and not flags.has("expert_tensor_parallel_size"):
        flags.set("strategy.etp", 1, "expert_tensor_parallel_size")
    megatron.set_pipeline(flags)
    _batch(flags)
    megatron.set_recompute(flags)
    megatron.set_kernels(flags)
    _experts(flags)
    set_time(flags, routed=flags.count("expert_model_parallel_size") > 1)
    _tuner(flags)
    reader.harmless(*_KEYS.harmless)
    shared = _KEYS.lists["shared"]
    reader.not_counted({**_KEYS.not_counted, **{name: row for name, row in KEYS.not_counted.items() if name in shared}})
    says = {**_KEYS.not_modelled, **{name: says for name, says in KEYS.not_modelled.items() if name in shared}}
    reader.not_modelled(says, unless=(False, None, 0, 1, "", "none", "fp32", []))
    return reader.finish(known=_KEYS.names("harmless", "not_counted", "not_modelled", "defaults", "shared"))


def _precision(flags: Flags) -> None:
    """`torch_dtype` says it, by default the checkpoint's own; gradients of bf16 weights are kept in fp32."""
    dtype = flags.one_of("torch_dtype", _DTYPES, "bf16")
    narrow = next((name for name in ("bf16", "fp16") if flags.has(name) and flags.on(name)), dtype)
    key = narrow if flags.has(narrow) else "torch_dtype"
    flags.set("precision", "fp32" if narrow == "fp32" else f"{narrow}-mixed", key)
    set_float8(flags, [narrow])
    set_states(flags, [narrow])
    unfused = "no_gradient_accumulation_fusion"
    flags.set("strategy.wgrad_fusion", not flags.on(unfused), unfused)


def _muon(flags: Flags) -> None:
    """`muon` switches the distributed optimizer off (_check_muon), and `dist_muon` shares states out by itself."""
    name = flags.text("optimizer") or "adam"
    if "muon" in name:
        flags.set("zero", int(name == "dist_muon"), "optimizer")


def _batch(flags: Flags) -> None:
    """Packs are `packing_length` long, else `max_length`; without either the model's own longest sequence."""
    longer = flags.on("packing") and flags.has("packing_length")
    flags.reader.harmless("packing_length", "max_length")
    flags.reader.set_integer("seq_len", "packing_length" if longer else "max_length")
    flags.set("micro_batch", flags.integer("micro_batch_size", 1, low=1), "micro_batch_size")
    flags.set("global_batch", flags.integer("global_batch_size", 16, low=1), "global_batch_size")
    flags.set("varying_lengths", not flags.on("packing"), "packing")


def _experts(flags: Flags) -> None:
    if not flags.on("moe_grouped_gemm"):
        flags.warn("moe_grouped_gemm", "experts run one after another; counted as grouped")
    capacity = flags.number("moe_expert_capacity_factor", 1.0) or 1.0
    if flags.on("moe_pad_expert_input_to_capacity") and capacity >= 1:
        flags.set("strategy.expert_overload", capacity, "moe_expert_capacity_factor")
    elif capacity != 1.0:
        flags.warn("moe_expert_capacity_factor", "every expert is counted with its equal share of the tokens")


def _tuner(flags: Flags) -> None:
    """All weights, or adapters on every linear layer (Megatron's own classes of LoRA)."""
    key = "train_type" if flags.reader.has("train_type") else "tuner_type"
    kind = flags.one_of(key, _TUNERS, "full")
    tower, projector = flags.reader.flag("freeze_vit", True), flags.reader.flag("freeze_aligner", True)
    flags.set("vision", "trained" if not tower else "frozen" if projector else "projector", "freeze_vit")
    if kind == "lora_llm":
        raise ObjectiveError(
            f"{flags.reader.document.path.name} trains adapters beside a whole vision part ({key} {kind}): memcalc has "
            "no figures for both under Megatron."
        )
    if kind == "lora":
        _adapters(flags.reader)


def _adapters(reader: ConfigReader) -> None:
    """Adapters of Megatron-LM's layers; those of the router, of ends and of biases are not counted.

    They are as wide as the weights, whatever ``lora_dtype`` says: ``Float16Module`` casts the whole model.
    """
    rank, names = reader.integer("lora_rank", 8, low=1) or 8, [str(name) for name in reader.items("target_modules")]
    beside = {
        "all-router": "adapters of the router are not counted",
        "all-embedding": "adapters of the embedding are not counted",
    }
    for name in (name for name in names if name in beside):
        reader.not_modelled({"target_modules": beside[name]})
    layers = [name for name in names if name not in beside] or ["all-linear"]
    if reader.has("target_regex") or not {*layers} <= _LAYERS.keys():
        key = "target_regex" if reader.has("target_regex") else "target_modules"
        reader.ask("lora", key, str(reader.raw(key))[:60], f"names layers by more than {', '.join(_LAYERS)}")
    else:
        targets = list(dict.fromkeys(_LAYERS[name] for name in layers))
        listed = ["all-linear"] if "all-linear" in targets else targets
        reader.set("lora", f"{rank}:{','.join(listed)}", "target_modules")
    reader.set("strategy.lora_classes", "swift", "target_modules")
    reader.set("workload.lora_dropout", reader.number("lora_dropout", 0.05), "lora_dropout")
    reader.not_modelled({"lora_bias": "biases are trained too, which is not counted"})
    if saved := reader.items("modules_to_save"):
        raise ObjectiveError(
            f"{reader.document.path.name} has modules_to_save {cut(', '.join(map(str, saved)))}, which Megatron-LM "
            "trains in full beside adapters: memcalc has no figures for this."
        )


def _recognise(document: Document) -> bool:
    data: Any = document.data
    if document.kind not in ("yaml", "json") or not isinstance(data, dict) or not isinstance(data.get("model"), str):
        return False
    return {"micro_batch_size", "global_batch_size"} <= data.keys() and "max_length" in data


FORMAT = Format(
    "swift_megatron", "ms-swift arguments (Megatron)", _SOFTWARE, _recognise, read, write,
    kind="yaml", filename="sft.yaml", decided=("etp",),
    over_adapters={"settings": {"strategy.lora_classes": "swift"}},
)  # fmt: skip
"""Arguments of `megatron sft`, as flags or YAML."""


# ---------------------------------------------------------------- verl's Megatron workers

_VERL = "actor_rollout_ref"
_ACTOR, _REFERENCE = f"{_VERL}.actor.megatron", f"{_VERL}.ref.megatron"
_OVERRIDES = "override_transformer_config"
_LAYOUT = {
    "tp": "tensor_model_parallel_size", "pp": "pipeline_model_parallel_size", "cp": "context_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size", "ep": "expert_model_parallel_size",
    "rl.expert_tp": "expert_tensor_parallel_size",
}  # fmt: skip
_STATED = {"num_virtual_stages_per_pipeline_rank": _LAYOUT["vpp"]}
_ATTENTION = {"flash": "flash", "auto": "flash", "fused": "cudnn", "unfused": "eager"}
_VERL_KEYS = key_table("verl").tables


class VerlWorkers(Flags):
    """Megatron-LM's settings by the keys of verl's actor, which the reference and all GPUs share.

    verl 1dda039b: workers/engine/megatron/transformer_impl.py, engine_workers.py, utils/megatron_utils.py,
    utils/megatron/optimizer.py, trainer/config/engine/megatron.yaml. The first engine of a process lays its ranks out
    for all; blocks are checkpointed as Megatron-LM is told, whatever the model's own flag says.
    """

    def key(self, name: str) -> str:
        """Where the setting stands."""
        name = _STATED.get(name, name)
        inner = "" if name in _LAYOUT.values() else f"{_OVERRIDES}."
        return f"{_ACTOR}.{inner}{name}"

    def degree(self, *parts: str) -> int:
        """Ranks over which the layout spreads in these ways, [1]."""
        return prod(self.count(_LAYOUT[part]) for part in parts)

    def set_trained(self) -> None:
        """Set how the actor is laid out, kept and trained."""
        self._refuse()
        self.reader.set("rl.trainer", "megatron", f"{_VERL}.actor.strategy")
        for word, name in _LAYOUT.items():
            self.reader.set_integer(word, self.key(name))
        if not self.reader.flag(key := f"{_ACTOR}.use_distributed_optimizer", True):
            self.reader.set("zero", 0, key)
        self._split()
        megatron.set_recompute(self)
        self.set("attention", self.one_of("attention_backend", _ATTENTION, "flash"), "attention_backend")
        self._set_optimizer()
        parts = {"params": f"{_ACTOR}.param_offload", "optimizer": f"{_ACTOR}.optimizer_offload"}
        parks = [part for part, key in parts.items() if self.reader.flag(key)]
        self.reader.set("rl.park", ",".join(parks) or "none", parts["params"])
        self.reader.not_modelled(_VERL_KEYS["megatron_not_modelled"])
        self._judge_overrides()

    def _split(self) -> None:
        """Set how blocks part over stages; null is an even share."""
        sizes = {end: self.integer(f"num_layers_in_{end}_pipeline_stage") for end in ("first", "last")}
        parts = [f"{end}={size}" for end, size in sizes.items() if size]
        parts += [end for end in ("embedding", "loss") if self.on(f"account_for_{end}_in_pipeline_split")]
        if parts:
            self.set("rl.stage_split", ",".join(parts), "num_layers_in_last_pipeline_stage")

    def _judge_overrides(self) -> None:
        """What else Megatron-LM is told, of which its own flags say what it changes."""
        reader = self.reader
        reader.harmless(*(self.key(name) for name in KEYS.names("harmless", "yaml")))
        reader.not_counted({self.key(name): row for name, row in KEYS.not_counted.items()})
        reader.not_modelled({self.key(name): says for name, says in KEYS.not_modelled.items()})

    def _refusal(self, key: str, value: Any, says: str) -> ObjectiveError:
        says = f"memcalc has no figures for {says} by verl's Megatron workers."
        return ObjectiveError(f"{self.reader.document.path.name} sets {key} {cut(str(value))}: {says}")

    def _refuse(self) -> None:
        """Refuse what has no figures, and a reference that is laid out or kept otherwise."""
        reader = self.reader
        off: tuple[Any, ...] = (None, False, 0, "", "none", "false", "0", [], {})
        for key, says in _VERL_KEYS["megatron_refused"].items():
            if (value := reader.raw(key)) not in off and str(value).lower() not in off:
                raise self._refusal(key, value, says)
        for key, row in _VERL_KEYS["megatron_allowed"].items():
            if (value := reader.text(key, row["known"][0]).lower()) not in row["known"]:
                raise self._refusal(key, value, row["says"])
        if reader.flag(key := f"{_ACTOR}.sequence_parallel", True) is False and self.degree("tp") > 1:
            raise self._refusal(key, "false", "tensor parallelism without sequence parallelism")
        if (estimator := reader.text(key := "algorithm.adv_estimator", "gae")) == "gae":
            raise self._refusal(key, estimator, "a critic")
        if any(reader.flag(key) for key in (f"{_VERL}.actor.use_kl_loss", "algorithm.use_kl_in_reward")):
            self._refuse_reference()

    def _refuse_reference(self) -> None:
        reader = self.reader
        for word, name in _LAYOUT.items():
            size = self.integer(name, 0 if word == "rl.expert_tp" else 1)
            if (value := reader.integer(key := f"{_REFERENCE}.{name}", size)) != size:
                raise self._refusal(key, value, f"a reference with another layout than the actor's {size}")
        away = reader.flag(f"{_ACTOR}.param_offload")
        other = reader.flag(key := f"{_REFERENCE}.param_offload", away)
        if away and not other:
            raise self._refusal(key, "false", "a reference that stays on the GPU while the actor leaves it")
        if other != away:
            says = "changes memory but is not counted: the reference is counted as on the GPU between its phases"
            reader.note("warning", "MC002", key, f"{key} true {says}")

    def _set_optimizer(self) -> None:
        """Set an optimizer on the host; parts of one, or states below fp32 on the GPU, have no figures."""
        reader, optim = self.reader, f"{_VERL}.actor.optim.override_optimizer_config"
        away = reader.flag(key := f"{optim}.optimizer_cpu_offload")
        share = reader.number(part := f"{optim}.optimizer_offload_fraction", 0.0)
        aware = reader.flag(narrow := f"{optim}.use_precision_aware_optimizer")
        if away and share != 1:
            raise self._refusal(part, share, "a part of the optimizer on the host")
        if aware and not away:
            raise self._refusal(narrow, "true", "the precision-aware optimizer on the GPU")
        if away:
            reader.set("offload", ("optimizer",), key)
