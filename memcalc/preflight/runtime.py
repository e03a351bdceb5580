"""What follows from the runtime: the dtype of the weights, who casts them, and what Accelerate and the Trainer fill in.

Accelerate 1.15: accelerator.py (prepare_model, no_sync), utils/fsdp_utils.py (fsdp2_prepare_model) and
utils/dataclasses.py (set_mixed_precision of both plugins). Transformers 5.23: trainer.py and integrations/deepspeed.py.
DeepSpeed 0.19: runtime/engine.py (_configure_distributed_model).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.convert.config import Config, Finding, Said
from memcalc.frameworks import habits_of

if TYPE_CHECKING:
    from memcalc.preflight.join import Joined

__all__ = ["compared", "filled_in", "mismatches", "precision", "prevails", "sharded", "trimmed", "usual", "yields"]

_COMPARED = {
    "micro_batch": ("deepspeed",), "accumulation": ("deepspeed", "accelerate"), "mixed": ("deepspeed",),
}  # fmt: skip
"""Words that the Trainer compares with its own, and in which file (integrations/deepspeed.py, fill_match)."""


def precision(job: Joined) -> None:
    """Say the precision: its name depends on the runtime.

    FSDP under Accelerate keeps fp32 shards of what it trains, whatever they were loaded in, and computes and reduces in
    16 bits; a frozen base stays as it was loaded. DeepSpeed casts all weights, adapters too, and keeps an fp32 master.
    Else autocast runs over the weights as they are.
    """
    if job.words.get("precision") is not None or not {"mixed", "weights"} & set(job.facts):
        return
    mixed, weights = job.facts.get("mixed", "no"), _weights(job)
    name = str(job.words.get("framework", "")).partition("@")[0]
    fsdp = name in {"fsdp1", "fsdp2"} or (name == "hf" and int(job.words.get("zero", 0)) > 0)
    if mixed == "no":
        job.words["precision"] = weights
    elif name == "deepspeed":
        job.words["precision"] = f"{mixed}-mixed"
        if job.words.get("lora"):
            job.words.setdefault("adapter_dtype", "bf16")
    elif fsdp and not (job.words.get("lora") and weights != "fp32"):
        job.words["precision"] = f"{mixed}-mixed"
        if _accelerated(job):
            job.words.setdefault("autocast", True)
    elif weights == "fp32":
        job.words["precision"] = f"{mixed}-autocast"
        _assumed(job)
    else:
        job.words["precision"] = weights
        job.words.setdefault("autocast", True)
    if fsdp and _accelerated(job):
        _reductions(job, narrow=mixed != "no" or weights != "fp32")


def _accelerated(job: Joined) -> bool:
    """Whether Accelerate wraps the model, as the Trainer lets it."""
    return bool(job.facts.get("accelerated")) or "trainer" in job.engines


def sharded(job: Joined) -> None:
    """Say the stage of a runtime that shards over several GPUs and runs plainly on one; 16-bit weights reduce in 16."""
    stage = job.facts.get("sharded")
    if stage is None or job.words.get("gpus") is None:
        return
    several = int(job.words["gpus"]) > 1
    if job.words.get("zero") is None:
        job.words["zero"] = int(stage) if several else 0
    if several and job.words.get("precision") == "bf16":
        job.settings.setdefault("strategy.reduce_dtype", "bf16")


def usual(job: Joined) -> None:
    """Do not say that checkpoints are not reentrant where the framework's are not anyway: a plan does not either."""
    own = job.words.get("framework")
    if "strategy.checkpoint" not in job.origins or job.settings.get("strategy.checkpoint") != "non-reentrant":
        return
    if own is not None and not habits_of(str(own)).reentrant:
        del job.settings["strategy.checkpoint"]


def _weights(job: Joined) -> str:
    """The dtype of the weights where autocast or FSDP finds them; fp16's arithmetic has the widths of bf16's."""
    if job.words.get("quantize") not in {None, "none"}:
        return "bf16"
    found = job.facts.get("weights", "fp32")
    return "bf16" if found == "fp16" else str(found)


def _assumed(job: Joined) -> None:
    """A script of one's own may load 16-bit weights, as from_pretrained() does since Transformers 5.0."""
    if "weights" in job.facts or "script_loads" not in job.origins:
        return
    config, said = job.origins["script_loads"]
    message = (
        "no file says in which dtype the script loads the weights: counted as fp32, with autocast over them. "
        "from_pretrained() without a dtype takes the checkpoint's own since Transformers 5.0, mostly bf16"
    )
    job.findings.append(
        (config, Finding("note", "MC004", said.field, message, "--precision bf16 --set strategy.autocast=true"))
    )


def _reductions(job: Joined, *, narrow: bool) -> None:
    """Gradients are reduced in the dtype of compute, and by no_sync for a step's last micro-batch alone."""
    job.settings.setdefault("strategy.reduce_dtype", "bf16" if narrow else "fp32")
    if int(job.facts.get("accumulation") or 1) > 1 and not job.facts.get("sync_each_batch"):
        job.settings.setdefault("strategy.whole_accumulation", True)


def filled_in(job: Joined, dirs: tuple[str, ...]) -> None:
    """Sizes that are `auto`: from the model's width (Accelerate 1.15, accelerator.py, hidden_size_based_keys)."""
    fields = job.facts.get("filled_in")
    if not fields or job.facts.get("model") is None:
        return
    from memcalc.api import load_model

    model = job.facts["model"]
    hidden = (load_model(model, dirs) if isinstance(model, str) else model).hidden
    sizes = {
        "strategy.reduce_bucket_size": hidden * hidden,
        "strategy.zero_prefetch_bucket": int(0.9 * hidden * hidden),
        "strategy.persistence_threshold": 10 * hidden,
    }
    for field in fields:
        if field in sizes and (field == "strategy.reduce_bucket_size" or int(job.words.get("zero", 0)) == 3):
            job.settings.setdefault(field, sizes[field])


def mismatches(job: Joined, configs: tuple[Config, ...]) -> None:
    """Values on which a Trainer and its DeepSpeed config must agree: else it stops before the first step."""
    trainer = next((config for config in configs if config.format == "trainer"), None)
    if trainer is None or "deepspeed" not in job.engines:
        return
    for word, formats in _COMPARED.items():
        own = next((said for said in trainer.said if said.word == word), None)
        for config in configs:
            said = next((said for said in config.said if said.word == word and not said.default), None)
            if own is not None and said is not None and config.format in formats and said.value != own.value:
                job.findings.append((config, _mismatch(said, own, trainer)))


def trimmed(job: Joined) -> None:
    """Take away what a Trainer says of an optimizer that DeepSpeed replaces, or of wrapping where there is no FSDP."""
    if not str(job.words.get("optimizer", "")).endswith("8bit"):
        job.settings.pop("strategy.wide_embedding_moments", None)
    if job.facts.get("trl") and job.words.get("lora") and job.words.get("framework") == "deepspeed":
        _adapters_under_zero3(job)
    _checkpoints_as_usual(job)
    if not job.engines & {"fsdp1", "fsdp2"}:
        job.facts.pop("checkpoints_wrapped", None)


def _checkpoints_as_usual(job: Joined) -> None:
    """What a file says of checkpoints that is the framework's habit anyhow is no setting of its own."""
    said = job.settings.get("strategy.checkpoint")
    if said is None or "strategy.checkpoint" not in job.origins or job.words.get("framework") is None:
        return
    if said == ("reentrant" if habits_of(str(job.words["framework"])).reentrant else "non-reentrant"):
        del job.settings["strategy.checkpoint"]


def _adapters_under_zero3(job: Joined) -> None:
    """TRL 1.16 makes checkpoints reentrant there, whatever is asked for (sft_trainer.py)."""
    if int(job.words.get("zero", 0)) == 3 and job.words.get("recompute", "none") != "none":
        job.settings["strategy.checkpoint"] = "reentrant"


def _mismatch(said: Said, own: Said, trainer: Config) -> Finding:
    default = ", its default" if own.default else ""
    message = (
        f"{said.field} says {said.value}, and {own.field} of {trainer.document.path.name} {own.value}{default}: "
        "the Trainer stops at its start"
    )
    return Finding("error", "MC106", said.field, message, f'"{said.field}": "auto"', said.place)


def compared(before: tuple[Config, Said], config: Config, said: Said) -> bool:
    """Whether two different values are a mismatch of the Trainer and DeepSpeed, which :func:`mismatches` reports."""
    formats = {before[0].format, config.format}
    return "trainer" in formats and bool(formats & set(_COMPARED.get(said.word, ())))


def prevails(before: tuple[Config, Said], config: Config, said: Said) -> bool:
    """Whether what was said before goes first although it is not younger.

    DeepSpeed's own optimizer runs where its config names one (integrations/deepspeed.py, deepspeed_optim_sched).
    """
    return said.word in {"optimizer", "optimizer_impl"} and (before[0].format, config.format) == (
        "deepspeed",
        "trainer",
    )


def yields(before: Said, said: Said) -> bool:
    """Whether one default gives way to another: mixed precision is on where either turns it on."""
    return said.word == "mixed" and before.default and before.value == "no"
