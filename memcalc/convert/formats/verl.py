"""verl's configuration: overrides of Hydra behind `python3 -m verl.trainer.main_ppo`, or a YAML of the same keys.

verl 0.10 (1dda039b): trainer/config/ppo_trainer.yaml and the files that it is put together from, in actor, rollout,
model, engine, critic, ref and data; workers/config. What only another trainer than FSDP and Megatron-LM has is refused
by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain

from memcalc.convert.config import Config, ConfigReader, split_key
from memcalc.convert.document import Document
from memcalc.convert.formats.base import Format, key_table
from memcalc.convert.formats.swift_megatron import VerlWorkers
from memcalc.convert.formats.verl_tuning import (
    TRAINERS,
    is_easy_r1,
    plain,
    read_easy_r1,
    same_model,
    set_attention,
    set_model,
    set_sharded,
)
from memcalc.convert.objectives import ALGORITHMS, method_of_script, refuse_idle, refuse_library, refuse_method
from memcalc.errors import ObjectiveError, cut

KEYS = key_table("verl")
ROLES = "actor_rollout_ref"
_ACTOR, _ROLLOUT, _MODEL = f"{ROLES}.actor", f"{ROLES}.rollout", f"{ROLES}.model"
_ESTIMATORS = {
    "gae": "ppo", "grpo": "grpo", "grpo_vectorized": "grpo", "grpo_passk": "grpo", "gpg": "grpo", "opo": "grpo",
    "gdpo": "grpo", "rloo": "rloo", "rloo_vectorized": "rloo", "remax": "rloo", "reinforce_plus_plus": "rloo",
    "reinforce_plus_plus_baseline": "rloo", "optimal_token_baseline": "grpo", "tir_optimal_token_baseline": "grpo",
}  # fmt: skip
"""By its estimator of advantages an algorithm with the same roles: what sets them apart is arithmetic on the host."""
_OTHERS = re.compile("megatron|veomni|torchtitan|automodel")
"""Names of trainers beside FSDP's."""
_MEGATRON = re.compile(r"(ppo_)?megatron(_actor|_ref|_critic|_trainer)?(\.yaml)?")
"""Names of the configs by which Megatron-LM trains."""
_TOKENS = 16384
"""Of a micro-batch by default."""


def read(document: Document) -> Config:
    """Return what verl's keys say of a job, or those of EasyR1."""
    if is_easy_r1(document):
        return read_easy_r1(document, KEYS, read)
    reader = ConfigReader(replace(document, data=plain(document.data, document.data)), "verl", "verl 0.10")
    if parent := _parent(reader):
        child = replace(document, data={key: value for key, value in document.data.items() if key != "defaults"})
        reader.refer("verl", "defaults", path=parent, over=child)
        return Config(document, "verl", (), (), tuple(reader.references))
    reader.set("rl.framework", "verl", ROLES)
    _refuse_others(reader)
    if reader.flag(key := "distillation.enabled"):
        refuse_method(document.path.name, "distillation", key)
    if reader.flag(key := "trainer.val_only"):  # fit() returns after its first validation (trainer/ppo/ray_trainer.py)
        refuse_idle(document.path.name, [key])
    _algorithm(reader)
    _hardware(reader)
    _lengths(reader)
    _batches(reader)
    _trained(reader)
    if _megatron(reader):
        VerlWorkers(reader).set_trained()
        if reader.flag(key := f"{_MODEL}.enable_gradient_checkpointing"):
            reader.note("note", "MC004", key, "ignored by verl's Megatron workers: recompute_granularity says it")
    else:
        set_sharded(reader, _MODEL, f"{_ACTOR}.fsdp_config", f"{_ACTOR}.strategy")
    _reference(reader)
    _rollout(reader)
    _critic(reader)
    if not any(setting.name == "rl.algorithm" and setting.value == "ppo" for setting in reader.settings):
        reader.harmless("critic.")  # there is none
    reader.harmless(*KEYS.harmless, *KEYS.lists["megatron" if _megatron(reader) else "sharded"])
    reader.not_counted(KEYS.not_counted, _as_counted(reader))
    says = {key: text for key, text in KEYS.not_modelled.items() if not (_megatron(reader) and ".optim." in key)}
    reader.not_modelled(same_model(reader, says), unless=(False, None, 0, "", "none", "adamw"))
    return reader.finish()


def _algorithm(reader: ConfigReader) -> None:
    """What is optimized; scripts and configs that are not called after PPO may have a default of their own."""
    key, script, config = "algorithm.adv_estimator", reader.text("command"), reader.text("config_name")
    method = method_of_script(script)
    if method not in ("", "ppo", "reinforce", *ALGORITHMS):
        refuse_method(reader.document.path.name, method, script)
    unread = re.search(r"trainer(\.yaml)?$", config) and method_of_script(config) not in ("", "ppo")
    other = config if unread else script if method != "ppo" else ""
    if other and not reader.has(key):
        reader.ask("rl.algorithm", key, "-", f"is not said, and {other} may have a default of its own")
    else:
        reader.set("rl.algorithm", reader.one_of(key, _ESTIMATORS, "ppo"), key)


def _parent(reader: ConfigReader) -> str:
    """The file beside a config that it builds on (Hydra's `defaults`); empty where that is verl's own."""
    named = [name for name in reader.items("defaults") if isinstance(name, str) and name != "_self_"]
    if any(name.endswith("trainer") for name in named):
        return ""
    return next((f"{name}.yaml" for name in named if "@" not in name), "")


def _bases(reader: ConfigReader) -> list[str]:
    """Configs that a config builds on."""
    parts = [base.values() if isinstance(base, dict) else [base] for base in reader.items("defaults")]
    return [str(name) for name in (reader.text("config_name"), *chain(*parts))]


def _stated(reader: ConfigReader) -> tuple[str, str]:
    """The engine and the strategy by name, empty where nothing is said."""
    groups = reader.table(f"actor@{ROLES}")  # a group of Hydra that is chosen: its whole part of the config
    strategy = str(groups.get("actor", reader.text(f"{_ACTOR}.strategy"))).removesuffix("_actor")
    return reader.text("model_engine"), strategy


def _megatron(reader: ConfigReader) -> bool:
    """Whether Megatron-LM trains."""
    return "megatron" in _stated(reader) or any(_MEGATRON.fullmatch(name) for name in _bases(reader))


def _refuse_others(reader: ConfigReader) -> None:
    """Refuse what trains otherwise than by FSDP and Megatron-LM, and engines that are not modelled."""
    if reader.document.kind != "flags" and re.search(r"trainer_(split|async|pipeline)$", reader.document.path.stem):
        refuse_library(reader.document.path.name, reader.document.path.stem, form="verl")
    other = next((name for name in _stated(reader) if name not in ("", "dp", "megatron", *TRAINERS)), "")
    if not other:  # of a config that it builds on, or of a group that is chosen
        bases = (name for name in _bases(reader) if not _MEGATRON.fullmatch(name))
        other = next((name for name in bases if _OTHERS.search(name)), "")
    if other:
        raise ObjectiveError(
            f"{reader.document.path.name} trains by verl's {cut(other)}: memcalc has figures for its FSDP and Megatron "
            "workers alone (actor.strategy fsdp, fsdp2 or megatron)."
        )
    separate = any(reader.has(f"{engine}.nnodes") for engine in ("rollout", _ROLLOUT))
    apart = not (reader.flag(f"{ROLES}.hybrid_engine", True) or separate)
    key = next((table for table in ("async_training", "async_resources") if reader.table(table)), "")
    key = key or ("rllm.async_training" if reader.flag("rllm.async_training.enable") else "")
    if apart or key or str(reader.raw("data.train_batch_size")) == "0":
        raise ObjectiveError(
            f"{reader.document.path.name} trains by a fully asynchronous trainer with verl's arguments "
            f"({'hybrid_engine false' if apart else key or 'data.train_batch_size 0'}): memcalc has no figures for it."
        )
    name = reader.text(f"{_ROLLOUT}.name", "vllm")
    if name not in ("vllm", "sglang"):
        raise ObjectiveError(
            f"{reader.document.path.name} generates by {cut(name)} (rollout.name): memcalc has figures for vllm and "
            "sglang."
        )


def _hardware(reader: ConfigReader) -> None:
    reader.set_integer("gpus_per_node", "trainer.n_gpus_per_node", 8)
    reader.set_integer("nodes", "trainer.nnodes", 1)
    engine = "rollout" if reader.has("rollout.nnodes") else _ROLLOUT  # as experimental/one_step_off_policy has it
    if nodes := reader.integer(key := f"{engine}.nnodes", 0):
        each = reader.integer(f"{engine}.n_gpus_per_node") or reader.integer("trainer.n_gpus_per_node", 8)
        reader.set("rl.apart", True, key)
        reader.set("rl.engine_gpus", nodes * int(each or 8), key)


def _lengths(reader: ConfigReader) -> None:
    reader.set_integer("rl.prompt", "data.max_prompt_length", 512)
    reader.set_integer("rl.response", "data.max_response_length", 512)
    reader.set_integer("rl.prompts", "data.train_batch_size", 1024)
    agents = reader.integer(agent := f"{_ROLLOUT}.n_agent", 1, low=1) or 1  # Search-R1: repeats each prompt before
    each = reader.integer(sample := f"{_ROLLOUT}.n", 1, low=1) or 1
    reader.set("rl.samples", each * agents, agent if agents > 1 else sample)
    key = f"{_ACTOR}.ppo_mini_batch_size"  # of prompts (trainer/ppo/ray_trainer.py)
    prompts, samples = reader.integer(key, 256, low=1), reader.integer(f"{_ROLLOUT}.n", 1, low=1)
    if prompts and samples and not {split_key(key), split_key(f"{_ROLLOUT}.n")} & reader.document.unknown.keys():
        reader.set("rl.mini_batch", prompts * samples, key)


def _longest(reader: ConfigReader) -> int:
    """The longest prompt with the longest response [tokens]."""
    return sum(reader.integer(f"data.max_{part}_length", 512) or 512 for part in ("prompt", "response"))


def _as_counted(reader: ConfigReader) -> Iterator[str]:
    """Keys with the value that is counted anyway: an engine's longest sequence, a critic that goes as the actor."""
    if reader.integer(key := f"{_ROLLOUT}.max_model_len") == _longest(reader):
        yield key
    for forward in ("forward_micro_batch_size_per_gpu", "forward_micro_batch_size", "forward_max_token_len_per_gpu"):
        update = reader.integer(f"critic.{forward.replace('forward', 'ppo')}", 32768 if "token" in forward else 0)
        if (reader.integer(key := f"critic.{forward}", 0) or 0) <= (update or 0):
            yield key
    for part in ("param_offload", "optimizer_offload"):
        actor = reader.flag(f"{_ACTOR}.fsdp_config.{part}")
        yield from (key for key in _of_critic(part) if reader.flag(key) == actor)
    shards = reader.integer(f"{_ACTOR}.fsdp_config.fsdp_size", -1, low=-1)
    yield from (key for key in _of_critic("fsdp_size") if reader.integer(key, -1, low=-1) == shards)
    if reader.integer(key := f"{ROLES}.ref.fsdp_config.fsdp_size", -1, low=-1) == shards:
        yield key


def _of_critic(part: str) -> tuple[str, str]:
    return f"critic.model.fsdp_config.{part}", f"critic.fsdp.{part}"


def _sharers(reader: ConfigReader, part: str = _ACTOR) -> int:
    """Ranks that share a sequence (Ulysses), in the words of a role or of its engine."""
    keys = (f"{part}.ulysses_sequence_parallel_size", f"{part}.fsdp_config.ulysses_sequence_parallel_size")
    return max(reader.integer(key, 1, low=1) or 1 for key in keys)


def _ring(reader: ConfigReader) -> int:
    """Ranks of Megatron-LM that share a sequence, which have their budgets of tokens together; else 1."""
    return VerlWorkers(reader).degree("cp") if _megatron(reader) else 1


def _shared_length(reader: ConfigReader) -> int:
    """The longest sequence where several ranks share it, whose budgets then hold it together; 0 where none does."""
    if _sharers(reader) == 1:
        return 0
    return _longest(reader)


def _rows(reader: ConfigReader, part: str, role: str = _ACTOR) -> tuple[int | None, str]:
    """Whole sequences of a micro-batch on one rank, with the key that says it.

    The older keys give those of all ranks (workers/fsdp_workers.py: divided by the ranks over those that share one).
    Ranks that share sequences hold equal parts of their tokens (dp_actor.py, ulysses_pad_and_slice_inputs).
    """
    ranks = (reader.integer("trainer.n_gpus_per_node", 8) or 8) * (reader.integer("trainer.nnodes", 1) or 1)
    sharers = _sharers(reader, role)
    ranks //= VerlWorkers(reader).degree("tp", "pp", "cp") if _megatron(reader) else 1
    each = reader.integer(key := f"{part}_per_gpu", low=1)
    if each is None and (total := reader.integer(key := part, low=1)) is not None:
        each = None if _ranks_unknown(reader) else max(1, total // max(1, ranks // sharers))
    if each is None:
        return None, part if reader.has(part) else f"{part}_per_gpu"
    if each % sharers:
        message = f"{sharers} ranks share {each} sequences: a rank is counted with {-(-each // sharers)} whole ones"
        reader.note("note", "MC004", key, message)
    return -(-each // sharers), key


_RANKS = ("trainer.n_gpus_per_node", "trainer.nnodes")


def _ranks_unknown(reader: ConfigReader) -> bool:
    """Whether only a run knows how many ranks share the sequences of a batch."""
    return any(split_key(key) in reader.document.unknown for key in _RANKS)


def _ask_for_rows(reader: ConfigReader, option: str, key: str) -> None:
    """Ask for the sequences of a micro-batch on one rank, and say why."""
    shared = "is of all ranks, whose number is known only at run time"
    reader.ask(option, key, "null", shared if reader.has(key) else "is not set, and verl has no default")


def _batches(reader: ConfigReader) -> None:
    """Tokens of a micro-batch, or samples, which verl has no default for."""
    padded = not reader.flag(key := f"{_MODEL}.use_remove_padding", True)
    if reader.flag(f"{_ACTOR}.use_dynamic_bsz"):
        budget = reader.integer(key := f"{_ACTOR}.ppo_max_token_len_per_gpu", _TOKENS, low=1) or _TOKENS
        budget *= _ring(reader)
        if (longest := _shared_length(reader)) > budget:
            message = f"{_sharers(reader)} ranks share a sequence: counted with {longest} tokens a rank, as if whole"
            reader.note("warning", "MC002", key, message)
        reader.set("rl.micro_tokens", max(budget, longest), key)
        if padded:
            says = "samples that fill the budget are padded to the longest length, and are counted without that"
            reader.not_modelled({f"{_MODEL}.use_remove_padding": says}, unless=(True,))
        reader.harmless(f"{_ACTOR}.ppo_micro_batch_size_per_gpu", f"{_ACTOR}.ppo_micro_batch_size")
        _log_probs(reader, max(budget, longest))
        return
    if padded:
        reader.set("rl.padded", True, key)
    rows, key = _rows(reader, f"{_ACTOR}.ppo_micro_batch_size")
    if rows is not None:
        reader.set("micro_batch", rows, key)
    else:
        _ask_for_rows(reader, "micro_batch", key)
    _log_probs(reader, 0)


_READERS = (_ROLLOUT, f"{ROLES}.ref")
"""Roles that read log-probabilities, each with a batch of its own."""


def _log_probs(reader: ConfigReader, budget: int) -> None:
    """What a pass of log-probabilities holds on a rank: the most of those that read them.

    By default as many tokens as an update's ``budget``, where that is dynamic (config/rollout/rollout.yaml,
    config/ref/ref.yaml). With less than a sample verl stops (utils/seqlen_balancing.py, rearrange_micro_batches).
    """
    dynamic = {part: reader.flag(f"{part}.log_prob_use_dynamic_bsz", bool(budget)) for part in _READERS}
    rows = {part: _rows(reader, f"{part}.log_prob_micro_batch_size") for part in _READERS if not dynamic[part]}
    tokens: dict[str, int] = {}
    for part in (part for part in _READERS if dynamic[part]):
        limit = reader.integer(key := f"{part}.log_prob_max_token_len_per_gpu", low=1) or 0
        limit = limit * _ring(reader) or budget or _TOKENS * _ring(reader)
        tokens[key] = max(limit, _longest(reader))
    if not tokens and not budget:
        most, key = max(rows.values(), key=lambda part: part[0] or 0)
        if most is not None:
            reader.set("rl.logprob_batch", most, key)
        elif reader.has(key):
            _ask_for_rows(reader, "rl.logprob_batch", key)
        return
    tokens |= {key: count * _longest(reader) for count, key in rows.values() if count is not None}
    key = max(tokens, key=lambda name: tokens[name], default="")
    if key and tokens[key] != budget:
        reader.set("rl.logprob_tokens", tokens[key], key)


def _trained(reader: ConfigReader) -> None:
    set_model(reader, _MODEL)
    set_attention(reader, _MODEL)
    if reader.flag(key := f"{_ACTOR}.calculate_entropy") or reader.number(key := f"{_ACTOR}.entropy_coeff", 0.0):
        reader.set("rl.entropy", True, key)
    reader.number(f"{_ACTOR}.entropy_coeff")


def _reference(reader: ConfigReader) -> None:
    """There is a reference where a KL term is in the loss or in the reward (trainer/ppo/utils.py)."""
    loss, reward = f"{_ACTOR}.use_kl_loss", "algorithm.use_kl_in_reward"
    key = next((key for key in (loss, reward) if reader.flag(key)), loss)
    reader.flag(reward)
    shares = f"{ROLES}.ref.ulysses_sequence_parallel_size"  # by default the actor's
    if reader.integer(shares, _sharers(reader)) != _sharers(reader):
        reader.note("warning", "MC002", shares, f"{shares} changes memory but is not counted: it counts as the actor's")
    reader.set("rl.reference", bool(reader.flag(key)), key)


def _rollout(reader: ConfigReader) -> None:
    """The engine; verl drops cache and weights where it sleeps, and keeps weights on the host beside adapters."""
    reader.set("rl.engine", reader.text(f"{_ROLLOUT}.name", "vllm"), f"{_ROLLOUT}.name")
    reader.set_integer("rl.engine_tp", f"{_ROLLOUT}.tensor_model_parallel_size", 2)
    key = f"{_ROLLOUT}.gpu_memory_utilization"
    reader.set("rl.utilization", reader.number(key, 0.5), key)
    reader.set_integer("rl.max_seqs", f"{_ROLLOUT}.max_num_seqs", 256)
    reader.set_integer("rl.max_batched_tokens", f"{_ROLLOUT}.max_num_batched_tokens", 8192)
    if reader.flag(key := f"{_ROLLOUT}.enforce_eager"):
        reader.set("rl.eager", True, key)
    sleeps = "1" if reader.integer(f"{_MODEL}.lora_rank", 0) else "2"
    key = f"{_ROLLOUT}.free_cache_engine"
    reader.set("rl.sleep", sleeps if reader.flag(key, True) else "0", key)


def _critic(reader: ConfigReader) -> None:
    key = "critic.model.path"
    if reader.has(key) and reader.text(key) != reader.text(f"{_MODEL}.path"):  # else it is the policy's architecture
        reader.set("rl.critic_model", reader.text(key), key)
    if any(setting.name == "rl.algorithm" and setting.value == "ppo" for setting in reader.settings):
        _critic_batches(reader)
    prime = ("prime_model", "model.update", "model.beta_train")  # recipe/prime/config/prime_trainer.yaml, old and new
    if reader.text("reward_model.rm_type") == "prime" or any(reader.raw(f"reward_model.{key}") for key in prime):
        raise ObjectiveError(
            f"{reader.document.path.name} trains a second model as its reward (PRIME, reward_model): "
            "memcalc has no figures for this."
        )
    if reader.flag("reward_model.enable") and reader.flag(key := "reward_model.use_reward_loop"):
        raise ObjectiveError(
            f"{reader.document.path.name} judges by a reward model in an engine of its own ({key}): not counted."
        )
    if reader.flag("reward_model.enable"):
        variable = reader.document.unknown.get(split_key(key := "reward_model.model.path"), "")
        if reader.has(key):
            reader.set("rl.reward_model", reader.text(key), key)
        else:
            reader.ask("rl.reward_model", key, variable or "-", "" if variable else "is not set")
        reader.not_counted(KEYS.tables["of_judges"])
    else:
        reader.harmless("reward_model.")


def _critic_batches(reader: ConfigReader) -> None:
    """What of the critic is not as of the actor: its checkpoints, its samples, or a budget of tokens of 32,768."""
    key = "critic.model.enable_gradient_checkpointing"
    if (checkpointed := reader.flag(key, True)) != reader.flag(f"{_MODEL}.enable_gradient_checkpointing", True):
        reader.set("rl.critic_recompute", "full" if checkpointed else "none", key)
    if reader.flag(key := "critic.use_dynamic_bsz", bool(reader.flag(f"{_ACTOR}.use_dynamic_bsz"))):
        budget = reader.integer(key := "critic.ppo_max_token_len_per_gpu", 32768, low=1) or 32768
        budget = max(budget, _longest(reader))
        if not any(setting.name == "rl.micro_tokens" and setting.value == budget for setting in reader.settings):
            reader.set("rl.critic_micro_tokens", budget, key)
        return
    rows, key = _rows(reader, "critic.ppo_micro_batch_size", "critic")
    if rows is not None and not any(
        setting.name == "micro_batch" and setting.value == rows for setting in reader.settings
    ):
        reader.set("rl.critic_micro_batch", rows, key)


def _recognise(document: Document) -> bool:
    return is_easy_r1(document) or (isinstance(document.data, dict) and isinstance(document.data.get(ROLES), dict))


FORMAT = Format("verl", "verl's config", "verl 0.10", _recognise, read, kind="yaml", launched=True)
"""verl's keys, as YAML or as overrides."""
