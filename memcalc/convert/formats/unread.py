"""Configs of trainers whose keys are not read: known by name, so that none is taken for another's, and refused with it.

nanotron 0.4 at 2411b022. Its states are those of a mixed-precision optimizer with ZeRO 0 or 1
(optim/gradient_accumulator.py, optim/zero.py), but its gradients are kept three times: fp32 buffers of all weights, the
16-bit ones of each micro-batch's backward, and torch's DDP buckets of them (trainer.py). No framework here has these,
and its own layers keep more for backward: counted as Megatron-LM's, 40 of its published runs that were drawn at random
(presets/runs/layouts/nanotron.toml) come out between half too small and two fifths too large, 13% too small in the
median. Of the others only the keys were looked at, in their public configs.
"""

from __future__ import annotations

from dataclasses import dataclass

from memcalc.convert.config import Config
from memcalc.convert.document import Document
from memcalc.convert.formats.base import Format
from memcalc.errors import FileError, ObjectiveError


@dataclass(frozen=True)
class Unread:
    """A trainer whose configs are known and not read."""

    name: str
    keys: tuple[str, ...]
    """At the top of its configs, a dot leading into a table; all of them tell it."""
    why: str = "which memcalc does not read: give memcalc estimate what it trains"


_AS_MEGATRON = (
    "which memcalc does not read: give its model, degrees and batch to memcalc estimate --framework megatron, which it "
    "trains by"
)
_AS_RL = "which memcalc does not read: give memcalc rl what it trains"
TRAINERS = (
    Unread(
        "nanotron",
        ("parallelism", "tokens", "optimizer", "general"),
        "whose gradients stand in fp32, in 16 bits and in DDP's buckets at once: no framework here has them, and the "
        "nearest, memcalc estimate --framework megatron, says too little, often by 10% to 40%",
    ),
    Unread("NeMo", ("trainer.devices", "model.tensor_model_parallel_size"), _AS_MEGATRON),
    Unread("Megatron-Bridge", ("train.train_iters", "model"), _AS_MEGATRON),
    Unread("GPT-NeoX", ("pipe_parallel_size", "model_parallel_size")),
    Unread("Anyscale's LLMForge", ("model_id", "context_length", "num_devices")),
    Unread("ArcticTraining", ("type", "model.name_or_path", "data.sources")),
    Unread("verl's fsdp_sft_trainer", ("data.max_length", "model.partial_pretrain")),
    Unread("AReaL", ("experiment_name", "trial_name", "cluster", "train_dataset"), _AS_RL),
    Unread("ROLL", ("exp_name", "pretrain", "actor_train"), _AS_RL),
    Unread("ROLL", ("exp_name", "pretrain", "sft_train")),
    Unread("prime-rl", ("orchestrator", "model.name"), _AS_RL),
    Unread("prime-rl", ("model.name", "data.name", "data.seq_len")),
    Unread("NeMo Automodel", ("step_scheduler", "model")),
    Unread("Primus", ("work_group", "modules")),
    Unread("leap-finetune", ("project_name", "training_type", "training_config")),
    Unread("align-anything", ("train_cfgs", "data_cfgs")),
    Unread("open_lm", ("model", "tokens", "global_bs", "acc")),
    Unread("VeOmni", ("model", "data.train_path", "train.accelerator")),
)


def _trainer_of(document: Document) -> Unread | None:
    data = document.data
    if not isinstance(data, dict):
        return None
    keys = {str(key).replace("-", "_") for key in data}
    keys |= {f"{key}.{inner}" for key, table in data.items() if isinstance(table, dict) for inner in table}
    return next((trainer for trainer in TRAINERS if keys.issuperset(trainer.keys)), None)


def recognise(document: Document) -> bool:
    """Whether a document is a config of one of them."""
    return _trainer_of(document) is not None


def read(document: Document) -> Config:
    """Refuse it by its trainer's name."""
    trainer = _trainer_of(document)
    if trainer is None:
        names = ", ".join(trainer.name for trainer in TRAINERS)
        raise FileError("file", str(document.path), f"must be a config of {names}")
    raise ObjectiveError(
        f"{document.path.name} is a config of {trainer.name} ({', '.join(trainer.keys)}), {trainer.why}."
    )


FORMAT = Format("unread", "configs of trainers that are not read", "nanotron 0.4", recognise, read)
