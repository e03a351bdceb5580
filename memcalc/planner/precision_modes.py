"""What a precision really keeps of a parameter, and the readings of "16-bit training" that a job can have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, cast, get_args

from memcalc.errors import CombinationError
from memcalc.planner.defaults import check_precision, precisions_for
from memcalc.results.changes import Kind, Storage

if TYPE_CHECKING:
    from memcalc.frameworks import Habits, Widths
    from memcalc.grid import Grid
    from memcalc.specs.hardware import GPU
    from memcalc.specs.strategy import Strategy

PrecisionMode = Literal["pure-16-bit", "fp32-master", "autocast"]
PRECISION_MODES: tuple[str, ...] = get_args(PrecisionMode)
"""What ``--reading`` may pick."""
_ENDINGS = {"pure-16-bit": "", "fp32-master": "-mixed", "autocast": "-autocast"}
_SAID = {
    "fp32": "fp32 weights, gradients and optimizer states",
    "pure-16-bit": "16-bit weights, gradients and optimizer states, no fp32 master",
    "fp32-master": "16-bit weights and gradients, fp32 master weights and optimizer states",
    "fp32-shards": "fp32 weights, gradients and states, sharded; blocks gathered in 16 bits",
    "autocast": "fp32 weights, gradients and states, plus 16-bit weight copies during forward and backward",
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


def storage_of(grid: Grid, strategy: Strategy) -> Storage:
    """What is kept of a trained parameter, in numbers and in words; of adapters, where they are what is trained."""
    widths = grid.habits.widths[strategy.precision]
    kind = kind_of(widths)
    sizes = {name: int(grid.width(name).max()) for name in ("parameter", "gradient", "master", "moment")}
    text = _SAID[kind]
    if strategy.precision_aware:
        moments = f"a first moment in {strategy.exp_avg_dtype} and a second in {strategy.exp_avg_sq_dtype}"
        text = f"16-bit weights with main weights that the precision-aware optimizer updates, {moments}"
    if strategy.lora:
        base = f"{8 * widths.compute}-bit" if strategy.quantize == "none" else strategy.quantize
        text = f"a frozen {base} base; adapters, their gradients and states in {strategy.adapter_dtype}"
        width = FP32 if strategy.adapter_dtype == "fp32" else FP32 // 2
        sizes = dict.fromkeys(sizes, width) | {"master": 0}
    return Storage(kind=kind, said=text, cached=widths.cached, **sizes)


def mode_of(storage: Storage) -> Literal["pure-16-bit", "fp32-master", "autocast", "fp32"]:
    """The reading that a storage is."""
    return cast("Literal['pure-16-bit', 'fp32-master', 'autocast', 'fp32']", _NAMES.get(storage.kind, storage.kind))


def precision_of(mode: str, gpu: GPU, habits: Habits, zero: int) -> str:
    """The precision of a reading; CombinationError where the GPU or the framework does not have it."""
    dtype = "bf16" if gpu.supports("bf16") else "fp16"
    name = f"{dtype}{_ENDINGS[mode]}"
    if name == "fp16":
        # torch 2.13 torch/amp/grad_scaler.py, _unscale_grads_: "Attempting to unscale FP16 gradients."
        allowed = f"{gpu.name} has no bf16 arithmetic, and PyTorch's GradScaler refuses gradients in fp16"
        raise CombinationError("reading", mode, allowed)
    try:
        check_precision(name, gpu, habits, zero)
    except CombinationError as error:
        raise CombinationError("reading", mode, f"as {name}, {error.allowed.partition(';')[0]}") from None
    return name


def usual_modes(gpu: GPU, habits: Habits, zero: int, *, frozen: bool = False) -> tuple[dict[str, str], list[str]]:
    """The precision of each reading that is shown unasked, and why the others are not possible.

    A ``frozen`` base has one, since no master stands beside weights that do not change. Autocast is what a loop of
    PyTorch without shards has in practice, and the only fp32 reading where there is no master: elsewhere it is shown
    where it is asked for.
    """
    if frozen:
        return {"pure-16-bit": precisions_for(gpu, habits, zero, frozen=True)[0]}, []
    result: dict[str, str] = {}
    reasons: list[str] = []
    for mode in PRECISION_MODES:
        if mode == "autocast" and "fp32-master" in result and set(habits.zero) != {0}:
            continue
        try:
            result[mode] = precision_of(mode, gpu, habits, zero)
        except CombinationError as error:
            reasons.append(f"{mode}: {error.allowed}")
    return result, reasons
