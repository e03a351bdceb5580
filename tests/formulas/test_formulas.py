"""What must hold of every formula: columns give what scalars give, more work never costs less, sharing never more."""

import inspect
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from drawing import drawn
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from memcalc.formulas import (
    activations,
    bubbles,
    communication,
    flops,
    gradients,
    offload,
    optimizer,
    optimizer_states,
    parameters,
    pipeline,
)
from memcalc.specs.strategy import OPTIMIZERS

MODULES = (
    *(activations, bubbles, communication, flops, gradients),
    *(offload, optimizer, optimizer_states, parameters, pipeline),
)
FORMULAS = {
    f"{module.__name__.rpartition('.')[2]}.{name}": function
    for module in MODULES
    for name, function in inspect.getmembers(module, inspect.isfunction)
    if function.__module__ == module.__name__ and not name.startswith("_")
    if name not in {"quantized_bits", "state_traffic"}
}
"""All but those that take the name of a format or of a width: one number a job, and no column."""
NOT_NUMBERS = {"kind", "impl", "schedule"}
SECONDS = {
    *("transfer_seconds", "offload_seconds", "exposed_offload_seconds"),
    *("group_bandwidth", "kernel_seconds", "slower"),
    *("bubble", "bubble_1f1b", "bubble_zb_h1", "bubble_zb_h2", "bubble_zb_v", "bubble_dualpipe_v"),
}
"""Times and rates, which are no whole numbers."""
FLAGS = {"joint", "second", "gated", "bias", "causal", "as_view", "q_bias", "k_bias", "v_bias", "vectors"}


def numeric(function: Callable[..., Any]) -> list[str]:
    """Return the parameters that take numbers; the choice of an optimizer is the one thing that is not a column."""
    names = list(inspect.signature(function).parameters)
    quantised = {"block"} if "kind" in names else set()
    return [name for name in names if name not in NOT_NUMBERS | quantised]


def bound(function: Callable[..., Any], row: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments with an optimizer put in where the function asks for one."""
    words = {"kind": optimizer.OPTIMIZERS["adamw"], "schedule": "zb-h1"}
    return {**row, **{name: words[name] for name in inspect.signature(function).parameters if name in words}}


def values(name: str, parameter: str) -> st.SearchStrategy[Any]:
    """Return what a parameter may be: integers of a realistic size, or seconds."""
    if name.startswith("bubbles") and parameter in {"stages", "microbatches", "chunks"}:
        return st.integers(1, 512)
    if name.partition(".")[2] in SECONDS and parameter not in FLAGS:
        # eighths add up without rounding, so that order is exact
        return st.integers(1, 10**6).map(lambda eighths: eighths / 8)
    if parameter in FLAGS:
        return st.integers(0, 1)
    if parameter == "stage":
        return st.integers(0, 3)
    return st.integers(4, 512)


def rows(name: str) -> st.SearchStrategy[list[dict[str, Any]]]:
    """Return several sets of arguments of one formula."""
    names = numeric(FORMULAS[name])
    return st.lists(st.fixed_dictionaries({p: values(name, p) for p in names}), min_size=1, max_size=5)


@pytest.mark.parametrize("name", FORMULAS)
@given(data=st.data())
@drawn(25)
def test_columns_equal_scalars(name: str, data: st.DataObject) -> None:
    """A column gives, bit for bit, what each of its entries gives alone."""
    function = FORMULAS[name]
    sets = data.draw(rows(name))
    alone = [function(**bound(function, row)) for row in sets]
    columns = {parameter: np.array([row[parameter] for row in sets]) for parameter in sets[0]}
    together = function(**bound(function, columns))
    assert together.tolist() == alone


@pytest.mark.parametrize("name", [name for name in FORMULAS if name.partition(".")[2] not in SECONDS])
def test_columns_keep_their_axes(name: str) -> None:
    """Arguments that lie along different axes broadcast against one another."""
    function = FORMULAS[name]
    names = numeric(function)
    axes = {}
    for index, parameter in enumerate(names):
        shape = [1] * len(names)
        shape[index] = 2
        axes[parameter] = np.array([0, 1] if parameter in FLAGS else [2, 3]).reshape(shape)
    result = function(**bound(function, axes))
    assert result.ndim == len(names) or name.endswith("in_flight_gpipe")


@pytest.mark.parametrize(
    "name", [name for name in FORMULAS if not name.startswith("pipeline") and name.partition(".")[2] not in SECONDS]
)
@given(data=st.data())
@settings(max_examples=10, deadline=None)
def test_bytes_and_counts_are_whole(name: str, data: st.DataObject) -> None:
    """Integers in, integers out: no byte is lost to a float."""
    if name == "flops.model_flops_utilization":
        return
    function = FORMULAS[name]
    (row, *_) = data.draw(rows(name))
    assert isinstance(function(**bound(function, row)), int | np.integer)


SHARED = {
    "optimizer_states.shard": "ranks",
    "activations.saved_bytes": "ranks",
    "communication.pipeline_bytes": "shards",
}
FALLING = {
    *SHARED.items(),
    ("flops.attention_flops", "causal"),
    ("gradients.ddp_bucket_bytes", "as_view"),
    ("optimizer_states.quantised_bytes", "block"),
    ("pipeline.in_flight_1f1b", "stage"),
    ("pipeline.in_flight_interleaved", "stage"),
    ("pipeline.in_flight_zb_v_first", "stage"),
    ("pipeline.in_flight_zb_v_first", "second"),
    ("bubbles.bubble", "microbatches"),
    ("bubbles.bubble", "chunks"),
    ("bubbles.bubble_1f1b", "chunks"),
    ("bubbles.bubble_zb_h1", "chunks"),
    ("bubbles.bubble_zb_h1", "weight"),
    ("bubbles.bubble_zb_h2", "weight"),
    ("bubbles.bubble_zb_v", "weight"),
    ("bubbles.bubble_dualpipe_v", "weight"),
    ("pipeline.bubble_fraction", "microbatches"),
    ("pipeline.bubble_fraction", "chunks"),
    ("communication.transfer_seconds", "bandwidth"),
    ("offload.offload_seconds", "bandwidth"),
    ("offload.exposed_offload_seconds", "compute"),
    ("flops.model_flops_utilization", "peak"),
    ("communication.group_bandwidth", "ranks"),
    ("flops.kernel_seconds", "rate"),
    ("flops.kernel_seconds", "bandwidth"),
}
NEITHER = {
    # longer passes over weights hide more of a bubble, but for few micro-batches the answer is 1F1B's
    ("bubbles.bubble", "weight"),
    # a longer forward hides more of a backward, or makes the first micro-batch come later
    ("bubbles.bubble_zb_h2", "forward"),
    ("bubbles.bubble_zb_v", "forward"),
    ("bubbles.bubble_dualpipe_v", "forward"),
    # gradients are reduced in more bytes than parameters are gathered in, or in fewer
    ("communication.zero_bytes", "stage"),
    # padded to a whole number of rows, and to fewer chunks where the model is wide
    ("activations.chunk_rows", "vocab"),
    ("activations.chunk_rows", "hidden"),
    ("activations.fused_linear_loss_bytes", "vocab"),
    ("activations.fused_linear_loss_bytes", "hidden"),
    # the padding depends on the remainder
    ("gradients.reduce_scatter_input_bytes", "ranks"),
}
ARGUMENTS = [(name, p) for name, f in FORMULAS.items() for p in numeric(f) if (name, p) not in NEITHER]


@pytest.mark.parametrize(("name", "parameter"), ARGUMENTS)
@given(data=st.data())
@settings(max_examples=10, deadline=None)
def test_each_argument_pulls_one_way(name: str, parameter: str, data: st.DataObject) -> None:
    """More of an argument never lowers the result, but for those that share or hide, which never raise it."""
    function = FORMULAS[name]
    (row, *_) = data.draw(rows(name))
    more = data.draw(values(name, parameter))
    low, high = sorted((row[parameter], more))
    first, second = (function(**bound(function, {**row, parameter: value})) for value in (low, high))
    assert (second <= first) if (name, parameter) in FALLING else (second >= first)


def test_every_optimizer_has_its_kind() -> None:
    assert tuple(optimizer.OPTIMIZERS) == OPTIMIZERS
    assert all(kind.name == name and kind.source for name, kind in optimizer.OPTIMIZERS.items())


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("adamw", 8),
        ("paged-adamw", 8),
        ("lion", 4),
        ("sgd", 0),
        ("sgd-momentum", 4),
        ("adamw-8bit", 2 + 8 / 256),
        ("paged-adamw-8bit", 2 + 8 / 256),
        ("lion-8bit", 1 + 4 / 256),
    ],
)
def test_bytes_a_parameter(name: str, expected: float) -> None:
    assert optimizer.moment_bytes(2**20, optimizer.OPTIMIZERS[name]) == 2**20 * expected


def test_a_fixed_width_wins() -> None:
    """Bitsandbytes keeps 32-bit states for 16-bit parameters; PyTorch's states follow the parameter."""
    assert optimizer.moment_bytes(10, optimizer.OPTIMIZERS["paged-adamw"], width=2) == 80
    assert optimizer.moment_bytes(10, optimizer.OPTIMIZERS["adamw"], width=2) == 40


@given(total=st.integers(0, 10**14), ranks=st.integers(1, 10**5))
def test_shards_cover_the_whole_and_waste_less_than_one_element_a_rank(total: int, ranks: int) -> None:
    share = optimizer_states.shard(total, ranks)
    assert total <= share * ranks < total + ranks


@given(ranks=st.integers(1, 4096), size=st.integers(0, 2**40))
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(ranks: int, size: int) -> None:
    payload = size * ranks
    halves = communication.reduce_scatter_bytes(payload, ranks) + communication.all_gather_bytes(payload, ranks)
    assert communication.all_reduce_bytes(payload, ranks) == halves == 2 * (ranks - 1) * size


@given(stages=st.integers(1, 64), microbatches=st.integers(1, 512), data=st.data())
def test_1f1b_holds_no_more_than_gpipe(stages: int, microbatches: int, data: st.DataObject) -> None:
    stage = data.draw(st.integers(0, stages - 1))
    held = pipeline.in_flight_1f1b(stage, stages, microbatches)
    assert 1 <= held <= pipeline.in_flight_gpipe(microbatches)
    assert held == min(stages - stage, microbatches)


def test_large_columns_do_not_overflow() -> None:
    """A trillion parameters over thousands of ranks stay within 64 bits."""
    count = np.array([10**13])
    assert communication.zero_bytes(2 * count, 4 * count, 4096, 3, 64).tolist() == [
        communication.zero_bytes(2 * 10**13, 4 * 10**13, 4096, 3, 64)
    ]


class Live(TorchDispatchMode):  # type: ignore[misc]  # torch is not followed by mypy
    """Counts the bytes that operators allocate inside it, and the most that were alive at once."""

    def __init__(self, known: list[torch.Tensor]) -> None:
        super().__init__()
        self.alive = self.peak = 0
        self.seen = {tensor.untyped_storage().data_ptr() for tensor in known}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operator and count the storages that are new."""
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().nbytes() > 64:
                self.count(tensor.untyped_storage())
        return out

    def count(self, storage: torch.UntypedStorage) -> None:
        """Add a storage until it dies."""
        pointer, size = storage.data_ptr(), storage.nbytes()
        if pointer in self.seen:
            return
        self.seen.add(pointer)
        self.alive += size
        self.peak = max(self.peak, self.alive)
        weakref.finalize(storage, self.free, pointer, size)

    def free(self, pointer: int, size: int) -> None:
        """Take a dead storage off."""
        self.seen.discard(pointer)
        self.alive -= size


def measured_temporary(
    make: Callable[..., torch.optim.Optimizer], shapes: list[tuple[int, int]], **options: Any
) -> int:
    """Return the most bytes alive beyond parameters, gradients and states during the second step."""
    weights = [torch.nn.Parameter(torch.ones(shape)) for shape in shapes]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    chosen = make(weights, **options)
    chosen.step()
    states = [value for state in chosen.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
    with Live([*weights, *(weight.grad for weight in weights if weight.grad is not None), *states]) as live:
        chosen.step()
    peak: int = live.peak
    return peak


SHAPES = [[(64, 64)], [(64, 64), (128, 64)], [(128, 64), (64, 64), (32, 64)]]
MADE = [
    ("adamw", torch.optim.AdamW, {}),
    ("sgd-momentum", torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
    ("sgd", torch.optim.SGD, {"weight_decay": 0.1}),
]


@pytest.mark.parametrize("impl", ["foreach", "loop", "fused"])
@pytest.mark.parametrize("shapes", SHAPES, ids=["one", "rising", "falling"])
@pytest.mark.parametrize(("name", "make", "options"), MADE, ids=[name for name, *_ in MADE])
def test_step_temporary_is_what_torch_allocates(
    *, name: str, make: Any, options: dict[str, Any], shapes: list[tuple[int, int]], impl: str
) -> None:
    """To the byte, on the CPU, whose multi-tensor and loop forms call the same operators as on a GPU."""
    flags = {"foreach": {"foreach": True}, "loop": {"foreach": False}, "fused": {"fused": True}}[impl]
    sizes = [rows * columns for rows, columns in shapes]
    place = sizes.index(max(sizes))
    before = sizes[place - 1] if place else 0
    kind = optimizer.OPTIMIZERS[name]
    expected = optimizer.step_temporary(sum(sizes), max(sizes), 4, impl=impl, kind=kind, preceding=before)
    assert measured_temporary(make, shapes, **options, **flags) == expected


def test_muon_temporary_is_that_of_a_square_matrix() -> None:
    kind = optimizer.OPTIMIZERS["muon"]
    square, wide = [(64, 64)], [(64, 256)]
    assert measured_temporary(torch.optim.Muon, square) == optimizer.step_temporary(64**2, 64**2, kind=kind)
    assert measured_temporary(torch.optim.Muon, wide) <= optimizer.step_temporary(64 * 256, 64 * 256, kind=kind)
