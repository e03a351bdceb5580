"""What mixes tokens in attention's place: parameters and operations, on integers or NumPy columns.

Every count of elements is written [1]; flags such as `bias` are 0 or 1 (or False and True).
"""

from __future__ import annotations

from typing import Any, TypeAlias

Number: TypeAlias = Any
"""An int, or a NumPy column of them: every formula broadcasts."""


def short_convolution_parameters(hidden: Number, taps: Number, bias: Number = 0) -> Number:
    r"""Return the parameters of a gated short convolution: two projections, and a filter for each channel.

    .. math:: P = 4 h^2 + k h + 5 b\, h

    Parameters
    ----------
    hidden : width of the residual stream h, [1]
    taps : length of the filter k, [1]
    bias : 1 with a bias vector b in projections and convolution, else 0, [1]

    Returns
    -------
    parameters P, [1]

    Examples
    --------
    >>> short_convolution_parameters(2048, 3)
    16783360

    References
    ----------
    [1] LFM2 Technical Report, arXiv:2511.23404, section 2; Transformers 5.24 ``models/lfm2/modeling_lfm2.py``

    """
    return 4 * hidden * hidden + taps * hidden + 5 * bias * hidden


def gated_delta_net_parameters(
    hidden: Number, *, keys: Number, values: Number, heads: Number, value_dim: Number, taps: Number
) -> Number:
    r"""Return the parameters of a gated delta net.

    .. math:: P = h (2 d_k + 3 d_v + 2 H) + k (2 d_k + d_v) + 2 H + v

    Parameters
    ----------
    hidden : width of the residual stream h, [1]
    keys : width of all keys d_k, [1]
    values : width of all values d_v, [1]
    heads : heads of values H, [1]
    value_dim : width of one head's value v, which the norm's weight has, [1]
    taps : length of the convolution k, [1]

    Returns
    -------
    parameters P, [1]

    Examples
    --------
    >>> gated_delta_net_parameters(2048, keys=2048, values=4096, heads=32, value_dim=128, taps=4)
    33718464

    References
    ----------
    [1] Transformers 5.24 ``models/qwen3_next/modeling_qwen3_next.py``, ``Qwen3NextGatedDeltaNet``; arXiv:2412.06464

    """
    return hidden * (2 * keys + 3 * values + 2 * heads) + taps * (2 * keys + values) + 2 * heads + value_dim


def delta_attention_parameters(hidden: Number, heads: Number, head_dim: Number, taps: Number) -> Number:
    r"""Return the parameters of Kimi Delta Attention.

    .. math:: P = d (4 h + 3 k + 2 d_h + 1) + 2 h d_h + H (h + 1) + d_h, \quad d = H d_h

    Parameters
    ----------
    hidden : width of the residual stream h, [1]
    heads : heads H, [1]
    head_dim : width of one head d_h, [1]
    taps : length of the convolution k, [1]

    Returns
    -------
    parameters P, [1]

    Examples
    --------
    >>> delta_attention_parameters(2304, 32, 128, 4)
    39514272

    References
    ----------
    [1] Transformers 5.24 ``models/kimi_linear/modeling_kimi_linear.py``, ``KimiLinearDeltaAttention``; arXiv:2510.26692

    """
    inner = heads * head_dim
    low = 2 * hidden * head_dim + heads * (hidden + 1) + head_dim
    return inner * (4 * hidden + 3 * taps + 2 * head_dim + 1) + low


def mamba2_parameters(
    hidden: Number, *, inner: Number, channels: Number, heads: Number, taps: Number, conv_bias: Number = 1,
    bias: Number = 0, normed: Number = 1,
) -> Number:  # fmt: skip
    r"""Return the parameters of a Mamba-2 mixer.

    .. math:: P = h (2 d + c + H) + (k + b_c)\, c + 3 H + n\, d + b (d + c + H + h)

    Parameters
    ----------
    hidden : width of the residual stream h, [1]
    inner : width of all heads d, [1]
    channels : channels of the convolution c, [1]
    heads : heads H, [1]
    taps : length of the convolution k, [1]
    conv_bias : 1 with a bias of the convolution b_c, else 0, [1]
    bias : 1 with biases of both projections b, else 0, [1]
    normed : 1 with a gated norm n, else 0, [1]

    Returns
    -------
    parameters P, [1]

    Examples
    --------
    >>> mamba2_parameters(2560, inner=5120, channels=5376, heads=80, taps=4)
    40214000

    References
    ----------
    [1] Transformers 5.24 ``models/mamba2/modeling_mamba2.py``, ``Mamba2Mixer``; arXiv:2405.21060

    """
    projections = hidden * (2 * inner + channels + heads) + bias * (inner + channels + heads + hidden)
    return projections + (taps + conv_bias) * channels + 3 * heads + normed * inner


def mamba_parameters(
    hidden: Number, *, inner: Number, state: Number, rank: Number, taps: Number, conv_bias: Number = 1,
    bias: Number = 0, normed: Number = 0,
) -> Number:  # fmt: skip
    r"""Return the parameters of a Mamba mixer.

    .. math:: P = d (3 h + 2 r + 3 n + k + b_c + 2) + b (2 d + h) + \nu (r + 2 n)

    Parameters
    ----------
    hidden : width of the residual stream h, [1]
    inner : channels d, [1]
    state : width of the state of each channel n, [1]
    rank : width of what the steps are projected from r, [1]
    taps : length of the convolution k, [1]
    conv_bias : 1 with a bias of the convolution b_c, else 0, [1]
    bias : 1 with biases of the projections of input and output b, else 0, [1]
    normed : 1 with learned norms of steps, B and C, else 0, [1]

    Returns
    -------
    parameters P, [1]

    Examples
    --------
    >>> mamba_parameters(2560, inner=5120, state=16, rank=160, taps=4)
    41241600

    References
    ----------
    [1] Transformers 5.24 ``models/mamba/modeling_mamba.py``, ``MambaMixer``; arXiv:2312.00752

    """
    channels = inner * (3 * hidden + 2 * rank + 3 * state + taps + conv_bias + 2)
    return channels + bias * (2 * inner + hidden) + normed * (rank + 2 * state)


def delta_rule_flops(tokens: Number, heads: Number, key_dim: Number, value_dim: Number, chunk: Number = 64) -> Number:
    r"""Return the operations of the gated delta rule in chunks, forward.

    .. math:: F = T H (6\, d_k d_v + C (6\, d_k + 4\, d_v))

    Within a chunk: products of keys with keys and with queries, and the corrected keys and values; between chunks: the
    state's update, and its products with queries and corrected keys. Solving the chunk's triangle is left out.

    Parameters
    ----------
    tokens : tokens T, [tokens]
    heads : heads of values H, [1]
    key_dim : width of one head's key d_k, [1]
    value_dim : width of one head's value d_v, [1]
    chunk : tokens of a chunk C, [tokens]

    Returns
    -------
    operations F, [FLOP]

    Examples
    --------
    >>> delta_rule_flops(1, 32, 128, 128)
    5767168

    References
    ----------
    [1] Yang et al., "Gated Delta Networks", 2024, arXiv:2412.06464, section 3.3.

    """
    return tokens * heads * (6 * key_dim * value_dim + chunk * (6 * key_dim + 4 * value_dim))


def state_space_flops(
    tokens: Number, heads: Number, head_dim: Number, state: Number, groups: Number, chunk: Number
) -> Number:
    r"""Return the operations of Mamba-2's scan in chunks, forward.

    .. math:: F = T (H (4\, n p + 2\, C p) + 2\, g C n)

    Parameters
    ----------
    tokens : tokens T, [tokens]
    heads : heads H, [1]
    head_dim : width of one head p, [1]
    state : width of the state n, [1]
    groups : groups of heads that share B and C g, [1]
    chunk : tokens of a chunk C, [tokens]

    Returns
    -------
    operations F, [FLOP]

    Examples
    --------
    >>> state_space_flops(1, 80, 64, 128, 1, 256)
    5308416

    References
    ----------
    [1] Dao and Gu, "Transformers are SSMs", 2024, arXiv:2405.21060, section 6.

    """
    return tokens * (heads * (4 * state * head_dim + 2 * chunk * head_dim) + 2 * groups * chunk * state)


def selective_scan_flops(tokens: Number, inner: Number, state: Number) -> Number:
    r"""Return the operations of Mamba's scan, forward.

    .. math:: F = T d (7\, n + 4)

    For each place of a state: its decay (a product and an exponential), what enters it, its update (two operations) and
    what leaves it (two); for each channel the step times the input, the skip (two) and the gate.

    Parameters
    ----------
    tokens : tokens T, [tokens]
    inner : channels d, [1]
    state : width of the state of each channel n, [1]

    Returns
    -------
    operations F, [FLOP]

    Examples
    --------
    >>> selective_scan_flops(1, 5120, 16)
    593920

    References
    ----------
    [1] Gu and Dao, "Mamba", 2023, arXiv:2312.00752, section 3.2 and algorithm 2.

    """
    return tokens * inner * (7 * state + 4)
