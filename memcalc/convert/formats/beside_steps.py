"""What files say of loading, resuming, evaluation and saving, under the names that Trainer and Accelerate have for it.

Transformers 5.23: training_args.py, training_args_seq2seq.py, trainer.py (get_batch_samples, evaluation_loop);
Accelerate 1.15: utils/dataclasses.py (FullyShardedDataParallelPlugin), commands/launch.py.
"""

from __future__ import annotations

from memcalc.convert.config import ConfigReader

STATE_DICTS = {
    "full_state_dict": "full", "sharded_state_dict": "sharded", "local_state_dict": "sharded", "1": "full",
    "2": "sharded", "3": "sharded",
}  # fmt: skip
"""PyTorch's StateDictType, by name and by number; Accelerate's full one leaves for the host of rank 0."""
RESUME = "resume_from_checkpoint"
_NOT_SAID = "none of the files says how many tokens are generated: counted as none"


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
        reader.not_modelled({"predict_with_generate": _NOT_SAID})
    else:
        reader.set("workload.eval_new_tokens", tokens, key)


def tokens_up_to(longest: int | None, prompt: int | None) -> int | None:
    """New tokens where a sequence may have ``longest`` with its prompt: a longer prompt gets one.

    >>> tokens_up_to(2048, 1024), tokens_up_to(128, 1024), tokens_up_to(None, 1024)
    (1024, 1, None)
    """
    return None if longest is None else max(longest - (prompt or 0), 1)
