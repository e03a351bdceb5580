"""Bytes of gradients and of the buffers that reduce them."""

from __future__ import annotations

from memcalc.formulas.parameters import Number


def gradient_bytes(elements: Number, width: Number) -> Number:
    r"""Return the bytes of the gradients that a rank keeps.

    .. math:: B = w P

    Parameters
    ----------
    elements : trainable parameters P whose gradient the rank keeps, [1]
    width : bytes of one gradient element w, [bytes]

    Returns
    -------
    gradients B, [bytes]

    Examples
    --------
    >>> gradient_bytes(7_500_000_000, 2)
    15000000000

    References
    ----------
    [1] Rajbhandari et al., "ZeRO", 2020, arXiv:1910.02054, section 3.1.

    """
    return width * elements


def main_gradient_bytes(elements: Number) -> Number:
    r"""Return the bytes of Megatron's fp32 main gradients, into which every backward pass accumulates.

    .. math:: B = 4 P

    Parameters
    ----------
    elements : trainable parameters on the rank P, [1]

    Returns
    -------
    main gradients B, [bytes]

    Examples
    --------
    >>> main_gradient_bytes(1_947_165_696)
    7788662784

    References
    ----------
    [1] Megatron-LM, docs/user-guide/features/dist_optimizer.md@d98e8a64, the bf16 row.

    """
    return 4 * elements


def ddp_bucket_bytes(elements: Number, width: Number, as_view: Number = 0) -> Number:
    r"""Return the bytes that the buckets of DistributedDataParallel add to the gradients.

    .. math:: B = (1 - v) w P

    Parameters
    ----------
    elements : trainable parameters on the rank P, [1]
    width : bytes of one gradient element w, [bytes]
    as_view : 1 with ``gradient_as_bucket_view`` v, where a gradient is a view of its bucket, else 0, [1]

    Returns
    -------
    second copy of the gradients B, [bytes]

    Examples
    --------
    >>> ddp_bucket_bytes(1_000_000_000, 4)
    4000000000
    >>> ddp_bucket_bytes(1_000_000_000, 4, as_view=1)
    0

    References
    ----------
    [1] PyTorch, torch/nn/parallel/distributed.py@v2.13.0, argument gradient_as_bucket_view.

    """
    return (1 - as_view) * width * elements


def reduce_scatter_input_bytes(elements: Number, width: Number, ranks: Number = 1) -> Number:
    r"""Return the bytes of the flat buffer from which one group's gradients are reduced and scattered.

    .. math:: B = w N \lceil P / N \rceil

    Parameters
    ----------
    elements : parameters of the group P (one block, or the root), [1]
    width : bytes of one element in the reduction's dtype w, [bytes]
    ranks : ranks that share the gradients N; each shard is padded to the same size, [1]

    Returns
    -------
    reduce-scatter input B, [bytes]

    Examples
    --------
    >>> reduce_scatter_input_bytes(202_383_360, 4, 8)
    809533440

    References
    ----------
    [1] PyTorch, torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py@v2.13.0, foreach_reduce.

    """
    return width * ranks * -(-elements // ranks)


def reduce_bucket_bytes(bucket: Number, width: Number, buffers: Number = 1) -> Number:
    r"""Return the bytes of DeepSpeed's contiguous reduction buckets.

    .. math:: B = n w E

    Parameters
    ----------
    bucket : elements of one bucket E (``reduce_bucket_size``), [1]
    width : bytes of one element in the reduction's dtype w, [bytes]
    buffers : buckets allocated n: 2 with ``overlap_comm``, else 1, [1]

    Returns
    -------
    reduction buckets B, [bytes]

    Examples
    --------
    >>> reduce_bucket_bytes(500_000_000, 2, buffers=2)
    2000000000

    References
    ----------
    [1] DeepSpeed, deepspeed/runtime/zero/stage_1_and_2.py@edaa722, lines 2492-2513.

    """
    return buffers * width * bucket
