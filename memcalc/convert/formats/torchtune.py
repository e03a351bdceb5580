"""torchtune's recipe YAML, as torchtune 0.7.0 reads it.

Sources at bd2a0fc7c: recipes/*.py, config/_utils.py and _parse.py, models/*/_model_builders.py, training/_compile.py,
training/activations.py, modules/loss/cross_entropy_loss.py; OmegaConf 2.4 (interpolation). Which recipe runs is not in
the file: with one GPU it is the one for a single device, with more it is FSDP 2.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from memcalc.convert.config import Config, ConfigReader
from memcalc.convert.document import Document, KeyPath
from memcalc.convert.formats.base import Format, key_table
from memcalc.convert.formats.fsdp_config import set_resumes
from memcalc.convert.formats.tuning import Optimizer, optimizers_of, set_decay
from memcalc.convert.objectives import method_of_script, refuse_idle, refuse_method
from memcalc.errors import FileError, shown
from memcalc.frameworks.torchtune import TORCHTUNE

_KEYS = key_table("torchtune")
MODELS = _KEYS.tables["models"]
_LAYERS = {"q_proj": "q", "k_proj": "k", "v_proj": "v", "output_proj": "o"}
"""``lora_attn_modules``."""
OPTIMIZERS = optimizers_of(_KEYS)
_LINEAR = "torchtune.modules.loss.LinearCrossEntropyLoss"
_CHUNKED = "torchtune.modules.loss.CEWithChunkedOutputLoss"
_LOSSES = {
    _LINEAR: ("chunked", "torchtune"),
    "torchtune.modules.loss.cross_entropy_loss.LinearCrossEntropyLoss": ("chunked", "torchtune"),
    _CHUNKED: ("chunked", "torchtune@2024-11"),
    "torch.nn.CrossEntropyLoss": ("standard", "torchtune"),
}
"""By component: the loss, and the release whose code computes it so."""
_METHODS = {"policy_model": "ppo", "reward_and_value_model": "ppo", "teacher_model": "distillation",
            "grpo_samples": "grpo"}  # fmt: skip
"""Keys of recipes with further models."""
_IDLE = ("prompt", "tasks", "quantizer", "max_new_tokens")
"""Keys of recipes that generate, evaluate or quantise."""
_CHUNKS = 8
_NODE = re.compile(r"\$\{([^${}]*)\}")
_PATH = re.compile(r"\.*[A-Za-z_][\w\-]*(?:(?:\.[\w\-]+)|(?:\[\w+\]))*")
DEEPEST = 16
"""Interpolations that lead to one another."""
LONGEST = 1 << 16
"""Characters that a text may become."""


def read(document: Document) -> Config:
    """Return what a torchtune config says of a job."""
    reader = ConfigReader(resolve_interpolations(document), "torchtune", "torchtune 0.7")
    _check_objective(reader)
    _model(reader)
    _data(reader)
    reader.set("precision", reader.one_of("dtype", {"bf16": "bf16", "fp32": "fp32"}, "fp32"), "dtype")
    _sharding(reader)
    _checkpointing(reader)
    _optimizer(reader)
    _loss(reader)
    reader.harmless(*_KEYS.harmless)
    reader.not_counted(_KEYS.not_counted)
    reader.not_modelled(_KEYS.not_modelled, unless=(False, None, 0, 1, -1, "", "none"))
    return reader.finish(known=_KEYS.names("harmless", "not_modelled", "not_counted", "read"))


def _check_objective(reader: ConfigReader) -> None:
    """Refuse recipes that hold several models, score pairs or train nothing: the file does not name its recipe."""
    name = reader.document.path.name
    for key, method in _METHODS.items():
        if reader.has(key):
            refuse_method(name, method, key)
    loss, key = _component(reader, "loss")
    refuse_method(name, method_of_script(loss.removesuffix("Loss")), f"{key}: {loss}")
    if not reader.has("optimizer") and (idle := [key for key in _IDLE if reader.has(key)]):
        refuse_idle(name, idle)


def _component(reader: ConfigReader, key: str) -> tuple[str, str]:
    """The name of a component, and the key under which it stands: a table of its own, or a bare text."""
    inner = f"{key}._component_"
    return (reader.text(inner), inner) if isinstance(reader.raw(key), dict) else (reader.text(key), key)


def _model(reader: ConfigReader) -> None:
    """A builder's name has the model, and by what it begins the adapters and whether their base is NF4."""
    name, key = _component(reader, "model")
    builder = name.rpartition(".")[2]
    kind = next((kind for kind in ("qlora_", "lora_") if builder.startswith(kind)), "")
    plain = builder.removeprefix(kind).removesuffix("_instruct").removesuffix("_base")
    if plain in MODELS:
        reader.set("model", MODELS[plain], key)
    elif name:
        reader.ask("model", key, name, f"is {shown(name)}, which is no model that memcalc has")
    if kind:
        _adapters(reader, quantised=kind == "qlora_")
    elif isinstance(reader.raw("model"), dict):
        reader.harmless("model.")


def _adapters(reader: ConfigReader, *, quantised: bool) -> None:
    """Builders take the layers of attention by name, those of the MLP and the head by a truth value each."""
    key = "model.lora_attn_modules"
    names = [str(name) for name in reader.items(key)]
    for name in names:
        if name not in _LAYERS:
            raise reader.error(key, name, f"must be one of {', '.join(_LAYERS)}")
    targets = [_LAYERS[name] for name in names]
    if reader.flag("model.apply_lora_to_mlp"):
        targets += ["gate", "up", "down"]
    if reader.flag("model.apply_lora_to_output"):
        targets.append("head")
    if not targets:
        raise reader.error(key, names, "must name the layers that get adapters")
    rank = reader.integer("model.lora_rank", 8, low=1)
    reader.set("lora", f"{rank}:{','.join(targets)}", key)
    reader.set("workload.lora_dropout", reader.number("model.lora_dropout", 0.0), "model.lora_dropout")
    stored = bool(reader.flag("model.quantize_base", quantised))
    reader.set("quantize", "nf4-dq" if stored else "none", "model.quantize_base" if not quantised else "model")
    reader.not_modelled({"model.use_dora": "DoRA keeps the norms of the merged weights"})
    reader.harmless("model.lora_alpha", "model._component_", "model.quantization_kwargs.")


def _data(reader: ConfigReader) -> None:
    """Without ``tokenizer.max_seq_len`` samples are as long as they are, and the longest decides: it is asked for."""
    for key, word in (("tokenizer.max_seq_len", "seq_len"), ("batch_size", "micro_batch")):
        value = reader.integer(key, low=1)
        if value is not None or tuple(key.split(".")) in reader.document.unknown:
            reader.set(word, value, key)
    reader.set_integer("accumulation", "gradient_accumulation_steps", 1)
    packed = bool(reader.flag("dataset.packed")) if isinstance(reader.raw("dataset"), dict) else False
    reader.set("varying_lengths", not packed, "dataset.packed")
    reader.set("batch_rule", "pad-max" if packed else "pad", "dataset.packed")
    reader.set("evaluates", reader.has("run_val_every_n_steps"), "run_val_every_n_steps")
    reader.set_integer("eval_micro_batch", "batch_size_val")
    set_resumes(reader)
    later = "a copy of the shards on the host while they are written"
    reader.not_modelled({"enable_async_checkpointing": later})
    reader.harmless("dataset.", "dataset_val.", "tokenizer.", "dataset", "dataset_val")


def _sharding(reader: ConfigReader) -> None:
    """``sharded`` is what happens where there are several GPUs; FSDP's offload takes the states along."""
    reshard = reader.flag("fsdp_reshard_after_forward", True)
    recipe = reader.text("recipe")  # of a launch line
    if recipe:
        reader.set("zero", 0 if "single_device" in recipe else 3 if reshard else 2, "recipe")
    reader.set("sharded", 3 if reshard else 2, "fsdp_reshard_after_forward")
    if reader.flag("fsdp_cpu_offload"):
        reader.set("offload", ("params",), "fsdp_cpu_offload")
    ranks = {"tensor_parallel_dim": "tp", "context_parallel_dim": "cp", "data_parallel_replicate_dim": "dp_replicate"}
    for key, word in ranks.items():
        degree = reader.integer(key, 1, low=1)
        if degree != 1:
            reader.set(word, degree, key)


def _checkpointing(reader: ConfigReader) -> None:
    """``ac_mode`` counts where ``enable_activation_checkpointing`` is off (full_finetune_distributed.py)."""
    key, mode = "enable_activation_checkpointing", reader.text("ac_mode", "none").lower()
    option = reader.text("ac_option", "")
    policy = "full" if reader.flag(key) else "none"
    if policy == "none" and mode == "full":
        policy, key = "full", "ac_mode"
    elif policy == "none" and mode == "selective":
        policy, key = ("selective-ops" if option == "op" else f"every-{option}"), "ac_option"
        if option != "op" and not option.isdigit():
            raise reader.error("ac_option", option, "must be op, or how many blocks have one checkpoint")
    elif policy == "full" and mode != "none":
        policy = "none"  # each of the two waits for the other to be left out
    reader.set("recompute", policy, key)
    if policy not in ("none", "selective-ops"):
        reader.set("strategy.checkpoint", "non-reentrant", key)
    if reader.flag("enable_activation_offloading"):
        reader.set("offload", ("activations",), "enable_activation_offloading")


def _optimizer(reader: ConfigReader) -> None:
    name, key = _component(reader, "optimizer")
    if name:
        optimizer: Optimizer = reader.one_of(key, OPTIMIZERS, fold=False)
        momentum = optimizer.name == "sgd" and bool(reader.number("optimizer.momentum", 0.0))
        reader.set("optimizer", "sgd-momentum" if momentum else optimizer.name, key)
        set_decay(reader, optimizer.name, "optimizer.weight_decay")
        fused = optimizer.impl == "foreach" and bool(reader.flag("optimizer.fused"))
        reader.set("optimizer_impl", "fused" if fused else optimizer.impl, key)
        if optimizer.missing:
            reader.not_modelled({key: optimizer.missing})
    reader.set("optimizer_in_backward", bool(reader.flag("optimizer_in_bwd")), "optimizer_in_bwd")
    reader.harmless("optimizer.")


def _loss(reader: ConfigReader) -> None:
    """The loss's component, and what is compiled: one truth value for blocks and loss, or a table."""
    name, key = _component(reader, "loss")
    loss, framework = _LOSSES.get(name, (TORCHTUNE.loss, "torchtune"))
    reader.set("framework", framework, key)
    reader.set("loss", loss, key)
    if name and name not in _LOSSES:
        reader.not_modelled({key: "a loss with tensors of its own; counted as LinearCrossEntropyLoss"})
    if (reader.integer("loss.num_output_chunks", _CHUNKS) or _CHUNKS) != _CHUNKS:
        reader.not_modelled({"loss.num_output_chunks": f"counted as {_CHUNKS} chunks"})
    reader.harmless("loss.")
    table = isinstance(reader.raw("compile"), dict)
    blocks = bool(reader.flag("compile.model", True) if table else reader.flag("compile"))
    head = bool(reader.flag("compile.loss", True) if table else blocks)
    compiled = {(True, True): "blocks+loss", (True, False): "blocks", (False, True): "loss", (False, False): "none"}
    reader.set("compile", compiled[blocks, head], "compile")
    reader.harmless("compile.")


def _recognise(document: Document) -> bool:
    data: Any = document.data
    if document.kind not in ("yaml", "flags") or not isinstance(data, dict):
        return False
    if "model" not in data:
        return "policy_model" in data and "reward_and_value_model" in data
    model = data["model"].get("_component_", "") if isinstance(data["model"], dict) else data["model"]
    return str(model).startswith("torchtune.") or ("checkpointer" in data and "_component_" in str(data["model"]))


def resolve_interpolations(document: Document) -> Document:
    """Return a document with what its interpolations lead to.

    A resolver (``${oc.env:NAME}``), or a key that is not there, is what only a run tells: the value is unknown.
    """
    walk = _Walk(document)
    data = walk.value(document.data, ())
    return replace(document, data=data, unknown={**document.unknown, **walk.unknown})


class _Walk:
    """Through the tables, each text put together."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.unknown: dict[KeyPath, str] = {}

    def value(self, value: Any, key_path: KeyPath) -> Any:
        """Return a value with its texts put together."""
        if isinstance(value, dict):
            return {key: self.value(inner, (*key_path, key)) for key, inner in value.items()}
        if isinstance(value, list):
            return [self.value(inner, (*key_path, index)) for index, inner in enumerate(value)]
        if not isinstance(value, str) or "${" not in value:
            return value
        try:
            return self.text(value, key_path, 0)
        except LookupError as error:
            self.unknown[key_path] = str(error.args[0])
            return None

    def text(self, text: str, key_path: KeyPath, depth: int) -> Any:
        """Put one text together; an interpolation that stands alone keeps the kind of its value."""
        if depth > DEEPEST:
            raise self._wrong(key_path, "must not refer to itself")
        alone = _NODE.fullmatch(text.strip())
        if alone:
            return self.node(alone[1], key_path, depth)
        result = _NODE.sub(lambda match: str(self.node(match[1], key_path, depth)), text)
        if len(result) > LONGEST:
            raise self._wrong(key_path, "must resolve to a text of a usual length")
        if "${" in result:
            raise LookupError(text[:60])
        return result

    def node(self, inner: str, key_path: KeyPath, depth: int) -> Any:
        """Return what one interpolation leads to."""
        path = inner.strip()
        if not _PATH.fullmatch(path):
            raise LookupError(f"${{{inner[:60]}}}")
        value: Any = self.document.data
        climbed = len(path) - len(path.lstrip("."))
        keys = [key for key in re.split(r"[.\[\]]", path) if key]
        if climbed > len(key_path):
            raise LookupError(f"${{{inner[:60]}}}")
        if climbed:
            keys = [*map(str, key_path[: len(key_path) - climbed]), *keys]
        for key in keys:
            if isinstance(value, dict) and key in value:
                value = value[key]
            elif isinstance(value, list) and key.isdigit() and int(key) < len(value):
                value = value[int(key)]
            else:
                raise LookupError(f"${{{inner[:60]}}}")
        if isinstance(value, dict | list):
            raise LookupError(f"${{{inner[:60]}}}")  # noqa: TRY004 (it is what the run would look up)
        return self.text(value, tuple(keys), depth + 1) if isinstance(value, str) and "${" in value else value

    def _wrong(self, key_path: KeyPath, message: str) -> FileError:
        key = ".".join(map(str, key_path))
        return FileError("file", str(self.document.path), f"{message} (line {self.document.line(key_path)}: {key})")


FORMAT = Format("torchtune", "torchtune YAML", "torchtune 0.7", _recognise, read, kind="yaml", filename="recipe.yaml")
