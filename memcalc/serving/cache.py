"""The cache of keys and values: how layers share its blocks, and what a sequence takes of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from memcalc.errors import InputError
from memcalc.formulas.serving import (
    cached_token_bytes,
    latent_token_bytes,
    pool_blocks,
    request_blocks,
    windowed_tokens,
)
from memcalc.results.serving import CacheGroup
from memcalc.specs.block import Attention, Block

FEW = 1.5
"""With fewer times the layers of one kind than of another, all are padded to the more (vLLM ``kv_cache_utils.py``)."""
_Kind = tuple[str, int, int]
"""What a layer caches, its window (0 for none), and its bytes a token."""


def kind_of(attention: Attention, tp: int, width: int) -> _Kind:
    """What one layer caches."""
    latent = attention.latent
    if latent is not None:
        return "latent", 0, int(latent_token_bytes(latent.kv_lora_rank, latent.qk_rope_head_dim, width))
    size = int(cached_token_bytes(attention.kv_heads, attention.head_dim, attention.value_dim, tp, width))
    return ("window" if attention.window else "full"), attention.window or 0, size


def groups_of(
    blocks: Iterable[Block], *, tp: int, width: int, block_tokens: int, max_len: int, batched: int
) -> tuple[CacheGroup, ...]:
    """Layers of one kind together, cut into groups of as many as those of the rarer kind.

    Blocks of all groups are as large: of fewer bytes a token they have more tokens (``unify_kv_cache_spec_page_size``).
    """
    kinds = Counter(kind_of(block.own_attention, tp, width) for block in blocks)
    sizes, seen = {size for _, _, size in kinds}, {(kind, window) for kind, window, _ in kinds}
    most = max(sizes)
    if len(sizes) > 1 and (len(seen) == 1 or any(most % size for size in sizes)):
        allowed = "must all cache as many bytes a token, or those of one kind a multiple of the others'"
        raise InputError("model", "its layers", allowed)
    few, many = min(kinds.values()), max(kinds.values())
    layers = many if many < FEW * few else few
    return tuple(
        CacheGroup(
            kind=kind,
            layers=layers,
            window=window,
            token_bytes=size,
            request_blocks=_taken(window, block_tokens * (most // size), max_len, batched),
        )
        for (kind, window, size), count in kinds.items()
        for _ in range(-(-count // layers))
    )


def _taken(window: int, block_tokens: int, max_len: int, batched: int) -> int:
    if not window:
        return int(request_blocks(max_len, block_tokens))
    return int(request_blocks(windowed_tokens(window, batched, max_len), block_tokens, 1))


def blocks_of(groups: Sequence[CacheGroup], available: int, block_tokens: int) -> int:
    """The blocks of the pool: one block is of all layers of a group."""
    return int(pool_blocks(available, block_tokens, groups[0].layers, most_bytes(groups)))


def most_bytes(groups: Sequence[CacheGroup]) -> int:
    """Bytes a token of the layers that set the size of a block."""
    return max(group.token_bytes for group in groups)


def sequence_blocks(groups: Iterable[CacheGroup]) -> int:
    """The blocks that a sequence of the longest length takes of the pool."""
    return sum(group.request_blocks for group in groups)


def logged_tokens(groups: Sequence[CacheGroup], blocks: int, block_tokens: int, max_len: int, logs: str) -> int:
    """The tokens that the engine logs for its pool."""
    if logs == "concurrency":
        return int(blocks / sequence_blocks(groups) * max_len)
    return blocks // len(groups) * block_tokens
