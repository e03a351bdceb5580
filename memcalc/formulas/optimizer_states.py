"""Elements and bytes of what an optimizer keeps of a weight, by its shape."""

from __future__ import annotations

import numpy as np

from memcalc.formulas.parameters import Number

BITSANDBYTES_BLOCK = 256
"""Elements that share a scale in 8-bit states of bitsandbytes from 0.44 on [1]; 2048 before, and in the paper."""
GALORE_RANK = 128
"""Transformers 5.23 trainer_optimizer.py, ``_get_galore_optimizer`` [1]."""
FULL = 4
"""Bytes of an fp32 number [bytes]."""


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
