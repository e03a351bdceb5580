"""FSDP's options, as Accelerate's YAML and the Trainer's `fsdp_config` spell them, and the file that the latter names.

Accelerate 1.15: utils/dataclasses.py (FullyShardedDataParallelPlugin), utils/fsdp_utils.py, commands/launch.py;
Transformers 5.23: training_args.py (_process_fsdp_args). Of what stands beside the steps, loading, resuming, evaluation
and saving, under the names that both have for it: training_args_seq2seq.py, trainer.py (get_batch_samples,
evaluation_loop).
"""

from __future__ import annotations

from memcalc.convert.config import Config, ConfigReader
from memcalc.convert.document import Document
from memcalc.convert.formats.base import Format

_SIGNS = frozenset({"transformer_layer_cls_to_wrap", "fsdp_transformer_layer_cls_to_wrap", "fsdp_version"})
STRATEGIES = {
    "full_shard": "full", "1": "full", "shard_grad_op": "grads", "2": "grads", "no_shard": "none", "3": "none",
    "hybrid_shard": "hybrid", "4": "hybrid", "hybrid_shard_zero2": "hybrid-grads", "5": "hybrid-grads",
}  # fmt: skip
"""FSDP 1's sharding strategies, by name and by number."""
_HARMLESS = (
    "use_orig_params", "sync_module_states", "min_num_params",
    "transformer_layer_cls_to_wrap", "xla", "xla_fsdp_v2", "xla_fsdp_grad_ckpt",
)  # fmt: skip
_NOT_MODELLED = {
    "ignored_modules": "modules that are left out stay whole on each rank",
    "xla_fsdp_settings": "XLA's own FSDP",
}
NODE = 0
"""Of ranks that share the states (``dp_shard``): those of a node (FSDP 1's hybrid strategies)."""
ALONE = 1
"""The same where nothing is sharded (NO_SHARD): each rank holds all states and casts its units one after another."""
LOSS_INSIDE = "the model computes its loss, for which the root is gathered: resharding it gains nothing here"
PLACED = "no option says where a reentrant checkpoint stands; a training script of your own does"
_WRAPS = "transformer_based_wrap"
ACCELERATED = ("autocast", "reduce_dtype")
"""What Accelerate decides of FSDP by itself (accelerator.py, prepare_model; FullyShardedDataParallelPlugin)."""


def read(document: Document) -> Config:
    """Return what the file says of FSDP; without a version it is the second."""
    reader = ConfigReader(document, "fsdp_config", "Transformers 5.23")
    read_options(reader, "", fsdp_version(reader, "", 2), wraps="transformer_based_wrap")
    return reader.finish()


def fsdp_version(reader: ConfigReader, table: str, default: int) -> int:
    """Return FSDP's version, which decides what the other options mean."""
    version: int = reader.one_of(_key(reader, table, "version"), {"1": 1, "2": 2}, default)
    return version


def set_reductions(reader: ConfigReader) -> None:
    """Set whether the gradients of each micro-batch are reduced (the Trainer's accelerator_config)."""
    table = "accelerator_config.gradient_accumulation_kwargs"
    if reader.flag(f"{table}.sync_each_batch"):
        reader.set("sync_each_batch", True, f"{table}.sync_each_batch")
    reader.harmless(f"{table}.sync_with_dataloader")


def read_options(reader: ConfigReader, table: str, version: int, wraps: str, legacy: str = "") -> None:
    """Set how FSDP runs the job, from a table of options.

    ``wraps`` is the wrapping policy where none is said; ``legacy`` the strategy that the Trainer's `fsdp` names.
    """
    reader.set("engine", f"fsdp{version}", _key(reader, table, "version"))
    _sharding(reader, table, version, legacy, trainer=wraps == _WRAPS)
    key = _key(reader, table, "offload_params")
    if reader.has(other := _key(reader, table, "cpu_offload")):
        key = other
    moved = _key(reader, table, "activation_checkpointing_offload")
    parts = [part for part, name in (("params", key), ("activations", moved)) if reader.flag(name)]
    if parts:
        reader.set("offload", tuple(parts), key if reader.flag(key) else moved)
    _checkpoints(reader, table, version)
    _wrapping(reader, table, wraps)
    _prefetch(reader, table, version)
    _whole_weights(reader, table, version, trainer=wraps == _WRAPS)
    reader.harmless(*(_key(reader, table, name) for name in _HARMLESS))
    reader.not_modelled({_key(reader, table, name): says for name, says in _NOT_MODELLED.items()})


def _key(reader: ConfigReader, table: str, name: str) -> str:
    """Return an option's key: with `fsdp_` before it or without, as it stands in the file."""
    lead = f"{table}." if table else ""
    plain = f"{lead}{name}"
    return plain if reader.has(plain) else f"{lead}fsdp_{name}"


def _sharding(reader: ConfigReader, table: str, version: int, legacy: str, *, trainer: bool) -> None:
    """FSDP 2 has a truth value; FSDP 1 a strategy, which Accelerate reads from `sharding_strategy` alone.

    The Trainer's table (``own``) passes no `sharding_strategy` on, so that its FSDP 1 shards all.
    """
    again, strategy = (_key(reader, table, name) for name in ("reshard_after_forward", "sharding_strategy"))
    if version == 2:
        default = legacy != "grads"
        reader.set("zero", 3 if reader.flag(again, default) else 2, again)
        reader.harmless(strategy)
        return
    stated = reader.one_of(strategy, STRATEGIES, "full")
    kind = "full" if trainer else stated
    if stated != kind:
        message = (
            f"the Trainer hands no {strategy} to FSDP 1, which stays FULL_SHARD: what is said here changes nothing"
        )
        reader.note("warning", "MC115", strategy, message, "fsdp_version 2 with reshard_after_forward: false")
    wanted = reader.one_of(again, {**STRATEGIES, "true": "full", "false": "grads"}, legacy or kind)
    if wanted != kind:
        stays = "FULL_SHARD" if kind == "full" else kind
        message = (
            f"FSDP 1 under Accelerate takes fsdp_sharding_strategy, which stays {stays}: "
            f"{'the strategy' if legacy else 'reshard_after_forward'} that is said here changes nothing"
        )
        reader.note("warning", "MC115", again, message, "fsdp_version 2 with reshard_after_forward: false")
    if kind == "none" or kind.startswith("hybrid"):
        reader.set("dp_shard", ALONE if kind == "none" else NODE, strategy)
    reader.set("zero", 2 if kind.endswith("grads") else 3, strategy)


def _checkpoints(reader: ConfigReader, table: str, version: int) -> None:
    key = _key(reader, table, "activation_checkpointing")
    if reader.flag(key):
        set_checkpoints(reader, key, version)


def set_checkpoints(reader: ConfigReader, key: str, version: int) -> None:
    """Set the checkpoints that FSDP's own option puts round the blocks."""
    reader.set("recompute", "full", key)
    reader.set("strategy.checkpoint", "non-reentrant", key)
    if version == 2:
        reader.set("checkpoints_by_fsdp2", True, key)


def _wrapping(reader: ConfigReader, table: str, wraps: str) -> None:
    key = _key(reader, table, "auto_wrap_policy")
    policy = reader.text(key, wraps).lower()
    if policy != _WRAPS:
        says = "the whole model is one unit, gathered at once" if policy == "no_wrap" else "units are cut by their size"
        message = f"{key} {policy.upper()}: {says}; here each block is a unit of its own"
        reader.note("warning", "MC002", key, message, "TRANSFORMER_BASED_WRAP")


def _whole_weights(reader: ConfigReader, table: str, version: int, *, trainer: bool) -> None:
    """The Trainer writes whole weights under both versions, and lets each rank read; `accelerate launch` rank 0."""
    set_state_dict(reader, _key(reader, table, "state_dict_type"), "full" if trainer or version == 1 else "")
    set_loading(reader, _key(reader, table, "cpu_ram_efficient_loading"), default=None if trainer else True)


def _prefetch(reader: ConfigReader, table: str, version: int) -> None:
    """BACKWARD_PRE is what is counted; the rest gathers a block less, or one more."""
    backward, forward, limit = (
        _key(reader, table, name) for name in ("backward_prefetch", "forward_prefetch", "limit_all_gathers")
    )
    if version == 2:
        reader.harmless(backward, forward, limit)
        return
    reader.not_modelled(
        {backward: "a gathered block fewer than with BACKWARD_PRE, which is what is counted"},
        unless=("backward_pre", "1"),
    )
    reader.not_modelled({forward: "a gathered block more than is counted in forward"})
    if reader.flag(limit, True) is False:
        reader.not_modelled({limit: "gathers run ahead of compute without a bound"}, unless=())


def _recognise(document: Document) -> bool:
    return document.kind == "json" and bool(_SIGNS & set(document.data))


FORMAT = Format("fsdp_config", "the Trainer's FSDP JSON", "Transformers 5.23", _recognise, read)
"""FSDP's options, beside the Trainer's own arguments."""


# ------------------------------------------------------------------------------------------------- beside the steps


STATE_DICTS = {
    "full_state_dict": "full", "sharded_state_dict": "sharded", "local_state_dict": "sharded", "1": "full",
    "2": "sharded", "3": "sharded",
}  # fmt: skip
"""PyTorch's StateDictType, by name and by number; Accelerate's full one leaves for the host of rank 0."""
RESUME = "resume_from_checkpoint"


def set_state_dict(reader: ConfigReader, key: str, default: str = "") -> None:
    """Set what a checkpoint has of sharded weights; ``default`` is what the framework writes where nothing is said."""
    if form := reader.one_of(key, STATE_DICTS, default):
        reader.set("strategy.state_dict", form, key)


def set_loading(reader: ConfigReader, key: str, default: bool | None = None) -> None:
    """Set who reads the weights, from FSDP's ``cpu_ram_efficient_loading``; nothing where nobody says it."""
    alone = reader.flag(key, default)
    if alone is not None:
        reader.set("strategy.loading", "rank-0" if alone else "every-rank", key)


def set_resumes(reader: ConfigReader, *keys: str) -> None:
    """Set whether the job goes on from a checkpoint: a path, or a truth value for the newest one."""
    for key in keys or (RESUME,):
        if reader.text(key).lower() not in ("", "false", "none", "null", "no"):
            reader.set("workload.resumes", True, key)


def set_evaluation(reader: ConfigReader) -> None:
    """Set whether the Trainer evaluates, how much at a time, and what it keeps.

    A script evaluates with ``do_eval`` after training too, and predicts with ``do_predict`` in the same loop.
    """
    older = reader.has("evaluation_strategy") and not reader.has("eval_strategy")
    strategy = "evaluation_strategy" if older else "eval_strategy"
    stated = reader.text(strategy, "no").lower() not in ("no", "false")
    others = [key for key in ("do_eval", "do_predict", "eval_on_start") if reader.flag(key)]
    reader.set("evaluates", stated or bool(others), strategy if stated or not others else others[0])
    reader.set_integer("eval_micro_batch", "per_device_eval_batch_size", 8)
    reader.set_integer("eval_accumulation", "eval_accumulation_steps")
    alone = [key for key in ("prediction_loss_only", "batch_eval_metrics") if reader.flag(key)]
    if alone:
        reader.set("eval_keeps", "nothing", alone[0])


def set_generation(reader: ConfigReader, tokens: int | None, key: str) -> None:
    """Set that an evaluation generates ``tokens`` after each sequence, as `key` says; None where no file says it."""
    if not reader.flag("predict_with_generate"):
        return
    reader.set("eval_keeps", "nothing", "predict_with_generate")
    if tokens is None:
        says = "none of the files says how many tokens are generated: counted as none"
        reader.not_modelled({"predict_with_generate": says})
    else:
        reader.set("workload.eval_new_tokens", tokens, key)


def tokens_up_to(longest: int | None, prompt: int | None) -> int | None:
    """New tokens where a sequence may have ``longest`` with its prompt: a longer prompt gets one.

    >>> tokens_up_to(2048, 1024), tokens_up_to(128, 1024), tokens_up_to(None, 1024)
    (1024, 1, None)
    """
    return None if longest is None else max(longest - (prompt or 0), 1)


def set_generated(reader: ConfigReader) -> None:
    """Seq2SeqTrainer's: ``generation_max_length`` counts the prompt of a decoder too."""
    key = "generation_max_length"
    prompt = next((setting.value for setting in reader.settings if setting.name == "seq_len"), None)
    set_generation(reader, tokens_up_to(reader.integer(key, low=1), prompt), key)
    reader.not_modelled({"generation_num_beams": "each beam has a cache of its own"}, unless=(None, 1))


def ask_for_rows(reader: ConfigReader, whose: str) -> None:
    """Ask for the micro-batch where no key says it beside keys of somebody else's, whose defaults may go before it."""
    foreign, key = sorted(reader.unread()), "per_device_train_batch_size"
    if foreign and not reader.has(key):
        says = f"is not said, and {whose} has arguments of its own ({', '.join(foreign[:3])}), so perhaps defaults too"
        reader.ask("micro_batch", key, "8", says)


def ask_for_targets(reader: ConfigReader) -> None:
    """Ask for the layers with adapters where a script with arguments of its own is given their rank alone.

    PEFT's default (queries and values, for most classes) is TRL's; such a script most often names others in its code.
    """
    foreign = sorted(reader.unread())
    setting = next((setting for setting in reader.settings if setting.name == "lora"), None)
    if not foreign or setting is None or not str(setting.value).isdecimal():
        return
    # the words of TRL's ModelConfig, of which get_peft_config makes the adapters
    if not ((reader.has("use_peft") and setting.field == "lora_r") or reader.text("training_script") == "trl"):
        says = f"is said without layers, and its script has arguments of its own ({', '.join(foreign[:3])})"
        reader.settings.remove(setting)
        reader.ask("lora", setting.field, str(setting.value), says)
        if "qlora" in reader.document.path.stem.lower() and not any(
            named.name == "quantize" for named in reader.settings
        ):
            says = "is of a file that is called after QLoRA, and no key says how the weights are stored"
            reader.ask("quantize", setting.field, str(setting.value), says)
