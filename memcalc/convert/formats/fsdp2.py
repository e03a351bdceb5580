"""A training script for FSDP2, as memcalc writes it: the plan stands in its constants, which are read back.

The calls are those of PyTorch 2.13 (torch/distributed/fsdp/_fully_shard, torch/distributed/algorithms/_checkpoint,
torch/nn/attention) and Transformers 5.23 (modeling_utils.py: from_config, init_weights, _no_split_modules).
"""

from __future__ import annotations

import ast
import json
import textwrap
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from memcalc.convert.config import Config, Reading
from memcalc.convert.document import Document, Place, Span
from memcalc.convert.formats.base import Format
from memcalc.convert.formats.fsdp2_script import BODY, MARKER, TOP
from memcalc.convert.job import Job
from memcalc.errors import FileError, MemcalcError
from memcalc.formulas.recompute import parse_policy
from memcalc.specs.strategy import Strategy

if TYPE_CHECKING:
    from memcalc.specs.model import Model

_DTYPES = {"float32": "fp32", "bfloat16": "bf16"}
_PRECISIONS = {
    "bf16-mixed": ("float32", "bfloat16", False),
    "bf16": ("bfloat16", "bfloat16", False),
    "fp32": ("float32", "float32", False),
    "bf16-autocast": ("float32", "float32", True),
}
"""Dtypes of the shards and of what is gathered, and whether autocast runs over them."""
_OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "adamw": ("AdamW", {}),
    "sgd": ("SGD", {}),
    "sgd-momentum": ("SGD", {"momentum": 0.9}),
}
_ATTENTION = {
    "flash": "FLASH_ATTENTION",
    "efficient": "EFFICIENT_ATTENTION",
    "cudnn": "CUDNN_ATTENTION",
    "math": "MATH",
    "eager": "EAGER",
}
_PARTS = {"mlp": "mlp", "attention": "self_attn"}
"""Modules of a block that a policy computes again, as most classes of Transformers call them."""
WITH_PARTS = (
    "CohereForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM", "GemmaForCausalLM", "GlmForCausalLM",
    "LlamaForCausalLM", "MistralForCausalLM", "Olmo2ForCausalLM", "OlmoForCausalLM", "Phi3ForCausalLM",
    "PhiForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "SmolLM3ForCausalLM", "Starcoder2ForCausalLM",
)  # fmt: skip
"""Classes whose blocks have both under these names."""
_SAID = frozenset(
    [
        "framework", "precision", "optimizer", "optimizer_impl", "zero", "dp", "recompute", "offload", "attention",
        "reduce_dtype", "reshard", "expandable_segments", "micro_batch", "checkpoint", "offload_to",
    ]
)  # fmt: skip
"""Fields of a strategy that the script follows; it is written for no other value of the rest than the default."""


def read(document: Document) -> Config:
    """Return what the constants of a script say of a job."""
    reading = Reading(_constants(document), "fsdp2", "the script of memcalc export")
    reading.say("framework", "fsdp2", "MODEL")
    for key, word in (
        ("GPUS", "gpus"),
        ("SEQ_LEN", "seq_len"),
        ("MICRO_BATCH", "micro_batch"),
        ("ACCUMULATION", "accumulation"),
    ):
        reading.say(word, reading.whole(key, 1, low=1), key)
    _model(reading)
    _precision(reading)
    _recompute(reading)
    reading.say("zero", 3 if reading.flag("RESHARD", True) else 2, "RESHARD")
    reading.say("offload", ("params",) if reading.flag("OFFLOAD") else (), "OFFLOAD")
    _optimizer(reading)
    kernel = reading.one_of("ATTENTION", {name: word for word, name in _ATTENTION.items()}, "flash", fold=False)
    reading.say("attention", kernel, "ATTENTION")
    reading.say("strategy.expandable_segments", reading.flag("EXPANDABLE_SEGMENTS"), "EXPANDABLE_SEGMENTS")
    reading.harmless("STEPS", "PREDICTED.")
    return reading.finish()


def _constants(document: Document) -> Document:
    """The document of what is assigned before the imports; nothing is run."""
    head = document.text.partition("\nimport ")[0]
    try:
        with warnings.catch_warnings():  # the parser's doubts about a text are no reader's business
            warnings.simplefilter("ignore", SyntaxWarning)
            tree = ast.parse(head)
        pairs = [(one, ast.literal_eval(one.value)) for one in tree.body if isinstance(one, ast.Assign)]
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        said = "must assign plain values, as memcalc export writes them"
        raise FileError("file", str(document.path), said) from None
    starts = [0]
    for line in head.splitlines(keepends=True):
        starts.append(starts[-1] + len(line.encode()))
    data: dict[str, Any] = {}
    spans: dict[Place, Span] = {}
    for one, value in pairs:
        name = ast.unparse(one.targets[0])
        begin, end = (starts[line - 1] + column for line, column in _ends(one.value))
        data[name] = list(value) if isinstance(value, tuple) else value
        spans[(name,)] = Span(starts[one.lineno - 1], begin, end)
    return replace(document, data=data, find_spans=lambda: spans)


def _ends(node: ast.expr) -> tuple[tuple[int, int], tuple[int, int]]:
    return (node.lineno, node.col_offset), (node.end_lineno or node.lineno, node.end_col_offset or node.col_offset)


def _model(reading: Reading) -> None:
    """The preset by name, whose sizes stand beside it, or a path."""
    name = reading.text("MODEL")
    reading.say("model", name or None, "MODEL")
    sizes = reading.table("CONFIG")
    reading.harmless("CONFIG.")
    spec = _preset(name) if sizes else None
    if spec is not None and _config(spec) != sizes:
        says = f"CONFIG is not that of {name}, whose sizes count here: give --model a config.json of your own"
        reading.note("warning", "MC002", "CONFIG", says)


def _config(spec: Model) -> dict[str, Any]:
    """The sizes that the model's class in Transformers takes; TOML has no null, and `null` stands for it."""
    return {key: None if value == "null" else value for key, value in spec.hf_config.items()}


def _preset(name: str) -> Model | None:
    from memcalc import catalog

    try:
        return catalog.model(name)
    except MemcalcError:  # one of the user's own
        return None


def _precision(reading: Reading) -> None:
    names = {name: name for name in _DTYPES}
    weights, compute, reduce = (
        reading.one_of(key, names, default)
        for key, default in (("WEIGHTS", "float32"), ("COMPUTE", "bfloat16"), ("REDUCE", "float32"))
    )
    known = {dtypes: name for name, dtypes in _PRECISIONS.items()}
    chosen = (weights, compute, bool(reading.flag("AUTOCAST")))
    if chosen not in known:
        raise reading.wrong("COMPUTE", compute, f"with WEIGHTS {weights} and this AUTOCAST, memcalc knows no precision")
    reading.say("precision", known[chosen], "COMPUTE")
    if known[chosen] == "bf16-mixed":
        reading.say("strategy.reduce_dtype", _DTYPES[reduce], "REDUCE")
    elif reduce != compute:
        raise reading.wrong("REDUCE", reduce, f"must be {compute}, like COMPUTE")


def _recompute(reading: Reading) -> None:
    """A slice of the blocks, and the part of each that is computed again."""
    chosen, part = reading.items("CHECKPOINTED_BLOCKS"), reading.text("CHECKPOINTED_PART")
    policies = {name: policy for policy, name in _PARTS.items()}
    first, stop, step = chosen if len(chosen) == 3 else (None, None, None)
    if part in policies and (first, stop, step) == (0, None, 1):
        policy = policies[part]
    elif part == "" and isinstance(step, int) and step > 0 and stop is None and first == step - 1:
        policy = "full" if step == 1 else f"every-{step}"
    elif part == "" and first == 0 and step == 1 and isinstance(stop, int) and stop >= 0:
        policy = f"block-{stop}" if stop else "none"
    else:
        raise reading.wrong("CHECKPOINTED_BLOCKS", chosen, "must be (0, N, 1), (K - 1, None, K) or (0, None, 1)")
    reading.say("recompute", policy, "CHECKPOINTED_BLOCKS")


def _optimizer(reading: Reading) -> None:
    name = reading.one_of("OPTIMIZER", {"AdamW": "adamw", "SGD": "sgd"}, "adamw", fold=False)
    options = "OPTIMIZER_OPTIONS"
    momentum = name == "sgd" and bool(reading.number(f"{options}.momentum", 0.0))
    reading.say("optimizer", "sgd-momentum" if momentum else name, "OPTIMIZER")
    kernel = [kind for kind in ("fused", "foreach") if reading.flag(f"{options}.{kind}")]
    reading.say("optimizer_impl", kernel[0] if kernel else "loop", options)


def write(job: Job) -> dict[str, Any]:
    """Return the constants of the script that runs a job."""
    plan = job.strategy
    job.must(job.framework == "fsdp2", "framework", job.framework, "this script is written for --framework fsdp2")
    job.must(plan.precision in _PRECISIONS, "precision", plan.precision, f"the script has {', '.join(_PRECISIONS)}")
    job.must(plan.optimizer in _OPTIMIZERS, "optimizer", plan.optimizer, f"the script has {', '.join(_OPTIMIZERS)}")
    job.must(plan.offload in {(), ("params",)}, "offload", ",".join(plan.offload), "FSDP2 itself offloads params alone")
    usual = Strategy()
    for name in Strategy.model_fields:
        value = getattr(plan, name)
        fine = name in _SAID or value == getattr(usual, name)
        job.must(fine, name.replace("_", "-"), value, "the script of memcalc export does not have it")
    spec = _spec(job)
    weights, compute, autocast = _PRECISIONS[plan.precision]
    optimizer, options = _OPTIMIZERS[plan.optimizer]
    blocks, part = _checkpointed(job, spec)
    kernels = {"foreach": plan.optimizer_impl == "foreach", "fused": plan.optimizer_impl == "fused"}
    reduce = compute if plan.precision != "bf16-mixed" or plan.reduce_dtype == "bf16" else "float32"
    return {
        "MODEL": job.model,
        "CONFIG": _config(spec),
        "GPUS": job.gpus,
        "SEQ_LEN": job.seq_len,
        "MICRO_BATCH": plan.micro_batch,
        "ACCUMULATION": job.accumulation,
        "WEIGHTS": weights,
        "COMPUTE": compute,
        "REDUCE": reduce,
        "AUTOCAST": autocast,
        "RESHARD": plan.zero == 3,
        "CHECKPOINTED_BLOCKS": blocks,
        "CHECKPOINTED_PART": part,
        "OFFLOAD": bool(plan.offload),
        "OPTIMIZER": optimizer,
        "OPTIMIZER_OPTIONS": {**options, **kernels},
        "ATTENTION": _ATTENTION[plan.attention],
        "EXPANDABLE_SEGMENTS": plan.expandable_segments,
    }


def _spec(job: Job) -> Model:
    """The model: a decoder that one of Transformers' classes runs."""
    from memcalc.api import load_model

    spec = job.spec or load_model(job.model)
    dense = not spec.is_moe and all(group.tower == "decoder" for group in spec.groups)
    job.must(dense, "model", job.model, "the script is written for dense decoders")
    path = not spec.hf_class and ("/" in job.model or job.model.endswith(".json")) and not job.model.endswith(".toml")
    known = path or bool(spec.hf_class and spec.hf_config)
    job.must(known, "model", job.model, "the script needs a class of Transformers: a preset with one, or a config.json")
    return spec


def _checkpointed(job: Job, spec: Model) -> tuple[tuple[int | None, ...], str]:
    """The slice of the blocks that are computed again, and which part of each."""
    name = job.strategy.recompute
    policy = parse_policy(name)
    if name in _PARTS:
        job.must(spec.hf_class in WITH_PARTS, "recompute", name, f"blocks of {job.model} may not have it as one module")
        return (0, None, 1), _PARTS[name]
    slices = {"none": (0, 0, 1), "full": (0, None, 1), "every": (policy.count - 1, None, policy.count)}
    slices["block"] = (0, policy.count, 1)
    job.must(policy.kind in slices, "recompute", name, "the script has none, full, every-K, block-N, mlp and attention")
    return slices[policy.kind], ""


_SAYS = {
    "GPUS": "processes, one for each GPU",
    "MICRO_BATCH": "sequences that a rank passes at a time",
    "WEIGHTS": "dtype of the shards, of gradients and of the optimizer's states",
    "COMPUTE": "dtype of what is gathered",
    "REDUCE": "dtype in which gradients are reduced",
    "RESHARD": "whether blocks are sharded again after forward (ZeRO 3) or stay whole until backward (ZeRO 2)",
    "CHECKPOINTED_BLOCKS": "which blocks are computed again in backward: first, end and step of a slice",
    "CHECKPOINTED_PART": "the module of such a block that is; empty for the whole block",
    "OFFLOAD": "whether weights, gradients and the optimizer's states stay in host memory",
}


def text(job: Job) -> str:
    """Return the script that runs a job."""
    fields = write(job)
    spec = _spec(job)
    config = "transformers.AutoConfig.from_pretrained(MODEL)"
    if fields["CONFIG"]:
        config = f"transformers.{spec.hf_class}.config_class(**CONFIG)"
    lines = [f"{name} = {_value(value)}{_comment(name, job)}" for name, value in fields.items()]
    lines += [f"PREDICTED = {_value(dict(job.predicted))}  # bytes", "STEPS = 10"]
    head = TOP.replace("{title}", f"{job.model} on {job.gpus} x {job.gpu}")
    return head + "\n".join(lines) + "\n" + BODY.replace("{config}", config)


def _comment(name: str, job: Job) -> str:
    if name == "ACCUMULATION":
        return f"  # micro-batches a step, which has {job.global_batch} sequences in all"
    return f"  # {_SAYS[name]}" if name in _SAYS else ""


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return (
            "{" + textwrap.fill(", ".join(f"{_value(key)}: {_value(inner)}" for key, inner in value.items()), 100) + "}"
        )
    return json.dumps(value) if isinstance(value, str) else repr(value)


FORMAT = Format(
    name="fsdp2",
    title="FSDP2 script",
    software="PyTorch 2.13",
    recognise=lambda document: document.kind == "shell" and document.text.startswith(MARKER),
    read=read,
    write=write,
    text=text,
    kind="shell",
    filename="train_fsdp2.py",
)
"""A training loop of its own, not a config of a framework."""
