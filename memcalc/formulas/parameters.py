"""Parameters of each part of a model: plain arithmetic on integers or NumPy columns.

Every count is a number of elements, written [1]; flags such as `bias` are 0 or 1 (or False and True).
"""

from __future__ import annotations

from typing import Any, TypeAlias

Number: TypeAlias = Any
"""An int, or a NumPy column of them: every formula broadcasts."""


def linear_parameters(inputs: Number, outputs: Number, bias: Number = 0) -> Number:
    r"""Return the parameters of one linear layer.

    .. math:: P = n_{in} n_{out} + b\, n_{out}

    Parameters
    ----------
    inputs : input features n_in, [1]
    outputs : output features n_out, [1]
    bias : 1 with a bias vector b, else 0, [1]

    Returns
    -------
    parameters P, [1]

    Examples
    --------
    >>> linear_parameters(768, 3072, bias=1)
    2362368

    """
    return inputs * outputs + bias * outputs


def attention_parameters(hidden: Number, q_dim: Number, kv_dim: Number, kv_hidden: Number | None = None) -> Number:
    r"""Return the parameters of the four matrices of multi-head, grouped-query or multi-query attention.

    .. math:: P = 2 h d_q + 2 h_{kv} d_{kv}

    Parameters
    ----------
    hidden : width of the residual stream h, [1]
    q_dim : heads times head size d_q, [1]
    kv_dim : key-value heads times head size d_kv, [1]
    kv_hidden : width that keys and values are projected from h_kv (cross attention); h where absent, [1]

    Returns
    -------
    parameters P, [1]

    Examples
    --------
    >>> attention_parameters(4096, 4096, 1024)
    41943040

    References
    ----------
    [1] Ainslie et al., "GQA", 2023, arXiv:2305.13245, section 2.

    """
    source = hidden if kv_hidden is None else kv_hidden
    return 2 * hidden * q_dim + 2 * source * kv_dim


def qkv_bias_parameters(
    q_dim: Number, kv_dim: Number, q_bias: Number = 1, k_bias: Number = 1, v_bias: Number = 1
) -> Number:
    r"""Return the parameters of the biases of the query, key and value projections.

    .. math:: P = b_q d_q + (b_k + b_v) d_{kv}

    Parameters
    ----------
    q_dim : heads times head size d_q, [1]
    kv_dim : key-value heads times head size d_kv, [1]
    q_bias, k_bias, v_bias : 1 where that projection has a bias b, else 0, [1]

    Returns
    -------
    parameters P, [1]

    Examples
    --------
    >>> qkv_bias_parameters(3584, 512)
    4608

    """
    return q_bias * q_dim + (k_bias + v_bias) * kv_dim


def latent_up_parameters(
    heads: Number, *, query_rank: Number, kv_rank: Number, nope_dim: Number, rope_dim: Number, value_dim: Number
) -> Number:
    r"""Return the parameters of the up-projections of multi-head latent attention, which are split by heads.

    .. math:: P = a \left( r_q (d_n + d_r) + r_{kv} (d_n + d_v) \right)

    Parameters
    ----------
    heads : attention heads a, [1]
    query_rank : width the queries are projected from r_q (the hidden size without query compression), [1]
    kv_rank : rank of the compressed keys and values r_kv, [1]
    nope_dim : head size without position d_n, [1]
    rope_dim : rotary part of a head d_r, [1]
    value_dim : value head size d_v, [1]

    Returns
    -------
    parameters P, [1]

    Examples
    --------
    >>> latent_up_parameters(128, query_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128)
    54525952

    References
    ----------
    [1] DeepSeek-AI, "DeepSeek-V2", 2024, arXiv:2405.04434, section 2.1 and appendix B.

    """
    return heads * (query_rank * (nope_dim + rope_dim) + kv_rank * (nope_dim + value_dim))


def latent_down_parameters(hidden: Number, query_rank: Number, kv_rank: Number, rope_dim: Number) -> Number:
    r"""Return the parameters of the down-projections of multi-head latent attention with the norms of the latents.

    .. math:: P = h (r_q + r_{kv} + d_r) + r_q + r_{kv}

    Parameters
    ----------
    hidden : width of the residual stream h, [1]
    query_rank : rank of the compressed queries r_q; 0 without query compression, [1]
    kv_rank : rank of the compressed keys and values r_kv, [1]
    rope_dim : rotary part of a head d_r, which all heads share, [1]

    Returns
    -------
    parameters P, [1]

    Examples
    --------
    >>> latent_down_parameters(7168, 1536, 512, 64)
    15140864

    References
    ----------
    [1] DeepSeek-AI, "DeepSeek-V2", 2024, arXiv:2405.04434, section 2.1 and appendix B.

    """
    return hidden * (query_rank + kv_rank + rope_dim) + query_rank + kv_rank


def mlp_parameters(hidden: Number, ffn: Number, gated: Number = 1) -> Number:
    r"""Return the parameters of the matrices of an MLP: two, or three with a gate.

    .. math:: P = (2 + g) h f

    Parameters
    ----------
    hidden : width of the residual stream h, [1]
    ffn : inner width f, [1]
    gated : 1 with a gate matrix g, else 0, [1]

    Returns
    -------
    parameters P, [1]

    Examples
    --------
    >>> mlp_parameters(4096, 11008)
    135266304

    References
    ----------
    [1] Shazeer, "GLU Variants Improve Transformer", 2020, arXiv:2002.05202, equation 6.

    """
    return (2 + gated) * hidden * ffn


def mlp_bias_parameters(ffn: Number, gated: Number = 1) -> Number:
    r"""Return the parameters of the biases on the inner width of an MLP; the output's bias has the hidden size.

    .. math:: P = (1 + g) f

    Parameters
    ----------
    ffn : inner width f, [1]
    gated : 1 with a gate matrix g, else 0, [1]

    Returns
    -------
    parameters P, [1]

    Examples
    --------
    >>> mlp_bias_parameters(3072, gated=0)
    3072

    """
    return (1 + gated) * ffn


def experts_parameters(experts: Number, hidden: Number, ffn: Number, gated: Number = 1, bias: Number = 0) -> Number:
    r"""Return the parameters of a number of routed experts.

    .. math:: P = E \left( (2 + g) h f + b ((1 + g) f + h) \right)

    Parameters
    ----------
    experts : experts counted E: all of them, or the top-k that one token passes, [1]
    hidden : width of the residual stream h, [1]
    ffn : inner width of one expert f, [1]
    gated : 1 with a gate matrix g, else 0, [1]
    bias : 1 where an expert's matrices have biases b, else 0, [1]

    Returns
    -------
    parameters P, [1]

    Examples
    --------
    >>> experts_parameters(8, 4096, 14336)
    1409286144

    References
    ----------
    [1] Jiang et al., "Mixtral of Experts", 2024, arXiv:2401.04088, section 2.1.

    """
    return experts * (mlp_parameters(hidden, ffn, gated) + bias * (mlp_bias_parameters(ffn, gated) + hidden))


def norm_parameters(width: Number, vectors: Number = 1) -> Number:
    r"""Return the parameters of one normalisation layer.

    .. math:: P = v w

    Parameters
    ----------
    width : normalised width w, [1]
    vectors : learned vectors v: 2 for LayerNorm, 1 for RMSNorm, 0 without learned scale, [1]

    Returns
    -------
    parameters P, [1]

    Examples
    --------
    >>> norm_parameters(768, vectors=2)
    1536

    """
    return vectors * width


def embedding_parameters(vocab: Number, width: Number) -> Number:
    r"""Return the parameters of a token (or position) embedding, or of an output head without bias.

    .. math:: P = V w

    Parameters
    ----------
    vocab : rows V, [1]
    width : width of a row w, [1]

    Returns
    -------
    parameters P, [1]

    Examples
    --------
    >>> embedding_parameters(32000, 4096)
    131072000

    """
    return vocab * width


def lora_parameters(rank: Number, inputs: Number, outputs: Number) -> Number:
    r"""Return the trainable parameters that a low-rank adapter adds to one linear layer.

    .. math:: P = r (n_{in} + n_{out})

    Parameters
    ----------
    rank : rank of the adapter r, [1]
    inputs : input features n_in, [1]
    outputs : output features n_out, [1]

    Returns
    -------
    parameters P, [1]

    Examples
    --------
    >>> lora_parameters(8, 4096, 4096)
    65536

    References
    ----------
    [1] Hu et al., "LoRA", 2021, arXiv:2106.09685, section 4.1.

    """
    return rank * (inputs + outputs)


def narayanan_parameters(layers: Number, hidden: Number, vocab: Number, seq_len: Number) -> Number:
    r"""Return the parameters of a GPT-2 shaped model as Narayanan et al. count them (the final norm left out).

    .. math:: P = 12 l h^2 \left( 1 + \frac{13}{12 h} + \frac{V + s}{12 l h} \right)

    Parameters
    ----------
    layers : transformer layers l, [1]
    hidden : hidden size h, [1]
    vocab : vocabulary V, [1]
    seq_len : positions s, [1]

    Returns
    -------
    parameters P, [1]

    Examples
    --------
    >>> narayanan_parameters(96, 12288, 51200, 2048)
    174615822336

    References
    ----------
    [1] Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", SC21,
        arXiv:2104.04473, equation 2.

    """
    return 12 * layers * hidden**2 + 13 * layers * hidden + (vocab + seq_len) * hidden


def quantized_bits(bits: Number, block: Number, scale_bits: Number, outer_block: Number = 0) -> Number:
    r"""Return the stored bits a parameter of block-wise quantised weights, the scales included.

    .. math:: B = b + \frac{c}{n} + \frac{32}{n m}

    The last summand, the fp32 scales of the scales, stands only with double quantisation (``outer_block`` m above 0).

    Parameters
    ----------
    bits : bits of one weight b, [bit]
    block : weights that share a scale n, [1]
    scale_bits : bits of one scale c, [bit]
    outer_block : scales that share a second, fp32 scale m; 0 without double quantisation, [1]

    Returns
    -------
    bits a parameter B, [bit]

    Examples
    --------
    >>> quantized_bits(4, 64, 8, outer_block=256)
    4.126953125
    >>> quantized_bits(4, 64, 32)
    4.5

    References
    ----------
    [1] Dettmers et al., "QLoRA", 2023, arXiv:2305.14314, section 3.

    """
    outer = 32 / (block * outer_block) if outer_block else 0
    return bits + scale_bits / block + outer
