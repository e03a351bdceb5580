"""How often a full card makes the allocator give its cache back, step after step."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memcalc.allocator import Replay


def flushes_of(replay: Replay, accumulation: int) -> int:
    """How often the cache is given back in a step after the first, in which the optimizer's states appear.

    A replay has a few micro-batches of a step with many: those that it leaves out flush as its last whole one does.
    """
    marks = replay.retries_at
    updates = [index for index, (name, _) in enumerate(marks) if name == "step"]
    begin = updates[-2] if len(updates) > 1 else updates[0] if updates else len(marks)
    forwards = [index for index in range(begin, len(marks)) if marks[index][0] == "forward-last"]
    if not forwards:
        return replay.retries
    last, passed = forwards[-1], 0
    end = last
    while end < len(marks) - 1 and passed <= 1 and marks[end][0] != "step":
        end += 1
        passed += marks[end][0] == "loss"
    repeated = max(accumulation - len(forwards), 0)
    return replay.retries - marks[forwards[0]][1] + repeated * (marks[end][1] - marks[last][1])
