"""The words for adapters and for a quantised base: ``--lora 16:q,v``, ``--also-train head``, ``--quantize nf4``."""

from collections.abc import Collection
from functools import lru_cache
from typing import Literal, get_args

from pydantic import Field

from memcalc.errors import InputError
from memcalc.specs.strict import Frozen

Quantization = Literal["none", "nf4", "nf4-dq", "int8", "gptq-int4", "gptq-int8"]
AdapterDtype = Literal["fp32", "bf16"]
AlsoTrained = Literal["embedding", "head"]
Target = Literal[
    "q", "k", "v", "qkv", "o", "gate", "up", "gate_up", "down", "q_a", "q_b", "kv_a", "kv_b", "mixer_in", "mixer_out",
    "router", "shared_gate", "experts_gate", "experts_up", "experts_gate_up", "experts_down", "embedding", "head",
]  # fmt: skip
BY_CLASS: dict[str, dict[str, tuple[str, ...]]] = {
    "wo": {"t5": ("down",), "mt5": ("down",), "": ("o",)},
    "dense": {"bertmodel": ("o", "up", "down"), "robertamodel": ("o", "up", "down"), "": ("o",)},
}
"""Names that mean different layers in different classes of Transformers: by class which, and of all others (5.24
models/t5/modeling_t5.py, models/bert/modeling_bert.py; InternLM 2's own code; models/falcon, gpt_neox, phi)."""
EVERY = ("all", "all-linear")
"""All linear layers with the head, or without it."""
LARGEST_RANK = 65_536
USUAL = "usual"
"""In the place of a rank: the one that the framework has by itself."""
PARTS_OF_A_BLOCK = {
    "attention": ("q", "k", "v", "qkv", "o", "q_a", "q_b", "kv_a", "kv_b", "mixer_in", "mixer_out"),
    "mlp": ("gate", "up", "gate_up", "down", "router", "shared_gate"),
}
"""Linear layers of each half of a block."""


JOINED = ("experts_gate", "experts_up")
"""Layers of an expert that are one where experts are stacked; each that is named adds its ranks."""
ON_STACKS = (*JOINED, "experts_gate_up", "experts_down")
"""Adapters on the weights of a block's experts, stacked in a parameter."""


def rank_on_stack(rank: int, targets: Collection[str], *, down: bool) -> int:
    """The ranks of each expert's adapter on the stacked weights of their ``down`` projections, or of those before.

    PEFT 0.21 utils/transformers_weight_conversion.py (``rank_pattern``), tuners/lora/layer.py (``ParamWrapper``).

    >>> rank_on_stack(8, ("experts_gate", "experts_up"), down=False)
    16
    """
    if down:
        return rank * ("experts_down" in targets)
    return rank * (1 if "experts_gate_up" in targets else sum(name in targets for name in JOINED))


class Lora(Frozen):
    """Low-rank adapters."""

    rank: int = Field(ge=0)
    """Columns of A and rows of B [-]; 0 for the usual one of the framework."""
    targets: tuple[str, ...] = ()
    """Layers that have an adapter; empty for the usual ones of the architecture."""

    def __str__(self) -> str:
        return f"{self.rank}:{','.join(self.targets)}" if self.targets else str(self.rank)


def parse_lora(value: object) -> Lora:
    """Adapters from ``RANK`` or ``RANK:TARGETS``, or the usual ones from ``usual`` or True.

    >>> parse_lora("16:q,v").targets
    ('q', 'v')
    >>> parse_lora("usual").rank
    0
    """
    rank, _, targets = str(value).partition(":")
    if value is True or rank.strip() == USUAL:
        return Lora(rank=0, targets=parse_targets("lora", targets, value))
    if not rank.strip().isdigit() or not 0 < int(rank) <= LARGEST_RANK:
        raise InputError("lora", value, f"the rank must be a whole number from 1 to {LARGEST_RANK:,}, as in 16:q,k,v,o")
    return Lora(rank=int(rank), targets=parse_targets("lora", targets, value))


def parse_targets(name: str, targets: object, value: object = None, further: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Linear layers from a comma-separated list, as part of the ``value`` of an option; some have ``further`` names.

    Transformers' own names of Llama and its kin are known too, such as ``q_proj``.
    """
    listed = targets.split(",") if isinstance(targets, str) else [str(part) for part in targets]  # type: ignore[attr-defined]
    stripped = [part.strip() for part in listed if part.strip()]
    projections = {f"{target}_proj": target for target in ("q", "k", "v", "o", "gate", "up", "down")}
    named = tuple(dict.fromkeys(projections.get(part, part) for part in stripped))
    known, shown = (*get_args(Target), *further, *EVERY), targets if value is None else value
    for target in named:
        if target not in known and target not in BY_CLASS:
            raise InputError(name, shown, f"a target is one of {', '.join(known)}, and {target!r} is none", known)
    if len(named) > 1 and any(target in EVERY for target in named):
        raise InputError(name, shown, f"{' and '.join(n for n in named if n in EVERY)} goes without other names")
    return named


def in_class(targets: tuple[str, ...], architecture: str) -> tuple[str, ...]:
    """Layers as memcalc calls them, where a class of Transformers calls another one so.

    >>> in_class(("q", "wo"), "t5"), in_class(("qkv", "wo"), "llama")
    (('q', 'down'), ('qkv', 'o'))
    """
    layers = [BY_CLASS.get(name, {"": (name,)}) for name in targets]
    return tuple(dict.fromkeys(target for of in layers for target in of.get(architecture, of[""])))


@lru_cache(maxsize=64)
def lora_of(text: str) -> Lora | None:
    """The adapters that a resolved strategy names; None where the text is empty."""
    rank, _, targets = text.partition(":")
    return Lora(rank=int(rank), targets=tuple(filter(None, targets.split(",")))) if text else None


def parse_layers(name: str, value: object) -> tuple[str, ...]:
    """Linear layers, or all of attention or of the MLP, from a comma-separated list."""
    return parse_targets(name, value, further=(*PARTS_OF_A_BLOCK,))


def parse_also_train(value: object) -> tuple[str, ...]:
    """Parts that are trained in full beside the adapters, from a comma-separated list."""
    listed = [part.strip() for part in value.split(",")] if isinstance(value, str) else list(value)  # type: ignore[call-overload]
    known = get_args(AlsoTrained)
    for part in listed:
        if part not in known:
            raise InputError("also-train", part, f"must be one of {', '.join(known)}", known)
    return tuple(name for name in known if name in listed)


def release(version: str) -> tuple[int, ...]:
    """A version as numbers that sort by age.

    >>> release("0.9") < release("0.12")
    True
    """
    return tuple(int(part) for part in version.split("."))
