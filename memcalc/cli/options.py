"""The options that mean the same everywhere, and how a command takes them.

Values stay as typed: the library reads and checks them, so that a wrong one gets the same sentence from Python and
from the command line.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Mapping
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar, get_args

import typer

from memcalc.errors import CombinationError, InputError

if TYPE_CHECKING:
    from memcalc.specs.recorded import Source
    from memcalc.specs.strict import Option


Command = TypeVar("Command", bound=Callable[..., Any])
_MODULE, _OUTPUT = "Module", "Output"


class Shared(NamedTuple):
    """One option; `kind` is str, bool (a flag) or list (repeatable)."""

    name: str
    panel: str
    metavar: str
    help: str
    kind: type = str
    values: tuple[str, ...] = ()
    """Names that complete it."""
    presets: str = ""
    """Or the kind of presets whose names do: models, gpus or nodes."""
    required: bool = False
    negative: bool = False
    letter: str = ""
    """The option in one letter."""

    @classmethod
    def of(cls, option: Option) -> Shared:
        """Return an option of the table."""
        kind = {"flag": bool, "list": list}.get(option.kind, str)
        return cls(
            option.name, option.panel, option.metavar, option.text, kind, option.values, option.completed_by,
            option.required, option.negative,
        )  # fmt: skip

    @property
    def flag(self) -> str:
        """The option as it is typed."""
        return f"--{self.name.replace('_', '-')}"

    def is_needed(self, flags: Collection[str]) -> bool:
        """Whether a command line has to be read with it: any but an optional text that no flag names."""
        return self.required or self.kind is not str or bool(self.letter) or self.flag in flags

    def parameter(self) -> inspect.Parameter:
        """Return the option as typer reads it from a signature."""
        flag = self.flag
        declared = f"{flag}/--no-{flag[2:]}" if self.negative else flag
        letter = [f"-{self.letter}"] if self.letter else []
        info = typer.Option(
            declared, *letter, help=self.help, metavar=self.metavar, rich_help_panel=self.panel,
            show_default=False, autocompletion=completes(*self.values, presets=self.presets) if self._named else None,
        )  # fmt: skip
        kind: Any = list[str] if self.kind is list else self.kind
        annotation: Any = Annotated[kind if self.required else kind | None, info]
        default = inspect.Parameter.empty if self.required else None
        return inspect.Parameter(self.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)

    @property
    def _named(self) -> bool:
        return bool(self.values or self.presets)


@cache
def job() -> tuple[Shared, ...]:
    """Return the options that say a job, read from their table when a command that takes them is built."""
    from memcalc.specs.options import COMMAND_LINE

    return tuple(Shared.of(option) for option in COMMAND_LINE)


def free() -> tuple[Shared, ...]:
    """Return the same where something else may say the job."""
    return tuple(option._replace(required=False) for option in job())


def calibration() -> tuple[Shared, ...]:
    """Return the option for a calibration alone."""
    return tuple(option for option in job() if option.name == "calibration")


MODULE = (
    Shared("module", _MODULE, "PACKAGE:FACTORY", "Your own model: package:function returning an nn.Module"),
    Shared("inputs", _MODULE, "PACKAGE:FUNCTION",
        "Function that returns one batch: function(micro_batch, seq_len) [default: example_inputs next to the factory]",
    ),
    Shared("loss_fn", _MODULE, "PACKAGE:FUNCTION", "Loss function [default: output.loss]"),
    Shared("block_class", _MODULE, "NAME", "Block class [default: detected]"),
)  # fmt: skip
PRESETS = (Shared("preset_dir", _OUTPUT, "DIR", "Your own presets, looked up first; repeatable.", kind=list),)
DESTINATION = (
    Shared("format", _OUTPUT, "NAME",
        "rich, plain, markdown, csv, json, latex, html, svg or xlsx; by default from the ending of FILE, else rich.",
    ),
    Shared("output", _OUTPUT, "FILE", "Write to FILE"),
    Shared("force", _OUTPUT, "", "Overwrite FILE", kind=bool),
)  # fmt: skip
DETAILS = (Shared("verbose", _OUTPUT, "", "Show all of the answer on the screen.", kind=bool, letter="v"),)
CHART = (Shared("chart", _OUTPUT, "FILE", "Also write a chart: .svg, .png, .pdf, .html"),)
TIMELINE = (Shared("timeline", _OUTPUT, "FILE", "Also chart memory over one step"),)


_ASIDE = re.compile(r" *\([^)]*\)|[;.].*| *\[default.*")
_OPEN = re.compile(r"(?<=[-:])[A-Z].*")
"""What stands for a number or a name within a value, as in every-K."""
_NAMED = frozenset({"NAME", "NAME[@VERSION]", "POLICY", "FORMAT", "LIST", "WHAT"})
"""What stands for a value that the help lists."""


def listed(text: str) -> tuple[str, ...]:
    """Return the names that an option's help lists, one of several words aside.

    >>> listed("Only one reading of 16 bits: pure-16-bit, fp32-master or autocast.")
    ('pure-16-bit', 'fp32-master', 'autocast')
    >>> listed("none, every-K or modules:A,B."), listed("Write to FILE")
    (('none', 'every-', 'modules:'), ())
    """
    first, *others = re.split(r", (?:or )?| or ", _ASIDE.sub("", text))
    names = [name for name in others if " " not in name]
    return tuple(_OPEN.sub("", name) for name in (first.rpartition(" ")[2], *names)) if names else ()


def completes(*names: str, presets: str = "") -> Callable[[str], list[str]]:
    """Complete a value, or the last of several, from `names` or from those of presets: models, gpus or nodes."""

    def complete(incomplete: str) -> list[str]:
        from memcalc import catalog

        known = names or catalog.names(presets.removesuffix("s"))  # type: ignore[arg-type]
        before, last = re.fullmatch(r"(.*[,/])?(.*)", incomplete).groups("")  # type: ignore[union-attr]
        matches = [name for name in known if name.startswith(incomplete)]
        return matches or [before + name for name in known if name.startswith(last) and name not in before]

    return complete


Options = Shared | Callable[[], tuple[Shared, ...]]
"""An option, or what gives several when a command is built."""


def takes(*options: Options, flags: Collection[str] | None = None) -> Callable[[Command], Callable[..., Any]]:
    """Give a command `options` besides its own parameters; it receives them as keywords.

    Of a command line with these `flags` it takes what they name alone, and the command gets None for the others: typer
    builds as much for an option that nobody typed as for one that somebody did.
    """

    def decorate(command: Command) -> Callable[..., Any]:
        signature = inspect.signature(command, eval_str=True)
        parameters = [part for part in signature.parameters.values() if part.kind is not part.VAR_KEYWORD]
        shared = [part for option in options for part in ((option,) if isinstance(option, Shared) else option())]
        built = [option for option in shared if flags is None or option.is_needed(flags)]
        parts = [*(option.parameter() for option in built), *parameters]
        parts.sort(key=lambda part: part.kind)
        for part in parts:
            _, info = get_args(part.annotation)
            if info.autocompletion is None and info.metavar in _NAMED and (names := listed(info.help or "")):
                info.autocompletion = completes(*names)
        order = [*(option.name for option in shared), *(part.name for part in parameters)]

        def taking(**typed: Any) -> Any:
            return command(**{name: typed.get(name) for name in order})

        taking.__signature__ = signature.replace(parameters=parts)  # type: ignore[attr-defined]
        taking.__annotations__ = {part.name: part.annotation for part in parts}
        return taking

    return decorate


def given(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords for the library: what was typed, under the library's names."""
    keywords = {name: value for name, value in options.items() if value not in (None, [])}
    pairs, dirs = keywords.pop("set", []), keywords.pop("preset_dir", ())
    return {**keywords, "preset_dirs": tuple(dirs), "settings": dict(_pair(pair) for pair in pairs)}


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise InputError("set", text, "must be key=value, such as strategy.reduce_dtype=bf16")
    return key.strip(), value.strip()


# --------------------------------------------------------------------------------- a module in the place of a model

MODULE_OPTIONS = ("module", "inputs", "loss_fn", "block_class")
OF_A_STEP = ("precision", "recompute", "optimizer", "optimizer_impl", "micro_batch", "seq_len")
"""What the steps of ``probe --device fake`` are told."""


def model_or_module() -> tuple[Shared, ...]:
    """Return the options that say a job, with those of a module in the place of a model."""
    return (*(option._replace(required=option.required and option.name != "model") for option in job()), *MODULE)


def module_step() -> tuple[Shared, ...]:
    """Return the options of the steps of a module on a fake device."""
    panel = MODULE[0].panel
    return (
        *MODULE,
        *(option._replace(panel=panel) for option in job() if option.name in OF_A_STEP),
        Shared("save", panel, "FILE", "Where the recorded model is written, for --model."),
    )


def source_of(options: dict[str, Any], seq_len: str | None) -> Source | None:
    """Take the options of a module out of the others."""
    module = {name: options.pop(name, None) for name in MODULE_OPTIONS}
    if module["module"] is None:
        for name, value in module.items():
            if value is not None:
                raise CombinationError(name.replace("_", "-"), value, "needs --module")
        return None
    from memcalc.planner.request import positive
    from memcalc.specs.recorded import Source

    length = 0 if seq_len is None else positive(seq_len, "seq_len")
    factory, inputs, loss, block_class = (module[name] or "" for name in MODULE_OPTIONS)
    return Source(factory, inputs, loss, block_class, seq_len=length)


def refuse_module(options: dict[str, Any]) -> None:
    """Refuse the options of a module where a device is measured."""
    for name in (*MODULE_OPTIONS, *OF_A_STEP, "save"):
        if options.get(name) is not None:
            raise CombinationError(name.replace("_", "-"), options[name], "is for --device fake")


def with_model(options: dict[str, Any], *, needed: bool = True) -> dict[str, Any]:
    """Return the keywords for the library, with the model that a module was recorded as where one is named."""
    source = source_of(options, options.get("seq_len"))
    named = options.get("model")
    if source is None:
        if named is None and needed:
            raise InputError("model", "", "give --model, or --module package.module:factory")
        return given(options)
    if named is not None:
        raise CombinationError("model", named, "--module is given too; one of them says what is trained")
    from memcalc.probe.module import modes_for, record_model
    from memcalc.report.progress import waiting

    with waiting("record the module", "series") as listen:
        model = record_model(source, modes_for(options.get("precision")), on_progress=listen)
    return {**given(options), "model": model}


# ------------------------------------------------------------------------------------------------- flags of other tools


_MICRO, _GLOBAL, _LENGTH, _GPUS = "--micro-batch N", "--global-batch N", "--seq-len N", "--gpus N"
_BF16, _FP16 = "--precision bf16-mixed", "--precision fp16-mixed"
_FULL, _NF4, _LORA = "--recompute full", "--quantize nf4", "--lora 16"
_FSDP, _DEEPSPEED = "--framework fsdp2", "--framework deepspeed"

_ANSWERS: dict[str, tuple[str, ...]] = {
    "--micro-batch N (per GPU) or --global-batch N (per step)": ("batch-size", "batch", "bs"),
    _MICRO: (
        "per-device-train-batch-size", "per-gpu-batch-size", "train-micro-batch-size-per-gpu", "micro-batch-size",
        "local-batch-size", "mbs", "device-batch-size",
    ),
    _GLOBAL: ("global-batch-size", "train-batch-size", "total-batch-size", "gbs", "effective-batch-size"),
    "--global-batch N (micro-batch x data-parallel ranks x accumulated steps)": (
        "gradient-accumulation-steps", "grad-accum", "gradient-accumulation", "accumulate-grad-batches", "accumulation",
        "grad-accumulation-steps",
    ),
    _FULL: (
        "gradient-checkpointing", "activation-checkpointing", "activation-checkpoint", "checkpoint-activations", "ac",
        "recompute-granularity", "enable-gradient-checkpointing", "gc", "checkpointing",
    ),
    "--recompute selective-core-attn": ("recompute-activations",),
    "--recompute selective-ops": ("selective-ac", "selective-activation-checkpointing"),
    "--zero N": ("zero-stage", "stage-zero", "sharding-strategy", "sharding", "zero-optimization"),
    "--zero 1": ("zero1", "zero-1", "use-distributed-optimizer"), "--zero 2": ("zero2", "zero-2"),
    "--zero 3": ("zero3", "zero-3"),
    _FSDP: ("fsdp", "use-fsdp", "fsdp2", "fully-shard"), "--framework fsdp1": ("fsdp1",),
    _DEEPSPEED: ("deepspeed", "use-deepspeed", "ds"), "--framework ddp": ("ddp", "use-ddp"),
    "--framework megatron": ("megatron", "use-megatron", "mcore"), "--framework torchtitan": ("torchtitan", "titan"),
    "--framework hf": ("hf", "accelerate", "trainer", "transformers"), "--framework NAME": ("backend", "engine"),
    f"{_LORA} {_NF4}": ("qlora", "use-qlora"), _NF4: ("load-in-4bit", "4bit", "bnb-4bit", "nf4", "bits"),
    "--quantize int8": ("load-in-8bit", "8bit", "int8"), "--quantize NAME": ("quantization", "quant", "quantise"),
    _LORA: ("lora-rank", "lora-r", "use-lora", "peft", "use-peft", "lora-dim", "rank-lora"),
    "--lora 16:q,v": ("lora-target-modules", "target-modules", "lora-targets"),
    "--offload optimizer or --offload params": ("cpu-offload", "offload-to-cpu", "fsdp-cpu-offload"),
    "--offload optimizer": ("offload-optimizer", "optimizer-cpu-offload", "offload-optimizer-device"),
    "--offload params": ("offload-param", "offload-params", "param-offload", "fsdp-offload-params"),
    "--offload activations": ("offload-activations", "activation-offloading", "activation-offload", "cpu-activations"),
    "--offload-to nvme": ("nvme", "nvme-offload", "offload-device"),
    _LENGTH: (
        "max-seq-length", "max-seq-len", "seq-length", "sequence-length", "sequence-len", "max-length",
        "context-length", "cutoff-len", "block-size", "model-max-length", "context", "ctx", "seqlen", "seq",
    ),
    _BF16: ("bf16", "bfloat16", "use-bf16"), _FP16: ("fp16", "half", "use-fp16"),
    "--precision fp8-mixed": ("fp8", "use-fp8", "fp8-format", "fp4-format"),
    "--precision fp32": ("fp32", "float32", "tf32"),
    "--precision NAME": ("mixed-precision", "dtype", "torch-dtype", "amp", "param-dtype", "model-dtype"),
    _GPUS: (
        "num-gpus", "n-gpus", "ngpus", "gpu-count", "num-devices", "devices", "nproc-per-node", "world-size", "n-gpu",
        "num-processes", "gpus-per-node",
    ),
    "--gpus N (GPUs of all nodes)": ("nnodes", "num-nodes", "nodes", "n-nodes"),
    "--gpus N (data parallelism is what tp, pp and cp leave)": (
        "data-parallel-size", "dp", "dp-size", "data-parallel", "data-parallel-shard-degree",
    ),
    "--tp N": ("tensor-parallel-size", "tensor-model-parallel-size", "tp-size", "tensor-parallel",
        "tensor-parallel-degree"),
    "--pp N": ("pipeline-parallel-size", "pipeline-model-parallel-size", "pp-size", "pipeline-parallel",
        "pipeline-parallel-degree"),
    "--cp N": ("context-parallel-size", "cp-size", "context-parallel", "ulysses", "sequence-parallel-size",
        "context-parallel-degree"),
    "--ep N": ("expert-parallel-size", "expert-model-parallel-size", "ep-size", "expert-parallel"),
    "--dp-replicate N": ("data-parallel-replicate-degree", "dp-replicate-size", "hsdp", "hybrid-shard",
        "num-distributed-optimizer-instances", "mics-shard-size", "zero-hpz-partition-size"),
    "--sp": ("sequence-parallel",),
    "--vpp N": ("virtual-pipeline-model-parallel-size", "num-virtual-stages-per-pipeline-rank"),
    "--optimizer NAME": ("optim", "optimiser", "optimizer-name"),
    "--optimizer adamw-8bit": ("adam8bit", "use-8bit-adam", "adamw-8bit", "bnb-adam"),
    "--attention flash": ("flash-attn", "use-flash-attn", "flash-attention", "use-flash-attention-2", "flash"),
    "--attention NAME": ("attn-implementation", "attn"),
    "--kernels fused": ("use-liger-kernel", "liger-kernel", "use-liger", "liger"),
    "--compile blocks": ("torch-compile", "use-compile"),
    "--model NAME": ("model-name", "model-name-or-path", "model-path", "hf-model", "base-model", "model-id", "params"),
    "--gpu NAME": ("gpu-type", "gpu-name", "device", "accelerator", "gpu-memory", "vram", "hardware"),
    "--output FILE": ("out", "o", "output-file"), "--format NAME": ("fmt", "json"),
    "--set strategy.expandable_segments=true": ("expandable-segments",),
    "--tight for the opposite (max and min leave a margin without it)": ("safe",),
}  # fmt: skip
FLAG_ANSWERS = {flag: answer for answer, flags in _ANSWERS.items() for flag in flags}
"""By a flag without dashes in front, with dashes for underscores: what says it here."""


_ENGINE_FLAGS: dict[str, tuple[str, ...]] = {
    "--utilization X": (
        "gpu-memory-utilization", "mem-fraction-static", "vllm-gpu-memory-utilization", "gpu-util",
    ),
    "--max-seqs N": ("max-num-seqs", "max-running-requests", "vllm-max-num-seqs"),
    "--max-batched-tokens N": ("max-num-batched-tokens", "chunked-prefill-size", "max-prefill-tokens"),
    "--max-len N": ("max-model-len", "context-length", "seq-len", "max-seq-len", "vllm-max-model-len"),
    "--kv-dtype NAME": ("kv-cache-dtype",), "--eager": ("enforce-eager", "disable-cuda-graph"),
    "--quantization NAME": ("quantize", "quant"),
}  # fmt: skip
_ROLE_FLAGS: dict[str, tuple[str, ...]] = {
    **{answer: _ENGINE_FLAGS[answer] for answer in ("--utilization X", "--max-seqs N")},
    "--prompt N and --response N": ("seq-len", "max-length", "max-model-len", "max-seq-len", "cutoff-len"),
    "--prompt N": ("max-prompt-length", "prompt-max-len", "max-prompt-len", "prompt-length"),
    "--response N": ("max-completion-length", "max-response-length", "generate-max-len", "max-new-tokens",
        "response-length"),
    "--samples N": ("num-generations", "rollout-n", "n-samples-per-prompt", "num-generations-per-prompt", "n"),
    "--prompts N": ("train-batch-size", "global-batch", "num-prompts-per-step", "rollout-batch-size"),
    "--micro-tokens N": ("ppo-max-token-len-per-gpu", "max-token-len", "train-mb-tokens"),
    "--reference, or --no-reference": ("beta", "kl-coef", "init-kl-coef", "use-kl-loss"),
    "--engine-tp N (of an engine), or --tp N with --trainer megatron": (
        "tensor-parallel-size", "vllm-tensor-parallel-size", "tp-size", "tensor-model-parallel-size",
    ),
    "--zero N: trained models are counted as sharded, not as split over sequences": (
        "sp", "ulysses", "ulysses-sequence-parallel-size",
    ),
    "--cp N with --trainer megatron": ("context-parallel-size",),
    "--pp N with --trainer megatron": ("pipeline-parallel-size", "pipeline-model-parallel-size"),
    "--ep N with --trainer megatron": ("expert-parallel-size", "expert-model-parallel-size"),
}  # fmt: skip
BY_COMMAND = {
    command: {flag: answer for answer, flags in answers.items() for flag in flags}
    for command, answers in {"serve": _ENGINE_FLAGS, "rl": _ROLE_FLAGS}.items()
}
"""The same of a command whose options are other ones."""


def answer_for(option: str, command: str = "") -> str | None:
    """What to type in the place of another tool's flag; None where it is not known.

    >>> answer_for("--zero_stage"), answer_for("--frobnicate"), answer_for("--num-generations", "rl")
    ('--zero N', None, '--samples N')
    """
    flag = option.lstrip("-").partition("=")[0].lower().replace("_", "-")
    return BY_COMMAND.get(command, {}).get(flag) or FLAG_ANSWERS.get(flag)
