"""torchtune's recipe YAML, as torchtune 0.7.0 reads it.

Sources at bd2a0fc7c: recipes/*.py, config/_utils.py and _parse.py, models/*/_model_builders.py, training/_compile.py,
training/activations.py, modules/loss/cross_entropy_loss.py; OmegaConf 2.4 (interpolation). Which recipe runs is not in
the file: with one GPU it is the one for a single device, with more it is FSDP 2.
"""

from __future__ import annotations

from typing import Any

from memcalc.convert.config import Config, Reading
from memcalc.convert.document import Document
from memcalc.convert.formats import torchtune_keys as keys
from memcalc.convert.formats.base import Format
from memcalc.convert.formats.interpolation import interpolated
from memcalc.convert.formats.optimizers import Optimizer

_PRECISIONS = {"bf16": "bf16", "fp32": "fp32"}
_LINEAR = "torchtune.modules.loss.LinearCrossEntropyLoss"
_CHUNKED = "torchtune.modules.loss.CEWithChunkedOutputLoss"
_LOSSES = {
    _LINEAR: ("chunked", "torchtune"),
    "torchtune.modules.loss.cross_entropy_loss.LinearCrossEntropyLoss": ("chunked", "torchtune"),
    _CHUNKED: ("chunked", "torchtune@2024-11"),
    "torch.nn.CrossEntropyLoss": ("standard", "torchtune"),
}
"""By component: the loss, and the release whose code computes it so."""
_CHUNKS = 8


def read(document: Document) -> Config:
    """Return what a torchtune config says of a job."""
    reading = Reading(interpolated(document), "torchtune", "torchtune 0.7")
    _model(reading)
    _data(reading)
    reading.say("precision", reading.one_of("dtype", _PRECISIONS, "fp32"), "dtype")
    _sharding(reading)
    _checkpointing(reading)
    _optimizer(reading)
    _loss(reading)
    reading.harmless(*keys.HARMLESS)
    reading.not_modelled(keys.NOT_MODELLED, unless=(False, None, 0, 1, -1, "", "none"))
    return reading.finish(known=keys.KNOWN)


def _component(reading: Reading, key: str) -> tuple[str, str]:
    """The name of a component, and the key under which it stands: a table of its own, or a bare text."""
    inner = f"{key}._component_"
    return (reading.text(inner), inner) if isinstance(reading.raw(key), dict) else (reading.text(key), key)


def _model(reading: Reading) -> None:
    """A builder's name has the model, and by what it begins the adapters and whether their base is NF4."""
    name, key = _component(reading, "model")
    builder = name.rpartition(".")[2]
    kind = next((kind for kind in ("qlora_", "lora_") if builder.startswith(kind)), "")
    plain = builder.removeprefix(kind).removesuffix("_instruct").removesuffix("_base")
    if plain in keys.MODELS:
        reading.say("model", keys.MODELS[plain], key)
    elif name:
        reading.ask("model", key, name)
    if kind:
        _adapters(reading, quantised=kind == "qlora_")
    elif isinstance(reading.raw("model"), dict):
        reading.harmless("model.")


def _adapters(reading: Reading, *, quantised: bool) -> None:
    """Builders take the layers of attention by name, those of the MLP and the head by a truth value each."""
    key = "model.lora_attn_modules"
    names = [str(name) for name in reading.items(key)]
    for name in names:
        if name not in keys.LAYERS:
            raise reading.wrong(key, name, f"must be one of {', '.join(keys.LAYERS)}")
    targets = [keys.LAYERS[name] for name in names]
    if reading.flag("model.apply_lora_to_mlp"):
        targets += ["gate", "up", "down"]
    if reading.flag("model.apply_lora_to_output"):
        targets.append("head")
    if not targets:
        raise reading.wrong(key, names, "must name the layers that get adapters")
    rank = reading.whole("model.lora_rank", 8, low=1)
    reading.say("lora", f"{rank}:{','.join(targets)}", key)
    reading.say("workload.lora_dropout", reading.number("model.lora_dropout", 0.0), "model.lora_dropout")
    stored = bool(reading.flag("model.quantize_base", quantised))
    reading.say("quantize", "nf4-dq" if stored else "none", "model.quantize_base" if not quantised else "model")
    reading.not_modelled({"model.use_dora": "DoRA keeps the norms of the merged weights"})
    reading.harmless("model.lora_alpha", "model._component_", "model.quantization_kwargs.")


def _data(reading: Reading) -> None:
    """Without ``tokenizer.max_seq_len`` samples are as long as they are, and the longest decides: it is asked for."""
    for key, word in (
        ("tokenizer.max_seq_len", "seq_len"),
        ("batch_size", "micro_batch"),
    ):
        value = reading.whole(key, low=1)
        if value is not None or tuple(key.split(".")) in reading.document.unknown:
            reading.say(word, value, key)
    steps = "gradient_accumulation_steps"
    reading.say("accumulation", reading.whole(steps, 1, low=1), steps)
    packed = bool(reading.flag("dataset.packed")) if isinstance(reading.raw("dataset"), dict) else False
    reading.say("varying_lengths", not packed, "dataset.packed")
    reading.say("evaluates", reading.has("run_val_every_n_steps"), "run_val_every_n_steps")
    size = reading.whole("batch_size_val", low=1)
    if size is not None:
        reading.say("eval_micro_batch", size, "batch_size_val")
    reading.harmless("dataset.", "dataset_val.", "tokenizer.", "dataset", "dataset_val")


def _sharding(reading: Reading) -> None:
    """``sharded`` is what happens where there are several GPUs; FSDP's offload takes the states along."""
    whole = reading.flag("fsdp_reshard_after_forward", True)
    recipe = reading.text("recipe")  # of a launch line
    if recipe:
        reading.say("zero", 0 if "single_device" in recipe else 3 if whole else 2, "recipe")
    reading.say("sharded", 3 if whole else 2, "fsdp_reshard_after_forward")
    if reading.flag("fsdp_cpu_offload"):
        reading.say("offload", ("params",), "fsdp_cpu_offload")
    for key, word in (("tensor_parallel_dim", "tp"), ("context_parallel_dim", "cp")):
        degree = reading.whole(key, 1, low=1)
        if degree != 1:
            reading.say(word, degree, key)


def _checkpointing(reading: Reading) -> None:
    """``ac_mode`` counts where ``enable_activation_checkpointing`` is off (full_finetune_distributed.py)."""
    key, mode = "enable_activation_checkpointing", reading.text("ac_mode", "none").lower()
    option = reading.text("ac_option", "")
    policy = "full" if reading.flag(key) else "none"
    if policy == "none" and mode == "full":
        policy, key = "full", "ac_mode"
    elif policy == "none" and mode == "selective":
        policy, key = ("selective-ops" if option == "op" else f"every-{option}"), "ac_option"
        if option != "op" and not option.isdigit():
            raise reading.wrong("ac_option", option, "must be op, or how many blocks have one checkpoint")
    elif policy == "full" and mode != "none":
        policy = "none"  # each of the two waits for the other to be left out
    reading.say("recompute", policy, key)
    if policy not in ("none", "selective-ops"):
        reading.say("strategy.checkpoint", "non-reentrant", key)
    if reading.flag("enable_activation_offloading"):
        reading.say("offload", ("activations",), "enable_activation_offloading")


def _optimizer(reading: Reading) -> None:
    name, key = _component(reading, "optimizer")
    if name:
        found: Optimizer = reading.one_of(key, keys.OPTIMIZERS, fold=False)
        momentum = found.name == "sgd" and bool(reading.number("optimizer.momentum", 0.0))
        reading.say("optimizer", "sgd-momentum" if momentum else found.name, key)
        fused = found.impl == "foreach" and bool(reading.flag("optimizer.fused"))
        reading.say("optimizer_impl", "fused" if fused else found.impl, key)
        if found.missing:
            reading.not_modelled({key: found.missing})
    reading.say("optimizer_in_backward", bool(reading.flag("optimizer_in_bwd")), "optimizer_in_bwd")
    reading.harmless("optimizer.")


def _loss(reading: Reading) -> None:
    """The loss's component, and what is compiled: one truth value for blocks and loss, or a table."""
    name, key = _component(reading, "loss")
    loss, framework = _LOSSES.get(name, ("chunked", "torchtune"))
    reading.say("framework", framework, key)
    reading.say("loss", loss, key)
    if name and name not in _LOSSES:
        reading.not_modelled({key: "a loss with tensors of its own; counted as LinearCrossEntropyLoss"})
    if (reading.whole("loss.num_output_chunks", _CHUNKS) or _CHUNKS) != _CHUNKS:
        reading.not_modelled({"loss.num_output_chunks": f"counted as {_CHUNKS} chunks"})
    reading.harmless("loss.")
    table = isinstance(reading.raw("compile"), dict)
    blocks = bool(reading.flag("compile.model", True) if table else reading.flag("compile"))
    head = bool(reading.flag("compile.loss", True) if table else blocks)
    compiled = {(True, True): "blocks+loss", (True, False): "blocks", (False, True): "loss", (False, False): "none"}
    reading.say("compile", compiled[blocks, head], "compile")
    reading.harmless("compile.")


def _recognise(document: Document) -> bool:
    data: Any = document.data
    if document.kind not in ("yaml", "flags") or not isinstance(data, dict) or "model" not in data:
        return False
    model = data["model"].get("_component_", "") if isinstance(data["model"], dict) else data["model"]
    return str(model).startswith("torchtune.") or ("checkpointer" in data and "_component_" in str(data["model"]))


FORMAT = Format(
    name="torchtune",
    title="torchtune YAML",
    software="torchtune 0.7",
    recognise=_recognise,
    read=read,
    kind="yaml",
    filename="recipe.yaml",
)
"""torchtune's own file."""
