"""Adam's states below fp32, which a kernel in fp32 updates: what the step copies, and what that moves."""

from __future__ import annotations

from memcalc.formulas.optimizer_states import FULL
from memcalc.formulas.parameters import Number

STATE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
"""Bytes of an element of a state by its dtype; the fp32 scale of a tensor is not counted [bytes]."""
SCALING_PASSES = {"bf16": 1, "fp16": 5, "fp8": 1}
"""fp32 passes over a copied state beside those that widen, update and narrow it: under bf16 a 16-bit copy on the way
back, written and read; under fp16 and fp8 the search for the largest value; under fp16 a product in place before and
after the update too [1]."""


def widened_bytes(group: Number, largest: Number, states: Number, through_bf16: Number = 0) -> Number:
    r"""Return the bytes of the fp32 copies that one parameter group's update makes of its narrow states.

    .. math:: B = 4 k P_g + 2 P_{max}

    The copies of all tensors of a group wait until the group is done; the second summand, a 16-bit copy of one tensor
    on its way back, is there where a copied state is bf16.

    Parameters
    ----------
    group : elements of the largest group P_g, [1]
    largest : elements of the largest tensor P_max, [1]
    states : narrow states of an element k, [1]
    through_bf16 : 1 where one of them is bf16, else 0, [1]

    Returns
    -------
    copies B, [bytes]

    Examples
    --------
    >>> widened_bytes(1_000_000, 250_000, 2, 1), widened_bytes(1_000_000, 250_000, 1)
    (8500000, 4000000)

    References
    ----------
    [1] NVIDIA/TransformerEngine@d0067d0d, transformer_engine/pytorch/optimizers/fused_adam.py, step, _apply_scale.

    """
    return FULL * states * group + 2 * largest * through_bf16


def state_traffic(dtype: str, *, widened: bool) -> int:
    r"""Return what the update of a state reads and writes of one element.

    .. math:: B = 2 w \quad\text{or, copied to fp32,}\quad B = 2 w + 4 (4 + c)

    A copied state is read and widened, updated in fp32, and read and narrowed: four fp32 passes, and c for its scale.

    Parameters
    ----------
    dtype : fp32, bf16, fp16 or fp8, which gives the width w and the passes c, [1]
    widened : whether the update makes an fp32 copy, [1]

    Returns
    -------
    traffic of an element B, [bytes]

    Examples
    --------
    >>> state_traffic("fp32", widened=False), state_traffic("bf16", widened=False), state_traffic("bf16", widened=True)
    (8, 4, 24)

    References
    ----------
    [1] NVIDIA/TransformerEngine@d0067d0d, transformer_engine/pytorch/optimizers/fused_adam.py, get_unscaled_state,
        step, _apply_scale.

    """
    passes = 4 + SCALING_PASSES[dtype] if widened else 0
    return 2 * STATE_BYTES[dtype] + FULL * passes
