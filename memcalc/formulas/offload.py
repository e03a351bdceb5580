"""Bytes a rank keeps in another memory tier, or moves to and from it in a step, and the time that takes."""

from __future__ import annotations

import numpy as np

from memcalc.formulas.parameters import Number


def optimizer_offload_bytes(gradients: Number, parameters: Number) -> Number:
    r"""Return the traffic of a step whose optimizer runs on the host: gradients go out, new parameters come back.

    .. math:: B = B_g + B_p

    Parameters
    ----------
    gradients : gradients of the rank's shard B_g, [bytes]
    parameters : 16-bit parameters of the rank's shard B_p, [bytes]

    Returns
    -------
    traffic a step B, [bytes]

    Examples
    --------
    >>> optimizer_offload_bytes(2_000_000, 2_000_000)
    4000000

    References
    ----------
    [1] Ren et al., "ZeRO-Offload", 2021, arXiv:2101.06840, section 3.

    """
    return gradients + parameters


def optimizer_swap_bytes(states: Number) -> Number:
    r"""Return the traffic of optimizer states that are read for the update and written back after it.

    .. math:: B = 2 B_s

    Parameters
    ----------
    states : master parameters and moments of the rank's shard B_s, [bytes]

    Returns
    -------
    traffic a step B, [bytes]

    Examples
    --------
    >>> optimizer_swap_bytes(12_000_000)
    24000000

    References
    ----------
    [1] Rajbhandari et al., "ZeRO-Infinity", 2021, arXiv:2104.07857, section 4.1.

    """
    return 2 * states


def parameter_offload_bytes(parameters: Number, microbatches: Number = 1, passes: Number = 2) -> Number:
    r"""Return the traffic of parameters that are fetched for each pass over the model and dropped after it.

    .. math:: B = m k B_p

    Parameters
    ----------
    parameters : 16-bit parameters that the rank fetches in one pass B_p, [bytes]
    microbatches : micro-batches a step m, [1]
    passes : passes a micro-batch k: forward and backward, 3 with full recomputation, [1]

    Returns
    -------
    traffic a step B, [bytes]

    Examples
    --------
    >>> parameter_offload_bytes(2_000_000, microbatches=4)
    16000000

    References
    ----------
    [1] Rajbhandari et al., "ZeRO-Infinity", 2021, arXiv:2104.07857, section 4.1.

    """
    return microbatches * passes * parameters


def activation_offload_bytes(saved: Number, microbatches: Number = 1) -> Number:
    r"""Return the traffic of activations that leave in forward and come back for backward.

    .. math:: B = 2 m B_a

    Parameters
    ----------
    saved : activations of one micro-batch that are moved B_a, [bytes]
    microbatches : micro-batches a step m, [1]

    Returns
    -------
    traffic a step B, [bytes]

    Examples
    --------
    >>> activation_offload_bytes(1_000_000, microbatches=8)
    16000000

    References
    ----------
    [1] Rajbhandari et al., "ZeRO-Infinity", 2021, arXiv:2104.07857, section 4.1.

    """
    return 2 * microbatches * saved


def offload_seconds(traffic: Number, bandwidth: Number) -> Number:
    r"""Return the time that traffic takes on the link to the tier, or on the tier itself if that is slower.

    .. math:: t = B / \beta

    Parameters
    ----------
    traffic : bytes moved B, [bytes]
    bandwidth : bandwidth of the slower of link and tier β, [bytes/s]

    Returns
    -------
    transfer time t, [s]

    Examples
    --------
    >>> offload_seconds(4_000_000_000, 16_000_000_000)
    0.25

    References
    ----------
    [1] Rajbhandari et al., "ZeRO-Infinity", 2021, arXiv:2104.07857, section 4.2.

    """
    return traffic / bandwidth


def exposed_offload_seconds(transfer: Number, compute: Number) -> Number:
    r"""Return the part of a transfer that computation does not hide.

    .. math:: t = \max(0,\; t_B - t_c)

    Parameters
    ----------
    transfer : transfer time t_B, [s]
    compute : computation that runs beside it t_c, [s]

    Returns
    -------
    exposed time t, [s]

    Examples
    --------
    >>> exposed_offload_seconds(0.75, 0.5), exposed_offload_seconds(0.25, 0.5)
    (0.25, 0.0)

    References
    ----------
    [1] Rajbhandari et al., "ZeRO-Infinity", 2021, arXiv:2104.07857, the overlap-centric design.

    """
    excess = transfer - compute
    return (excess + abs(excess)) / 2


def pinned_bytes(size: Number) -> Number:
    r"""Return what PyTorch's caching host allocator takes for one pinned tensor: the next power of two.

    .. math:: B = 2^{\lceil \log_2 S \rceil}

    Parameters
    ----------
    size : bytes of the tensor S, at most 2**53, [bytes]

    Returns
    -------
    page-locked host memory B, none for an empty tensor, [bytes]

    Examples
    --------
    >>> int(pinned_bytes(3_000_000_000)), int(pinned_bytes(4096))
    (4294967296, 4096)

    References
    ----------
    [1] PyTorch 2.13, ``aten/src/ATen/core/CachingHostAllocator.h``, ``allocate``: ``PowerOf2Ceil``, whatever the size
        unless ``pinned_max_round_threshold_mb`` is set.

    """
    mantissa, exponent = np.frexp(size)
    return np.ldexp(np.where(mantissa > 0, 1.0, 0.0), exponent - (mantissa == 0.5)).astype(np.int64)
