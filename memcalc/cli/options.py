"""The options that mean the same everywhere, declared once, and how a command takes them.

Values stay as typed: the library reads and checks them, so that a wrong one gets the same sentence from Python and
from the command line.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, TypeVar, get_args

import typer

from memcalc.errors import InputError

__all__ = [
    "CALIBRATION",
    "CHART",
    "DESTINATION",
    "FREE",
    "JOB",
    "MODULE",
    "PRESETS",
    "TIMELINE",
    "Command",
    "Shared",
    "given",
    "takes",
]

Command = TypeVar("Command", bound=Callable[..., Any])
_JOB, _PARALLELISM, _MEMORY, _ADAPTERS, _OUTPUT = "Job", "Parallelism", "Memory", "Adapters", "Output"
_MODULE = "Module"


@dataclass(frozen=True)
class Shared:
    """One option; `kind` is str, bool (a flag) or list (repeatable)."""

    name: str
    panel: str
    metavar: str
    help: str
    kind: type = str
    names: str = ""
    """What completes it: a name of :mod:`memcalc.specs.strategy`, or models, gpus, nodes."""
    required: bool = False
    negative: bool = False

    def parameter(self) -> inspect.Parameter:
        """Return the option as typer reads it from a signature."""
        flag = f"--{self.name.replace('_', '-')}"
        declared = f"{flag}/--no-{flag[2:]}" if self.negative else flag
        info = typer.Option(
            declared, help=self.help, metavar=self.metavar, rich_help_panel=self.panel,
            show_default=False, autocompletion=self._complete if self.names else None,
        )  # fmt: skip
        kind: Any = list[str] if self.kind is list else self.kind
        annotation: Any = Annotated[kind if self.required else kind | None, info]
        default = inspect.Parameter.empty if self.required else None
        return inspect.Parameter(self.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)

    def _complete(self, incomplete: str) -> list[str]:
        return [name for name in known_names(self.names) if name.startswith(incomplete)]


def known_names(names: str) -> tuple[str, ...]:
    """Return the presets of a kind, or the values of a choice of the strategy."""
    from memcalc import catalog
    from memcalc.specs import strategy

    presets = {"models": "model", "gpus": "gpu", "nodes": "node"}
    return tuple(catalog.names(presets[names])) if names in presets else get_args(getattr(strategy, names))  # type: ignore[arg-type]


CALIBRATION = (
    Shared("calibration", _MEMORY, "FILE",
        "A calibration of this GPU (memcalc calibrate); by default the installed one; none switches it off.",
    ),
)  # fmt: skip
JOB = (
    Shared("model", _JOB, "NAME|FILE|DIR",
        "A preset, a config.json, a directory with one, a .toml file, or a recorded module's .json.",
        names="models", required=True,
    ),
    Shared("gpu", _JOB, "NAME", "The GPU; `memcalc gpus` lists them.", names="gpus", required=True),
    Shared("gpus", _JOB, "N", "GPUs in all; plan tries 1, 2, 4, … of one node when left out."),
    Shared("node", _JOB, "NAME", "The kind of host; `memcalc nodes` lists them.", names="nodes"),
    Shared("seq_len", _JOB, "N", "Tokens a sequence."),
    Shared("micro_batch", _JOB, "N", "Sequences one data-parallel rank passes at a time."),
    Shared("global_batch", _JOB, "N|TOKENS", 'Sequences an optimizer step, or tokens as in "4M tokens".'),
    Shared("framework", _JOB, "NAME[@ERA]",
        "fsdp2, fsdp1, ddp, deepspeed, megatron, hf, torchtitan, torchtune, litgpt or plain; an era is a "
        "version or a month.",
        names="FrameworkName",
    ),
    Shared("precision", _JOB, "NAME",
        "fp32, fp16-mixed, bf16-mixed, fp16-autocast, bf16-autocast, bf16 or fp8-mixed.",
        names="Precision",
    ),
    Shared("zero", _PARALLELISM, "0|1|2|3", "ZeRO stage; under FSDP 2 is not resharded after forward, 3 is."),
    Shared("tp", _PARALLELISM, "N", "Tensor-parallel ranks."),
    Shared("sp", _PARALLELISM, "", "Sequence parallelism beside tensor parallelism.", kind=bool, negative=True),
    Shared("pp", _PARALLELISM, "N", "Pipeline stages."),
    Shared("pp_schedule", _PARALLELISM, "NAME",
        "1f1b, interleaved, gpipe, interleaved-zb, zb-h1, zb-h2, zb-1p, zb-2p or zb-v; what the framework runs.",
        names="Schedule",
    ),
    Shared("vpp", _PARALLELISM, "N", "Model chunks a pipeline stage, under interleaved, interleaved-zb or zb-v."),
    Shared("cp", _PARALLELISM, "N", "Context-parallel ranks."),
    Shared("cp_kind", _PARALLELISM, "NAME", "ring, allgather or a2a.", names="ContextParallel"),
    Shared("ep", _PARALLELISM, "N", "Expert-parallel ranks."),
    Shared("optimizer", _MEMORY, "NAME",
        "adamw, adamw-8bit, paged-adamw, paged-adamw-8bit, adafactor, lion, lion-8bit, sgd, sgd-momentum "
        "or muon.",
        names="Optimizer",
    ),
    Shared("optimizer_impl", _MEMORY, "NAME", "fused, foreach or loop.", names="OptimizerImpl"),
    Shared("optimizer_in_backward", _MEMORY, "", "Step each tensor as its gradient arrives.", kind=bool),
    Shared("recompute", _MEMORY, "POLICY",
        "none, full, every-K, segments-K, sqrt, attention, mlp, selective-ops, selective-core-attn, "
        "modules:A,B, block-N or uniform-N.",
    ),
    Shared("offload", _MEMORY, "LIST",
        "none, or any of optimizer, params, activations, with commas.",
        names="Offload",
    ),
    Shared("offload_to", _MEMORY, "TIER", "cpu, nvme or cxl.", names="Tier"),
    Shared("compress_activations", _MEMORY, "NAME", "none; int8 and int4 are not modelled yet."),
    Shared("attention", _MEMORY, "NAME", "flash, efficient, cudnn, math or eager.", names="AttentionImpl"),
    Shared("loss", _MEMORY, "NAME", "standard, chunked, fused-kernel, fused-linear, parallel or triton.", names="Loss"),
    Shared("kernels", _MEMORY, "NAME",
        "Norms, rotary and activations as the model writes them (model), fused, or in TransformerEngine modules (te).",
        names="Kernels",
    ),
    Shared("compile", _MEMORY, "NAME", "none, blocks, blocks+loss, model or loss.", names="Compile"),
    Shared("lora", _ADAPTERS, "R[:TARGETS]", "Train LoRA adapters of rank R instead of the weights."),
    Shared("adapter_dtype", _ADAPTERS, "DTYPE", "fp32 or bf16: the adapters and their states.", names="AdapterDtype"),
    Shared("autocast", _ADAPTERS, "", "Autocast over a 16-bit base.", kind=bool, negative=True),
    Shared("also_train", _ADAPTERS, "LIST", "What is trained in full beside the adapters: embedding, head."),
    Shared("quantize", _ADAPTERS, "NAME",
        "Base weights: none, nf4, nf4-dq, int8, gptq-int4 or gptq-int8.",
        names="Quantization",
    ),
    *CALIBRATION,
    Shared("set", _MEMORY, "KEY=VALUE",
        "Any field by its dotted name, such as strategy.reduce_dtype=bf16; repeatable.",
        kind=list,
    ),
)  # fmt: skip
MODULE = (
    Shared("module", _MODULE, "PACKAGE:FACTORY", "In the place of a model: a function that returns a torch.nn.Module."),
    Shared("inputs", _MODULE, "PACKAGE:FUNCTION",
        "One batch for it: function(micro_batch, seq_len); example_inputs beside the factory when left out.",
    ),
    Shared("loss_fn", _MODULE, "PACKAGE:FUNCTION", "The loss of its output; the output's own when left out."),
    Shared("block_class", _MODULE, "NAME", "The class of its blocks; found when left out."),
)  # fmt: skip
FREE = tuple(replace(option, required=False) for option in JOB)
"""The same where something else may say the job."""
PRESETS = (Shared("preset_dir", _OUTPUT, "DIR", "Your own presets, looked up first; repeatable.", kind=list),)
DESTINATION = (
    Shared("format", _OUTPUT, "NAME",
        "rich, plain, markdown, csv, json, latex, html or svg; by default from the ending of FILE, else rich.",
    ),
    Shared("output", _OUTPUT, "FILE", "Write there instead of on the screen."),
    Shared("force", _OUTPUT, "", "Replace FILE where it exists.", kind=bool),
)  # fmt: skip
CHART = (Shared("chart", _OUTPUT, "FILE", "Draw it besides: .svg, .png, .pdf or .html, by the ending of FILE."),)
TIMELINE = (Shared("timeline", _OUTPUT, "FILE", "Draw memory over one step, by phase and stage, in the same formats."),)


def takes(*options: Shared) -> Callable[[Command], Command]:
    """Give a command `options` besides its own parameters; it receives them as keywords."""

    def decorate(command: Command) -> Command:
        signature = inspect.signature(command, eval_str=True)
        own = [part for part in signature.parameters.values() if part.kind is not inspect.Parameter.VAR_KEYWORD]
        parts = [*(option.parameter() for option in options), *own]
        parts.sort(key=lambda part: part.kind)
        command.__signature__ = signature.replace(parameters=parts)  # type: ignore[attr-defined]
        command.__annotations__ = {part.name: part.annotation for part in parts}
        return command

    return decorate


def given(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the words for the library: what was typed, under the library's names."""
    words = {name: value for name, value in options.items() if value not in (None, [])}
    pairs, dirs = words.pop("set", []), words.pop("preset_dir", ())
    return {**words, "preset_dirs": tuple(dirs), "settings": dict(_pair(pair) for pair in pairs)}


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise InputError("set", text, "must be key=value, such as strategy.reduce_dtype=bf16")
    return key.strip(), value.strip()
