"""Bytes of activations: sums of the inventory over blocks, and what the loss holds.

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


def logits_bytes(
    tokens: Number, vocab: Number, numerator: Number, denominator: Number = 1, ranks: Number = 1
) -> Number:
    r"""Return the bytes alive around the loss: logits, their fp32 copy, the log-softmax and the gradients.

    .. math:: B = \lceil \frac{n}{d} \frac{T V}{t} \rceil

    Parameters
    ----------
    tokens : tokens of a micro-batch on the rank T, [tokens]
    vocab : vocabulary V, [1]
    numerator : bytes a logit n, of the loss in question, [bytes]
    denominator : what divides them d, where the loss runs in chunks, [1]
    ranks : ranks that share the logits t, [1]

    Returns
    -------
    logits and what is computed from them B, [bytes]

    Examples
    --------
    >>> logits_bytes(2048, 32000, 12)
    786432000

    References
    ----------
    [1] Transformers, loss/loss_utils.py@v5.23.0, ForCausalLMLoss; PyTorch, aten _log_softmax_backward_data.

    """
    return -(-(tokens * vocab * numerator) // (denominator * ranks))


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


def backward_transient_bytes(tokens: Number, hidden: Number, ffn: Number, width: Number, ranks: Number = 1) -> Number:
    r"""Return what the backward of one block holds beyond its saved tensors, where its peak stands.

    At the gradient of the activation the product is already freed and three gradients of width f are alive (gate, up,
    product), with the incoming gradient of the residual stream and the block's output.

    .. math:: B = \lceil w T (2 f / t + 2 h) \rceil

    Parameters
    ----------
    tokens : tokens of a micro-batch on the rank T, [tokens]
    hidden : width of the residual stream h, [1]
    ffn : width of the MLP f, [1]
    width : bytes of one element w, [bytes]
    ranks : ranks that share the MLP t, [1]

    Returns
    -------
    transient B, [bytes]

    Examples
    --------
    >>> backward_transient_bytes(2048, 4096, 11008, 2)
    123731968

    References
    ----------
    [1] PyTorch 2.13, backward of a Llama block on fake tensors: 12 f bytes a token are alive of 8 f saved.

    """
    return width * tokens * (-(-2 * ffn // ranks) + 2 * hidden)
