"""What a grid can be: in parts where a default of all its strategies is another for some, and countable in integers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from memcalc.errors import CombinationError, InputError
from memcalc.planner import defaults
from memcalc.planner.direct import exists_in, some_blocks
from memcalc.specs.block import MixtureOfExperts
from memcalc.terms.parameters import model_count, shapes_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from memcalc.frameworks import Habits
    from memcalc.grid import Grid, Layout
    from memcalc.planner.request import Request
    from memcalc.specs.block import Block
    from memcalc.specs.hardware import GPU
    from memcalc.specs.model import Model


def by_loss(grid: Grid, request: Request, habits: Habits) -> list[Grid]:
    """A grid apart for the layouts with tensor parallelism where the framework's own loss is another there."""
    if not habits.tensor_loss or request.given.get("loss") is not None:
        return [grid]
    parted = ((habits.loss, False), (habits.tensor_loss, True))
    grids = []
    for loss, tensor in parted:
        layouts = tuple(layout for layout in grid.layouts if (layout.tp > 1) == tensor)
        if layouts:
            grids.append(replace(grid, fixed=grid.fixed.model_copy(update={"loss": loss}), layouts=layouts))
    request.assumptions["loss"] = f"{habits.tensor_loss} under tensor parallelism, else {habits.loss}"
    return grids


def by_stages(grid: Grid, request: Request, habits: Habits, layers: int) -> list[Grid]:
    """A grid apart for the pipelines where embedding and head count as a block each by default, and for each depth.

    ``layers`` is the model's number of blocks.
    """
    weighing = {pp for pp in {layout.pp for layout in grid.layouts} if defaults.ends_weigh(request, habits, pp)}
    piped = tuple(layout for layout in grid.layouts if layout.pp in weighing)
    alone = tuple(layout for layout in grid.layouts if layout.pp not in weighing)
    split = grid.fixed.model_copy(update=defaults.ENDS_IN_SPLIT)
    parts = (grid.fixed, alone), (split, piped)
    ends = [replace(grid, fixed=fixed, layouts=layouts) for fixed, layouts in parts if layouts]
    return [part for each in ends for part in _by_depth(each, request, habits, layers)]


def _by_depth(grid: Grid, request: Request, habits: Habits, layers: int) -> list[Grid]:
    """A grid apart for stages and model chunks of each size.

    Of Megatron-LM's policies ``block-N`` counts the blocks of a stage, and units of blocks end with a chunk. What was
    asked for stays.
    """
    searched = request.given.get("recompute") is None and "recompute" not in request.choices
    of_all = some_blocks(layers)
    if not (habits.engine and searched and of_all and {*of_all} <= {*grid.recomputes}):
        return [grid]
    at = grid.recomputes.index(of_all[0])
    by_depth: dict[tuple[int, int], tuple[str, ...]] = {}
    parts: dict[tuple[str, ...], list[Layout]] = {}
    for pp, vpp in {(layout.pp, layout.vpp): None for layout in grid.layouts}:
        others = [name for name in grid.recomputes if name not in of_all and exists_in(name, -(-layers // (pp * vpp)))]
        by_depth[pp, vpp] = (*others[:at], *some_blocks(-(-layers // pp)), *others[at:])
    for layout in grid.layouts:
        parts.setdefault(by_depth[layout.pp, layout.vpp], []).append(layout)
    return [replace(grid, recomputes=names, layouts=tuple(layouts)) for names, layouts in parts.items()]


def by_defaults(grid: Grid, request: Request, habits: Habits, model: Model, gpu: GPU) -> list[Grid]:
    """A grid apart for each set of what framework and kernels decide by precision and by whether states are sharded.

    Precisions for which what was asked does not exist are left out, unless nothing is left: then it is refused.
    """
    quiet = replace(request, assumptions={})
    parts: dict[tuple[Any, ...], list[str]] = {}
    refusal: CombinationError | None = None
    for sharded, layouts, zeros, offloads in _shardings(grid, quiet, habits):
        for precision in grid.precisions:
            try:
                kernel = defaults.attention_for(quiet, habits, model, gpu, [precision], grid.fixed.seq_len)
            except CombinationError as error:
                refusal = error
                continue
            fields = {"attention": kernel, **defaults.runtime_fields(quiet, habits, [precision], sharded=sharded)}
            given = request.given["fields"]
            for switched in defaults.switches(quiet, habits, precision):
                values = {**fields, **switched}.items()
                decided = tuple(sorted((name, value) for name, value in values if name not in given))
                parts.setdefault((decided, layouts, zeros, offloads), []).append(precision)
    if not parts and refusal is not None:
        raise refusal
    return [
        replace(
            grid,
            fixed=grid.fixed.model_copy(update=dict(decided)),
            layouts=layouts,
            zeros=zeros,
            offloads=offloads,
            precisions=tuple(precisions),
        )
        for (decided, layouts, zeros, offloads), precisions in parts.items()
    ]


def expert_ways(request: Request, habits: Habits, model: Model) -> Iterator[tuple[Request, Callable[[Grid], Grid]]]:
    """How experts lie over tensor-parallel ranks, with what a grid is then: split as TP where nothing else is said.

    Megatron-LM's experts have ranks of their own (``--expert-tensor-parallel-size``), whole ones all of a stage; its
    recipes train them so (Megatron-Bridge 067f987d ``perf_recipes``: ``expert_tensor_parallel_size`` is 1).
    """
    yield request, lambda grid: grid
    folds = habits.engine and "hsdp" in habits.capabilities.parallel.direct  # both since Megatron-LM's core 0.10
    if folds and model.is_moe and "etp" not in request.given["fields"] and request.given.get("tp") != 1:
        yield replace(request, given={**request.given, "fields": {**request.given["fields"], "etp": 1}}), _of_tensor


def _of_tensor(grid: Grid) -> Grid:
    """A grid without the layouts that have no tensor or no expert parallelism; both need that of sequences."""
    return replace(grid, layouts=tuple(layout for layout in grid.layouts if layout.sp and layout.ep > 1))


def repeats(choice: tuple[str, ...], tier: str, earlier: Sequence[str]) -> bool:
    """Whether an offload is the same on a tier as on one before it.

    Nothing offloaded has no tier, and activations do not leave host memory for NVMe.
    """
    by_host = {"cpu", "nvme"}
    alike = choice == ("activations",) and tier in by_host and bool(by_host & set(earlier))
    return bool(earlier) and (not choice or alike)


Part = tuple[bool, tuple["Layout", ...], tuple[int, ...], tuple[tuple[str, ...], ...]]
"""Whether states are sharded, and the layouts, stages and offloads of which that holds."""


def _shardings(grid: Grid, request: Request, habits: Habits) -> Iterator[Part]:
    """Layouts and stages whose states are sharded, and those whose states are not; all at once where nothing differs.

    What is decided of one precision alone may differ where that of all together does not. Beside a stage without
    shards one rank has one with them only for what it offloads.
    """
    decided = [
        [defaults.runtime_fields(request, habits, [name], sharded=sharded) for name in grid.precisions]
        for sharded in (False, True)
    ]
    if decided[0] == decided[1]:
        yield True, grid.layouts, grid.zeros, grid.offloads
        return
    plain = tuple(stage for stage in grid.zeros if stage == 0)
    stages = tuple(stage for stage in grid.zeros if stage > 0)
    single = tuple(layout for layout in grid.layouts if layout.dp == 1)
    several = tuple(layout for layout in grid.layouts if layout.dp > 1)
    moved = tuple(offload for offload in grid.offloads if {"params", "optimizer"} & set(offload))
    parts = [(False, several, plain, grid.offloads), (True, several, stages, grid.offloads)]
    if defaults.is_sharded(habits, 1, 1):
        parts += [(False, single, plain, grid.offloads), (True, single, stages, moved if plain else grid.offloads)]
    else:
        parts += [(False, single, grid.zeros, grid.offloads)]
    yield from (part for part in parts if all(part[1:]))


# -------------------------------------------------------------------------------------------- sizes that can be counted


MOST_PARAMETERS = 10**16
"""A thousand times the largest published model; 20 bytes for each stay below 2^63."""
_MOST_BYTES = 2**60
"""What the tensors of a forward may come to, with room for sums over a few of them below 2^63 [bytes]."""
_WRITES_SCORES = frozenset({"math", "eager", "sdpa"})
"""Kernels that write, or may write, s x s scores."""
_PER_WIDTH = 64
"""Bytes that one token keeps in a block for each unit of its width: above every inventory of a block [bytes]."""


def refuse_batch(batch: int, steps: Iterable[int], whose: str) -> None:
    """Refuse a global batch that is a multiple of none of the ``steps``: the sequences that all ranks take at once.

    ``whose`` says what these are the product of.

    >>> refuse_batch(16, [6, 3, 7], "ranks")
    Traceback (most recent call last):
    memcalc.errors.CombinationError: global-batch 16: must be a multiple of 3 or 7 (ranks), such as 15 or 18.
    >>> refuse_batch(16, [6, 4], "ranks")
    """
    all_steps = {*steps}
    known = sorted(n for n in all_steps if not any(n % other == 0 for other in all_steps - {n}))
    if not known or any(batch % step == 0 for step in known):
        return
    near = max(batch // step * step for step in known), min(-(-batch // step) * step for step in known)
    several, such = (" or ".join(str(number) for number in numbers if number) for numbers in (known, near))
    raise CombinationError("global-batch", batch, f"must be a multiple of {several} ({whose}), such as {such}")


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
