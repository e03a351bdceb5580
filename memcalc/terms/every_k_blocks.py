"""Blocks that keep everything between checkpointed ones: where the largest moments of backward are then.

Terms of the saved tensors of a group of blocks, one by one, for a grid of one strategy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from memcalc.formulas.activations import saved_bytes
from memcalc.grid import AXES, column
from memcalc.ledger import KEPT, Term
from memcalc.terms.activations import first_apart, full, groups_of, largest
from memcalc.terms.order import from_end, from_start, spared_records
from memcalc.trace.template import trace
from memcalc.trace.working_sets import total

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memcalc.formulas import Array
    from memcalc.grid import Grid
    from memcalc.terms.activations import GroupActivations
    from memcalc.terms.model_on_grid import ModelOnGrid
    from memcalc.terms.order import Part, Stack
    from memcalc.trace.tape import Record
    from memcalc.trace.working_sets import Sum


def block_copies(activations: GroupActivations) -> Array:
    """Bytes of the 16-bit weight copies that autocast makes for one block, by precision."""
    results = []
    for setting in activations.settings:
        records = activations.census.traces.get(trace, activations.group.block, setting, "full").records
        copies = total(record for record in records if record.kind == "weight copy" and setting.autocast)
        results.append(full(activations.evaluate(copies, np.int64(0))))
    return np.concatenate(np.broadcast_arrays(*results), axis=AXES.index("precision"))


def copies_in_part(activations: GroupActivations) -> Array:
    """Bytes of those copies that a treated block keeps, of which parts alone run again, by precision and policy."""
    rows = []
    for setting in activations.settings:
        row = []
        for policy in activations.grid.policies:
            copies: Sum = {}
            if policy.kind == "parts" and setting.autocast:
                records = activations.template(policy, setting, copies=True).kept_records
                copies = total(record for record in records if record.kind == "weight copy")
            row.append(activations.evaluate(copies, np.int64(0)))
        rows.append(row)
    return activations.stacked(rows)


def spacing(grid: Grid) -> Array:
    """Of how many blocks one is checkpointed, along the recompute axis; 1 where blocks are alike."""
    return column([p.count if p.kind == "every" else 1 for p in grid.policies], "recompute")


def first_checkpointed(grid: Grid) -> Array:
    """Blocks before the first that is checkpointed, along the recompute axis; 0 where blocks are alike."""
    return column([p.skipped for p in grid.policies], "recompute")


def every_terms(census: ModelOnGrid) -> Iterator[Term]:
    """The first checkpointed block's backward, where it needs more than the first block's.

    Before it are blocks that keep everything, whose gradients are still to come.
    """
    groups, number, here = groups_of(census), spacing(census.grid), 1 - census.grid.offloaded("activations")
    if np.all(number == 1):
        return
    stacks = {id(a.stack): a.stack for a in groups if a.stack is not None}
    alone = [after_first_segment(census, a) for a in groups if a.stack is None]
    more = largest([*alone, *(beyond_in_order(census.grid, stack, here) for stack in stacks.values())])
    title, formula = "blocks that keep everything, before the first checkpointed one", "(k - 1) · (A_kept - G_block)"
    yield Term("activations", title, more, ("backward-first",), formula, INVENTORY, {"k": number}, in_events=True)


def beyond_in_order(grid: Grid, stack: Stack[GroupActivations], on_gpu: Array) -> Array:
    """The same where a stack has several kinds of blocks: the largest of the moments from the first checkpoint on."""
    number, apart = spacing(grid).reshape(-1), first_apart(grid)
    chosen = np.flatnonzero(number > 1)
    first = largest([a.first_in_order(stack, on_gpu) for a in stack.groups])
    parts: list[tuple[Array, Array]] = []
    saved: Array = np.int64(0)
    most: Array = np.int64(0)
    for index in range(int(number.max())):
        stack, here = stack.under(chosen), from_start(index, index + 1)
        moment = stack.each(here, lambda a: a.backward(), lambda a: a.backward(untreated=True))
        most = np.maximum(most, (moment + saved) * np.minimum(moment, 1))
        block = stack.left(here, on_gpu) + weight_copies(stack, here)
        saved = saved + (block if index else np.where(apart, 0, block))
        # Policies of which a later block is no first checkpoint are done
        done = number[chosen] == index + 1
        if done.any():
            parts.append((chosen[done], _at(most, done) - _at(stack.of(first), done)))
            saved, most, chosen = _at(saved, ~done), _at(most, ~done), chosen[~done]
    shapes = [(*part.shape[:3], 1, *part.shape[4:]) for _, part in parts]
    result = np.zeros((*(shape := np.broadcast_shapes(*shapes))[:3], len(number), *shape[4:]), dtype=np.int64)
    for policies, part in parts:
        result[:, :, :, policies] = part
    return result


def weight_copies(stack: Stack[GroupActivations], part: Part) -> Array:
    """Bytes of the 16-bit weight copies that autocast makes for those of some blocks that keep everything."""
    return stack.each(part, None, block_copies)


def _at(array: Array, places: Array) -> Array:
    """An array under some of its recompute policies."""
    return array[:, :, :, places] if array.shape[AXES.index("recompute")] > 1 else array


def after_first_segment(census: ModelOnGrid, activations: GroupActivations) -> Array:
    """Bytes by which that moment exceeds a checkpointed block's backward alone; negative where no moment needs those.

    FSDP 2 counts the first block's kept tensors of its own accord (:func:`memcalc.terms.fsdp2.reduction_terms`).
    """
    grid, number, skipped = census.grid, spacing(census.grid), first_checkpointed(census.grid)
    chosen = np.flatnonzero(number > 1)

    def of(array: Array) -> Array:
        return array if array.shape[AXES.index("recompute")] == 1 else array[:, :, :, chosen]

    skipped = of(skipped)
    counted, index = first_apart(grid).astype(np.int64), activations.index
    before = skipped - np.minimum(counted, skipped)
    sharded = grid.zero_from(2) & (grid.habits.full_shard or not grid.persistent_gradients)
    local = census.sharded(census.block_dense[index], census.block_experts[index], sharded)
    gradients = census.width("gradient") * local * ((grid.accumulation == 1) & (not grid.persistent_gradients))
    treated, untreated = of(activations.backward()), activations.backward(untreated=True)
    here = 1 - grid.offloaded("activations")
    each = activations.whole_block * here + block_copies(activations) - gradients
    there = np.minimum(of(activations.field("treated")), 1) * activations.exists
    second = np.minimum(activations.layers - 1, 1) * (of(activations.treated_block) * here - gradients)
    more = np.maximum(untreated - treated + np.where(skipped == 0, second, 0), before * each) * there
    result = np.zeros((*more.shape[:3], len(grid.policies), *more.shape[4:]), dtype=np.int64)
    result[:, :, :, chosen] = more
    return result


def kept_by_first(activations: GroupActivations) -> Array:
    """Bytes that a stage's first block keeps for backward, for one micro-batch."""
    if activations.stack is not None:
        return activations.stack.kept(from_start(0, 1))
    treated = (activations.field("treated") > 0) & (first_checkpointed(activations.grid) == 0)
    return np.where(treated, activations.treated_block, activations.whole_block) * activations.exists


def kept_by_last(activations: GroupActivations) -> Array:
    """Bytes that a stage's last block keeps for backward, for one micro-batch."""
    if activations.stack is not None:
        return activations.stack.each(from_end(1), lambda a: a.treated_block, lambda a: a.whole_block)
    treated = activations.is_treated == 1
    return np.where(treated, activations.treated_block, activations.whole_block) * activations.exists


def allocated_by_last(activations: GroupActivations) -> Array:
    """Bytes that the last block's forward adds to what stands before it, at its largest moment."""
    return kept_by_last(activations) + forward_of_last(activations)


def forward_of_last(activations: GroupActivations) -> Array:
    """Bytes that the last block's forward holds beyond what all blocks keep."""
    if activations.stack is not None:
        return activations.stack.each(from_end(1), lambda a: a.forward, lambda a: a.forward)
    return activations.forward


def freed_before(activations: GroupActivations) -> Array:
    """Bytes less in the working set and the kept tensors, once the last block's backward is over."""
    saved, number = kept_by_last(activations), spacing(activations.grid)
    if activations.stack is not None:
        work = activations.stack.each(from_end(1), run_again, run_once)
        return saved + work - activations.stack.each(from_end(2), run_again, run_once)
    if np.all(number == 1):
        return saved
    again, once = run_again(activations), run_once(activations)
    skipped = first_checkpointed(activations.grid)
    before = np.where(number == 1, activations.is_treated, (activations.layers - 2 - skipped) % number == 0)
    last: Array = np.where(activations.is_treated == 1, again, once)
    then: Array = np.where(before == 1, again, once)
    return saved + (last - then) * activations.exists


def run_again(activations: GroupActivations) -> Array:
    """Bytes of a checkpointed block's backward beyond what it keeps."""
    return activations.backward() - activations.treated_block


def run_once(activations: GroupActivations) -> Array:
    """Bytes of the backward of a block that keeps everything, beyond that."""
    return activations.backward(untreated=True) - activations.whole_block


INVENTORY = "PyTorch 2.13 tools/autograd/derivatives.yaml on the model's operators; arXiv:2205.05198 section 4"


def kept_terms(activations: GroupActivations, here: Array) -> Iterator[Term]:
    """One term a saved tensor of a grid of one strategy: blocks that keep it, its bytes, micro-batches in flight."""
    tower = f"{activations.group.tower} " if len(activations.census.model.groups) > 1 else ""
    policy, setting = activations.grid.policies[0], activations.settings[0]
    for field, untreated in (("treated", False), ("whole", True)):
        blocks = activations.field(field)
        if blocks.any():
            spared = spared_records(activations.census, activations.index, setting, policy) if untreated else ()
            names = {record.name for record in spared}
            for record in activations.template(policy, setting, untreated=untreated).kept_records:
                keeping = blocks - activations.grid.is_first if record.name in names else blocks
                yield kept_term(activations, record, f"{tower}{record.name}", keeping, here)


def kept_term(activations: GroupActivations, record: Record, name: str, blocks: Array, here: Array) -> Term:
    """The term of one saved tensor over all blocks that keep it."""
    size, units = record.size, activations.units[record.size.unit]
    bytes_ = saved_bytes(np.int64(size.elements), units, np.int64(size.width), activations.ranks(size.shard))
    bytes_ = bytes_ * activations.present(size.shard)
    flight, stage = activations.flight
    divided = size.shard != "none" and bool(np.any(activations.ranks(size.shard) > 1))
    inputs = {
        "elements": size.elements,
        "T": activations.tokens,
        "w": size.width,
        "blocks": blocks,
        "n": flight / stage,
        **({"s": activations.keys} if size.unit == "pair" else {}),
        **({"t": activations.ranks(size.shard)} if divided else {}),
    }
    formula = f"({size.label}) · T · w · blocks · n" + (" / t" if divided else "")
    return Term(
        "activations", name, bytes_ * blocks * flight * here // stage, KEPT, formula, INVENTORY, inputs, in_events=True
    )
