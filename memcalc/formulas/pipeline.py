"""Micro-batches that a pipeline stage holds for backward, and the share of time it idles.

Stages are counted from 0; every function takes integers or NumPy columns of them.
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
