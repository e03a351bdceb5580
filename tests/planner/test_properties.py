"""What holds of every strategy, whatever its figures are."""

from itertools import product
from typing import Any

import numpy as np
import pytest
from drawing import drawn
from hypothesis import given
from hypothesis import strategies as st

import memcalc
from memcalc import catalog
from memcalc.api import load_model
from memcalc.formulas.pipeline import in_flight_1f1b
from memcalc.grid import Grid, Layout
from memcalc.ledger import COMPONENTS, PHASES, ZERO, computed
from memcalc.planner.costs import costs_of
from memcalc.specs.options import SharedSettings
from memcalc.terms.build import build_ledger
from memcalc.terms.model_on_grid import ModelOnGrid
from memcalc.terms.occasions import evaluation_bytes
from memcalc.terms.overhead import Workspaces
from memcalc.terms.pipeline import in_flight

NO_WORKSPACES = Workspaces(0, 0)
MODELS = ("llama-3.2-1b", "gpt2", "bert-large", "mixtral-8x7b", "t5-base", "deepseek-v2-lite")
RECOMPUTES = (
    *("none", "full", "sqrt", "attention", "mlp", "selective-ops", "selective-core-attn"),
    *("every-2", "segments-3", "block-4", "uniform-2"),
)
OFFLOADS = ((), ("optimizer",), ("params",), ("activations",), ("params", "activations"))
PRECISIONS = ("bf16-mixed", "bf16-autocast", "bf16")

few = drawn(40)
words = st.fixed_dictionaries(
    {
        "model": st.sampled_from(MODELS),
        "framework": st.sampled_from(["fsdp2", "hf", "deepspeed"]),
        "gpus": st.sampled_from([1, 2, 8]),
        "micro_batch": st.sampled_from([1, 2, 4]),
        "recompute": st.sampled_from(RECOMPUTES),
        "precision": st.sampled_from(["bf16-mixed", "fp32"]),
        "optimizer": st.sampled_from(["adamw", "adamw-8bit", "sgd", "lion"]),
        "offload": st.sampled_from(OFFLOADS),
    }
)


def answer_of(chosen: dict[str, Any], **changes: Any) -> Any:
    """Return the estimate of one strategy of 32 x 512 tokens on A100s."""
    return memcalc.estimate(**{"gpu": "a100-80g", "zero": 3, "seq_len": 512, "global_batch": 32, **chosen, **changes})


@pytest.mark.slow
@few
@given(chosen=words)
def test_parts_make_the_whole(chosen: dict[str, Any]) -> None:
    answer = answer_of(chosen)
    assert sum(answer.components.model_dump().values()) == answer.peak.reserved
    assert max(answer.phases.values()) == answer.phases[answer.peak.phase] == answer.peak.allocated
    assert answer.peak.allocated <= answer.peak.reserved <= answer.peak.device
    assert answer.interval.low <= answer.peak.device <= answer.interval.high
    for phase, bytes_ in answer.phases.items():
        live = [term for term in answer.terms if phase in term.phases and term.component != "reserve"]
        assert sum(term.bytes for term in live) == bytes_


def grid_of(name: str, micro_batches: tuple[int, ...] = (1,), **changes: Any) -> tuple[Any, Grid]:
    """Return a model and a grid of one strategy, or of several micro-batches."""
    axes: dict[str, Any] = {
        "layouts": (Layout(dp=8),),
        "precisions": ("bf16-mixed",),
        "recomputes": ("none",),
        "zeros": (3,),
        "offloads": ((),),
    }
    fixed = SharedSettings(
        framework=changes.pop("framework", "fsdp2"),
        seq_len=changes.pop("seq_len", 512),
        global_batch=128,
        **changes.pop("fixed", {}),
    )
    return load_model(name), Grid(fixed, micro_batches=micro_batches, **{**axes, **changes})


def states(name: str, component: str, **changes: Any) -> int:
    """Return the bytes of a component of the states at the step."""
    model, grid = grid_of(name, **changes)
    return int(np.max(build_ledger(ModelOnGrid(model, grid), NO_WORKSPACES).component(component, "step")))


@few
@given(
    name=st.sampled_from(MODELS),
    component=st.sampled_from(["parameters", "gradients", "optimizer"]),
    ranks=st.sampled_from([2, 4, 8]),
)
def test_more_sharding_never_costs_more(name: str, component: str, ranks: int) -> None:
    layouts = (Layout(dp=ranks),)
    by_stage = [states(name, component, framework="deepspeed", layouts=layouts, zeros=(zero,)) for zero in (0, 1, 2, 3)]
    assert by_stage == sorted(by_stage, reverse=True)
    by_ranks = [states(name, component, layouts=(Layout(dp=dp),)) for dp in (1, ranks, 2 * ranks)]
    assert by_ranks == sorted(by_ranks, reverse=True)


@few
@given(name=st.sampled_from(["llama-3.2-1b", "gpt2", "mixtral-8x7b"]), sp=st.booleans())
def test_more_tensor_parallelism_never_costs_more(name: str, sp: bool) -> None:
    degrees = (1, 2, 4)
    for component in ("parameters", "gradients", "optimizer"):
        held = [states(name, component, layouts=(Layout(tp=tp, sp=sp and tp > 1),)) for tp in degrees]
        assert held == sorted(held, reverse=True)


def forward_activations(name: str, recompute: str) -> int:
    """Return the bytes of activations at the end of the forward pass."""
    model, grid = grid_of(name, recomputes=(recompute,))
    return int(np.max(build_ledger(ModelOnGrid(model, grid), NO_WORKSPACES).component("activations", "forward")))


@pytest.mark.parametrize("name", MODELS)
def test_recomputation_never_keeps_more(name: str) -> None:
    everything, least = forward_activations(name, "none"), forward_activations(name, "full")
    for recompute in RECOMPUTES:
        kept = forward_activations(name, recompute)
        # plain autograd keeps no output of a matmul that only the selective-operator policy stores
        assert kept <= everything or recompute == "selective-ops"
        assert least <= kept or recompute in {"uniform-2", "segments-3", "sqrt"}


def peaks(model: Any, grid: Grid) -> list[int]:
    """Return the largest peak over the stages, in the order of the grid."""
    peak = build_ledger(ModelOnGrid(model, grid), NO_WORKSPACES).peak().max(axis=1, keepdims=True)
    shape = (grid.shape[0], 1, *grid.shape[2:])
    return [int(value) for value in np.broadcast_to(peak, shape).reshape(-1)]


@few
@given(name=st.sampled_from(MODELS), recompute=st.sampled_from(RECOMPUTES), precision=st.sampled_from(PRECISIONS))
def test_memory_grows_with_the_work(name: str, recompute: str, precision: str) -> None:
    pinned = {"recomputes": (recompute,), "precisions": (precision,)}
    by_batch = peaks(*grid_of(name, (1, 2, 4, 8), **pinned))
    assert by_batch == sorted(by_batch)
    by_length = [peaks(*grid_of(name, seq_len=length, **pinned))[0] for length in (128, 256, 512)]
    assert by_length == sorted(by_length)
    model, grid = grid_of(name, recomputes=(recompute,), precisions=(precision,))
    last = model.groups[-1]
    deeper = model.model_copy(
        update={"groups": (*model.groups[:-1], last.model_copy(update={"count": 2 * last.count}))}
    )
    # twice the depth: one block more may move sqrt to more segments
    assert peaks(model, grid)[0] <= peaks(deeper, grid)[0]


LAYOUTS = (
    Layout(dp=8),
    Layout(dp=4, tp=2, sp=True),
    Layout(dp=2, tp=2, cp=2),
    Layout(dp=2, pp=4),
    Layout(dp=1, tp=2, sp=True, pp=4),
)


@pytest.mark.parametrize("name", ["llama-3.2-1b", "mixtral-8x7b"])
@pytest.mark.parametrize("every_stage", [False, True])
@pytest.mark.parametrize("attention", ["flash", "eager"])
def test_one_strategy_is_the_same_alone_and_in_a_space(name: str, every_stage: bool, attention: str) -> None:
    """Bit for bit: bytes on the GPU, on the host and in an evaluation, and each part of the step's time."""
    model, gpu = load_model(name), catalog.gpu("a100-80g")
    fixed = SharedSettings(framework="fsdp2", seq_len=512, global_batch=32, attention=attention, eval_micro_batch=3)
    space = Grid(fixed, LAYOUTS, PRECISIONS, RECOMPUTES, (3, 2), OFFLOADS, (1, 2, 4), every_stage=every_stage)
    node = catalog.node_for(gpu)
    shape = (len(LAYOUTS), 1, *space.shape[2:])

    def figures(grid: Grid) -> list[Any]:
        costs = costs_of(model, grid, gpu, node)
        reserved = computed(costs.reserved).max(axis=1, keepdims=True)
        host = sum((computed(held).max(axis=1, keepdims=True) for held, _ in costs.rooms), ZERO)
        evaluation = evaluation_bytes(ModelOnGrid(model, grid), NO_WORKSPACES)
        return [reserved, host, costs.allowed, evaluation, *costs.times.parts]

    together = [np.broadcast_to(array, shape) for array in figures(space)]
    random = np.random.default_rng(0)
    for _ in range(60):
        index = tuple(int(random.integers(length)) for length in shape)
        i, _, p, r, z, o, m = index
        one = Grid(
            fixed,
            (space.layouts[i],),
            (space.precisions[p],),
            (space.recomputes[r],),
            (space.zeros[z],),
            (space.offloads[o],),
            (space.micro_batches[m],),
            every_stage=every_stage,
        )
        assert [array.item() for array in figures(one)] == [array[index].item() for array in together]


PIPELINES = tuple(
    Layout(dp=4, pp=2, schedule=schedule, vpp=vpp)
    for schedule, vpp in [("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-v", 2)]
)


@pytest.mark.parametrize("name", ["llama-3.2-1b", "gemma-2-2b"])
@pytest.mark.parametrize(
    ("framework", "zero", "layouts", "shared"),
    [
        ("fsdp2", 3, PIPELINES, {}),
        ("fsdp2", 3, (*PIPELINES[:1], Layout(dp=8)), {"lora": "16:all-linear"}),
        ("torchtitan", 3, (*PIPELINES[:1], Layout(dp=8)), {"reshard": "always"}),
        ("hf", 0, LAYOUTS[:1], {}),
    ],
)
def test_each_phase_is_the_same_alone_and_in_a_space(
    name: str, framework: str, zero: int, layouts: tuple[Layout, ...], shared: dict[str, Any]
) -> None:
    """Where a phase is not the largest, too: chunks in flight, blocks between checkpoints, a root that reshards."""
    model = load_model(name)
    fixed = SharedSettings(framework=framework, seq_len=512, global_batch=8, **shared)
    precisions, recomputes, micro_batches = PRECISIONS[:2], ("none", "full", "every-2", "every-3", "every-5"), (1, 2)

    def parts(*chosen: Any) -> dict[tuple[str, str], Any]:
        layouts, precisions, recomputes, micro_batches = chosen
        grid = Grid(fixed, layouts, precisions, recomputes, (zero,), ((),), micro_batches, every_stage=True)
        ledger = build_ledger(ModelOnGrid(model, grid), NO_WORKSPACES, detail=False)
        return {
            (component, phase): np.broadcast_to(ledger.component(component, phase), grid.shape)
            for component in COMPONENTS
            for phase in PHASES
        }

    together = parts(layouts, precisions, recomputes, micro_batches)
    for (i, layout), (p, precision), (r, recompute), (m, batch) in product(
        *map(enumerate, (layouts, precisions, recomputes, micro_batches))
    ):
        alone = parts((layout,), (precision,), (recompute,), (batch,))
        for part, bytes_ in alone.items():
            one, many = bytes_[0, :, 0, 0, 0, 0, 0], together[part][i, : layout.pp, p, r, 0, 0, m]
            assert one.tolist() == many.tolist(), (*part, layout, precision, recompute, batch)


@pytest.mark.slow
@few
@given(
    gpus=st.sampled_from([1, 4, 8]),
    model=st.sampled_from(["llama-3.2-1b", "gpt2", "mixtral-8x7b"]),
    gpu=st.sampled_from(["a100-80g", "rtx-4090"]),
)
def test_a_plan_is_its_own_estimate(gpus: int, model: str, gpu: str) -> None:
    plans = memcalc.plan(model=model, gpu=gpu, gpus=gpus, seq_len=512, global_batch=32, top=3, advice=False)
    for plan in plans.plans:
        s = plan.strategy
        answer = memcalc.estimate(
            model=model,
            gpu=gpu,
            gpus=gpus,
            seq_len=512,
            global_batch=32,
            framework=s.framework,
            precision=s.precision,
            zero=s.zero,
            tp=s.tp,
            sp=s.sp,
            pp=s.pp,
            cp=s.cp,
            ep=s.ep,
            recompute=s.recompute,
            offload=s.offload,
            attention=s.attention,
            micro_batch=s.micro_batch,
            autocast=s.autocast,
            settings={"strategy.reduce_dtype": s.reduce_dtype},
        )
        assert answer.strategy == s
        assert answer.peak.model_dump() == plan.peak.model_dump()
        assert answer.verdict == plan.verdict
        assert answer.workload.accumulation_steps == plan.accumulation_steps


@few
@given(pp=st.sampled_from([2, 4, 8]), batch=st.sampled_from([1, 2, 4, 32]), schedule=st.sampled_from(["1f1b", "gpipe"]))
def test_micro_batches_in_flight(pp: int, batch: int, schedule: str) -> None:
    fixed = SharedSettings(framework="fsdp2", seq_len=512, global_batch=batch)
    grid = Grid(fixed, (Layout(pp=pp, schedule=schedule),), ("bf16",), ("none",), (3,), ((),), (1,), every_stage=True)
    held = [int(n) for n in np.broadcast_to(in_flight(grid), (1, pp, 1, 1, 1, 1, 1)).reshape(-1)]
    assert held == [batch if schedule == "gpipe" else in_flight_1f1b(stage, pp, batch) for stage in range(pp)]
