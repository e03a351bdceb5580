"""Floating-point operations of a transformer, and the share of the hardware's peak that they use.

A multiplication and an addition count as two operations.

Time of what one device computes: matrix products, fused attention, and kernels that only move memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memcalc.formulas.parameters import Number


def matmul_flops(rows: Number, inner: Number, columns: Number) -> Number:
    r"""Return the operations of one matrix product.

    .. math:: F = 2 m k n

    Parameters
    ----------
    rows : rows of the left matrix m (tokens, in a linear layer), [1]
    inner : inner dimension k, [1]
    columns : columns of the right matrix n, [1]

    Returns
    -------
    operations F, [FLOP]

    Examples
    --------
    >>> matmul_flops(2048, 4096, 11008)
    184683593728

    References
    ----------
    [1] Narayanan et al., "Efficient Large-Scale Language Model Training", 2021, arXiv:2104.04473, appendix.

    """
    return 2 * rows * inner * columns


def layer_matmul_flops(
    tokens: Number, hidden: Number, *, q_dim: Number, kv_dim: Number, ffn: Number, gated: Number = 1
) -> Number:
    r"""Return the operations of the weight matrices of one dense layer, forward.

    .. math:: F = 2 T h \left( 2 d_q + 2 d_{kv} + (2 + g) f \right)

    Parameters
    ----------
    tokens : tokens T, [tokens]
    hidden : width of the residual stream h, [1]
    q_dim : heads times head size d_q, [1]
    kv_dim : key-value heads times head size d_kv, [1]
    ffn : inner width of the MLP f, [1]
    gated : 1 with a gate matrix g, else 0, [1]

    Returns
    -------
    operations F, [FLOP]

    Examples
    --------
    >>> layer_matmul_flops(2048, 4096, q_dim=4096, kv_dim=1024, ffn=14336)
    893353197568

    References
    ----------
    [1] Narayanan et al., "Efficient Large-Scale Language Model Training", 2021, arXiv:2104.04473, appendix.

    """
    return 2 * tokens * hidden * (2 * q_dim + 2 * kv_dim + (2 + gated) * ffn)


def experts_matmul_flops(tokens: Number, topk: Number, hidden: Number, ffn: Number, gated: Number = 1) -> Number:
    r"""Return the operations of the routed experts of one layer, forward.

    .. math:: F = 2 T k (2 + g) h f

    Parameters
    ----------
    tokens : tokens T, [tokens]
    topk : experts a token k, [1]
    hidden : width of the residual stream h, [1]
    ffn : inner width of one expert f, [1]
    gated : 1 with a gate matrix g, else 0, [1]

    Returns
    -------
    operations F, [FLOP]

    Examples
    --------
    >>> experts_matmul_flops(1, 2, 4096, 14336)
    704643072

    References
    ----------
    [1] Jiang et al., "Mixtral of Experts", 2024, arXiv:2401.04088, section 2.1.

    """
    return topk * (2 + gated) * matmul_flops(tokens, hidden, ffn)


def attention_flops(tokens: Number, context: Number, width: Number, causal: Number = 0) -> Number:
    r"""Return the operations of the two products of attention in one layer, forward.

    .. math:: F = \left\lfloor \frac{4 T s d_q}{1 + c} \right\rfloor

    Parameters
    ----------
    tokens : query tokens T, [tokens]
    context : tokens each query may attend to s, the sequence length, [tokens]
    width : heads times head size d_q, [1]
    causal : 1 where a kernel leaves out the masked half c, else 0, [1]

    Returns
    -------
    operations F, [FLOP]

    Examples
    --------
    >>> attention_flops(2048, 2048, 4096), attention_flops(2048, 2048, 4096, causal=1)
    (68719476736, 34359738368)

    References
    ----------
    [1] Dao, "FlashAttention-2", 2023, arXiv:2307.08691, section 4.1.

    """
    return 4 * tokens * context * width // (1 + causal)


def logits_flops(tokens: Number, hidden: Number, vocab: Number) -> Number:
    r"""Return the operations of the output projection, forward.

    .. math:: F = 2 T h V

    Parameters
    ----------
    tokens : tokens T, [tokens]
    hidden : width of the residual stream h, [1]
    vocab : vocabulary V, [1]

    Returns
    -------
    operations F, [FLOP]

    Examples
    --------
    >>> logits_flops(1, 12288, 51200)
    1258291200

    References
    ----------
    [1] Narayanan et al., "Efficient Large-Scale Language Model Training", 2021, arXiv:2104.04473, appendix.

    """
    return matmul_flops(tokens, hidden, vocab)


def step_flops(forward: Number, recomputed: Number = 0) -> Number:
    r"""Return the operations of forward and backward, and of what backward computes again.

    .. math:: F = 3 F_f + F_r

    Backward takes two products for each one of forward: the gradient of the input and that of the weight.

    Parameters
    ----------
    forward : operations of the forward pass F_f, [FLOP]
    recomputed : the part of them that recomputation repeats F_r, [FLOP]

    Returns
    -------
    operations F, [FLOP]

    Examples
    --------
    >>> step_flops(100), step_flops(100, recomputed=100)
    (300, 400)

    References
    ----------
    [1] Narayanan et al., "Efficient Large-Scale Language Model Training", 2021, arXiv:2104.04473, appendix.

    """
    return 3 * forward + recomputed


def model_flops_per_token(active: Number, layers: Number, width: Number, seq_len: Number, frozen: Number = 0) -> Number:
    r"""Return the operations that the model needs for one token, forward and backward, as MFU counts them.

    .. math:: F = 6 P + 4 P_f + 12 L d_q s

    Attention counts in full, without the saving of a causal mask, and recomputation not at all. A frozen weight has a
    product in forward and one for its input's gradient, and none for its own.

    Parameters
    ----------
    active : trained parameters that one token passes P, [1]
    layers : layers L, [1]
    width : heads times head size d_q, [1]
    seq_len : tokens that one attends to s, [tokens]
    frozen : frozen parameters that one token passes P_f, [1]

    Returns
    -------
    operations a token F, [FLOP]

    Examples
    --------
    >>> model_flops_per_token(6_738_415_616, 32, 4096, 4096)
    46872944640

    References
    ----------
    [1] Chowdhery et al., "PaLM", 2022, arXiv:2204.02311, appendix B.
    [2] Hu et al., "LoRA", 2021, arXiv:2106.09685, section 4.2: no gradients of most parameters, 25% faster.

    """
    return 6 * active + 4 * frozen + 12 * layers * width * seq_len


def model_flops_utilization(tokens_per_second: Number, flops_per_token: Number, peak: Number) -> Number:
    r"""Return the share of the hardware's peak that the model's own operations use (MFU).

    .. math:: u = \frac{R F}{P}

    Parameters
    ----------
    tokens_per_second : throughput R of all devices together, or of one, [tokens/s]
    flops_per_token : operations of the model for one token F, [FLOP]
    peak : peak rate of the same devices P, [FLOP/s]

    Returns
    -------
    utilisation u, [1]

    Examples
    --------
    >>> model_flops_utilization(3_000, 52_000_000_000, 312_000_000_000_000)
    0.5

    References
    ----------
    [1] Chowdhery et al., "PaLM", 2022, arXiv:2204.02311, appendix B.

    """
    return tokens_per_second * flops_per_token / peak


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
