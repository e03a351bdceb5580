"""Terms of a root that FSDP 2 shards again after its forward, when the loss is computed outside of the model.

Its weights go where the model hands the logits over and are gathered anew where their gradient comes back, so that the
loss runs without them. The forward of the head, and backward from then on, find them as they would have been kept.

Source: torch/distributed/fsdp/_fully_shard/_fsdp_state.py of PyTorch 2.13 (``_lazy_init``: a root that is told to
reshard does, since 2.8; ``_post_forward``, ``_pre_backward``) and torchtitan b5bcd76 distributed/fsdp.py (norm and head
are resharded under ``always`` alone).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from memcalc.ledger import Term
from memcalc.terms.head import head_templates, loss_of, over_vocabularies

if TYPE_CHECKING:
    from memcalc.formulas.types import Array
    from memcalc.terms.model_on_grid import ModelOnGrid

SOURCE = "torch/distributed/fsdp/_fully_shard/_fsdp_state.py, torch 2.13: _lazy_init, _post_forward, _pre_backward"


def reshards_root(census: ModelOnGrid) -> bool:
    """Whether the unit of the head is sharded while the loss runs.

    A pipeline keeps units whole for its micro-batches, SimpleFSDP gathers each weight where it is used, and a loss that
    takes the head's weights needs them.
    """
    grid = census.grid
    wanted = grid.habits.reshards_root and grid.fixed.reshard == "always" and grid.fixed.fsdp_schedule == "default"
    if not wanted or bool(np.any(grid.degree("pp") > 1)) or grid.fixed.loss not in grid.habits.losses:
        return False
    return not loss_of(grid).held and len(head_templates(census)[0].crossings) == len(("handed over", "came back"))


def root_terms(census: ModelOnGrid, title: str, root: Array, before: Array, block: Array) -> Iterator[Term]:
    """The ``root`` and the flat buffers around it, as what the head's two working sets come to with them.

    ``before`` are the bytes of the unit gathered last in forward, and ``block`` those of a block.
    """
    inputs = {"P_root": census.root}
    formula, flat = "max(A_head + w · P, A_loss) - max(A_head, A_loss)", "flat buffer of the unit gathered last"
    for phase, sums in (("forward", forward_sums(census, root, before)), ("loss", backward_sums(census, root, block))):
        largest, with_root, with_buffers = sums
        yield Term("buffers", title, with_root - largest, (phase,), formula, SOURCE, inputs)
        bytes_ = with_buffers - with_root
        yield Term("buffers", flat, bytes_, (phase,), "w · P_unit", SOURCE, inputs, pool="all-gather")


def forward_sums(census: ModelOnGrid, root: Array, before: Array) -> tuple[Array, Array, Array]:
    """Forward of head and loss: the largest of both, the same with the root, and with the buffer that is left."""
    model, loss = (over_vocabularies(census, f"forward_peaks_in_{part}") for part in ("model", "loss"))
    return np.maximum(model, loss), *(np.maximum(model + more, loss) for more in (root, root + before))


def backward_sums(census: ModelOnGrid, root: Array, block: Array) -> tuple[Array, Array, Array]:
    """Backward of loss and head: the same; the root's own buffer is there while it is copied out, then a block's."""
    model, loss = (over_vocabularies(census, f"backward_peaks_in_{part}") for part in ("model", "loss"))
    crossing = over_vocabularies(census, "crossing_sum")
    with_root = np.maximum(np.maximum(model, crossing) + root, loss)
    with_buffers = np.maximum(np.maximum(model + block, crossing + root) + root, loss)
    return np.maximum(model, loss), with_root, with_buffers
