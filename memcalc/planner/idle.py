"""What a job is told that changes nothing in it: refused where the framework or the model has no such thing.

Where it is the strategy that has no use for it (a stage, a degree, a policy), which another one would have, the answer
says so in a warning.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from memcalc.errors import CombinationError, UncountedError
from memcalc.frameworks.habits import Habits
from memcalc.planner.request import Request
from memcalc.specs.model import Model
from memcalc.specs.options import BY_NAME, FIELDS
from memcalc.specs.strategy import Strategy
from memcalc.terms.fsdp2 import reshards_root
from memcalc.terms.model_on_grid import ModelOnGrid

STAGE_3 = ("zero_prefetch_bucket", "persistence_threshold", "max_live_parameters", "sub_group_size")
"""What DeepSpeed has at its stage 3 alone."""
ENGINE_ALONE = ("float8_attention", "float8_activation", "float8_transpose_cache")
"""What Megatron-LM alone can be told."""
PIPELINED = ("embedding_in_split", "loss_in_split", "microbatch_group")
"""How a pipeline parts blocks and micro-batches."""


IDLE = "changes nothing here"
"""What each warning says."""


def labelled(word: str) -> str:
    """An option as it is typed.

    >>> labelled("cp_kind"), labelled("strategy.checkpoint")
    ('--cp-kind', 'strategy.checkpoint')
    """
    return word if "." in word else f"--{word.replace('_', '-')}"


def lacking(fields: Mapping[str, Any], habits: Habits) -> Iterator[tuple[str, str]]:
    """The fields that are told and that no job of the framework has, each with the reason."""
    for name, value in fields.items():
        option = BY_NAME.get(name)
        if option is None or option.key not in FIELDS or value in (option.default, None):
            continue
        if reason := _of_framework(name, habits):
            yield name, reason


def _of_framework(name: str, habits: Habits) -> str:
    """Why a framework has nothing of a name; empty where it has."""
    deepspeed, units = habits.zero_optimizer is not None, habits.full_shard
    rules: dict[str, tuple[bool, str]] = {
        **dict.fromkeys((*STAGE_3, "partition_activations"), (deepspeed, "only DeepSpeed has it")),
        **dict.fromkeys(
            ("reduce_bucket_size", "overlap_comm"),
            (not units or habits.wraps_replicas, f"{habits.name} reduces unit by unit, without buckets"),
        ),
        "overlap_param_gather": (habits.persistent_gradients, "only Megatron-LM has it"),
        **dict.fromkeys(ENGINE_ALONE, (habits.engine, "only Megatron-LM has it")),
        "overlap_p2p": (habits.overlaps_stages, "only Megatron-LM has it"),
        "bucket_view": (habits.gradient_copy, f"{habits.name} passes no gradient_as_bucket_view on; only ddp has it"),
        "whole_accumulation": (units, f"{habits.name} has no FSDP, whose no_sync it is"),
        "wgrad_fusion": (habits.persistent_gradients, "only Megatron-LM has it"),
        "lora_classes": (habits.engine, f"{habits.name} runs PEFT's adapters"),
        "te": (habits.engine, f"{habits.name} runs no TransformerEngine"),
        "state_dict": (
            units or deepspeed or habits.persistent_gradients, f"{habits.name} shards no weights",
        ),
        "reshard": (units, f"{habits.name} has no FSDP"),
    }  # fmt: skip
    able, reason = rules.get(name, (True, ""))
    return "" if able else reason


def refuse_lacking(request: Request, habits: Habits) -> None:
    """Refuse the first field that says nothing to any job of the framework."""
    fields: dict[str, Any] = request.given["fields"]
    for name, reason in lacking(fields, habits):
        raise CombinationError(BY_NAME[name].key, fields[name], reason)
    quantized = str(request.given.get("quantize", "none"))
    if fields.get("lora_kernels") == "dora" and quantized != "none":
        raise UncountedError("strategy.lora_kernels", "dora", "DoRA has no figures over a quantized base")
    if fields.get("prepare_kbit") and quantized == "none":
        raise CombinationError("strategy.prepare_kbit", True, "norms are cast over a quantized base: needs --quantize")
    if fields.get("kbit_ends") and not fields.get("prepare_kbit"):
        raise CombinationError("strategy.kbit_ends", True, "norms are cast first: needs strategy.prepare_kbit")
    for name in ("kbit_experts", "kbit_passing"):
        if fields.get(name) and not quantized.startswith(("nf4", "int8")):
            allowed = "PEFT prepares a base of bitsandbytes: needs --quantize nf4, nf4-dq or int8"
            raise CombinationError(f"strategy.{name}", True, allowed)
    if fields.get("quantize_experts"):
        _check_experts(request, habits, quantized)
    mixed = str(request.given.get("precision") or "mixed").endswith("mixed")
    if fields.get("frozen_fp32") and (quantized != "none" or not habits.full_shard or not mixed):
        allowed = "needs FSDP in mixed precision, over a base that is not quantized"
        raise CombinationError("strategy.frozen_fp32", True, allowed)
    if fields.get("gptq_group") is not None and not quantized.startswith("gptq"):
        allowed = "needs --quantize gptq-int4 or gptq-int8"
        raise CombinationError("strategy.gptq_group", fields["gptq_group"], allowed)


def _check_experts(request: Request, habits: Habits, quantized: str) -> None:
    """Refuse what is not known of experts that are quantised as they are loaded, and pin what is then not searched.

    Under FSDP 2 a rank has more than one GPU alone, as not all is sharded (axolotl 0.18 docs/expert_quantization.qmd).
    """
    if not quantized.startswith(("nf4", "int8")):
        allowed = "experts are stored as the rest of the base is: needs --quantize nf4, nf4-dq or int8"
        raise CombinationError("strategy.quantize_experts", True, allowed)
    stage = request.given.get("zero", min(habits.zero))
    if stage > 1:
        allowed = "a rank holds more of experts that are quantized as they are loaded than its shard: give --zero 0"
        raise UncountedError("zero", stage, f"{allowed}, with --framework hf or ddp")
    request.given.update(zero=stage)


def idle_warnings(request: Request, strategy: Strategy, census: ModelOnGrid) -> Iterator[str]:
    """A sentence for each option that is told and has no use in this strategy."""
    options = {**request.given, **request.given["fields"]}
    for names, reason in (*_of_states(strategy, census), *_of_layout(strategy, census.model), *_of_rest(strategy)):
        for name in names:
            option = BY_NAME[name]
            if options.get(name) not in (None, option.default, ()):
                yield f"{labelled(option.word)} {options[name]} {IDLE}: {reason}."


Idle = tuple[tuple[str, ...], str]
"""Options, and why a strategy has no use for them."""


def _of_states(strategy: Strategy, census: ModelOnGrid) -> Iterator[Idle]:
    """Of how states are sharded and gradients reduced."""
    habits, ranks = census.grid.habits, strategy.dp * strategy.cp
    if habits.zero_optimizer is not None and strategy.zero < 3:
        yield (*STAGE_3, "state_dict"), f"it is of ZeRO-3, and this is stage {strategy.zero}"
    if habits.full_shard and (strategy.zero == 0 or ranks == 1):
        yield ("reduce_dtype", "reshard", "whole_accumulation", "state_dict"), "no weights are sharded"
    elif strategy.reshard == "always" and not reshards_root(census).any():
        yield ("reshard",), "the unit of the head stays whole while the loss runs"
    if not (habits.full_shard or habits.narrow_gradients):
        yield ("reduce_dtype",), f"{habits.name} reduces gradients in their own width"
    if ranks == 1:
        yield ("reduce_bucket_size", "overlap_comm", "overlap_param_gather"), "no gradients are reduced"
    elif habits.full_shard and strategy.zero:
        yield ("reduce_bucket_size", "overlap_comm"), "FSDP reduces unit by unit, without buckets"
    if strategy.zero == 0:
        yield ("zero_gather", "overlap_param_gather"), "no state is sharded"


def _of_layout(strategy: Strategy, model: Model) -> Iterator[Idle]:
    """Of the degrees of parallelism."""
    if strategy.tp == 1:
        yield ("partition_activations",), "there is no tensor parallelism"
    if strategy.pp == 1:
        yield PIPELINED, "there is no pipeline"
    elif strategy.vpp == 1:
        yield ("microbatch_group", "overlap_p2p"), "a stage has one chunk"
    if strategy.cp == 1:
        yield ("cp_kind",), "there is no context parallelism"
    if not model.is_moe:
        yield ("etp",), f"{model.name} has no routed experts"


def _of_rest(strategy: Strategy) -> Iterator[Idle]:
    """Of offload, recomputation and the optimizer."""
    if not strategy.offload:
        yield ("offload_to",), "nothing is offloaded"
    if strategy.recompute == "none":
        yield ("checkpoint",), "nothing is recomputed"
    if strategy.loss != "fused-linear":
        yield ("tiled_loss",), "the loss has logits"
    if not strategy.optimizer.endswith("8bit") or strategy.lora:
        yield ("wide_embedding_moments",), "no embedding has 8-bit moments"
    if not strategy.precision_aware:
        yield ("te", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"), "the optimizer is Megatron-LM's own"
