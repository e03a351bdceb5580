"""Bytes of activations: what autograd keeps, a loss that never stores all logits, and what is kept beside steps.

Legend: T tokens of a micro-batch on a rank, V vocabulary, h hidden, e elements a token, w bytes an element, t the
degree that divides the tensor.

Logits and what is kept of them where log-probabilities are read; what evaluation, generation, and copies of a job's
states on their way take.
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


def chunk_rows(tokens: Number, vocab: Number, hidden: Number) -> Number:
    r"""Return the rows whose logits are there at once in a loss that never stores them all.

    .. math:: c = \min(2^{\lceil \log_2 \lceil T / \lceil V / h \rceil \rceil \rceil}, T)

    Parameters
    ----------
    tokens : tokens of a micro-batch on the rank T, [tokens]
    vocab : vocabulary V, [1]
    hidden : width of the residual stream h, [1]

    Returns
    -------
    rows c, [tokens]

    Examples
    --------
    >>> int(chunk_rows(8192, 151936, 1536))
    128

    References
    ----------
    [1] Liger-Kernel, ops/fused_linear_cross_entropy.py@v0.8.5, fused_linear_cross_entropy_forward: as since v0.1.

    """
    rows = -(-tokens // -(-vocab // hidden))
    return np.minimum(np.left_shift(1, np.frexp(np.maximum(rows - 0.5, 0.5))[1]), tokens)


def fused_linear_loss_bytes(
    tokens: Number, vocab: Number, hidden: Number, width: Number, logit_bytes: Number, head_bytes: Number
) -> Number:
    r"""Return the bytes of a loss that never stores all logits: one chunk of rows, and the gradient of its input.

    .. math:: B = V (q c + u h) + w T h

    Parameters
    ----------
    tokens : tokens of a micro-batch on the rank T, [tokens]
    vocab : vocabulary V, [1]
    hidden : width of the residual stream h, [1]
    width : bytes of an element of its input w, [bytes]
    logit_bytes : bytes held for each of c rows' logits q, by release, [bytes]
    head_bytes : bytes held for each weight of the head u: a cast, or a chunk's gradient apart, [bytes]

    Returns
    -------
    chunk and gradient B, [bytes]

    Examples
    --------
    >>> int(fused_linear_loss_bytes(2048, 32000, 4096, 2, 6, 0))
    65929216

    References
    ----------
    [1] Liger-Kernel, ops/fused_linear_cross_entropy.py@v0.8.5, fused_linear_cross_entropy_forward.

    """
    rows = chunk_rows(tokens, vocab, hidden)
    return vocab * (logit_bytes * rows + head_bytes * hidden) + width * tokens * hidden


def log_prob_bytes(rows: Number, tokens: Number, vocab: Number, logit_bytes: Number) -> Number:
    r"""Return what logits and their copies take in a pass that reads log-probabilities.

    .. math:: M = r\, n\, V\, q

    Parameters
    ----------
    rows : sequences of the micro-batch r, [1]
    tokens : tokens of each that have logits n, [tokens]
    vocab : vocabulary V, [1]
    logit_bytes : bytes for each logit q, by framework and whether there are gradients, [bytes]

    Returns
    -------
    logits and their copies M, [bytes]

    Examples
    --------
    >>> log_prob_bytes(1, 16384, 152064, 2) / 2**30
    4.640625

    References
    ----------
    [1] verl, verl/utils/torch_functional.py@1dda039b, logprobs_from_logits; TRL, trl/trainer/utils.py@f2cd5771.

    """
    return rows * tokens * vocab * logit_bytes


TILE_TOKENS, TILE_VOCAB = 4096, 32768
"""Tokens and entries of the vocabulary of a tile of TRL's kernel (TOKEN_CHUNK_SIZE, _CHUNKED_LOGPROB_CHUNK_SIZE)."""


def tiled_log_prob_bytes(
    tokens: Number, vocab: Number, hidden: Number, width: Number, gradient_bytes: Number
) -> Number:
    r"""Return what a kernel holds that makes logits in tiles: a tile, and the gradients of head and hidden states.

    .. math:: M = 32768\, w \min(n, 4096) + h\, (V g + 8\, n)

    Parameters
    ----------
    tokens : tokens that are scored n, [tokens]
    vocab : vocabulary V, [1]
    hidden : width of the head h, 0 in a pass without gradients, [1]
    width : bytes of one logit w, [bytes]
    gradient_bytes : an element of the head's gradient g: 4 in fp32, 2 more for its copy in 16 bits, 0 for a frozen
        head, [bytes]

    Returns
    -------
    tile and gradients M, [bytes]

    Examples
    --------
    >>> int(tiled_log_prob_bytes(16384, 152064, 0, 2, 0)) >> 20
    256

    References
    ----------
    [1] trl/kernels/chunked_logprob.py@v1.16.0, ChunkedLogProbFunction; the 8 bytes of an element of its input: the
        scored ones, put together, and their gradient in fp32 and 16 bits, or all of them in fp32.

    """
    return TILE_VOCAB * width * np.minimum(tokens, TILE_TOKENS) + hidden * (vocab * gradient_bytes + 8 * tokens)


def tiled_cast_bytes(tokens: Number, vocab: Number, hidden: Number, width: Number) -> Number:
    r"""Return what that kernel holds of 16-bit copies where weights are fp32: of two tiles' weights and hidden states.

    A copy is made before the one before it goes.

    .. math:: M = w\, h\, (\min(V k, 65536) + \min(n, 4096)), \quad k = \min(2, \lceil n / 4096 \rceil)

    Up to k vocabularies, since tiles of other tokens begin anew.

    Parameters
    ----------
    tokens : tokens that are scored n, [tokens]
    vocab : vocabulary V, [1]
    hidden : width of the head h, [1]
    width : bytes of one logit w, [bytes]

    Returns
    -------
    copies M, [bytes]

    Examples
    --------
    >>> int(tiled_cast_bytes(8192, 151936, 896, 2)) >> 20
    119

    References
    ----------
    [1] trl/kernels/chunked_logprob.py@v1.16.0, ChunkedLogProbFunction: hidden_chunk, w_chunk.

    """
    turns = np.minimum(2, -(-tokens // TILE_TOKENS))
    return width * hidden * (np.minimum(vocab * turns, 2 * TILE_VOCAB) + np.minimum(tokens, TILE_TOKENS))


def split_log_prob_bytes(tokens: Number, vocab: Number, hidden: Number) -> Number:
    r"""Return what a kernel holds that makes gradients of logits in splits of the vocabulary, beside head and input.

    .. math:: M = 2\, n\, (h + s + \max(h, r)) + 2\, V h, \quad r = V \bmod s, \quad s = 9504

    Without gradients sums of splits of 1024 entries: :math:`M = 12\, n \lceil V / 1024 \rceil`.

    Parameters
    ----------
    tokens : tokens of the micro-batch n, [tokens]
    vocab : a rank's part of the vocabulary V, [1]
    hidden : width of the head h, 0 where there are no gradients, [1]

    Returns
    -------
    gradients of a split's logits, of the input, a part of it, and of the head M, [bytes]

    Examples
    --------
    >>> int(split_log_prob_bytes(24576, 76032, 4096)) >> 20
    1423
    >>> int(split_log_prob_bytes(24576, 76032, 0)) >> 20
    21

    References
    ----------
    [1] verl, verl/utils/kernel/kernels.py@1dda039b, efficient_entropy_forward; efficient_entropy_backward by its
        default method, whose last split is a copy, and whose others add a product to the input's gradient.

    """
    beside = np.maximum(hidden * (vocab > 9504), vocab % 9504)
    trained = 2 * tokens * (hidden + 9504 + beside) + 2 * vocab * hidden
    return np.where(np.asarray(hidden) > 0, trained, 12 * tokens * -(-vocab // 1024))[()]


def joined_outputs_bytes(outputs: Number, batches: Number) -> Number:
    r"""Return the bytes of outputs that an evaluation keeps, while the last batch is joined to those before it.

    Each batch is joined to those before it by a copy, so that old and new stand beside the batch itself.

    .. math:: B = \begin{cases} o & k = 1 \\ 2 k o & k > 1 \end{cases}

    Parameters
    ----------
    outputs : outputs of one batch of all ranks o, [bytes]
    batches : batches that are kept on the GPU at once k, [1]

    Returns
    -------
    outputs that are alive B, [bytes]

    Examples
    --------
    >>> joined_outputs_bytes(8 * 1024 * 128256 * 4, 10)
    84053852160
    >>> joined_outputs_bytes(8, 1)
    8

    References
    ----------
    [1] Transformers, trainer_pt_utils.py@v5.23, EvalLoopContainer.add and torch_pad_and_concatenate.

    """
    return outputs * batches * (1 + (batches > 1))


def waiting_outputs_bytes(outputs: Number, batches: Number) -> Number:
    r"""Return the bytes of outputs that an evaluation keeps, while the last batch passes the model.

    The loop still refers to the batch before, beside what it was joined to.

    .. math:: B = \begin{cases} (k - 1) o & k < 3 \\ k o & k \ge 3 \end{cases}

    Parameters
    ----------
    outputs : outputs of one batch of all ranks o, [bytes]
    batches : batches that are kept on the GPU at once k, [1]

    Returns
    -------
    outputs that are alive B, [bytes]

    Examples
    --------
    >>> waiting_outputs_bytes(8, 1), waiting_outputs_bytes(8, 2), waiting_outputs_bytes(8, 3)
    (0, 8, 24)

    References
    ----------
    [1] Transformers, trainer.py@v5.23, evaluation_loop: the variable ``logits``.

    """
    return outputs * (batches - (batches < 3))


def key_value_bytes(keys: Number, values: Number, tokens: Number, width: Number) -> Number:
    r"""Return the bytes of the keys and values that a layer caches.

    .. math:: B = w T (d_k + d_v)

    Parameters
    ----------
    keys : width of all cached keys of a token d_k, [1]
    values : width of all its values d_v, [1]
    tokens : cached tokens of all sequences T, [1]
    width : bytes of one element w, [bytes]

    Returns
    -------
    cache of one layer B, [bytes]

    Examples
    --------
    >>> 32 * key_value_bytes(1024, 1024, 8192, 2)
    1073741824

    References
    ----------
    [1] Transformers, cache_utils.py@v5.23, DynamicLayer.update.

    """
    return width * tokens * (keys + values)
