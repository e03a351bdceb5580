"""verl's supervised fine-tuning: overrides behind `torchrun -m verl.trainer.sft_trainer`, or a YAML of the same keys.

Beside it stands what its configs share with those of post-training, and EasyR1's, a fork's, in verl's words.

verl 0.10 (1dda039b): trainer/sft_trainer.py, sft_trainer_ray.py, trainer/config/sft_trainer_engine.yaml, and the files
of its defaults, model/hf_model.yaml and engine/fsdp.yaml. A step is the update of verl's policies without the entropy:
log-probabilities of packed rows, by the same engine (workers/utils/losses.py, sft_loss). The trainer before it,
fsdp_sft_trainer, has another loss, and is not read. Models and FSDP's engines have the keys of main_ppo's.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from memcalc.convert.config import Config, ConfigReader, Setting, split_key
from memcalc.convert.document import Document
from memcalc.convert.formats.base import Format, KeyTable, key_table, nested
from memcalc.convert.formats.tuning import targets_of
from memcalc.errors import ObjectiveError, cut

KEYS = key_table("verl_tuning")
_SOFTWARE = "verl 0.10"
TRAINERS = {"fsdp": "fsdp1", "fsdp2": "fsdp2"}
"""What shards and trains, by its name."""
_ATTENTION = {"flash_attention_2": "flash", "flash_attention_3": "flash", "sdpa": "sdpa", "eager": "eager"}
_KERNEL = {"attn_implementation"}
_LONGEST = 300
"""Characters of a table in braces that are looked at."""
_DEEPEST = 8
"""References that lead to references."""
_BACKENDS = ("fsdp", "fsdp2", "")
_SPLITS = "engine.ulysses_sequence_parallel_size"


_REFERENCE = re.compile(r"\$\{([\w.]+)\}")


def plain(value: Any, data: dict[str, Any], depth: int = 0) -> Any:
    """A value as YAML has it: flags have `null` as a word, and a reference of Hydra is what it leads to, or nothing."""
    if isinstance(value, dict):
        return {key: plain(inner, data, depth) for key, inner in value.items()}
    if not isinstance(value, str):
        return value
    if match := _REFERENCE.fullmatch(value):
        target: Any = data
        for key in match[1].split("."):
            target = target.get(key) if isinstance(target, dict) else None
        return plain(target, data, depth + 1) if depth < _DEEPEST and not isinstance(target, dict) else None
    return None if value in ("null", "None", "~", "???") or value.startswith("${") else value


def set_model(reader: ConfigReader, part: str) -> None:
    """Set what is trained, and by what it is read."""
    variable = reader.document.unknown.get(split_key(key := f"{part}.path"), "")
    if model := reader.text(key):
        reader.set("model", model, key)
    else:  # its default is a folder of the authors' home
        reader.ask("model", key, variable or "-", "" if variable else "is not set")
    if reader.flag(key := f"{part}.use_fused_kernels"):
        reader.set("rl.logits", "fused", key)


def set_sharded(reader: ConfigReader, part: str, config: str, strategy: str) -> None:
    """Set how FSDP keeps and trains it, by the keys of a model and of its engine."""
    reader.set("rl.trainer", reader.one_of(strategy, TRAINERS, "fsdp1"), strategy)
    key = f"{part}.enable_gradient_checkpointing"
    reader.set("recompute", "full" if reader.flag(key, True) else "none", key)
    if reader.flag(key := f"{part}.enable_activation_offload"):
        reader.set("offload", ("activations",), key)
    if (shards := reader.integer(key := f"{config}.fsdp_size", -1, low=-1)) is not None and shards > 0:
        reader.set("dp_shard", shards, key)  # workers/fsdp_workers.py, create_device_mesh
    if reader.has(key := f"{config}.use_no_sync_for_gradient_accumulation"):
        # workers/engine/fsdp/transformer_impl.py, _gradient_sync_context; off in the YAML of releases that have the key
        reader.set("rl.whole_gradients", reader.flag(key), key)
    if reader.flag(key := f"{config}.offload_policy"):
        reader.set("offload", ("params",), key)
    parks = [name for name in ("params", "optimizer") if reader.flag(f"{config}.{name.removesuffix('s')}_offload")]
    reader.flag(f"{config}.optimizer_offload")
    reader.set("rl.park", ",".join(parks) or "none", f"{config}.param_offload")
    if reader.text(key := f"{config}.model_dtype", "fp32") in ("bfloat16", "bf16"):
        reader.set("precision", "bf16", key)
    if rank := reader.integer(key := f"{part}.lora_rank", 0):
        reader.set("lora", f"{rank}:{_targets(reader, f'{part}.target_modules')}", key)
    elif reader.has(key := f"{part}.lora_adapter_path") or tuple(key.split(".")) in reader.document.unknown:
        reader.ask("lora", key, "-", "names adapters to go on with, whose rank stands beside them")


def _targets(reader: ConfigReader, key: str) -> str:
    """The layers that adapters are put on, named one by one or by PEFT's word for all."""
    value = reader.raw(key, "all-linear")
    names = re.findall(r"[\w.-]+", str(value)) if isinstance(value, str) else list(value or ("all-linear",))
    if "all-linear" in names:
        return "all-linear"
    if (targets := targets_of(names)) is None:
        raise reader.error(key, value, "must be all-linear, or names of layers that memcalc knows, to be counted")
    return ",".join(targets)


def _overrides(reader: ConfigReader, key: str) -> dict[str, Any]:
    """What is set of a model's config: a table, or one in braces as an override of Hydra has it."""
    value = reader.raw(key)
    return (
        value if isinstance(value, dict) else dict(re.findall(r"([\w.]+)\s*:\s*([\w.-]+)", str(value or "")[:_LONGEST]))
    )


def set_attention(reader: ConfigReader, part: str) -> None:
    """Set the kernel of attention that a model is loaded with."""
    key = f"{part}.override_config"
    name = str(_overrides(reader, key).get("attn_implementation", ""))
    if name in _ATTENTION:
        reader.set("attention", _ATTENTION[name], key)
        reader.harmless(f"{key}.attn_implementation")


def same_model(reader: ConfigReader, says: dict[str, str]) -> dict[str, str]:
    """What is said of keys, without that of a model's config where no more than the kernel of attention is another."""
    same = [key for key in says if key.endswith(".override_config") and _overrides(reader, key).keys() <= _KERNEL]
    return {key: text for key, text in says.items() if key not in same}


def is_easy_r1(document: Document) -> bool:
    """Whether a config is EasyR1's: its roles are tables of `worker`, or its `command` is the fork's own."""
    data = document.data if isinstance(document.data, dict) else {}
    worker = data.get("worker")
    return data.get("command") == "verl.trainer.main" or (
        isinstance(worker, dict) and {"actor", "rollout"} <= {*worker}
    )


def read_easy_r1(document: Document, keys: KeyTable, read_verl: Callable[[Document], Config]) -> Config:
    """Return what EasyR1's keys say of a job, as those of verl with the same meaning do.

    Its phases are verl's, with the reference in host memory by FSDP, samples that fill micro-batches of as many tokens
    as their longest ones have, and an engine that keeps its weights in host memory (sharding_manager/fsdp_vllm.py).
    """
    reader = ConfigReader(replace(document, data=plain(document.data, document.data)), "verl", "EasyR1 0.3")
    _refuse_of_easy_r1(reader, keys)
    names = {verl: easy for easy, verl in keys.tables["easy_r1"].items()}
    defaults = keys.tables["easy_r1_defaults"]
    stated = {verl: reader.raw(easy, defaults.get(easy)) for verl, easy in names.items()}
    stated |= _of_samples(reader, names)
    spans = {split_key(verl): split_key(easy) for verl, easy in names.items()}
    translated = Document(
        document.path, document.kind, document.text, nested(stated),
        lambda: {at: document.spans[of] for at, of in spans.items() if of in document.spans},
        {at: document.unknown[of] for at, of in spans.items() if of in document.unknown}, document.part,
    )  # fmt: skip
    config = read_verl(translated)
    settings = [_named_by(setting, reader, names) for setting in config.settings if setting.name != "rl.sleep"]
    reader.set("rl.sleep", "1", "worker.rollout")
    reader.note("note", "MC004", "worker", "EasyR1's phases are counted as those of verl 0.10")
    reader.harmless(*keys.lists["easy_r1"])
    says = reader.finish()
    return replace(says, settings=(*settings, *says.settings), findings=(*config.findings, *says.findings))


def _named_by(setting: Setting, reader: ConfigReader, names: dict[str, str]) -> Setting:
    """A setting with EasyR1's key, by default where that is not said."""
    key = names.get(setting.field, setting.field)
    silent = key in names.values() and not reader.has(key) and not setting.unknown
    return replace(setting, field=key, key_path=split_key(key), default=setting.default or silent)


def _of_samples(reader: ConfigReader, names: dict[str, str]) -> dict[str, Any]:
    """Micro-batches and the reference in verl's words, noted among the ``names``.

    Micro-batches that are filled have as many tokens as that many of the longest samples (actor/dp_actor.py).
    """
    update, passes = (f"worker.actor.micro_batch_size_per_device_for_{phase}" for phase in ("update", "experience"))
    longest = sum(reader.integer(f"data.max_{part}_length", 512) or 512 for part in ("prompt", "response"))
    filled = reader.flag("worker.actor.dynamic_batching", True)
    actor, rollout, reference = (f"actor_rollout_ref.{role}" for role in ("actor", "rollout", "ref"))
    limits = (
        ("ppo_max_token_len", "log_prob_max_token_len")
        if filled
        else ("ppo_micro_batch_size", "log_prob_micro_batch_size")
    )
    each = longest if filled else 1
    stated: dict[str, Any] = {}
    for part, word, key, default in (
        (actor, limits[0], update, 4),
        (rollout, limits[1], passes, 16),
        (reference, limits[1], passes, 16),
    ):
        names[name := f"{part}.{word}_per_gpu"] = key
        stated[name] = (reader.integer(key, default, low=1) or default) * each
    refers, in_loss = not reader.flag("algorithm.disable_kl"), reader.flag(key := "algorithm.use_kl_loss")
    names[f"{actor}.use_kl_loss"] = key
    return stated | {f"{actor}.use_kl_loss": refers and in_loss, "algorithm.use_kl_in_reward": refers and not in_loss}


def _refuse_of_easy_r1(reader: ConfigReader, keys: KeyTable) -> None:
    """Refuse values without figures, and a reference that stays on the GPUs beside what is trained."""
    rows = dict(keys.tables["easy_r1_allowed"])
    if not reader.flag("algorithm.disable_kl"):
        rows["worker.ref.fsdp.enable_cpu_offload"] = {"known": ["true"], "says": "a reference that stays on the GPUs"}
    for key, row in rows.items():
        default = "false" if key.endswith("cpu_offload") else row["known"][0]
        if (value := reader.text(key, default).lower()) not in row["known"]:
            says = f"{key} {cut(value)}: memcalc has no figures for {row['says']} by EasyR1"
            raise ObjectiveError(f"{reader.document.path.name} sets {says}.")


def read(document: Document) -> Config:
    """Return what the trainer's keys say of a job."""
    reader = ConfigReader(replace(document, data=plain(document.data, document.data)), "verl_tuning", _SOFTWARE)
    _refuse_others(reader)
    reader.set("rl.framework", "verl", "model")
    reader.set("rl.algorithm", "sft", "data")
    if reader.text("command").endswith("_ray"):  # which starts its ranks itself
        reader.set_integer("gpus_per_node", "trainer.n_gpus_per_node", 1)
        reader.set_integer("nodes", "trainer.nnodes", 1)
    set_model(reader, "model")
    set_attention(reader, "model")
    set_sharded(reader, "model", "engine", "engine.strategy")
    _batches(reader)
    reader.harmless(*KEYS.lists["harmless"])
    reader.not_modelled(same_model(reader, KEYS.not_modelled), unless=(False, None, 0, "", "none", "adamw", "AdamW"))
    return reader.finish()


def _refuse_others(reader: ConfigReader) -> None:
    """Refuse what trains otherwise than by FSDP, and rows that are padded to one length."""
    name = reader.document.path.name
    chosen = (reader.text("engine_group"), reader.text("engine.strategy", "fsdp"))
    other = next((engine for engine in chosen if engine not in _BACKENDS), "")
    if other:
        raise ObjectiveError(
            f"{name} fine-tunes by verl's {cut(other)}: memcalc has figures for its {' and '.join(TRAINERS)} engines."
        )
    packs = reader.flag("model.use_remove_padding", True)
    if reader.text(key := "data.pad_mode", "no_padding") != "no_padding" or not packs:
        raise ObjectiveError(f"{name} pads its rows ({key}): memcalc has figures for verl's packed rows alone.")


def _batches(reader: ConfigReader) -> None:
    """Tokens of a micro-batch on one rank, or its rows; ranks that share a sequence have their budgets together.

    workers/engine/utils.py, prepare_micro_batches: ``max_token_len_per_gpu * sp_size``, of which each has a part.
    """
    length = reader.integer(key := "data.max_length", 1024, low=2) or 1024
    sharers = reader.integer(_SPLITS, 1, low=1) or 1
    reader.set("seq_len", length, key)
    reader.set_integer("rl.mini_batch", "data.train_batch_size", 256)
    if reader.flag("data.use_dynamic_bsz", True):
        budget = reader.integer(key := "data.max_token_len_per_gpu", 8192, low=1) or 8192
        shortest = -(-length // sharers)  # a longer row than all budgets together stops it
        reader.set("rl.micro_tokens", max(budget, shortest, length if sharers > 1 else 0), key)
        if sharers > 1 and budget < length:
            message = f"{sharers} ranks share a sequence: counted with {length} tokens a rank, as if whole"
            reader.note("warning", "MC002", _SPLITS, message)
        reader.harmless("data.micro_batch_size_per_gpu")
        return
    rows = reader.integer(key := "data.micro_batch_size_per_gpu", 4, low=1) or 4
    if rows % sharers:
        message = f"{sharers} ranks share {rows} sequences: a rank is counted with {-(-rows // sharers)} whole ones"
        reader.note("note", "MC004", key, message)
    reader.set("micro_batch", -(-rows // sharers), key)
    reader.harmless("data.max_token_len_per_gpu")


def _recognise(document: Document) -> bool:
    data = document.data
    tables = [data.get(name) for name in ("data", "model", "engine", "trainer")] if isinstance(data, dict) else []
    return bool(tables) and all(isinstance(table, dict) for table in tables) and "max_token_len_per_gpu" in data["data"]


FORMAT = Format("verl_tuning", "verl's fine-tuning config", _SOFTWARE, _recognise, read, kind="yaml", launched=True)
"""Its keys, as YAML or as overrides."""
