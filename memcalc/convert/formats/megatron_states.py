"""Megatron-LM's flags for gradients and optimizer states below fp32 (d98e8a64 megatron/training/arguments.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memcalc.formulas.optimizer_states import STATE_BYTES

if TYPE_CHECKING:
    from memcalc.convert.formats.megatron_flags import Flags
    from memcalc.specs.strategy import Strategy

_AWARE = "use_precision_aware_optimizer"
_GRADIENTS = "main_grads_dtype"
_MOMENTS = {name: name for name in STATE_BYTES}
_DTYPES = {
    "main_params_dtype": {"fp32": "fp32", "fp16": "fp16"},
    **dict.fromkeys(("exp_avg_dtype", "exp_avg_sq_dtype"), _MOMENTS),
}
"""Dtypes of what the precision-aware optimizer holds; fields of a strategy have the same names."""


def set_states(flags: Flags, narrow: list[str]) -> None:
    """Set what the flags say over 16-bit weights, of which ``narrow`` is the dtype.

    An optimizer on the host has fp32 states all the same: HybridDeviceOptimizer is given none of the dtypes
    (core/optimizer/cpu_offloading/hybrid_optimizer.py).
    """
    aware, away = flags.on(_AWARE), flags.on("optimizer_cpu_offload")
    dtypes = {name: flags.one_of(name, names, "fp32") for name, names in _DTYPES.items()}
    gradients = flags.one_of(_GRADIENTS, {"fp32": "fp32", "bf16": "bf16"}, "fp32")
    for name, dtype in {_GRADIENTS: gradients, **dtypes}.items():
        if dtype != "fp32" and not aware:
            raise flags.reader.error(flags.key(name), dtype, f"needs {flags.key(_AWARE)}, as Megatron-LM does")
    wide = "accumulate_allreduce_grads_in_fp32"
    if gradients == "bf16" and narrow == ["bf16"] and flags.on(wide):
        raise flags.reader.error(flags.key(_GRADIENTS), gradients, f"must be fp32 with {flags.key(wide)}")
    reduced = "grad_reduce_in_bf16"
    if narrow == ["bf16"] and (flags.on(reduced) or gradients == "bf16"):
        flags.set("strategy.reduce_dtype", "bf16", reduced if flags.on(reduced) else _GRADIENTS)
    if away or not aware:
        ignored = [name for name, dtype in dtypes.items() if dtype != "fp32"]
        for name in ignored:
            key = flags.key(name)
            flags.reader.note("note", "MC004", key, f"{key} is ignored with an optimizer on the host")
        return
    flags.set("strategy.precision_aware", True, _AWARE)
    for name, dtype in dtypes.items():
        if dtype != "fp32":
            flags.set(f"strategy.{name}", dtype, name)


def state_flags(plan: Strategy) -> dict[str, Any]:
    """The flags of a strategy; validate_args asks for the precision-aware optimizer beside one on the host."""
    bf16 = plan.reduce_dtype == "bf16" and plan.precision != "fp32"
    aware = plan.precision_aware
    stated = {name: getattr(plan, name) for name in _DTYPES}
    return {
        "grad_reduce_in_bf16": (bf16 and not aware) or None,
        _AWARE: aware or bool(plan.offload) or None,
        _GRADIENTS: "bf16" if bf16 and aware else None,
        **{name: dtype if aware and dtype != "fp32" else None for name, dtype in stated.items()},
    }
