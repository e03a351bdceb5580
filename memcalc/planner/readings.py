"""What a precision really keeps of a parameter, and the readings of "16-bit training" that a job can have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, cast, get_args

from memcalc.errors import CombinationError
from memcalc.planner.request import check_precision
from memcalc.results.ladder import Kind, Storage

if TYPE_CHECKING:
    from memcalc.frameworks import Habits, Widths
    from memcalc.specs.hardware import GPU
    from memcalc.specs.strategy import Strategy

Reading = Literal["pure-16-bit", "fp32-master", "autocast"]
READINGS: tuple[str, ...] = get_args(Reading)
"""What ``--reading`` may pick."""
_ENDINGS = {"pure-16-bit": "", "fp32-master": "-mixed", "autocast": "-autocast"}
_SAID = {
    "fp32": "fp32 weights, gradients and optimizer states",
    "pure-16-bit": "16-bit weights, gradients and optimizer states, and no fp32 copy of the weights",
    "fp32-master": "16-bit weights with an fp32 copy that the optimizer updates, and fp32 states",
    "fp32-shards": "fp32 weights, gradients and states in shards; a block is gathered in 16 bits while it computes",
    "autocast": "fp32 weights, gradients and states as in fp32, and 16-bit copies of the weights on top in forward "
    "and backward",
}
FP32 = 4
"""Bytes of a number."""
_NAMES = {"fp32-shards": "fp32-master"}
"""The reading of a kind of storage, where it has another name."""


def kind_of(widths: Widths) -> Kind:
    """How weights lie under a precision of a framework.

    >>> from memcalc.frameworks import habits_of
    >>> kind_of(habits_of("fsdp2").widths["bf16-mixed"]), kind_of(habits_of("deepspeed").widths["bf16-mixed"])
    ('fp32-shards', 'fp32-master')
    >>> kind_of(habits_of("plain").widths["bf16-autocast"])
    'autocast'
    """
    if widths.parameter < FP32:
        return "fp32-master" if widths.master else "pure-16-bit"
    if widths.cached:
        return "autocast"
    return "fp32-shards" if widths.compute < widths.parameter else "fp32"


def storage_of(habits: Habits, strategy: Strategy) -> Storage:
    """What is kept of a trained parameter, in numbers and in words; of adapters, where they are what is trained."""
    widths = habits.widths[strategy.precision]
    kind = kind_of(widths)
    if strategy.lora:
        base = f"{8 * widths.parameter}-bit" if strategy.quantize == "none" else strategy.quantize
        said = f"a frozen {base} base; adapters, their gradients and states in {strategy.adapter_dtype}"
        width = FP32 if strategy.adapter_dtype == "fp32" else FP32 // 2
        return Storage(
            kind=kind, said=said, parameter=width, gradient=width, master=0, moment=width, cached=widths.cached
        )
    return Storage(
        kind=kind,
        said=_SAID[kind],
        parameter=widths.parameter,
        gradient=widths.gradient,
        master=widths.master,
        moment=widths.moment,
        cached=widths.cached,
    )


def reading_of(storage: Storage) -> Literal["pure-16-bit", "fp32-master", "autocast", "fp32"]:
    """The reading that a storage is."""
    return cast("Literal['pure-16-bit', 'fp32-master', 'autocast', 'fp32']", _NAMES.get(storage.kind, storage.kind))


def precision_of(reading: str, gpu: GPU, habits: Habits, zero: int) -> str:
    """The precision of a reading; CombinationError where the GPU or the framework does not have it."""
    dtype = "bf16" if gpu.supports("bf16") else "fp16"
    name = f"{dtype}{_ENDINGS[reading]}"
    if name == "fp16":
        # torch 2.13 torch/amp/grad_scaler.py, _unscale_grads_: "Attempting to unscale FP16 gradients."
        allowed = f"{gpu.name} has no bf16 arithmetic, and PyTorch's GradScaler refuses gradients in fp16"
        raise CombinationError("reading", reading, allowed)
    try:
        check_precision(name, gpu, habits, zero)
    except CombinationError as error:
        raise CombinationError("reading", reading, f"as {name}, {error.allowed.partition(';')[0]}") from None
    return name


def usual_readings(gpu: GPU, habits: Habits, zero: int) -> tuple[dict[str, str], list[str]]:
    """The precision of each reading that is shown unasked, and why the others are not possible.

    Autocast is what a loop of PyTorch without shards has in practice, and the only fp32 reading where there is no
    master: elsewhere it is shown where it is asked for.
    """
    found: dict[str, str] = {}
    reasons: list[str] = []
    for reading in READINGS:
        if reading == "autocast" and "fp32-master" in found and set(habits.zero) != {0}:
            continue
        try:
            found[reading] = precision_of(reading, gpu, habits, zero)
        except CombinationError as error:
            reasons.append(f"{reading}: {error.allowed}")
    return found, reasons


__all__ = ["READINGS", "kind_of", "precision_of", "reading_of", "storage_of", "usual_readings"]
