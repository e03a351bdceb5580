"""Time of what one device computes: matrix products, fused attention, and kernels that only move memory."""

from __future__ import annotations

from memcalc.formulas.parameters import Number


def matmul_bytes(rows: Number, inner: Number, columns: Number, width: Number = 2) -> Number:
    r"""Return the bytes that a matrix product reads and writes at the least: both operands and the result.

    .. math:: B = w (m k + k n + m n)

    Parameters
    ----------
    rows : rows of the left matrix m, [1]
    inner : inner dimension k, [1]
    columns : columns of the right matrix n, [1]
    width : bytes of one element w, [bytes]

    Returns
    -------
    traffic B, [bytes]

    Examples
    --------
    >>> matmul_bytes(2048, 4096, 4096)
    67108864

    References
    ----------
    [1] Williams, Waterman and Patterson, "Roofline", 2009, doi:10.1145/1498765.1498785.

    """
    return width * (rows * inner + inner * columns + rows * columns)


def attention_backward_flops(forward: Number) -> Number:
    r"""Return the operations of the backward of fused attention, which computes the scores again.

    .. math:: F_b = \frac{5}{2} F_f

    Five matrix products stand in backward, two in forward.

    Parameters
    ----------
    forward : operations of its forward F_f, [FLOP]

    Returns
    -------
    operations F_b, [FLOP]

    Examples
    --------
    >>> attention_backward_flops(4)
    10

    References
    ----------
    [1] Dao, "FlashAttention-2", 2023, arXiv:2307.08691, section 4.1.

    """
    return 5 * forward // 2


def kernel_seconds(flops: Number, rate: Number, traffic: Number = 0, bandwidth: Number = 1) -> Number:
    r"""Return the time of kernels that compute and move memory in turn.

    .. math:: t = \frac{F}{P} + \frac{B}{\beta}

    With the compulsory traffic of a product, F / P + B / β makes small and thin shapes slow: the efficiency is
    1 / (1 + P B / (β F)), so that no constant for each dimension is needed.

    Parameters
    ----------
    flops : operations F, [FLOP]
    rate : rate that large shapes reach P, [FLOP/s]
    traffic : memory traffic B, [bytes]
    bandwidth : memory bandwidth β, [bytes/s]

    Returns
    -------
    time t, [s]

    Examples
    --------
    >>> kernel_seconds(4_000_000, 2_000_000, 500, 1000)
    2.5

    References
    ----------
    [1] Williams, Waterman and Patterson, "Roofline", 2009, doi:10.1145/1498765.1498785.

    """
    return flops / rate + traffic / bandwidth


def slower(device: Number, host: Number) -> Number:
    r"""Return the time of a device whose kernels one host thread launches ahead of it.

    .. math:: t = \max(t_d,\; t_h)

    Parameters
    ----------
    device : time of the kernels t_d, [s]
    host : time of their launches t_h, [s]

    Returns
    -------
    time t, [s]

    Examples
    --------
    >>> slower(2.0, 0.5), slower(0.5, 2.0)
    (2.0, 2.0)

    References
    ----------
    The host runs ahead of the device, which waits for it only where its queue runs empty.

    """
    return (device + host + abs(device - host)) / 2
