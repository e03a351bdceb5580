"""NeMo-RL's YAML: GRPO, PPO, DPO, reward models and fine-tuning by its DTensor workers (FSDP 2).

NeMo-RL 0.5 (7ea279ab): utils/config.py (`defaults`, interpolation), algorithms/*.py, models/policy and
models/automodel. It has hardly a default in code: a config must say everything, most of them by naming one of its
examples as `defaults`. What a file leaves out counts as that example of its algorithm says it (examples/configs).

Values that name other values are filled in as OmegaConf 2.3 reads `${policy.precision}` and `${mul:${a}, ${b}}`; the
resolvers `add`, `mul`, `div` and `max` are NeMo-RL's own.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from memcalc.convert.config import Config, ConfigReader
from memcalc.convert.document import Document, KeyPath
from memcalc.convert.formats.base import Format, key_table
from memcalc.errors import MissingError, ObjectiveError, cut

_INNERMOST = re.compile(r"\$\{([^${}]*)\}")
_MOST = 64
"""Replacements in one value: a circle ends there."""
_ARITHMETIC: dict[str, Callable[[float, float], float]] = {
    "add": operator.add,
    "mul": operator.mul,
    "div": operator.truediv,
    "max": max,
}


def resolved(document: Document) -> Document:
    """Return a document with each such value in place of its name; what cannot be told without a run is unknown."""
    unknown = dict(document.unknown)
    return replace(document, data=_filled(document.data, document.data, (), unknown), unknown=unknown)


def _filled(data: Any, root: Any, at: KeyPath, unknown: dict[KeyPath, str]) -> Any:
    if isinstance(data, list):
        return [_filled(value, root, (*at, index), unknown) for index, value in enumerate(data)]
    if isinstance(data, dict):
        inner = {key: _filled(value, root, (*at, key), unknown) for key, value in data.items()}
        return {key: value for key, value in inner.items() if (*at, key) not in unknown}
    if not isinstance(data, str) or "${" not in data:
        return data
    value = _value(data, root, at)
    if isinstance(value, str) and "${" in value:
        unknown[at] = value
    return value


def _value(text: str, root: Any, at: KeyPath) -> Any:
    """What a text with names in it comes to; itself, or as far as it could be read, where one leads nowhere."""
    value: Any = text
    for _ in range(_MOST):
        match = _INNERMOST.search(value) if isinstance(value, str) else None
        if match is None:
            return value
        target = _named(match[1], root, at)
        if target is None or isinstance(target, dict | list):
            return value
        alone = match.span() == (0, len(value))
        value = target if alone else value[: match.start()] + str(target) + value[match.end() :]
    return text


def _named(name: str, root: Any, at: KeyPath) -> Any:
    """The value of a name or of a resolver; None where there is none."""
    resolver, colon, arguments = name.partition(":")
    if colon:
        return _computed(resolver.strip(), arguments.split(","))
    names = name.strip()
    dots = len(names) - len(names.lstrip("."))
    parts = [*(at[:-dots] if dots else ()), *names[dots:].split(".")]
    value = root
    for part in parts:
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _computed(resolver: str, arguments: list[str]) -> Any:
    if resolver not in _ARITHMETIC or len(arguments) != 2:
        return None
    try:
        number = _ARITHMETIC[resolver](*(float(part) for part in arguments))
        return int(number) if number == int(number) else number
    except (ValueError, ArithmeticError):
        return None


KEYS = key_table("nemo_rl")
_WORKERS, _VLLM = "policy.dtensor_cfg", "policy.generation.vllm_cfg"
_SOFTWARE = "NeMo-RL 0.5"


@dataclass(frozen=True)
class _Example:
    """What the example config of an algorithm says."""

    algorithm: str
    micro_batch: int
    length: int
    packs: bool
    online: bool


_EXAMPLES = {
    "grpo": _Example("grpo", micro_batch=4, length=512, packs=True, online=True),
    "ppo": _Example("ppo", micro_batch=4, length=16384, packs=True, online=True),
    "dpo": _Example("dpo", micro_batch=2, length=1024, packs=False, online=False),
    "rm": _Example("reward", micro_batch=1, length=8192, packs=False, online=False),
    "sft": _Example("sft", micro_batch=1, length=1024, packs=False, online=False),
}
"""By the part that says what is optimized: grpo_math_1B.yaml, ppo_math_1B.yaml, dpo.yaml, rm.yaml, sft.yaml."""
_SPREAD = {
    f"{_WORKERS}.tensor_parallel_size": "tensor parallelism",
    f"{_WORKERS}.context_parallel_size": "context parallelism",
    f"{_WORKERS}.expert_parallel_size": "expert parallelism",
    f"{_WORKERS}.dp_replicate_size": "replicas of the shards",
}
"""What memcalc rl has no word for."""


def read(document: Document) -> Config:
    """Return what a config says of a job; of one that builds on another file, that file with this one over it."""
    reader = ConfigReader(resolved(replace(document, data=_nulls(document.data))), "nemo_rl", _SOFTWARE)
    if reader.raw("defaults") is not None:
        return _over_parent(reader, document)
    example = _example(reader)
    _refuse_others(reader)
    reader.set("rl.framework", "nemo-rl", "policy")
    reader.set("rl.algorithm", example.algorithm, "policy")
    _model(reader)
    _batches(reader, example)
    if example.online:
        _online(reader, example)
    else:
        _hardware(reader, 0)
    if example.algorithm == "ppo":
        _critic(reader)
    reader.harmless(*KEYS.harmless)
    reader.not_counted(KEYS.not_counted)
    reader.not_modelled(KEYS.not_modelled)
    return reader.finish()


def _nulls(data: object) -> object:
    """Values as YAML has them: overrides have `null` as a word."""
    if isinstance(data, dict):
        return {key: _nulls(value) for key, value in data.items()}
    return None if data in ("null", "None", "~") else data


def _over_parent(reader: ConfigReader, document: Document) -> Config:
    """Name the file that a config builds on, over which it has its way (load_config_with_inheritance)."""
    name = document.path.name
    parents = reader.items("defaults")
    if len(parents) != 1:
        raise MissingError(f"{name} builds on {len(parents)} files (defaults): put them into one, and check that.")
    if "_override_" in document.text:
        raise MissingError(f"{name} replaces whole tables (_override_), which is not read: say each value in {name}.")
    child = replace(document, data={key: value for key, value in document.data.items() if key != "defaults"})
    reader.refer("nemo_rl", "defaults", path=str(parents[0]), over=child)
    return Config(document, "nemo_rl", (), (), tuple(reader.references))


def _example(reader: ConfigReader) -> _Example:
    """The example of the algorithm; refused by name where it is none that is counted."""
    part = next((name for name in KEYS.lists["parts"] if reader.has(name)), "")
    if part in _EXAMPLES:
        return _EXAMPLES[part]
    raise ObjectiveError(
        f"{reader.document.path.name} trains by {part or 'nothing that it says'} of NeMo-RL: memcalc reads its "
        f"{', '.join(_EXAMPLES)}."
    )


def _refuse_others(reader: ConfigReader) -> None:
    """Refuse workers of Megatron, ranks that share a copy of the model, other engines, and judges of their own."""
    name = reader.document.path.name
    if reader.flag("policy.megatron_cfg.enabled") or not reader.flag(f"{_WORKERS}.enabled", True):
        raise ObjectiveError(
            f"{name} trains by NeMo-RL's Megatron workers (policy.megatron_cfg.enabled): memcalc has figures for its "
            "DTensor workers alone."
        )
    critic = {key.replace("policy.", "value."): f"a critic with {says}" for key, says in _SPREAD.items()}
    for key, says in {**_SPREAD, **critic}.items():
        if (ways := reader.integer(key, 1, low=1) or 1) > 1:
            raise ObjectiveError(f"{name} has {says} of {ways} ({key}): memcalc rl counts trainers that shard alone.")
    backend = reader.text("policy.generation.backend", "vllm")
    if backend not in ("vllm", "sglang"):
        raise ObjectiveError(
            f"{name} generates by {cut(backend)} (policy.generation.backend): memcalc has figures for vllm and sglang."
        )
    if reader.has("env.reward_model"):
        raise ObjectiveError(f"{name} judges by a reward model on GPUs of its own (env.reward_model): not counted.")
    if reader.flag("on_policy_distillation.enabled", reader.has("on_policy_distillation")):
        raise ObjectiveError(f"{name} distills from teachers (on_policy_distillation), which are not counted.")


def _model(reader: ConfigReader) -> None:
    """How the policy is kept and trained: fp32 shards, computed in 16 bits (models/automodel/setup.py)."""
    key = "policy.model_name"
    if reader.has(key):
        reader.set("model", reader.text(key), key)
    precision = reader.one_of("policy.precision", {"bfloat16": "", "float16": "fp16", "float32": "fp32"}, "")
    if precision == "fp16":
        raise reader.error("policy.precision", "float16", "must be bfloat16 or float32 to be counted")
    if precision:
        reader.set("precision", precision, "policy.precision")
    key = f"{_WORKERS}.activation_checkpointing"
    on = reader.flag(key)
    reader.set("recompute", "submodules" if on else "none", key)
    if reader.flag(key := f"{_WORKERS}.cpu_offload"):
        reader.set("offload", ("params",), key)
    if reader.flag(key := f"{_WORKERS}.lora_cfg.enabled"):
        rank = reader.integer(f"{_WORKERS}.lora_cfg.dim", 8, low=1)
        everywhere = reader.flag(f"{_WORKERS}.lora_cfg.match_all_linear", True)
        if not everywhere:
            reader.ask("lora", f"{_WORKERS}.lora_cfg.target_modules", "modules", "names modules by patterns of its own")
        else:
            reader.set("lora", f"{rank}:all-linear", key)
    reader.harmless(f"{_WORKERS}.lora_cfg.")
    name = reader.text(key := "policy.optimizer.name", "torch.optim.AdamW")
    if "adam" not in name.rpartition(".")[2].lower():
        reader.not_modelled({key: "the optimizer is counted as AdamW"})
    _environment(reader)


def _environment(reader: ConfigReader) -> None:
    """Variables of the workers; expandable segments go with no pool of an engine that sleeps."""
    for variable in reader.table(f"{_WORKERS}.env_vars"):
        key = f"{_WORKERS}.env_vars.{variable}"
        if "expandable_segments:true" in reader.text(key).lower().replace(" ", ""):
            reader.not_counted({key: {"moves": "memory", "says": "segments that grow are counted as fixed ones"}})
    reader.harmless(f"{_WORKERS}.env_vars.", f"{_WORKERS}.env_vars")


def _batches(reader: ConfigReader, example: _Example) -> None:
    """Rows of a micro-batch, or its tokens; of preferences a pair is two rows (mbs = train_micro_batch_size * 2)."""
    length = reader.integer(key := "policy.max_total_sequence_length", example.length, low=2) or example.length
    rows = reader.integer("policy.train_micro_batch_size", example.micro_batch, low=1) or example.micro_batch
    if not example.online:
        reader.set("seq_len", length, key)
    way = _packs(reader, example)
    tokens = reader.integer(f"{way}.train_mb_tokens", length * rows, low=1) or length * rows if way else 0
    if way and (example.online or example.algorithm == "sft"):
        reader.set("rl.micro_tokens", max(tokens, length), f"{way}.train_mb_tokens")
    elif way:
        reader.set("micro_batch", max(1, -(-tokens // (2 * length))), f"{way}.train_mb_tokens")
    else:
        reader.set("micro_batch", rows, "policy.train_micro_batch_size")
    if example.online:
        _log_probs(reader, way, tokens, rows)


def _packs(reader: ConfigReader, example: _Example) -> str:
    """The table that makes micro-batches of tokens; empty where they have a number of rows."""
    if reader.flag("policy.dynamic_batching.enabled"):
        return "policy.dynamic_batching"
    packs = example.packs and not reader.flag("policy.dynamic_batching.enabled")
    return "policy.sequence_packing" if reader.flag("policy.sequence_packing.enabled", packs) else ""


def _log_probs(reader: ConfigReader, way: str, tokens: int, rows: int) -> None:
    """The micro-batch of a pass of log-probabilities."""
    batch = reader.integer("policy.logprob_batch_size", rows, low=1) or rows
    if not way:
        reader.set("rl.logprob_batch", batch, "policy.logprob_batch_size")
        return
    key = f"{way}.logprob_mb_tokens"
    if (reader.integer(key, tokens, low=1) or tokens) > tokens:
        says = "log-probabilities have a budget of tokens of their own; counted with that of training"
        reader.not_counted({key: {"moves": "memory", "says": says}})


def _online(reader: ConfigReader, example: _Example) -> None:
    """Generation: its lengths, its samples, the reference of a KL term, and the engine."""
    part = "ppo" if example.algorithm == "ppo" else "grpo"
    key = "policy.max_total_sequence_length"
    longest = reader.integer(key, example.length, low=2) or example.length
    response = min(reader.integer("policy.generation.max_new_tokens", longest, low=1) or longest, longest - 1)
    reader.set("rl.prompt", longest - response, key)
    reader.set("rl.response", response, "policy.generation.max_new_tokens")
    reader.set_integer("rl.prompts", f"{part}.num_prompts_per_step", 32)
    reader.set_integer("rl.samples", f"{part}.num_generations_per_prompt", 16)
    if (reader.integer(turns := f"{part}.max_rollout_turns", 1) or 1) > 1:
        reader.not_counted({turns: {"default": 1, "moves": "memory", "says": "responses of several turns"}})
    penalty = reader.number(key := "loss_fn.reference_policy_kl_penalty", 0.0 if part == "ppo" else 0.01)
    reader.set("rl.reference", bool(penalty), key)
    _engine(reader)
    _hardware(reader, _apart(reader))


def _engine(reader: ConfigReader) -> None:
    """vLLM, which sleeps at level 1 (vllm_worker.py), or SGLang."""
    backend = reader.text(key := "policy.generation.backend", "vllm")
    reader.set("rl.engine", backend, key)
    if backend == "sglang":
        table = "policy.generation.sglang_cfg"
        reader.set_integer("rl.engine_tp", f"{table}.tp_size", 1)
        reader.set("rl.utilization", reader.number(key := f"{table}.mem_fraction_static", 0.6), key)
        reader.set_integer("rl.max_seqs", f"{table}.max_running_requests")
        reader.harmless("policy.generation.vllm_cfg.", "policy.generation.vllm_kwargs.")
        longest = f"{table}.context_length"
    else:
        reader.set_integer("rl.engine_tp", f"{_VLLM}.tensor_parallel_size", 1)
        reader.set("rl.utilization", reader.number(key := f"{_VLLM}.gpu_memory_utilization", 0.6), key)
        reader.set_integer("rl.max_seqs", "policy.generation.vllm_kwargs.max_num_seqs")
        reader.harmless("policy.generation.sglang_cfg.")
        longest = f"{_VLLM}.max_model_len"
    total = reader.integer("policy.max_total_sequence_length")
    says = "the engine is counted with prompt and response as its longest sequence"
    reader.not_counted({longest: {"default": [total], "moves": "memory", "says": says}})
    if reader.text(key := f"{_VLLM}.precision", "bfloat16") in ("fp8", "float8"):
        reader.not_modelled({key: "the engine's weights are quantised; counted in 16 bits"})


def _apart(reader: ConfigReader) -> int:
    """GPUs that engines have to themselves, of those of the cluster (algorithms/grpo.py, setup)."""
    if reader.flag("policy.generation.colocated.enabled", True):
        return 0
    resources = "policy.generation.colocated.resources"
    each = reader.integer(f"{resources}.gpus_per_node", low=1) or reader.integer("cluster.gpus_per_node", 1) or 1
    nodes = reader.integer(f"{resources}.num_nodes", 1, low=1) or 1
    reader.set("rl.apart", True, "policy.generation.colocated.enabled")
    reader.set("rl.engine_gpus", each * nodes, f"{resources}.gpus_per_node")
    return each * nodes


def _hardware(reader: ConfigReader, engines: int) -> None:
    """GPUs of the trainer: the cluster's, less those of engines apart."""
    each = reader.integer(key := "cluster.gpus_per_node", 1, low=1) or 1
    nodes = reader.integer("cluster.num_nodes", 1, low=1) or 1
    if engines >= each * nodes:
        raise reader.error(key, each, f"must leave GPUs to train beside the {engines} of the engines")
    reader.set("gpus", each * nodes - engines, key)


def _critic(reader: ConfigReader) -> None:
    """The critic, which is counted as the policy is trained."""
    if reader.has(key := "value.model_name"):
        reader.set("rl.critic_model", reader.text(key), key)
    for part in KEYS.lists["alike"]:
        mine, other = reader.raw(f"value.{part}"), reader.raw(f"policy.{part}")
        if mine is not None and other is not None and mine != other:
            says = "the critic is counted with the policy's"
            reader.not_counted({f"value.{part}": {"default": [other], "moves": "memory", "says": says}})


def _recognise(document: Document) -> bool:
    """Its parts beside a policy, or beside the file of its own kind that it builds on."""
    data = document.data
    if not isinstance(data, dict) or data.keys().isdisjoint((*KEYS.lists["parts"], *KEYS.lists["beside"], "policy")):
        return False
    parents = data.get("defaults")
    named = [str(parent) for parent in (parents if isinstance(parents, list) else [parents])]
    if parents is not None and all(name.endswith((".yaml", ".yml")) for name in named):
        return True
    return isinstance(data.get("policy"), dict) and not data.keys().isdisjoint(("cluster", *KEYS.lists["parts"]))


FORMAT = Format("nemo_rl", "NeMo-RL YAML", _SOFTWARE, _recognise, read, kind="yaml", launched=True)
"""NeMo-RL's YAML, or overrides behind its example scripts."""
