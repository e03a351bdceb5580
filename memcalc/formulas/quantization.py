"""Bytes of quantised weights: plain arithmetic on integers or NumPy columns."""

from __future__ import annotations

from typing import Any, TypeAlias

Number: TypeAlias = Any
"""An int, or a NumPy column of them: every formula broadcasts."""

NF4_BLOCK = 64
"""Weights that share one scale (bitsandbytes ``quantize_4bit``, default ``blocksize``)."""
SCALE_BLOCK = 256
"""Scales that share one scale of their own, under double quantisation."""


def four_bit_bytes(elements: Number) -> Number:
    r"""Return the bytes of weights of four bits each, their scales left out.

    .. math:: M = \lceil n / 2 \rceil

    Parameters
    ----------
    elements : weights n of one matrix, [1]

    Returns
    -------
    packed weights M, [bytes]

    Examples
    --------
    >>> four_bit_bytes(4096 * 4096)
    8388608

    References
    ----------
    [1] Dettmers et al., "QLoRA", 2023, arXiv:2305.14314, section 3.

    """
    return -(-elements // 2)


def narrow_bytes(elements: Number, size: Number, block: Number) -> Number:
    r"""Return the bytes of a tensor in 8 or 4 bits with a scale for each block of elements.

    .. math:: M = \lceil n c / m \rceil

    Parameters
    ----------
    elements : elements n of the tensor, [1]
    size : bytes c of a block with its scale, [bytes]
    block : elements m of a block, [1]

    Returns
    -------
    data and scales M, [bytes]

    Examples
    --------
    >>> narrow_bytes(4096, 33, 32)
    4224

    References
    ----------
    [1] NVIDIA/TransformerEngine@d0067d0d, transformer_engine/pytorch/tensor/mxfp8_tensor.py, get_scale_shape.

    """
    return -(-elements * size // block)


def nf4_state_bytes(elements: Number, double: Number = 0) -> Number:
    r"""Return the bytes of the scales of NF4 weights, one for 64 weights.

    .. math:: M = 4 \lceil n / 64 \rceil, \qquad M_{dq} = b + 4 \lceil b / 256 \rceil, \quad b = \lceil n / 64 \rceil

    Parameters
    ----------
    elements : weights n of one matrix, [1]
    double : 1 where the scales are quantised to 8 bits in blocks of 256, else 0, [1]

    Returns
    -------
    scales M, [bytes]

    Examples
    --------
    >>> nf4_state_bytes(4096 * 4096), nf4_state_bytes(4096 * 4096, 1)
    (1048576, 266240)

    References
    ----------
    [1] Dettmers et al., "QLoRA", 2023, arXiv:2305.14314, section 3: 0.5 and 0.127 bits a weight.
    [2] bitsandbytes, functional.py@0.43.3, ``quantize_4bit`` and ``QuantState``.

    """
    blocks = -(-elements // NF4_BLOCK)
    return (4 - 3 * double) * blocks + 4 * double * -(-blocks // SCALE_BLOCK)


def gptq_bytes(inputs: Number, outputs: Number, bits: Number, group: Number) -> Number:
    r"""Return the bytes of the packed weights and zeros of a GPTQ linear layer.

    .. math:: M = \frac{b}{8} n_{in} n_{out} + \frac{b}{8} \lceil n_{in} / g \rceil n_{out}

    Parameters
    ----------
    inputs : input features n_in, [1]
    outputs : output features n_out, [1]
    bits : bits of a weight b, [bit]
    group : inputs that share a scale g; 0 for all, [1]

    Returns
    -------
    weights and zeros M, [bytes]

    Examples
    --------
    >>> gptq_bytes(4096, 4096, 4, 128)
    8454144

    References
    ----------
    [1] Frantar et al., "GPTQ", 2022, arXiv:2210.17323.
    [2] AutoGPTQ, nn_modules/qlinear/qlinear_tritonv2.py@v0.7.1: qweight, qzeros.

    """
    groups = -(-inputs // (group or inputs))
    return bits * outputs * (inputs + groups) // 8


def gptq_state_bytes(inputs: Number, outputs: Number, group: Number) -> Number:
    r"""Return the bytes of the fp16 scales of a GPTQ linear layer, and of each input's group as a 32-bit integer.

    .. math:: M = 2 \lceil n_{in} / g \rceil n_{out} + 4 n_{in}

    Parameters
    ----------
    inputs : input features n_in, [1]
    outputs : output features n_out, [1]
    group : inputs that share a scale g; 0 for all, [1]

    Returns
    -------
    scales and groups M, [bytes]

    Examples
    --------
    >>> gptq_state_bytes(4096, 4096, 128)
    278528

    References
    ----------
    [1] AutoGPTQ, nn_modules/qlinear/qlinear_tritonv2.py@v0.7.1: scales, g_idx.
    [2] fms-acceleration, accelerated-peft/autogptq_utils.py@876e2ed: FSDP shards qweight and qzeros.

    """
    groups = -(-inputs // (group or inputs))
    return 2 * groups * outputs + 4 * inputs


def dequantisation_bytes(stored: Number, elements: Number, double: Number = 0, casts: Number = 0) -> Number:
    r"""Return the memory traffic of turning a quantised matrix into 16 bits.

    .. math:: B = M + (2 + 4 c) n + 16 d \lceil n / 64 \rceil

    The kernel reads the weights and scales as they are stored and writes 16 bits a weight. Scales that are quantised
    themselves are made fp32 before, and have their offset added. A cast reads and writes all once more.

    Parameters
    ----------
    stored : weights and scales as they are stored M, [bytes]
    elements : weights of the matrix n, [1]
    double : 1 where the scales of NF4 are quantised too d, else 0, [1]
    casts : casts of the 16-bit weight to the other 16-bit dtype, or products with its scales c, [1]

    Returns
    -------
    traffic B, [bytes]

    Examples
    --------
    >>> n = 4096 * 4096
    >>> dequantisation_bytes(four_bit_bytes(n) + nf4_state_bytes(n), n) / n
    2.5625

    References
    ----------
    [1] bitsandbytes, csrc/kernels.cu, ``kDequantizeBlockwise``, and functional.py@0.43.3, ``dequantize_4bit``.
    [2] bitsandbytes, autograd/_functions.py@0.43.3: ``MatMul8bitLt.backward`` converts, then multiplies by the scales.

    """
    return stored + (2 + 4 * casts) * elements + 16 * double * -(-elements // NF4_BLOCK)


def int8_bytes(inputs: Number, outputs: Number) -> Number:
    r"""Return the bytes of a linear layer of 8-bit integers with one fp32 scale a row.

    .. math:: M = n_{in} n_{out} + 4 n_{out}

    Parameters
    ----------
    inputs : input features n_in, [1]
    outputs : output features n_out, [1]

    Returns
    -------
    weights and scales M, [bytes]

    Examples
    --------
    >>> int8_bytes(4096, 4096)
    16793600

    References
    ----------
    [1] Dettmers et al., "LLM.int8()", 2022, arXiv:2208.07339, section 2.1.
    [2] bitsandbytes, nn/modules.py@0.43.3, ``Int8Params``.

    """
    return inputs * outputs + 4 * outputs
