"""Sizes beyond which the integers of the grid would run over: refused before anything is computed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.errors import InputError
from memcalc.specs.block import MixtureOfExperts
from memcalc.terms.parameters import model_count, shapes_of

if TYPE_CHECKING:
    from memcalc.specs.block import Block
    from memcalc.specs.model import Model

MOST_PARAMETERS = 10**16
"""A thousand times the largest published model; 20 bytes for each stay below 2^63."""
_MOST_BYTES = 2**60
"""What the tensors of a forward may come to, with room for sums over a few of them below 2^63 [bytes]."""
_WRITES_SCORES = frozenset({"math", "eager", "sdpa"})
"""Kernels that write, or may write, s x s scores."""
_PER_WIDTH = 64
"""Bytes that one token keeps in a block for each unit of its width: above every inventory of a block [bytes]."""


def check_countable(model: Model, seq_len: int, micro_batch: int, *, attention: str) -> None:
    """Refuse a model or a micro-batch whose bytes run over 64-bit integers.

    Widths are elements of one token: hidden states, heads and MLP of each block, the logits; and its scores with all
    others where a kernel writes them.
    """
    if model_count(model).total > MOST_PARAMETERS:
        raise InputError("model", model.name, f"must have at most {MOST_PARAMETERS:.0e} parameters")
    rows = seq_len if attention in _WRITES_SCORES else 0
    widths = sum(group.count * _width(group.block, rows) for group in model.groups) + model.vocab
    if _PER_WIDTH * seq_len * micro_batch * widths > _MOST_BYTES:
        tokens = f"{micro_batch:,} x {seq_len:,} tokens"
        raise InputError("seq-len", seq_len, f"must be shorter: the tensors of {tokens} are more than can be counted")


def _width(block: Block, rows: int) -> int:
    """Elements of one token in a block, the scores of its heads with `rows` others among them."""
    mlp = block.mlp
    inner = mlp.ffn * mlp.topk + mlp.shared_ffn if isinstance(mlp, MixtureOfExperts) else getattr(mlp, "ffn", 0)
    heads = 0 if block.attention is None else block.attention.heads * (block.attention.head_dim + rows)
    mixed = sum(shape.outputs for shape in shapes_of(block.mixer, block.hidden)) if block.mixer else 0
    return block.hidden + heads + mixed + inner
