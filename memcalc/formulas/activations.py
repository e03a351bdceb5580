"""Bytes of activations: of one tensor that autograd keeps, and of a loss that never stores all logits.

Legend: T tokens of a micro-batch on a rank, V vocabulary, h hidden, e elements a token, w bytes an element, t the
degree that divides the tensor.
"""

from __future__ import annotations

import numpy as np

from memcalc.formulas.parameters import Number


def saved_bytes(elements: Number, tokens: Number, width: Number, ranks: Number = 1, keys: Number = 1) -> Number:
    r"""Return the bytes of one saved tensor on a rank.

    .. math:: B = \lceil e T s w / t \rceil

    Parameters
    ----------
    elements : elements a token (and key, where the tensor is quadratic) e, [1]
    tokens : tokens of a micro-batch on the rank T, [tokens]
    width : bytes of one element w, [bytes]
    ranks : ranks that share the tensor t, [1]
    keys : keys that each token attends to s, for materialised scores, [tokens]

    Returns
    -------
    saved B, [bytes]

    Examples
    --------
    >>> saved_bytes(4096, 2048, 2)
    16777216

    References
    ----------
    [1] Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022, arXiv:2205.05198.

    """
    return -(-(elements * tokens * keys * width) // ranks)


def fused_linear_loss_bytes(tokens: Number, vocab: Number, hidden: Number, width: Number) -> Number:
    r"""Return the bytes of a loss that never stores all logits: one chunk of rows, and the gradient of its input.

    .. math:: B = (w + 4) V c + w T h, \quad c = 2^{\lceil \log_2 \lceil T / \lceil V / h \rceil \rceil \rceil}

    Parameters
    ----------
    tokens : tokens of a micro-batch on the rank T, [tokens]
    vocab : vocabulary V, [1]
    hidden : width of the residual stream h, [1]
    width : bytes of one logit w, [bytes]

    Returns
    -------
    chunk and gradient B, [bytes]

    Examples
    --------
    >>> int(fused_linear_loss_bytes(2048, 32000, 4096, 2))
    65929216

    References
    ----------
    [1] Liger-Kernel, ops/fused_linear_cross_entropy.py@v0.5.0, fused_linear_cross_entropy_forward.

    """
    rows = -(-tokens // -(-vocab // hidden))
    chunk = np.left_shift(1, np.frexp(np.maximum(rows - 0.5, 0.5))[1])
    return (width + 4) * vocab * np.minimum(chunk, tokens) + width * tokens * hidden
