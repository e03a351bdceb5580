"""Bytes that one rank sends in a collective or a step, and the time they take.

A volume is what one rank sends; it receives as much.
"""

from __future__ import annotations

import numpy as np

from memcalc.formulas.parameters import Number


def all_gather_bytes(payload: Number, ranks: Number) -> Number:
    r"""Return the bytes one rank sends in a ring all-gather.

    .. math:: B = \left\lceil \frac{n - 1}{n} M \right\rceil

    Parameters
    ----------
    payload : the whole gathered tensor M, [bytes]
    ranks : ranks n, [1]

    Returns
    -------
    bytes sent B, [bytes]

    Examples
    --------
    >>> all_gather_bytes(1024, 8), all_gather_bytes(1024, 1)
    (896, 0)

    References
    ----------
    [1] Thakur et al., "Optimization of Collective Communication", 2005, doi:10.1177/1094342005051521, section 4.1.

    """
    return payload - payload // ranks


def reduce_scatter_bytes(payload: Number, ranks: Number) -> Number:
    r"""Return the bytes one rank sends in a ring reduce-scatter.

    .. math:: B = \left\lceil \frac{n - 1}{n} M \right\rceil

    Parameters
    ----------
    payload : the whole tensor that is reduced M, [bytes]
    ranks : ranks n, [1]

    Returns
    -------
    bytes sent B, [bytes]

    Examples
    --------
    >>> reduce_scatter_bytes(1024, 4)
    768

    References
    ----------
    [1] Thakur et al., "Optimization of Collective Communication", 2005, doi:10.1177/1094342005051521, section 4.4.

    """
    return all_gather_bytes(payload, ranks)


def all_reduce_bytes(payload: Number, ranks: Number) -> Number:
    r"""Return the bytes one rank sends in a ring all-reduce: a reduce-scatter, then an all-gather.

    .. math:: B = \left\lceil \frac{2 (n - 1)}{n} M \right\rceil

    Parameters
    ----------
    payload : the tensor that is reduced M, [bytes]
    ranks : ranks n, [1]

    Returns
    -------
    bytes sent B, [bytes]

    Examples
    --------
    >>> all_reduce_bytes(1024, 8)
    1792

    References
    ----------
    [1] Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", 2009, doi:10.1016/j.jpdc.2008.09.002.

    """
    return 2 * payload - 2 * payload // ranks


def all_to_all_bytes(payload: Number, ranks: Number) -> Number:
    r"""Return the bytes one rank sends to the others in an all-to-all with equal parts.

    .. math:: B = \left\lceil \frac{n - 1}{n} M \right\rceil

    Parameters
    ----------
    payload : the rank's own tensor M, its own part included, [bytes]
    ranks : ranks n, [1]

    Returns
    -------
    bytes sent B, [bytes]

    Examples
    --------
    >>> all_to_all_bytes(4096, 4)
    3072

    References
    ----------
    [1] Thakur et al., "Optimization of Collective Communication", 2005, doi:10.1177/1094342005051521, section 4.2.

    """
    return all_gather_bytes(payload, ranks)


def zero_bytes(parameters: Number, gradients: Number, ranks: Number, stage: Number, microbatches: Number = 1) -> Number:
    r"""Return the bytes one data-parallel rank sends in a step at a ZeRO stage.

    .. math:: B = \left\lceil \frac{n - 1}{n} k \left( g B_p + r B_g \right) \right\rceil

    Stage 0 all-reduces gradients (g = 0, r = 2); 1 and 2 reduce-scatter them and all-gather the new parameters once
    (1, 1); 3 gathers the parameters for forward and again for backward, and reduces gradients (2, 1), in each of k
    micro-batches.

    Parameters
    ----------
    parameters : 16-bit parameters of one replica B_p, [bytes]
    gradients : gradients of one replica in the reduction's dtype B_g, [bytes]
    ranks : ranks n that share a replica, [1]
    stage : ZeRO stage s, 0 to 3, [1]
    microbatches : micro-batches a step k; it matters at stage 3 alone, [1]

    Returns
    -------
    bytes sent a step B, [bytes]

    Examples
    --------
    >>> [zero_bytes(1024, 1024, 4, stage) for stage in (0, 1, 2, 3)]
    [1536, 1536, 1536, 2304]

    References
    ----------
    [1] Rajbhandari et al., "ZeRO", 2020, arXiv:1910.02054, section 7.

    """
    repeats = 1 + (stage == 3) * (microbatches - 1)
    gathers = (stage + 1) // 2
    reductions = 1 + (stage == 0)
    return all_gather_bytes(repeats * (gathers * parameters + reductions * gradients), ranks)


def tensor_parallel_bytes(
    tokens: Number, hidden: Number, width: Number, ranks: Number, reductions: Number = 4
) -> Number:
    r"""Return the bytes one tensor-parallel rank sends for one layer and one micro-batch.

    .. math:: B = k \left\lceil \frac{2 (n - 1)}{n} w T h \right\rceil

    With sequence parallelism each all-reduce becomes an all-gather and a reduce-scatter of the same volume.

    Parameters
    ----------
    tokens : tokens of the micro-batch T, [tokens]
    hidden : width of the residual stream h, [1]
    width : bytes of one element w, [bytes]
    ranks : tensor-parallel ranks n, [1]
    reductions : all-reduces a layer k: two forward and two backward, 6 with full recomputation, [1]

    Returns
    -------
    bytes sent B, [bytes]

    Examples
    --------
    >>> tensor_parallel_bytes(2048, 4096, 2, 8)
    117440512

    References
    ----------
    [1] Shoeybi et al., "Megatron-LM", 2019, arXiv:1909.08053, section 3.
    [2] Korthikanti et al., "Reducing Activation Recomputation", 2022, arXiv:2205.05198, section 4.2.2.

    """
    return reductions * all_reduce_bytes(width * tokens * hidden, ranks)


def context_parallel_bytes(key_values: Number, ranks: Number, passes: Number = 3) -> Number:
    r"""Return the bytes one rank sends in ring attention for one layer and one micro-batch.

    .. math:: B = k (n - 1) B_{kv}

    Parameters
    ----------
    key_values : keys and values of the rank's own tokens B_kv, [bytes]
    ranks : context-parallel ranks n, [1]
    passes : rounds in units of keys and values k: one forward, two backward (they and their gradients), [1]

    Returns
    -------
    bytes sent B, [bytes]

    Examples
    --------
    >>> context_parallel_bytes(1_000_000, 4)
    9000000

    References
    ----------
    [1] Liu, Zaharia and Abbeel, "Ring Attention with Blockwise Transformers", 2023, arXiv:2310.01889, section 3.

    """
    return passes * (ranks - 1) * key_values


def expert_parallel_bytes(
    tokens: Number, hidden: Number, width: Number, ranks: Number, *, topk: Number = 1, exchanges: Number = 4
) -> Number:
    r"""Return the bytes one expert-parallel rank sends for one layer and one micro-batch under even routing.

    .. math:: B = k_x \left\lceil \frac{n - 1}{n} w T k h \right\rceil

    Parameters
    ----------
    tokens : tokens of the rank T, [tokens]
    hidden : width of the residual stream h, [1]
    width : bytes of one element w, [bytes]
    ranks : expert-parallel ranks n, [1]
    topk : experts a token k, [1]
    exchanges : all-to-alls k_x: dispatch and combine, forward and backward; 6 with full recomputation, [1]

    Returns
    -------
    bytes sent B, [bytes]

    Examples
    --------
    >>> expert_parallel_bytes(4096, 4096, 2, 8, topk=2)
    234881024

    References
    ----------
    [1] Lepikhin et al., "GShard", 2020, arXiv:2006.16668, section 3.3.

    """
    return exchanges * all_to_all_bytes(width * tokens * topk * hidden, ranks)


def pipeline_bytes(tokens: Number, hidden: Number, width: Number, chunks: Number = 1, shards: Number = 1) -> Number:
    r"""Return the bytes one inner pipeline stage sends for one micro-batch: activations on, gradients back.

    .. math:: B = 2 v \lceil w T h / t \rceil

    Parameters
    ----------
    tokens : tokens of the micro-batch T, [tokens]
    hidden : width of the residual stream h, [1]
    width : bytes of one element w, [bytes]
    chunks : model chunks a stage v: 1 unless interleaved, [1]
    shards : ranks that share what is sent t (tensor-parallel ranks under sequence parallelism), [1]

    Returns
    -------
    bytes sent B, [bytes]

    Examples
    --------
    >>> pipeline_bytes(2048, 4096, 2)
    33554432

    References
    ----------
    [1] Narayanan et al., "Efficient Large-Scale Language Model Training", 2021, arXiv:2104.04473, section 3.2.

    """
    return 2 * chunks * -(-width * tokens * hidden // shards)


def transfer_seconds(volume: Number, bandwidth: Number, latency: Number = 0.0, steps: Number = 0) -> Number:
    r"""Return the time of a transfer.

    .. math:: t = \frac{B}{\beta} + k \alpha

    Parameters
    ----------
    volume : bytes sent B, [bytes]
    bandwidth : bandwidth of the link β, [bytes/s]
    latency : start-up time of one step α, [s]
    steps : steps k, n - 1 for one ring all-gather or reduce-scatter over n ranks, [1]

    Returns
    -------
    time t, [s]

    Examples
    --------
    >>> transfer_seconds(50_000_000_000, 200_000_000_000)
    0.25

    References
    ----------
    [1] Thakur et al., "Optimization of Collective Communication", 2005, doi:10.1177/1094342005051521, section 3.

    """
    return volume / bandwidth + steps * latency


def group_bandwidth(inside: Number, between: Number, ranks: Number, in_node: Number) -> Number:
    r"""Return the rate at which one rank of a group takes part in a ring or an all-to-all over nodes.

    .. math:: \beta = \beta_i \text{ where } n \le k, \text{ else } \min(\beta_i, k \beta_o)

    A ring enters and leaves a node once, over the network adapters of all k ranks that it has there.

    Parameters
    ----------
    inside : rate of one rank within a node β_i, [bytes/s]
    between : rate of one rank to other nodes β_o, [bytes/s]
    ranks : ranks of the group n, [1]
    in_node : ranks of the group that share a node k, [1]

    Returns
    -------
    rate β, [bytes/s]

    Examples
    --------
    >>> [int(group_bandwidth(300, 25, n, k)) for n, k in ((8, 8), (64, 8), (8, 1))]
    [300, 200, 25]

    References
    ----------
    [1] Narayanan et al., "Efficient Large-Scale Language Model Training", 2021, arXiv:2104.04473, section 3.

    """
    one_node = ranks <= in_node
    outside = in_node * between
    narrow = (inside + outside - abs(inside - outside)) / 2
    return one_node * inside + (1 - one_node) * narrow


def peer_buffer_bytes(peers: Number, links: Number) -> Number:
    r"""Return what NCCL keeps to send tensors to other GPUs over NVLink, and to receive theirs.

    .. math:: B = 12\,\text{MiB} \cdot p \cdot \min(2^{\lceil \log_2 2 l \rceil}, 32)

    A channel has a page of 2 MiB to send and 10 MiB to receive from each peer, whatever is sent.

    Parameters
    ----------
    peers : GPUs that tensors are exchanged with p, [1]
    links : NVLinks of a GPU l, [1]

    Returns
    -------
    bytes B, [bytes]

    Examples
    --------
    >>> [int(peer_buffer_bytes(7, links)) // 2**20 for links in (18, 12, 8)]
    [2688, 2688, 1344]

    References
    ----------
    [1] NVIDIA/nccl@5067397, src/graph/paths.cc (ncclTopoGetNchannels), src/transport/p2p.cc.
    [2] NVIDIA/nccl@5067397, issue 1685: 32 channels a pair on 8 H100, in buffers of 2,097,152 and 10,485,760 bytes.

    """
    channels = np.minimum(np.left_shift(np.int64(1), np.frexp(2 * links - 0.5)[1]), 32)
    return 12 * 2**20 * channels * peers
