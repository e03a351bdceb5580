"""A training script for FSDP2, as memcalc writes it: the plan stands in its constants, which are read back.

The calls are those of PyTorch 2.13 (torch/distributed/fsdp/_fully_shard, torch/distributed/algorithms/_checkpoint,
torch/nn/attention) and Transformers 5.23 (modeling_utils.py: from_config, init_weights, _no_split_modules).
"""

from __future__ import annotations

import ast
import json
import re
import textwrap
import warnings
from dataclasses import replace
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from memcalc import catalog
from memcalc.convert.config import Config, ConfigReader
from memcalc.convert.document import Document, KeyPath, Span
from memcalc.convert.formats.base import ConfigJob, Format
from memcalc.convert.formats.trainer_writer import require_decoder, sizes
from memcalc.convert.formats.tuning import DECAY, set_decay
from memcalc.errors import FileError, MemcalcError
from memcalc.formulas.recompute import parse_policy
from memcalc.specs.strategy import Strategy

if TYPE_CHECKING:
    from memcalc.specs.model import Model

MARKER = "# memcalc fsdp2 script 1"
"""First line of the script, by which it is known again."""
_DTYPES = {"float32": "fp32", "bfloat16": "bf16"}
_PRECISIONS = {
    "bf16-mixed": ("float32", "bfloat16", False),
    "fp16-mixed": ("float32", "float16", False),
    "bf16": ("bfloat16", "bfloat16", False),
    "fp32": ("float32", "float32", False),
    "bf16-autocast": ("float32", "float32", True),
}
"""Dtypes of the shards and of what is gathered, and whether autocast runs over them."""
_OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "adamw": ("AdamW", {}), "sgd": ("SGD", {}), "sgd-momentum": ("SGD", {"momentum": 0.9}),
}  # fmt: skip
_ATTENTION = {
    "flash": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION", "cudnn": "CUDNN_ATTENTION", "math": "MATH",
    "eager": "EAGER", "sdpa": "SDPA",
}  # fmt: skip
_PARTS = {"mlp": "mlp", "attention": "self_attn"}
"""Modules of a block that a policy computes again, as most classes of Transformers call them."""
_OFFLOADS = {"params": "OFFLOAD", "activations": "OFFLOAD_ACTIVATIONS"}
"""What leaves the GPU, and the constant that says so; states go where the weights are."""
_STATED = (
    "framework", "precision", "optimizer", "optimizer_impl", "zero", "dp", "dp_replicate", "tp", "recompute", "offload",
    "attention", "reduce_dtype", "reshard", "expandable_segments", "micro_batch", "checkpoint", "offload_to", "compile",
    "sgd_weight_decay",
)  # fmt: skip
"""Fields of a strategy that the script follows; it is written for no other value of the rest than the default."""


def read(document: Document) -> Config:
    """Return what the constants of a script say of a job."""
    reader = ConfigReader(_constants(document), "fsdp2", "the script of memcalc export")
    reader.set("framework", "fsdp2", "MODEL")
    for key in ("GPUS", "TP", "SEQ_LEN", "MICRO_BATCH", "ACCUMULATION"):
        reader.set_integer(key.lower(), key, 1)
    if reader.integer("TP", 1, 1) != 1:
        reader.set("sp", False, "TP")
    _model(reader)
    _precision(reader)
    _recompute(reader)
    reader.set("zero", 3 if reader.flag("RESHARD", True) else 2, "RESHARD")
    if reader.flag("RESHARD_ROOT"):
        reader.set("strategy.reshard", "always", "RESHARD_ROOT")
    reader.set_integer("dp_replicate", "REPLICAS", 1)
    _offload(reader)
    reader.set("compile", "blocks" if reader.flag("COMPILE") else "none", "COMPILE")
    _optimizer(reader)
    kernel = reader.one_of("ATTENTION", {name: word for word, name in _ATTENTION.items()}, "flash", fold=False)
    reader.set("attention", kernel, "ATTENTION")
    reader.set("strategy.expandable_segments", reader.flag("EXPANDABLE_SEGMENTS"), "EXPANDABLE_SEGMENTS")
    reader.harmless("STEPS", "PREDICTED.")
    return reader.finish()


def _constants(document: Document) -> Document:
    """The document of what is assigned before the imports; nothing is run."""
    head = document.text.partition("\nimport ")[0]
    try:
        with warnings.catch_warnings():  # the parser's doubts about a text are no reader's business
            warnings.simplefilter("ignore", SyntaxWarning)
            tree = ast.parse(head)
        pairs = [(node, ast.literal_eval(node.value)) for node in tree.body if isinstance(node, ast.Assign)]
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        message = "must assign plain values, as memcalc export writes them"
        raise FileError("file", str(document.path), message) from None
    starts = [0]
    for line in head.splitlines(keepends=True):
        starts.append(starts[-1] + len(line.encode()))
    data: dict[str, Any] = {}
    spans: dict[KeyPath, Span] = {}
    for assignment, value in pairs:
        name = ast.unparse(assignment.targets[0])
        begin, end = (starts[line - 1] + column for line, column in _ends(assignment.value))
        data[name] = list(value) if isinstance(value, tuple) else value
        spans[(name,)] = Span(starts[assignment.lineno - 1], begin, end)
    return replace(document, data=data, find_spans=lambda: spans)


def _ends(node: ast.expr) -> tuple[tuple[int, int], tuple[int, int]]:
    return (node.lineno, node.col_offset), (node.end_lineno or node.lineno, node.end_col_offset or node.col_offset)


def _model(reader: ConfigReader) -> None:
    """The preset by name, whose sizes stand beside it, or a path."""
    name = reader.text("MODEL")
    reader.set("model", name or None, "MODEL")
    stated = reader.table("CONFIG")
    reader.harmless("CONFIG.")
    spec = _preset(name) if stated else None
    if spec is not None and sizes(spec) != stated:
        says = f"CONFIG is not that of {name}, whose sizes count here: give --model a config.json of your own"
        reader.note("warning", "MC002", "CONFIG", says)


def _preset(name: str) -> Model | None:
    try:
        return catalog.model(name)
    except MemcalcError:  # one of the user's own
        return None


def _precision(reader: ConfigReader) -> None:
    names = {name: name for name in _DTYPES}
    weights, reduce = (reader.one_of(key, names, "float32") for key in ("WEIGHTS", "REDUCE"))
    compute = reader.one_of("COMPUTE", {**names, "float16": "float16"}, "bfloat16")
    known = {dtypes: name for name, dtypes in _PRECISIONS.items()}
    chosen = (weights, compute, bool(reader.flag("AUTOCAST")))
    if chosen not in known:
        raise reader.error("COMPUTE", compute, f"with WEIGHTS {weights} and this AUTOCAST, memcalc knows no precision")
    reader.set("precision", known[chosen], "COMPUTE")
    if known[chosen].endswith("-mixed"):
        reader.set("strategy.reduce_dtype", _DTYPES[reduce], "REDUCE")
    elif reduce != compute:
        raise reader.error("REDUCE", reduce, f"must be {compute}, like COMPUTE")


def _recompute(reader: ConfigReader) -> None:
    """A slice of the blocks, and the part of each that is computed again."""
    chosen, part = reader.items("CHECKPOINTED_BLOCKS"), reader.text("CHECKPOINTED_PART")
    policies = {name: policy for policy, name in _PARTS.items()}
    first, stop, step = chosen if len(chosen) == 3 else (None, None, None)
    keeps = reader.one_of("CHECKPOINTS_KEEP", {"": "", "operators": "selective-ops"}, "")
    if keeps and (part, first, stop, step) == ("", 0, None, 1):
        policy = keeps
    elif keeps:
        raise reader.error("CHECKPOINTS_KEEP", "operators", "must be of all blocks: CHECKPOINTED_BLOCKS (0, None, 1)")
    elif part in policies and (first, stop, step) == (0, None, 1):
        policy = policies[part]
    elif part == "" and isinstance(step, int) and step > 0 and stop is None and first == step - 1:
        policy = "full" if step == 1 else f"every-{step}"
    elif part == "" and first == 0 and step == 1 and isinstance(stop, int) and stop >= 0:
        policy = f"block-{stop}" if stop else "none"
    else:
        raise reader.error("CHECKPOINTED_BLOCKS", chosen, "must be (0, N, 1), (K - 1, None, K) or (0, None, 1)")
    reader.set("recompute", policy, "CHECKPOINTED_BLOCKS")


def _offload(reader: ConfigReader) -> None:
    parts = [part for part, key in _OFFLOADS.items() if reader.flag(key)]
    reader.set("offload", tuple(parts), "OFFLOAD")


def _optimizer(reader: ConfigReader) -> None:
    name = reader.one_of("OPTIMIZER", {"AdamW": "adamw", "SGD": "sgd"}, "adamw", fold=False)
    options = "OPTIMIZER_OPTIONS"
    momentum = name == "sgd" and bool(reader.number(f"{options}.momentum", 0.0))
    reader.set("optimizer", "sgd-momentum" if momentum else name, "OPTIMIZER")
    set_decay(reader, name, f"{options}.weight_decay")
    kernels = ("fused", "foreach")
    chosen_by_torch = not any(reader.has(f"{options}.{kind}") for kind in kernels)
    usual = "foreach" if chosen_by_torch else "loop"  # torch 2.13 optim/adam.py
    chosen = [kind for kind in kernels if reader.flag(f"{options}.{kind}")]
    reader.set("optimizer_impl", chosen[0] if chosen else usual, options)


def write(job: ConfigJob) -> dict[str, Any]:
    """Return the constants of the script that runs a job."""
    plan = job.strategy
    job.require(job.framework == "fsdp2", "framework", "this script is written for --framework fsdp2")
    usual = Strategy()
    for name in Strategy.model_fields:
        value = getattr(plan, name)
        fine = name in _STATED or value == getattr(usual, name)
        job.require(fine, name.replace("_", "-"), "the FSDP2 script cannot state it", value)
    spec = _spec(job)
    _check_split(job, spec)
    weights, compute, autocast = _PRECISIONS[plan.precision]
    optimizer, options = _OPTIMIZERS[plan.optimizer]
    blocks, part = _checkpointed(job)
    if plan.sgd_weight_decay:
        options = options | {"weight_decay": DECAY}
    kernels = {"foreach": plan.optimizer_impl == "foreach", "fused": plan.optimizer_impl == "fused"}
    reduce = {name: dtype for dtype, name in _DTYPES.items()}[plan.reduce_dtype]
    return {
        "MODEL": job.model,
        "CONFIG": sizes(spec),
        "GPUS": job.gpus,
        "TP": plan.tp,
        "SEQ_LEN": job.seq_len,
        "MICRO_BATCH": plan.micro_batch,
        "ACCUMULATION": job.accumulation,
        "WEIGHTS": weights,
        "COMPUTE": compute,
        "REDUCE": reduce if plan.precision.endswith("-mixed") else compute,
        "AUTOCAST": autocast,
        "RESHARD": plan.zero == 3,
        "RESHARD_ROOT": plan.reshard == "always",
        "REPLICAS": plan.dp_replicate,
        "CHECKPOINTED_BLOCKS": blocks,
        "CHECKPOINTED_PART": part,
        "CHECKPOINTS_KEEP": "operators" if plan.recompute == "selective-ops" else "",
        **{key: part in plan.offload for part, key in _OFFLOADS.items()},
        "COMPILE": plan.compile == "blocks",
        "OPTIMIZER": optimizer,
        "OPTIMIZER_OPTIONS": {**options, **kernels},
        "ATTENTION": _ATTENTION[plan.attention],
        "EXPANDABLE_SEGMENTS": plan.expandable_segments,
    }


def _spec(job: ConfigJob) -> Model:
    """The model: a decoder that one of Transformers' classes runs."""
    spec = job.sized()
    require_decoder(job, "memcalc's script of FSDP 2")
    job.require(not spec.is_moe, "model", "the script is written for dense decoders")
    path = not spec.hf_class and ("/" in job.model or job.model.endswith(".json")) and not job.model.endswith(".toml")
    known = path or bool(spec.hf_class and spec.hf_config)
    job.require(known, "model", "the script needs a class of Transformers: a preset with one, or a config.json")
    return spec


def _check_split(job: ConfigJob, spec: Model) -> None:
    """Refuse tensor parallelism that would leave ranks MLPs of different widths."""
    tp = job.strategy.tp
    widths = {getattr(group.block.mlp, "ffn", tp) for group in spec.groups}
    job.require(not any(width % tp for width in widths), "tp", f"must be a divisor of the MLP's width of {job.model}")


def _checkpointed(job: ConfigJob) -> tuple[tuple[int | None, ...], str]:
    """The slice of the blocks that are computed again, and which part of each."""
    name = job.strategy.recompute
    policy = parse_policy(name)
    if name in _PARTS:
        return (0, None, 1), _PARTS[name]
    slices = {"none": (0, 0, 1), "full": (0, None, 1), "every": (policy.count - 1, None, policy.count)}
    slices |= {"block": (0, policy.count, 1), "selective-ops": (0, None, 1)}
    return slices[policy.kind], ""


_SAYS = {
    "GPUS": "processes, one for each GPU",
    "TP": "ranks that share a data-parallel rank's matrices (tensor parallelism); 1 for none",
    "MICRO_BATCH": "sequences that a rank passes at a time",
    "WEIGHTS": "dtype of the shards, of gradients and of the optimizer's states",
    "COMPUTE": "dtype of what is gathered",
    "REDUCE": "dtype in which gradients are reduced",
    "RESHARD": "whether blocks are sharded again after forward (ZeRO 3) or stay whole until backward (ZeRO 2)",
    "RESHARD_ROOT": "whether the root is, too, so that the loss, outside of the model, runs without it (PyTorch 2.8)",
    "REPLICAS": "groups of ranks each of which has all shards, between which gradients are all-reduced (HSDP)",
    "CHECKPOINTED_BLOCKS": "which blocks are computed again in backward: first, end and step of a slice",
    "CHECKPOINTED_PART": "the module of such a block that is; empty for the whole block",
    "CHECKPOINTS_KEEP": "operators: attention and every second matrix product are not computed again",
    "OFFLOAD": "whether weights, gradients and the optimizer's states stay in host memory",
    "OFFLOAD_ACTIVATIONS": "whether what blocks keep for backward waits there",
    "COMPILE": "whether each block is compiled",
}


def text(job: ConfigJob) -> str:
    """Return the script that runs a job."""
    fields = write(job)
    spec = _spec(job)
    config = "transformers.AutoConfig.from_pretrained(MODEL)"
    if fields["CONFIG"]:
        config = f"transformers.{spec.hf_class}.config_class(**CONFIG)"
    lines = [f"{name} = {_value(value)}{_comment(name, job)}" for name, value in fields.items()]
    lines += [f"PREDICTED = {_value(dict(job.predicted))}  # bytes", "STEPS = 10"]
    parts = {"title": f"{job.model} on {job.gpus} x {job.gpu}", "constants": "\n".join(lines) + "\n", "config": config}
    template = (files("memcalc.convert.formats") / "fsdp2_script.txt").read_text(encoding="utf-8")
    return re.sub(r"\{(title|constants|config)\}", lambda match: parts[match[1]], template)


def _comment(name: str, job: ConfigJob) -> str:
    if name == "ACCUMULATION":
        return f"  # micro-batches a step, which has {job.global_batch} sequences in total"
    return f"  # {_SAYS[name]}" if name in _SAYS else ""


def _value(value: Any) -> str:
    if isinstance(value, dict):
        pairs = ", ".join(f"{_value(key)}: {_value(inner)}" for key, inner in value.items())
        return f"{{{textwrap.fill(pairs, 100)}}}"
    return json.dumps(value) if isinstance(value, str) else repr(value)


def _recognise(document: Document) -> bool:
    return document.kind == "shell" and document.text.startswith(MARKER)


FORMAT = Format(
    "fsdp2", "FSDP2 script", "PyTorch 2.13", _recognise, read, write, text, kind="shell", filename="train_fsdp2.py"
)
