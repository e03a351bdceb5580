"""verl's supervised fine-tuning: overrides behind `torchrun -m verl.trainer.sft_trainer`, or a YAML of the same keys.

verl 0.10 (1dda039b): trainer/sft_trainer.py, sft_trainer_ray.py, trainer/config/sft_trainer_engine.yaml, and the files
of its defaults, model/hf_model.yaml and engine/fsdp.yaml. A step is the update of verl's policies without the entropy:
log-probabilities of packed rows, by the same engine (workers/utils/losses.py, sft_loss). The trainer before it,
fsdp_sft_trainer, has another loss, and is not read.
"""

from __future__ import annotations

from dataclasses import replace

from memcalc.convert.config import Config, ConfigReader
from memcalc.convert.document import Document
from memcalc.convert.formats.base import Format, key_table
from memcalc.convert.formats.verl import TRAINERS, plain, set_model, set_sharded
from memcalc.errors import ObjectiveError, cut

KEYS = key_table("verl_tuning")
_SOFTWARE = "verl 0.10"
_BACKENDS = ("fsdp", "fsdp2", "")
_SPLITS = "engine.ulysses_sequence_parallel_size"


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
    set_sharded(reader, "model", "engine", "engine.strategy")
    _batches(reader)
    reader.harmless(*KEYS.lists["harmless"])
    reader.not_modelled(KEYS.tables["not_modelled"], unless=(False, None, 0, "", "none", "adamw", "AdamW"))
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
