"""Time that the stages of a pipeline idle in a step, by schedule.

A zero-bubble schedule splits a backward in two: B makes the gradients of inputs, W those of weights. Times are those of
one micro-batch on one stage, all its chunks together; stages are taken to be alike, and messages to cost nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from memcalc.formulas.parameters import Number

WHOLE = ("1f1b", "gpipe", "interleaved")
"""Schedules whose backward is one pass."""
ONCE = ("zb-h1", "zb-1p", "interleaved-zb")
"""Zero-bubble schedules that hold as many micro-batches as there are stages."""
TURNED = ("zb-v", "dualpipe-v")
"""Schedules whose second chunk runs back over the stages: the first stage has both ends of the model."""


def bubble_1f1b(stages: Number, forward: Number, backward: Number, weight: Number, chunks: Number = 1) -> Number:
    r"""Return the time that a stage idles in a step under GPipe, 1F1B and interleaved 1F1B.

    .. math:: t = \frac{(p - 1) (T_F + T_B + T_W)}{v}

    Parameters
    ----------
    stages : pipeline stages p, [1]
    forward : forward of one micro-batch on a stage T_F, [s]
    backward : gradients of its inputs T_B, [s]
    weight : gradients of its weights T_W, [s]
    chunks : model chunks a stage v: 1 unless interleaved, [1]

    Returns
    -------
    idle time t, [s]

    Examples
    --------
    >>> bubble_1f1b(8, 1.0, 1.0, 1.0), bubble_1f1b(8, 1.0, 1.0, 1.0, chunks=2)
    (21.0, 10.5)

    References
    ----------
    [1] Narayanan et al., "Efficient Large-Scale Language Model Training", 2021, arXiv:2104.04473, section 2.2.
    [2] Qi et al., "Zero Bubble Pipeline Parallelism", 2024, arXiv:2401.10241, table 2.

    """
    return (stages - 1) * (forward + backward + weight) / chunks


def bubble_zb_h1(
    stages: Number, forward: Number, backward: Number, weight: Number, chunks: Number = 1, joint: Number = 1
) -> Number:
    r"""Return the time that a stage idles in a step under ZB-H1, and with chunks under interleaved zero bubble.

    .. math:: t = \frac{p - 1}{v} \left(\max(T_F, T_B, T_F + T_B - T_W) \;\text{joint},\quad
              T_B + \max(T_F - T_W, 0) \;\text{apart}\right)

    A joint step begins on all stages at once, as a norm of all gradients asks; one apart, with the optimizer's check
    put off, begins on a stage when its last W is done, so that the wait for the first micro-batch costs nothing. The
    paper's figure is the second, (p - 1) (T_F + T_B - T_W) where T_W is at most T_F. With m of at least p.

    Parameters
    ----------
    stages : pipeline stages p, [1]
    forward : forward of one micro-batch on a stage T_F, [s]
    backward : gradients of its inputs T_B, [s]
    weight : gradients of its weights T_W, [s]
    chunks : model chunks a stage v: 1 unless interleaved, [1]
    joint : 1 where the step waits for all stages, 0 where it does not, [1]

    Returns
    -------
    idle time t, [s]

    Examples
    --------
    >>> float(bubble_zb_h1(8, 1.0, 1.0, 1.0))
    7.0

    References
    ----------
    [1] Qi et al., "Zero Bubble Pipeline Parallelism", 2024, arXiv:2401.10241, table 2.
    [2] DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, arXiv:2412.19437, table 2: ZB1P.

    """
    together = np.maximum(np.maximum(forward, backward), forward + backward - weight)
    alone = backward + np.maximum(forward - weight, 0)
    return (stages - 1) * np.where(joint == 1, together, alone) / chunks


def bubble_zb_h2(stages: Number, forward: Number, backward: Number, weight: Number, joint: Number = 1) -> Number:
    r"""Return the time that a stage idles in a step under ZB-H2.

    .. math:: t = (p - 1) \max(T_F + T_B - 2 T_W,\; T_B - T_F,\; T_F \;\text{joint or}\; 0 \;\text{apart})

    The paper's figure is (p - 1) (T_F + T_B - 2 T_W), of steps that stages begin apart. With m of at least 2 p - 1.

    Parameters
    ----------
    stages : pipeline stages p, [1]
    forward : forward of one micro-batch on a stage T_F, [s]
    backward : gradients of its inputs T_B, [s]
    weight : gradients of its weights T_W, [s]
    joint : 1 where the step waits for all stages, 0 where it does not, [1]

    Returns
    -------
    idle time t, [s]

    Examples
    --------
    >>> float(bubble_zb_h2(8, 1.0, 1.0, 1.0)), float(bubble_zb_h2(8, 1.0, 1.0, 1.0, joint=0))
    (7.0, 0.0)

    References
    ----------
    [1] Qi et al., "Zero Bubble Pipeline Parallelism", 2024, arXiv:2401.10241, table 2.

    """
    left = np.maximum(forward + backward - 2 * weight, backward - forward)
    return (stages - 1) * np.maximum(left, forward * joint)


def bubble_zb_v(stages: Number, forward: Number, backward: Number, weight: Number, joint: Number = 1) -> Number:
    r"""Return the time that a stage idles in a step under ZB-V, in the order in which PyTorch runs it.

    .. math:: t = \frac{p - 1}{2} \max(2 (T_B - T_W),\; T_B \;\text{joint or}\; T_B - T_F \;\text{apart})

    Exact where T_B is at least T_F and T_F at least T_W, as in matmuls and attention; with m of at least 2 p - 1. The
    times are those of both chunks together, each of which takes half.

    Parameters
    ----------
    stages : pipeline stages p, [1]
    forward : forward of one micro-batch on a stage T_F, [s]
    backward : gradients of its inputs T_B, [s]
    weight : gradients of its weights T_W, [s]
    joint : 1 where the step waits for all stages, 0 where it does not, [1]

    Returns
    -------
    idle time t, [s]

    Examples
    --------
    >>> float(bubble_zb_v(8, 1.0, 1.0, 1.0)), float(bubble_zb_v(8, 1.0, 1.0, 1.0, joint=0))
    (3.5, 0.0)

    References
    ----------
    [1] PyTorch 2.13, distributed/pipelining/schedules.py, ScheduleZBVZeroBubble.
    [2] Qi et al., "Zero Bubble Pipeline Parallelism", 2024, arXiv:2401.10241, section 6.

    """
    least = np.where(joint == 1, np.maximum(backward, forward), np.maximum(backward - forward, 0))
    return (stages - 1) * np.maximum(2 * (backward - weight), least) / 2


def bubble_dualpipe_v(stages: Number, forward: Number, backward: Number, weight: Number) -> Number:
    r"""Return the time that a stage idles in a step under DualPipeV, in the order in which PyTorch runs it.

    .. math:: t = \frac{1}{2} \max((p - 1) (T_F + T_B - T_W),\; (p - 1) (2 T_B - T_W) - T_F,\; 0)

    Exact where T_B is at least T_F and T_F at least T_W, with m of at least 2 p. PyTorch runs one after the other where
    the order overlaps a forward with a backward. The times are those of both chunks together.

    Parameters
    ----------
    stages : pipeline stages p, [1]
    forward : forward of one micro-batch on a stage T_F, [s]
    backward : gradients of its inputs T_B, [s]
    weight : gradients of its weights T_W, [s]

    Returns
    -------
    idle time t, [s]

    Examples
    --------
    >>> float(bubble_dualpipe_v(8, 1.0, 1.0, 1.0))
    3.5

    References
    ----------
    [1] PyTorch 2.13, distributed/pipelining/schedules.py, ScheduleDualPipeV.
    [2] DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, arXiv:2412.19437, section 3.2.1.

    """
    others = stages - 1
    left = np.maximum(others * (forward + backward - weight), others * (2 * backward - weight) - forward)
    return np.maximum(left, 0) / 2


def bubble(
    schedule: Any,
    stages: Number,
    microbatches: Number,
    chunks: Number,
    forward: Number,
    backward: Number,
    weight: Number,
    joint: Number = 1,
) -> Number:
    r"""Return the time that a stage idles in a step, by the name of its schedule.

    .. math:: t = t_{\text{schedule}}(p, v, T_F, T_B, T_W)

    ZB-1p idles as ZB-H1, ZB-2p as ZB-H2: their searches find no worse orders under the same limits. With fewer
    micro-batches than a zero-bubble schedule needs to be in its stride, p (ZB-H1, interleaved) or 2 p - 1, the answer
    is that of 1F1B without chunks, an upper bound.

    Parameters
    ----------
    schedule : name, or a column of names, [1]
    stages : pipeline stages p, [1]
    microbatches : micro-batches a step m, [1]
    chunks : model chunks a stage v, [1]
    forward : forward of one micro-batch on a stage T_F, [s]
    backward : gradients of its inputs T_B, [s]
    weight : gradients of its weights T_W, [s]
    joint : 1 where the step waits for all stages, 0 where it does not, [1]

    Returns
    -------
    idle time t, [s]

    Examples
    --------
    >>> [float(bubble(name, 4, 16, 1, 2.0, 2.0, 1.0, joint=0)) for name in ("1f1b", "zb-h1", "zb-h2")]
    [15.0, 9.0, 6.0]

    References
    ----------
    [1] Qi et al., "Zero Bubble Pipeline Parallelism", 2024, arXiv:2401.10241, table 2.

    """
    once, unsplit, times = np.isin(schedule, ONCE), np.isin(schedule, WHOLE), (forward, backward, weight)
    few = microbatches < np.where(once, stages, 2 * stages - 1)
    turned = bubble_zb_v(stages, *times, joint), bubble_dualpipe_v(stages, *times)
    twice = np.select([np.asarray(schedule) == name for name in TURNED], turned, bubble_zb_h2(stages, *times, joint))
    zero = np.where(once, bubble_zb_h1(stages, *times, chunks, joint), twice)
    return np.where(unsplit | few, bubble_1f1b(stages, *times, np.where(unsplit, chunks, 1)), zero)
