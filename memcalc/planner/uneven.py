"""Unequal stages that a search offers where a pipeline's depth does not divide the blocks of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memcalc.frameworks.capability import SPLITS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from memcalc.frameworks import Habits
    from memcalc.planner.request import Request
    from memcalc.specs.model import Model


def splits_for(
    request: Request, habits: Habits, model: Model, depths: Iterable[int]
) -> list[tuple[dict[str, Any], tuple[int, ...]]]:
    """Fields of a strategy by which stages are unequal, with the numbers of stages that they serve.

    Where a framework's stages are alike by default and neither depth nor fields are given: embedding and loss count as
    blocks, as Llama 3 was trained (arXiv:2407.21783, section 3.3.2), or first and last stage hold fewer of them.
    """
    fields = request.given["fields"]
    stated = "pp" in request.given or any(name in fields for name in SPLITS)
    able = habits.even_chunks and {*SPLITS} <= {*habits.capabilities.uneven.direct}
    if stated or not able or any(group.tower != "decoder" for group in model.groups):
        return []
    blocks = model.num_layers - int(fields.get("mtp", 0))
    served: dict[tuple[tuple[str, Any], ...], list[int]] = {}
    for stages in depths:
        if blocks % stages and (split := split_of(blocks, stages)):
            served.setdefault(tuple(split.items()), []).append(stages)
    return [(dict(split), tuple(numbers)) for split, numbers in served.items()]


def split_of(blocks: int, stages: int) -> dict[str, Any]:
    """How a number of blocks that the stages do not divide is shared out all the same; empty where it is not.

    >>> split_of(126, 16), split_of(95, 16)
    ({'embedding_in_split': True, 'loss_in_split': True}, {'loss_in_split': True})
    >>> split_of(61, 16)
    {'first_stage_layers': 3, 'last_stage_layers': 2}
    """
    if (blocks + 2) % stages == 0:
        return {"embedding_in_split": True, "loss_in_split": True}
    if (blocks + 1) % stages == 0:
        return {"loss_in_split": True}
    share = -(-blocks // stages)
    ends = blocks - (stages - 2) * share
    if stages < 3 or stages & (stages - 1) or ends < 2:  # beyond powers of two nobody cuts so
        return {}
    return {"first_stage_layers": -(-ends // 2), "last_stage_layers": ends // 2}
