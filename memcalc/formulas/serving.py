"""Memory of an inference engine: the cache of keys and values, its blocks, and what the engine takes beside it."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

Number: TypeAlias = Any
"""An int, or a NumPy column of them: every formula broadcasts."""


def padded(size: Number, multiple: Number) -> Number:
    r"""Return a size rounded up to a multiple, as vocabularies and expert widths are padded.

    .. math:: x' = m \lceil x / m \rceil

    Parameters
    ----------
    size : elements x, [1]
    multiple : what x' is a multiple of m, [1]

    Returns
    -------
    padded elements x', [1]

    Examples
    --------
    >>> padded(151936, 64), padded(32001, 64)
    (151936, 32064)

    References
    ----------
    [1] vLLM, vllm/model_executor/layers/vocab_parallel_embedding.py@001cabc1, pad_vocab_size.

    """
    return -(-size // multiple) * multiple


def cached_token_bytes(kv_heads: Number, key_dim: Number, value_dim: Number, tp: Number, width: Number) -> Number:
    r"""Return what one layer caches of one token on a rank: multi-head, grouped-query or multi-query attention.

    .. math:: c = \max(1, a_{kv} / t) (d_k + d_v) e

    Parameters
    ----------
    kv_heads : key-value heads a_kv, [1]
    key_dim : width of one head's key d_k, [1]
    value_dim : width of one head's value d_v, [1]
    tp : ranks that share the heads t; where there are fewer heads than ranks each rank has one, [1]
    width : one element of the cache e, [bytes]

    Returns
    -------
    cached keys and values c, [bytes]

    Examples
    --------
    >>> int(cached_token_bytes(8, 128, 128, 2, 2)), int(cached_token_bytes(4, 128, 128, 8, 2))
    (2048, 512)

    References
    ----------
    [1] vLLM, vllm/v1/kv_cache_interface.py@001cabc1, AttentionSpec.page_size_bytes.

    """
    return np.maximum(1, kv_heads // tp) * (key_dim + value_dim) * width


def latent_token_bytes(kv_rank: Number, rope_dim: Number, width: Number) -> Number:
    r"""Return what one layer caches of one token under latent attention: tensor parallelism does not divide it.

    .. math:: c = (r_{kv} + d_r) e

    Parameters
    ----------
    kv_rank : rank of the compressed keys and values r_kv, [1]
    rope_dim : rotary part of a key that all heads share d_r, [1]
    width : one element of the cache e, [bytes]

    Returns
    -------
    cached latents c, [bytes]

    Examples
    --------
    >>> latent_token_bytes(512, 64, 2)
    1152

    References
    ----------
    [1] DeepSeek-AI, "DeepSeek-V2", 2024, arXiv:2405.04434, section 2.1.

    """
    return (kv_rank + rope_dim) * width


def windowed_tokens(window: Number, batched: Number, max_len: Number) -> Number:
    r"""Return the tokens that a request holds at most in a layer with a sliding window.

    .. math:: n = \min(w - 1 + B, L)

    Parameters
    ----------
    window : tokens that a token sees, itself included w, [tokens]
    batched : tokens that the engine takes up in one step B, [tokens]
    max_len : longest sequence L, [tokens]

    Returns
    -------
    tokens n, [tokens]

    Examples
    --------
    >>> int(windowed_tokens(128, 8192, 131072)), int(windowed_tokens(4096, 8192, 8192))
    (8319, 8192)

    References
    ----------
    [1] vLLM, vllm/v1/kv_cache_interface.py@001cabc1, SlidingWindowSpec.max_memory_usage_bytes.

    """
    return np.minimum(window - 1 + batched, max_len)


def request_blocks(tokens: Number, block: Number, spare: Number = 0) -> Number:
    r"""Return the blocks that one request takes of one group of layers.

    .. math:: b = \lceil n / k \rceil + x

    Parameters
    ----------
    tokens : tokens that are held n, [tokens]
    block : tokens of one block k, [tokens]
    spare : a further block x: 1 with a sliding window, which need not begin with a block, else 0, [1]

    Returns
    -------
    blocks b, [1]

    Examples
    --------
    >>> request_blocks(8192, 16), request_blocks(8192, 16, spare=1)
    (512, 513)

    References
    ----------
    [1] vLLM, vllm/v1/kv_cache_interface.py@001cabc1, FullAttentionSpec and SlidingWindowSpec.

    """
    return -(-tokens // block) + spare


def pool_blocks(available: Number, block: Number, layers: Number, token_bytes: Number) -> Number:
    r"""Return the blocks of the pool that all groups of layers share.

    .. math:: N = \lfloor K / (k\, g\, c) \rfloor

    Parameters
    ----------
    available : memory for the cache K, [bytes]
    block : tokens of one block k, [tokens]
    layers : layers of one group g, [1]
    token_bytes : what a layer caches of a token c, [bytes]

    Returns
    -------
    blocks N, [1]

    Examples
    --------
    >>> int(pool_blocks(62_277_025_792, 16, 32, 4096))
    29696

    References
    ----------
    [1] vLLM, vllm/v1/core/kv_cache_utils.py@001cabc1, get_num_blocks.

    """
    return np.maximum(0, available) // (block * layers * token_bytes)


def sampler_bytes(seqs: Number, vocab: Number, logit_bytes: Number) -> Number:
    r"""Return what the sampler holds at once for one token of each sequence: logits, their fp32 copy, sorted ones.

    .. math:: M = S V q

    Parameters
    ----------
    seqs : sequences that run at once S, [1]
    vocab : vocabulary V, [1]
    logit_bytes : bytes for each logit q: 12 beside the logit itself from vLLM 0.17 on, 38.5 before, [bytes]

    Returns
    -------
    logits and their copies M, [bytes]

    Examples
    --------
    >>> sampler_bytes(1024, 152064, 14)
    2179989504

    References
    ----------
    [1] vLLM, vllm/v1/worker/gpu_model_runner.py@001cabc1, _dummy_sampler_run; start-up logs of 0.15 to 0.19.

    """
    return seqs * vocab * logit_bytes


def prefill_bytes(tokens: Number, hidden: Number, ffn: Number, width: Number) -> Number:
    r"""Return the working set of one block's forward over the tokens of one step.

    .. math:: M = \frac{e}{2} B (6 f + 8.5 h)

    Parameters
    ----------
    tokens : tokens of one step B, [tokens]
    hidden : width of the residual stream h, [1]
    ffn : inner width of the MLP on a rank f, [1]
    width : one element e, [bytes]

    Returns
    -------
    working set M, [bytes]

    Examples
    --------
    >>> prefill_bytes(8192, 4096, 11008, 2)
    826277888.0

    References
    ----------
    [1] llm-d-incubation/llm-d-planner, accuracy/results/v0.19.0/logs@d3121e05, fitted where no sampler rules.

    """
    return width / 2 * tokens * (6 * ffn + 8.5 * hidden)


def routed_workspace_bytes(tokens: Number, topk: Number, ffn: Number, hidden: Number, width: Number) -> Number:
    r"""Return the two buffers of the fused kernel of routed experts.

    .. math:: M = B k (\max(2 f, h) + f) e

    Parameters
    ----------
    tokens : tokens of one step B, [tokens]
    topk : experts that a token goes to k, [1]
    ffn : inner width of one expert on a rank f, [1]
    hidden : width of the residual stream h, [1]
    width : one element e, [bytes]

    Returns
    -------
    buffers M, [bytes]

    Examples
    --------
    >>> int(routed_workspace_bytes(8192, 8, 768, 2048, 2))
    369098752

    References
    ----------
    [1] vLLM, vllm/model_executor/layers/fused_moe/fused_moe.py@001cabc1, TritonExperts.workspace_shapes.

    """
    return tokens * topk * (np.maximum(2 * ffn, hidden) + ffn) * width


def static_pool_bytes(total: Number, fraction: Number, taken: Number) -> Number:
    r"""Return the pool of an engine that keeps weights and cache within a fraction of the GPU, the rest free.

    .. math:: K = F G - M

    Parameters
    ----------
    total : memory of the GPU G, [bytes]
    fraction : mem_fraction_static F, [1]
    taken : weights, and what was taken before them M, [bytes]

    Returns
    -------
    pool K, [bytes]

    Examples
    --------
    >>> static_pool_bytes(80 * 2**30, 0.875, 30 * 2**30) / 2**30
    40.0

    References
    ----------
    [1] SGLang, sglang/srt/model_executor/model_runner_kv_cache_mixin.py@001ccef0, profile_max_num_token.

    """
    return total * fraction - taken


def decode_seconds(steps: Number, weights: Number, reads: Number, bandwidth: Number) -> Number:
    r"""Return how long it takes to read weights and cached tokens from memory, the least that generation takes.

    .. math:: t = \frac{d W + R}{\beta}

    Parameters
    ----------
    steps : decoding steps, each of which reads the weights d, [1]
    weights : of a rank that a step reads W, [bytes]
    reads : what all steps read of the cache R, [bytes]
    bandwidth : of the GPU's memory, as its vendor says it, :math:`\beta`, [bytes/s]

    Returns
    -------
    time t, [s]

    Examples
    --------
    >>> decode_seconds(2048, 14e9, 0, 3.35e12)
    8.558805970149253

    References
    ----------
    [1] R. Pope et al., Efficiently Scaling Transformer Inference, arXiv:2211.05102, 2022, section 2.

    """
    return (steps * weights + reads) / bandwidth


def decoded_token_reads(prompt: Number, response: Number, window: Number) -> Number:
    r"""Return how many cached tokens are read of a layer while one response is generated.

    .. math:: T = c \min(w, p) + \max(0, \min(w - p, c)) (c - \tfrac12 \max(0, \min(w - p, c)))

    Parameters
    ----------
    prompt : of the sample p, [tokens]
    response : of it c, [tokens]
    window : tokens that a token sees w; 0 for all, [tokens]

    Returns
    -------
    reads T, [tokens]

    Examples
    --------
    >>> float(decoded_token_reads(10, 4, 0)), float(decoded_token_reads(10, 4, 8))
    (48.0, 32.0)

    References
    ----------
    [1] R. Pope et al., Efficiently Scaling Transformer Inference, arXiv:2211.05102, 2022, section 2.

    """
    span = np.where(np.asarray(window) == 0, prompt + response, window)
    grows = np.clip(span - prompt, 0, response)
    return response * np.minimum(span, prompt) + grows * (response - grows / 2)
