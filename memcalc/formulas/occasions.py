"""Bytes of what a job does beside its steps: evaluation, generation, and copies of its states on their way."""

from __future__ import annotations

from memcalc.formulas.parameters import Number


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
