"""Elements and bytes of what an optimizer keeps of a weight, by its shape."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import numpy as np

from memcalc.formulas.parameters import Number

BITSANDBYTES_BLOCK = 256
"""Elements that share a scale in 8-bit states of bitsandbytes from 0.44 on [1]; 2048 before, and in the paper."""
GALORE_RANK = 128
"""Transformers 5.23 trainer_optimizer.py, ``_get_galore_optimizer`` [1]."""
FULL = 4
"""Bytes of an fp32 number [bytes]."""


class Weight(NamedTuple):
    """Equal parameter tensors of two dimensions or more, as the optimizer sees them on one rank."""

    target: str
    """As :class:`memcalc.terms.tensors.Tensor` names it."""
    shape: tuple[Number, ...]
    """Sizes of the dimensions, rows before columns [1]."""
    linear: bool = False
    """The weight of an ``nn.Linear``."""
    width: Number = 4
    """Bytes of a gradient's element as the optimizer sees it [bytes]."""
    rank: int = GALORE_RANK
    """Rank of GaLore's projection [1]."""
    targets: tuple[str, ...] = ()
    """Weights that GaLore projects."""
    ranks: Number = 1
    """Ranks that share the rows, where they do [1]."""

    @property
    def elements(self) -> Number:
        """Elements of one of them [1]."""
        return prod(self.shape)


def shard(total: Number, ranks: Number) -> Number:
    r"""Return what one of several ranks keeps when they share something evenly; the last may be padded.

    .. math:: S = \lceil T / N \rceil

    Parameters
    ----------
    total : what is shared T, in any unit, [1]
    ranks : ranks that share it N, [1]

    Returns
    -------
    share of one rank S, in the unit of T, [1]

    Examples
    --------
    >>> shard(10, 4)
    3

    References
    ----------
    [1] Rajbhandari et al., "ZeRO", 2020, arXiv:1910.02054, section 5.

    """
    return -(-total // ranks)


def master_bytes(elements: Number, width: Number = 4) -> Number:
    r"""Return the bytes of the full-precision copy of the parameters that the optimizer updates.

    .. math:: B = w P

    Parameters
    ----------
    elements : parameters that the rank updates P, [1]
    width : bytes of one master element w, [bytes]

    Returns
    -------
    master parameters B, [bytes]

    Examples
    --------
    >>> master_bytes(1_000_000)
    4000000

    References
    ----------
    [1] Micikevicius et al., "Mixed Precision Training", 2018, arXiv:1710.03740, section 3.1.

    """
    return width * elements


def quantised_bytes(elements: Number, block: Number = BITSANDBYTES_BLOCK) -> Number:
    r"""Return the bytes of one moment quantised block-wise to 8 bits: a byte an element, an fp32 scale a block.

    .. math:: B = P + 4 \lceil P / Q \rceil

    Parameters
    ----------
    elements : elements of the moment P, [1]
    block : elements that share a scale Q, [1]

    Returns
    -------
    quantised moment B, [bytes]

    Examples
    --------
    >>> quantised_bytes(4096), quantised_bytes(4096, block=2048)
    (4160, 4104)

    References
    ----------
    [1] Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2021, arXiv:2110.02861, section 2.
    [2] bitsandbytes, bitsandbytes/optim/optimizer.py@95f9af3, line 524.

    """
    return elements + 4 * -(-elements // block)


def factored_bytes(rows: Number, columns: Number, width: Number = 4, matrices: Number = 1) -> Number:
    r"""Return the bytes of Adafactor's factored second moment of matrices; a vector keeps a full one instead.

    .. math:: B = n w (r + c)

    Parameters
    ----------
    rows : rows of one matrix r, [1]
    columns : columns of one matrix c, [1]
    width : bytes of one element w, [bytes]
    matrices : matrices of this shape n, [1]

    Returns
    -------
    factored second moment B, [bytes]

    Examples
    --------
    >>> factored_bytes(4096, 11008)
    60416

    References
    ----------
    [1] Shazeer and Stern, "Adafactor", 2018, arXiv:1804.04235, section 3.

    """
    return matrices * width * (rows + columns)


def preconditioner_elements(size: Number) -> Number:
    r"""Return the elements of what SOAP keeps for one dimension of a weight: a Gram matrix and its eigenvectors.

    .. math:: E = 2 d^2

    Parameters
    ----------
    size : size of the dimension d, [1]

    Returns
    -------
    elements E, [1]

    Examples
    --------
    >>> preconditioner_elements(4096)
    33554432

    References
    ----------
    [1] Vyas et al., "SOAP: Improving and Stabilizing Shampoo using Adam", 2024, arXiv:2409.11321, section 4.
    [2] nikhilvyas/SOAP, soap.py@a1e5535, init_preconditioner.

    """
    return 2 * size * size


def projected_elements(rows: Number, columns: Number, rank: Number, width: Number = FULL) -> Number:
    r"""Return the elements of GaLore's states of one matrix: two moments of the projected gradient, and the projector.

    .. math:: E = 2 r l + s p, \quad s = \min(m, n), \quad l = \max(m, n)

    The gradient is projected on its shorter side: by the right singular vectors of a tall matrix, the left ones of a
    wide one. Of fp32 gradients the projector is a view into all of them (p = s), which therefore stay; of 16-bit
    gradients it is a copy (p = r).

    Parameters
    ----------
    rows : rows of the matrix m, [1]
    columns : its columns n, [1]
    rank : rank of the projection r, at most s, [1]
    width : bytes of a gradient's element, [bytes]

    Returns
    -------
    state elements E, [1]

    Examples
    --------
    >>> int(projected_elements(4096, 4096, 128, width=2)), int(projected_elements(4096, 4096, 128))
    (1572864, 17825792)

    References
    ----------
    [1] Zhao et al., "GaLore", 2024, arXiv:2403.03507, section 4.
    [2] jiaweizzhao/GaLore, galore_torch/galore_projector.py@2cc66f8, get_orthogonal_matrix: ``Vh[:rank, :]``.

    """
    short, long = np.minimum(rows, columns), np.maximum(rows, columns)
    basis = np.minimum(rank, short)
    return 2 * basis * long + short * np.where(width < FULL, basis, short)


# Adam's states below fp32, which a kernel in fp32 updates: what the step copies, and what that moves.

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
