"""Micro-batches that a pipeline stage holds for backward, and the share of time it idles.

Stages are counted from 0; every function takes numbers or NumPy columns of them.

Zero-bubble schedules split a backward in two: B makes the gradients of inputs, W those of weights. Between them a
micro-batch keeps what W reads, M_W. It is taken to be all that the forward kept, M_B: PyTorch keeps the whole graph
until W (``stage_backward_input``: ``retain_graph=True``), and the paper's own count, 32 of 34 bytes, is close to it.
What PyTorch adds there, the gradients at the outputs of weights, is not counted for blocks.
"""

from __future__ import annotations

from memcalc.formulas.parameters import Number


def _minimum(a: Number, b: Number) -> Number:
    """Return the smaller of two counts; unlike NumPy's, Python integers stay Python integers."""
    return (a + b - abs(a - b)) // 2


def in_flight_gpipe(microbatches: Number) -> Number:
    r"""Return the micro-batches whose activations a stage holds at once under GPipe: all of them.

    .. math:: n = m

    Parameters
    ----------
    microbatches : micro-batches a step m, [1]

    Returns
    -------
    micro-batches in flight n, [1]

    Examples
    --------
    >>> in_flight_gpipe(16)
    16

    References
    ----------
    [1] Narayanan et al., "Efficient Large-Scale Language Model Training", 2021, arXiv:2104.04473, section 2.2.

    """
    return microbatches


def in_flight_1f1b(stage: Number, stages: Number, microbatches: Number) -> Number:
    r"""Return the micro-batches whose activations a stage holds at once under one-forward-one-backward.

    .. math:: n = \min(p - i, m)

    Parameters
    ----------
    stage : index of the stage i, from 0, [1]
    stages : pipeline stages p, [1]
    microbatches : micro-batches a step m, [1]

    Returns
    -------
    micro-batches in flight n, [1]

    Examples
    --------
    >>> in_flight_1f1b(0, 8, 32), in_flight_1f1b(7, 8, 32), in_flight_1f1b(0, 8, 4)
    (8, 1, 4)

    References
    ----------
    [1] Narayanan et al., "Efficient Large-Scale Language Model Training", 2021, arXiv:2104.04473, section 2.2.1.

    """
    return _minimum(stages - stage, microbatches)


def in_flight_interleaved(
    stage: Number, stages: Number, microbatches: Number, chunks: Number, group: Number | None = None
) -> Number:
    r"""Return the model chunks whose activations a stage holds at once under interleaved 1F1B.

    .. math:: n = \min\left(2 (p - i - 1) + (v - 1) g + 1,\; m v\right)

    A chunk holds 1/v of the stage's layers for one micro-batch.

    Parameters
    ----------
    stage : index of the stage i, from 0, [1]
    stages : pipeline stages p, [1]
    microbatches : micro-batches a step m, a multiple of p, [1]
    chunks : model chunks a stage v, [1]
    group : micro-batches that pass one chunk before the next g, by default p, [1]

    Returns
    -------
    chunks in flight n, [1]

    Examples
    --------
    >>> in_flight_interleaved(3, 4, 4, 8), in_flight_interleaved(0, 4, 4, 8)
    (29, 32)

    References
    ----------
    [1] Megatron-LM, megatron/core/pipeline_parallel/schedules.py@d98e8a64, get_pp_rank_microbatches.
    [2] Narayanan et al., "Efficient Large-Scale Language Model Training", 2021, arXiv:2104.04473, section 2.2.2.

    """
    each = stages if group is None else group
    return _minimum(2 * (stages - stage - 1) + (chunks - 1) * each + 1, microbatches * chunks)


def in_flight_zb_h1(stages: Number, microbatches: Number, chunks: Number = 1, group: Number | None = None) -> Number:
    r"""Return the model chunks whose activations a stage holds at once under ZB-H1, ZB-1p and interleaved zero bubble.

    .. math:: n = \min\left((v - 1) g + p,\; m v\right)

    Stage i runs p - i forwards before its first B, as 1F1B, and puts W off by i micro-batches: every stage holds p,
    the limit that ZB-1p is given. With chunks, i + 1 forwards follow the first (v - 1) g + p - i - 1 before a W.

    Parameters
    ----------
    stages : pipeline stages p, [1]
    microbatches : micro-batches a step m, [1]
    chunks : model chunks a stage v: 1 unless interleaved, [1]
    group : micro-batches that pass one chunk before the next g, by default p, [1]

    Returns
    -------
    chunks in flight n, [1]

    Examples
    --------
    >>> in_flight_zb_h1(8, 32), in_flight_zb_h1(8, 32, chunks=2)
    (8, 16)

    References
    ----------
    [1] Qi et al., "Zero Bubble Pipeline Parallelism", 2024, arXiv:2401.10241, sections 2.1 and 2.3.
    [2] PyTorch 2.13, distributed/pipelining/schedules.py, ScheduleInterleavedZeroBubble.

    """
    each = stages if group is None else group
    return _minimum((chunks - 1) * each + stages, microbatches * chunks)


def in_flight_zb_h2(stages: Number, microbatches: Number) -> Number:
    r"""Return the micro-batches whose activations a stage holds at once under ZB-H2.

    .. math:: n = \min(2 p - 1, m)

    Stage i runs 2 (p - i) - 1 forwards before its first B, and puts W off by 2 i micro-batches.

    Parameters
    ----------
    stages : pipeline stages p, [1]
    microbatches : micro-batches a step m, [1]

    Returns
    -------
    micro-batches in flight n, [1]

    Examples
    --------
    >>> in_flight_zb_h2(8, 32)
    15

    References
    ----------
    [1] Qi et al., "Zero Bubble Pipeline Parallelism", 2024, arXiv:2401.10241, sections 2.2 and 2.3.

    """
    return _minimum(2 * stages - 1, microbatches)


def in_flight_zb_2p(stages: Number, microbatches: Number) -> Number:
    r"""Return the micro-batches whose activations a stage may hold under ZB-2p: the limit that its search is given.

    .. math:: n = \min(2 p, m)

    Parameters
    ----------
    stages : pipeline stages p, [1]
    microbatches : micro-batches a step m, [1]

    Returns
    -------
    micro-batches in flight n, [1]

    Examples
    --------
    >>> in_flight_zb_2p(8, 32)
    16

    References
    ----------
    [1] Qi et al., "Zero Bubble Pipeline Parallelism", 2024, arXiv:2401.10241, sections 3 and 4.

    """
    return _minimum(2 * stages, microbatches)


def in_flight_zb_v_first(stage: Number, stages: Number, microbatches: Number, second: Number = 0) -> Number:
    r"""Return the micro-batches of a stage's first chunk that are held under ZB-V when the stage holds most.

    .. math:: n = \min(2 p - i - k, m)

    Stage i holds parts i and 2 p - 1 - i of the model. Together its chunks hold 2 p parts, p micro-batches' worth.

    Parameters
    ----------
    stage : index of the stage i, from 0, [1]
    stages : pipeline stages p, [1]
    microbatches : micro-batches a step m, [1]
    second : 1 after a forward of the second chunk, 0 after one of the first k, [1]

    Returns
    -------
    micro-batches in flight n, [1]

    Examples
    --------
    >>> in_flight_zb_v_first(0, 4, 16), in_flight_zb_v_first(3, 4, 16)
    (8, 5)

    References
    ----------
    [1] PyTorch 2.13, distributed/pipelining/schedules.py, ScheduleZBVZeroBubble.
    [2] Qi et al., "Zero Bubble Pipeline Parallelism", 2024, arXiv:2401.10241, section 6.

    """
    return _minimum(2 * stages - stage - second, microbatches)


def in_flight_zb_v_second(stage: Number, microbatches: Number, second: Number = 0) -> Number:
    r"""Return the micro-batches of a stage's second chunk that are held under ZB-V when the stage holds most.

    .. math:: n = \min(i + k, m)

    Parameters
    ----------
    stage : index of the stage i, from 0, [1]
    microbatches : micro-batches a step m, [1]
    second : 1 after a forward of the second chunk, 0 after one of the first k, [1]

    Returns
    -------
    micro-batches in flight n, [1]

    Examples
    --------
    >>> in_flight_zb_v_second(0, 16, 1), in_flight_zb_v_second(3, 16, 1)
    (1, 4)

    References
    ----------
    [1] PyTorch 2.13, distributed/pipelining/schedules.py, ScheduleZBVZeroBubble.

    """
    return _minimum(stage + second, microbatches)


def bubble_fraction(stages: Number, microbatches: Number, chunks: Number = 1) -> Number:
    r"""Return the idle time of a pipeline as a fraction of its ideal time, for GPipe, 1F1B and interleaved 1F1B.

    .. math:: f = \frac{p - 1}{v m}

    Parameters
    ----------
    stages : pipeline stages p, [1]
    microbatches : micro-batches a step m, [1]
    chunks : model chunks a stage v: 1 unless interleaved, [1]

    Returns
    -------
    bubble over ideal time f, [1]

    Examples
    --------
    >>> bubble_fraction(8, 28), bubble_fraction(8, 28, chunks=2)
    (0.25, 0.125)

    References
    ----------
    [1] Narayanan et al., "Efficient Large-Scale Language Model Training", 2021, arXiv:2104.04473, section 2.2.

    """
    return (stages - 1) / (chunks * microbatches)
