"""A request: the words of the interface, checked one by one, and the defaults that fill what was left out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, get_args

from memcalc.errors import CombinationError, InputError, MissingError, UnknownNameError
from memcalc.formulas.recompute import parse_policy
from memcalc.frameworks import Habits, habits_of
from memcalc.planner.choices import Choice, parse_choice
from memcalc.planner.settings import FIELDS, check_fields
from memcalc.specs import adapters
from memcalc.specs import strategy as words
from memcalc.units import parse_count

if TYPE_CHECKING:
    from memcalc.specs.hardware import GPU, Node
    from memcalc.specs.model import Model

CHOICES = {
    "precision": words.Precision,
    "optimizer": words.Optimizer,
    "optimizer_impl": words.OptimizerImpl,
    "pp_schedule": words.Schedule,
    "attention": words.AttentionImpl,
    "loss": words.Loss,
    "kernels": words.Kernels,
    "offload_to": words.Tier,
    "compile": words.Compile,
    "cp_kind": words.ContextParallel,
    "adapter_dtype": adapters.AdapterDtype,
    "quantize": adapters.Quantization,
}
FLAGS = ("sp", "optimizer_in_backward", "autocast")
NUMBERS = ("gpus", "seq_len", "micro_batch", "tp", "pp", "vpp", "cp", "ep")
NOT_MODELLED = {
    "calibration": (),
    "compress_activations": ("none",),
}
"""Words of the interface that this version does not model, with the values that change nothing."""
LARGEST_NUMBER = {
    "gpus": 1_000_000,
    "seq_len": 100_000_000,
    "micro_batch": 1_000_000,
    "global_batch": 100_000_000,
    "critical_batch": 10**12,
    "tokens": 10**15,
}
SETTINGS = {
    f"strategy.{name}": name
    for name in (
        *CHOICES,
        "zero",
        "tp",
        "sp",
        "pp",
        "vpp",
        "cp",
        "ep",
        "recompute",
        "offload",
        "framework",
        "optimizer_in_backward",
        "micro_batch",
        "lora",
        "autocast",
        "also_train",
    )
} | {
    "workload.seq_len": "seq_len",
    "workload.global_batch": "global_batch",
    "hardware.gpus": "gpus",
}
WORDS = tuple(sorted({*SETTINGS.values(), *NOT_MODELLED}))
"""What :func:`memcalc.estimate` and :func:`memcalc.plan` take besides model, gpu, node, settings and preset_dirs."""
SEARCHED = (
    "gpus",
    "global_batch",
    "precision",
    "optimizer",
    "recompute",
    "zero",
    "tp",
    "sp",
    "pp",
    "pp_schedule",
    "vpp",
    "cp",
    "ep",
    "offload",
    "offload_to",
    "micro_batch",
)
"""Words of which a search takes several values (:mod:`memcalc.planner.choices`)."""
DEFAULT_TOKENS = 524_288
"""Tokens of the default global batch: half a million, a common size for pretraining and continued training."""


@dataclass
class Request:
    """Checked words: None where the user said nothing."""

    given: dict[str, Any]
    assumptions: dict[str, str] = field(default_factory=dict)
    choices: dict[str, Choice] = field(default_factory=dict)
    """Words of which several values were given."""

    def get(self, name: str, default: Any, said: str = "") -> Any:
        """The user's value, or the default, which is then noted as an assumption."""
        if self.given.get(name) is not None:
            return self.given[name]
        self.assumptions[name] = said or str(default)
        return default


def check_words(raw: Mapping[str, Any], settings: Mapping[str, Any] | None, *, several: bool = False) -> Request:
    """Check each word by itself; unknown names and impossible numbers are refused here.

    With ``several`` a word that a search can leave open may have several values.
    """
    unknown = next((name for name in raw if name not in WORDS), None)
    if unknown is not None:
        raise UnknownNameError("word", unknown, f"must be one of {', '.join(WORDS)}", WORDS)
    merged = {**raw, **_settings(settings or {})}
    given: dict[str, Any] = {name: value for name, value in merged.items() if value is not None}
    given["fields"] = check_fields(settings or {})
    for name, harmless in NOT_MODELLED.items():
        if name in given and given.pop(name) not in harmless:
            raise InputError(
                name.replace("_", "-"), raw.get(name), "this version does not model it, so it must be left out"
            )
    choices: dict[str, Choice] = {}
    for name in [name for name in given if name != "fields"]:
        value = _read(name, given[name])
        if isinstance(value, Choice):
            if not several:
                raise InputError(flag(name), given[name], "must be one value here; memcalc plan takes several")
            choices[name] = value
            del given[name]
        else:
            given[name] = value
    return Request(given, choices=choices)


def _read(name: str, value: Any) -> Any:
    """One word's value, or several where a search takes them."""
    if name not in SEARCHED or (name == "offload" and not isinstance(value, str)):
        return _one(name, value)
    return parse_choice(flag(name), value, lambda one: _one(name, one), number=name in (*NUMBERS, "zero"))


def _one(name: str, value: Any) -> Any:
    """One value of a word."""
    if name in NUMBERS:
        return positive(value, name)
    if name in CHOICES:
        return one_of(value, name, get_args(CHOICES[name]))
    if name in PARSERS:
        return PARSERS[name](value)
    return boolean(value, name) if name in FLAGS else value


def _settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """``--set`` keys as the words they stand for."""
    known = (*SETTINGS, *FIELDS)
    unknown = next((key for key in settings if key not in known), None)
    if unknown is not None:
        raise InputError("set", unknown, f"a field is one of {', '.join(known)}", known)
    return {SETTINGS[key]: value for key, value in settings.items() if key in SETTINGS}


def flag(name: str) -> str:
    """The option's name as typed."""
    return name.replace("_", "-")


def positive(value: object, name: str) -> int:
    """A whole number above zero."""
    number = parse_count(value, flag(name))
    most = LARGEST_NUMBER.get(name, 1_000_000)
    if not 0 < number <= most:
        raise InputError(flag(name), value, f"must be a whole number from 1 to {most:,}")
    return number


def one_of(value: object, name: str, allowed: tuple[str, ...]) -> str:
    """One of the allowed names."""
    if not isinstance(value, str) or value not in allowed:
        raise InputError(flag(name), value, f"must be one of {', '.join(allowed)}", allowed)
    return value


def boolean(value: object, name: str) -> bool:
    """True or false, also as text."""
    if isinstance(value, str) and value.lower() in {"true", "false"}:
        return value.lower() == "true"
    if not isinstance(value, bool):
        raise InputError(flag(name), value, "must be true or false")
    return value


def framework(value: object) -> str:
    """A framework's name, with an era where one is given."""
    habits_of(str(value))
    return str(value)


def zero(value: object) -> int:
    """A ZeRO stage."""
    if str(value) not in {"0", "1", "2", "3"}:
        raise InputError("zero", value, "must be 0, 1, 2 or 3")
    return int(str(value))


def recompute(value: object) -> str:
    """A recompute policy's name."""
    return parse_policy(str(value)).name


def offload(value: object) -> tuple[str, ...]:
    """A comma-separated list of what leaves the GPU, in a fixed order."""
    listed = [part.strip() for part in value.split(",")] if isinstance(value, str) else list(value)  # type: ignore[call-overload]
    for part in listed:
        one_of(part, "offload", ("none", *get_args(words.Offload)))
    if "none" in listed and len(listed) > 1:
        raise InputError("offload", ",".join(listed), "none stands alone")
    return tuple(name for name in get_args(words.Offload) if name in listed)


PARSERS: dict[str, Callable[[object], Any]] = {
    "framework": framework,
    "zero": zero,
    "recompute": recompute,
    "offload": offload,
    "lora": adapters.parse_lora,
    "also_train": adapters.parse_also_train,
}
"""How a word becomes a value, where it is neither a number nor a name."""


def batch_of(request: Request, seq_len: int, micro_steps: int = 1) -> int:
    """Global batch in sequences; a number with the word tokens is divided by the sequence length."""
    raw = request.given.get("global_batch")
    if raw is None:
        sequences = max(DEFAULT_TOKENS // seq_len, 1)
        sequences = max(1 << (sequences.bit_length() - 1), micro_steps)
        sequences = -(-sequences // micro_steps) * micro_steps
        return int(request.get("global_batch", sequences, f"{sequences} sequences ({sequences * seq_len:,} tokens)"))
    number = parse_count(raw, "global-batch")
    if isinstance(raw, str) and raw.strip().lower().endswith(("token", "tokens")):
        number //= seq_len
        request.assumptions["global_batch"] = f"{number} sequences ({number * seq_len:,} tokens)"
    if not 0 < number <= LARGEST_NUMBER["global_batch"]:
        raise InputError(
            "global-batch",
            raw,
            f"must be from one sequence of {seq_len:,} tokens to {LARGEST_NUMBER['global_batch']:,} sequences",
        )
    return number


def precisions_for(gpu: GPU, habits: Habits, zero: int = 3) -> list[str]:
    """Precisions with fp32 accuracy of the update that the GPU and the framework have, the usual one first."""
    unsharded = habits.full_shard and zero == 0
    wanted = (
        ["bf16-mixed", "bf16-autocast", "fp32"] if gpu.supports("bf16") else ["fp16-mixed", "fp16-autocast", "fp32"]
    )
    known = [name for name in wanted if name in habits.widths and gpu.supports(name.split("-")[0])]
    return [name for name in known if not (unsharded and name.endswith("-mixed"))]


def check_precision(name: str, gpu: GPU, habits: Habits, zero: int) -> None:
    """Refuse a precision that the GPU or the framework does not have."""
    dtype = name.split("-", maxsplit=1)[0]
    if dtype in {"bf16", "fp8"} and not gpu.supports(dtype):
        able = [p for p in habits.widths if gpu.supports(p.split("-")[0])]
        raise CombinationError("precision", name, f"{gpu.name} has no {dtype} arithmetic; it can run {', '.join(able)}")
    if name not in habits.widths:
        raise CombinationError("precision", name, f"{habits.name} is modelled with {', '.join(habits.widths)}")
    if habits.full_shard and zero == 0 and name.endswith("-mixed"):
        autocast = name.replace("-mixed", "-autocast")
        raise CombinationError(
            "precision", name, f"{habits.name} has it at --zero 2 and 3 alone; use {autocast} or bf16"
        )


def grouped(model: Model) -> bool:
    """Whether several query heads share a key-value head; in fp32 PyTorch then has the math kernel alone."""
    return any(g.block.attention.kv_heads < g.block.attention.heads for g in model.groups)


def classes_kernel(model: Model, seq_len: int) -> str:
    """The kernel that the model's own class in Transformers gets where none is asked for.

    Some classes have no fused one (Gemma 2, BLOOM, MPT, GPT-J); a mask, which a window needs as soon as sequences reach
    its width, leaves PyTorch's memory-efficient one.
    """
    kinds = [group.block.attention for group in model.groups]
    if not all(kind.fused for kind in kinds):
        return "eager"
    masked = any(kind.explicit_mask or (kind.window or seq_len + 1) <= seq_len for kind in kinds)
    return "efficient" if masked else "flash"


def attention_for(request: Request, habits: Habits, model: Model, gpu: GPU, precisions: list[str], seq_len: int) -> str:
    """The attention kernel: flash where GPU, precision and model have it, else memory-efficient, math or eager."""
    able = gpu.flash_attention
    asked = request.given.get("attention")
    if asked in {"flash", "cudnn"} and not able:
        raise CombinationError(
            "attention", asked, f"{gpu.name} ({gpu.arch}) has no flash attention 2; use efficient, math or eager"
        )
    if asked in {"flash", "cudnn"} and precisions == ["fp32"]:
        raise CombinationError("attention", asked, "flash attention has no fp32 kernel; use efficient, math or eager")
    if asked == "efficient" and precisions == ["fp32"] and grouped(model):
        raise CombinationError("attention", asked, "in fp32 it has no grouped-query kernel; use math or eager")
    fallback = "math" if precisions == ["fp32"] and grouped(model) else "efficient"
    default = "flash" if able and precisions != ["fp32"] else fallback
    if habits.kernels == "model" and habits.own_code is None and default in ("flash", "efficient"):
        own = classes_kernel(model, seq_len)
        default = default if own == "flash" else own
    said = "as the module calls it" if model.recording is not None else ""
    return str(request.get("attention", default, said))


def check_framework(request: Request, habits: Habits) -> None:
    """Refuse what the framework does not have."""
    for name in ("tp", "pp", "cp", "ep"):
        if request.given.get(name, 1) > 1 and (not habits.tensor_parallel or name in habits.lacks):
            raise CombinationError(
                name, request.given[name], f"{habits.name} is modelled without it; use fsdp2, torchtitan or megatron"
            )
    if request.given.get("sp") and "sp" in habits.lacks:
        raise CombinationError("sp", True, f"{habits.name} is modelled without sequence parallelism; use megatron")
    if habits.pipeline_engine != "none" and request.given.get("pp", 1) > 1:
        check_engine(request, habits)
    stage = request.given.get("zero")
    if stage is not None and stage not in habits.zero:
        raise CombinationError("zero", stage, f"{habits.name} has {', '.join(map(str, sorted(habits.zero)))}")
    loss = request.given.get("loss")
    if loss not in {None, "fused-linear"} and loss not in habits.losses:
        raise CombinationError(
            "loss", loss, f"{habits.name} is modelled with {', '.join([*habits.losses, 'fused-linear'])}"
        )
    if request.given.get("sp") and request.given.get("tp", 1) == 1:
        raise CombinationError("sp", True, "sequence parallelism needs tp above 1")


def check_engine(request: Request, habits: Habits) -> None:
    """Refuse what DeepSpeed's pipeline engine does not run (runtime/pipe/engine.py)."""
    stage = request.given.get("zero", 1)
    if stage > 1:
        raise CombinationError("zero", stage, f"{habits.name}'s pipeline engine has stages 0 and 1 alone")


def zero_stages(request: Request, habits: Habits) -> tuple[int, ...]:
    """The sharding stages that can be had with the pipeline asked for, the default first."""
    piped = habits.pipeline_engine != "none" and request.given.get("pp", 1) > 1
    return tuple(stage for stage in habits.zero if stage <= 1 or not piped)


def check_offload(request: Request, habits: Habits, node: Node) -> None:
    """Refuse an offload that the framework or the node does not have."""
    choice, tier = request.given.get("offload", ()), request.given.get("offload_to", "cpu")
    if "params" in choice and 3 not in habits.zero:
        raise CombinationError("offload", "params", f"{habits.name} has no sharded parameters to offload")
    if "params" in choice and request.given.get("zero", 3) not in {2, 3}:
        raise CombinationError("offload", "params", "parameters are offloaded at --zero 3 (fsdp: 2 or 3)")
    if "optimizer" in choice and habits.zero_optimizer is not None and "zero" in request.given:
        lowest = 3 if tier == "nvme" else 1
        if request.given["zero"] < lowest:
            allowed = "DeepSpeed swaps to NVMe at --zero 3 alone" if lowest == 3 else "needs --zero 1, 2 or 3"
            raise CombinationError("offload", "optimizer", allowed)
    if tier != "cpu" and not any(known.name == tier for known in node.tiers):
        raise MissingError(
            f"offload-to {tier!r} needs a node with that tier; node {node.name} lists "
            f"{', '.join(t.name for t in node.tiers) or 'none'}: give --node."
        )


def habits_for(request: Request) -> tuple[str, Habits]:
    """The framework and its habits."""
    name = str(request.get("framework", "fsdp2"))
    return name, habits_of(name)


def sequence_length(request: Request, model: Model) -> int:
    """The sequence length; by default the model's own, at most 4096. A vision model sees its patches."""
    fixed = model.fixed_tokens.get(model.main.tower)
    if fixed is not None:
        return int(request.get("seq_len", fixed, f"{fixed} (tokens that the model sees a sample)"))
    length = int(request.get("seq_len", min(model.max_positions, 4096)))
    if model.positions == "learned" and length > model.max_positions:
        raise CombinationError(
            "seq-len", length, f"{model.name} has learned positions for {model.max_positions} tokens"
        )
    return length
