"""Pipeline schedules: closed forms against the papers' tables and against orders of passes, run one after another."""

from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from drawing import drawn
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torch_schedules

import memcalc
from memcalc import catalog
from memcalc.errors import InputError
from memcalc.formulas import bubbles, pipeline
from memcalc.frameworks import FRAMEWORKS
from memcalc.grid import Grid, Layout
from memcalc.ledger import computed
from memcalc.planner.costs import costs_of
from memcalc.planner.pipelines import check_rounds
from memcalc.specs.flat import from_flat
from memcalc.specs.options import SharedSettings
from memcalc.specs.strategy import Strategy
from memcalc.stages import blocks_in
from memcalc.terms.build import build_ledger
from memcalc.terms.model_on_grid import ModelOnGrid
from memcalc.terms.overhead import overhead_of
from memcalc.terms.pipeline import chunks_in_flight, in_flight, visits

Order = list[tuple[str, int, int]]
"""What one stage runs: pass (F, B with its weights, I for inputs alone, W), part of the model, micro-batch."""


class Run:
    """Every stage runs its order as soon as it may; messages cost nothing."""

    def __init__(self, orders: list[Order], forward: int, backward: int, weight: int) -> None:
        self.cost = {"F": forward, "I": backward, "W": weight, "B": backward + weight}
        self.parts = 1 + max(part for order in orders for _, part, _ in order)
        self.ended: dict[tuple[str, int, int], int] = {}
        self.clocks, self.begun = [0] * len(orders), [-1] * len(orders)
        self.held: list[set[tuple[int, ...]]] = [set() for _ in orders]
        left, kept = [list(reversed(order)) for order in orders], [Counter[int]() for _ in orders]
        while any(left):
            ready = [i for i, order in enumerate(left) if order and self.wait(*order[-1]) is not None]
            assert ready, "the orders wait for each other"
            for i in ready:
                kind, part, batch = left[i].pop()
                start = max(self.clocks[i], self.wait(kind, part, batch) or 0)
                self.begun[i] = start if self.begun[i] < 0 else self.begun[i]
                self.clocks[i] = self.ended["I" if kind == "B" else kind, part, batch] = start + self.cost[kind]
                kept[i][part] += {"F": 1, "I": 0}.get(kind, -1)
                self.held[i].add(tuple(kept[i][p] for p in sorted(kept[i])))
        self.work = [sum(self.cost[kind] for kind, _, _ in order) for order in orders]

    def wait(self, kind: str, part: int, batch: int) -> int | None:
        """When a pass may begin, or None where what it needs has not run."""
        needs = {"F": [("F", part - 1, batch)] if part else [], "W": [("I", part, batch)]}.get(
            kind, [("F", part, batch)] + ([("I", part + 1, batch)] if part < self.parts - 1 else [])
        )
        return max((self.ended[n] for n in needs), default=0) if all(n in self.ended for n in needs) else None

    @property
    def joint(self) -> int:
        """Idle time of a stage where all end together."""
        assert len(set(self.work)) == 1
        return max(self.clocks) - self.work[0]

    @property
    def apart(self) -> int:
        """Idle time of the stage that idles most from its first pass to its last."""
        return max(c - b - w for c, b, w in zip(self.clocks, self.begun, self.work, strict=True))

    @property
    def most(self) -> list[int]:
        """Micro-batches, or chunks of them, that each stage held at most."""
        return [max(map(sum, held)) for held in self.held]


def gpipe(stages: int, m: int) -> list[Order]:
    return [[(k, i, j) for k in "FB" for j in range(m)] for i in range(stages)]


def one_forward_one_backward(stages: int, m: int) -> list[Order]:
    """arXiv:2104.04473, figure 4: as many forwards as stages follow, then one backward and one forward in turn."""
    orders = []
    for i in range(stages):
        first = min(stages - i, m)
        rest = [pass_ for j in range(m) for pass_ in (("B", i, j), *([("F", i, j + first)] if j + first < m else []))]
        orders.append([("F", i, j) for j in range(first)] + rest)
    return orders


def zero_bubble(stages: int, m: int, times: int) -> list[Order]:
    """arXiv:2401.10241, figure 3: ZB-H1 (once) and ZB-H2 (twice) the warm-up of 1F1B, and W put off by as much."""
    orders = []
    for i in range(stages):
        first, late = min(times * (stages - i) - times + 1, m), times * i
        order = [("F", i, j) for j in range(first)]
        for j in range(m):
            order += [("I", i, j), *([("W", i, j - late)] if j >= late else [])]
            order += [("F", i, j + first)] if j + first < m else []
        orders.append(order + [("W", i, j) for j in range(max(m - late, 0), m)])
    return orders


def interleaved(stages: int, m: int, chunks: int) -> list[Order]:
    """Megatron-LM d98e8a64 schedules.py: get_schedule_table and get_pp_rank_microbatches."""
    orders = []
    for i in range(stages):
        table = [(c, j) for s in range(0, m, stages) for c in range(chunks) for j in range(s, min(s + stages, m))]
        first = min(2 * (stages - i - 1) + (chunks - 1) * stages, m * chunks)
        ahead = [("F", c * stages + i, j) for c, j in table]
        back = [("B", (chunks - 1 - c) * stages + i, j) for c, j in table]
        order = ahead[:first]
        for n in range(len(table)):
            order += [*ahead[first + n : first + n + 1], back[n]]
        orders.append(order)
    return orders


def of_torch(kind: type, stages: int, m: int, chunks: int) -> list[Order]:
    """The order in which PyTorch runs a schedule of several chunks a stage."""
    rounds = max(1, m // stages)
    asked: Any = SimpleNamespace(pp_group_size=stages, n_local_stages=chunks, _n_microbatches=m)
    asked.num_stages, asked.microbatches_per_round = stages * chunks, m // rounds
    words = {"FORWARD": "F", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W", "FULL_BACKWARD": "B"}
    ranks = [kind._calculate_single_rank_operations(asked, rank) for rank in range(stages)]  # type: ignore[attr-defined]
    passes = [[single for action in rank if action for single in action.sub_actions or (action,)] for rank in ranks]
    return [[(words[a.computation_type.name], a.stage_index, a.microbatch_index) for a in rank] for rank in passes]


TIMES = [(10, 10, 10), (10, 11, 9), (10, 20, 9), (10, 14, 10), (7, 7, 3), (5, 15, 4)]
"""T_F, T_B, T_W: a pass over inputs takes no less than a forward, one over weights no more."""
SIZES = [(2, 4), (4, 8), (4, 12), (8, 16)]


@pytest.mark.parametrize(("stages", "m"), SIZES)
@pytest.mark.parametrize("times", TIMES)
def test_idle_time(stages: int, m: int, times: tuple[int, int, int]) -> None:
    """Of each schedule's order of passes, in a step that waits for all stages, and in one that stages begin apart."""
    interleaved_zb = of_torch(torch_schedules.ScheduleInterleavedZeroBubble, stages, m, 2)
    v = of_torch(torch_schedules.ScheduleZBVZeroBubble, stages, m, 2)
    cases = [
        ("gpipe", 1, gpipe(stages, m)),
        ("1f1b", 1, one_forward_one_backward(stages, m)),
        ("interleaved", 2, interleaved(stages, m, 2)),
        ("interleaved-zb", 2, interleaved_zb),
        ("zb-h1", 1, zero_bubble(stages, m, 1)),
        ("zb-h2", 1, zero_bubble(stages, m, 2)),
        ("zb-v", 2, v),
        ("dualpipe-v", 2, of_torch(torch_schedules.ScheduleDualPipeV, stages, m, 2)),
    ]
    for name, chunks, orders in cases:
        run = Run(orders, *times)
        whole = tuple(chunks * t for t in times)
        assert bubbles.bubble(name, stages, m, chunks, *whole) == run.joint, name
        if name.startswith(("zb", "dual")):
            assert bubbles.bubble(name, stages, m, chunks, *whole, joint=0) == run.apart, name


@pytest.mark.parametrize("stages", [2, 3, 4, 6])
@pytest.mark.parametrize("m", range(1, 12))
def test_with_few_micro_batches_the_idle_time_is_a_bound(stages: int, m: int) -> None:
    v = of_torch(torch_schedules.ScheduleZBVZeroBubble, stages, m, 2)
    for name, chunks, orders in (
        ("zb-h1", 1, zero_bubble(stages, m, 1)),
        ("zb-h2", 1, zero_bubble(stages, m, 2)),
        ("zb-v", 2, v),
    ):
        times = (chunks * 10, chunks * 12, chunks * 9)
        assert bubbles.bubble(name, stages, m, chunks, *times) >= Run(orders, 10, 12, 9).joint


# arXiv:2401.10241, table 2: bubble and peak of 1F1B, ZB-H1 and ZB-H2; section 2.3: memory of each worker, M_W = M_B.
@pytest.mark.parametrize("p", [4, 8])
def test_the_table_of_the_zero_bubble_paper(p: int) -> None:
    f, b, w, m = 5.0, 6.0, 4.0, 4 * p
    idle = {name: float(bubbles.bubble(name, p, m, 1, f, b, w, joint=0)) for name in ("1f1b", "zb-h1", "zb-h2")}
    assert idle == {"1f1b": (p - 1) * (f + b + w), "zb-h1": (p - 1) * (f + b - w), "zb-h2": (p - 1) * (f + b - 2 * w)}
    assert pipeline.in_flight_1f1b(0, p, m) == pipeline.in_flight_zb_h1(p, m) == p
    assert pipeline.in_flight_zb_h2(p, m) == 2 * p - 1
    assert float(bubbles.bubble("zb-v", p, m, 2, 1.0, 1.0, 1.0, joint=0)) == 0
    # Table 1x / 2x / 1x of sail-sg/zero-bubble-pipeline-parallelism: ZB-1p, ZB-2p and ZB-V over 1F1B
    assert pipeline.in_flight_zb_2p(p, m) == 2 * p
    for stage in range(p):
        chunks = pipeline.in_flight_zb_v_first(stage, p, m, 1) + pipeline.in_flight_zb_v_second(stage, m, 1)
        assert chunks == 2 * p


def grid(layout: Layout, m: int, framework: str = "fsdp2", groups: tuple[int, ...] = (), **fixed: Any) -> Grid:
    """A grid of one strategy with m micro-batches a step."""
    shared = SharedSettings(framework=framework, seq_len=512, global_batch=m * layout.dp, **fixed)
    whole = not groups
    return Grid(shared, (layout,), ("bf16",), ("none",), (3,), ((),), (1,), every_stage=whole, sequence=groups)


def by_stage(column: Any, stages: int) -> list[int]:
    return [int(n) for n in np.broadcast_to(column, (1, stages, 1, 1, 1, 1, 1)).reshape(-1)]


@pytest.mark.parametrize("stages", [2, 4, 8])
@pytest.mark.parametrize("m", [1, 2, 3, 4, 6, 8, 16, 32])
def test_micro_batches_in_flight(stages: int, m: int) -> None:
    """What a stage holds at most, of each schedule's order of passes; what W reads stays until W."""
    for name, orders in {
        "gpipe": gpipe(stages, m),
        "1f1b": one_forward_one_backward(stages, m),
        "zb-h1": zero_bubble(stages, m, 1),
        "zb-h2": zero_bubble(stages, m, 2),
    }.items():
        held = by_stage(in_flight(grid(Layout(pp=stages, schedule=name), m)), stages)
        assert held == Run(orders, 1, 1, 1).most, name
    turned = {"zb-v": torch_schedules.ScheduleZBVZeroBubble, "dualpipe-v": torch_schedules.ScheduleDualPipeV}
    for name, kind in turned.items():
        job = grid(Layout(pp=stages, schedule=name, vpp=2), m)
        if name == "dualpipe-v" and m < 2 * stages:
            with pytest.raises(InputError, match=f"at least 2 x pp = {2 * stages} micro-batches, and there are {m}"):
                check_rounds(job)
            continue
        v = Run(of_torch(kind, stages, m, 2), 1, 1, 1)
        assert by_stage(chunks_in_flight(job), stages) == v.most
        for stage in range(stages):
            both = {(by_stage(first, stages)[stage], by_stage(second, stages)[stage]) for first, second in visits(job)}
            fullest = {held for held in v.held[stage] if sum(held) == v.most[stage]}
            assert fullest <= {held for held in both if sum(held) == v.most[stage]}


@pytest.mark.parametrize("chunks", [2, 3])
@pytest.mark.parametrize(("stages", "m"), [(2, 2), (2, 8), (4, 4), (4, 16), (8, 16)])
def test_chunks_in_flight(stages: int, m: int, chunks: int) -> None:
    orders = {
        "interleaved": interleaved(stages, m, chunks),
        "interleaved-zb": of_torch(torch_schedules.ScheduleInterleavedZeroBubble, stages, m, chunks),
    }
    for name, order in orders.items():
        job = grid(Layout(pp=stages, schedule=name, vpp=chunks), m)
        assert by_stage(chunks_in_flight(job), stages) == Run(order, 1, 1, 1).most, name


@pytest.mark.parametrize("m", [4, 7, 9, 10, 15])
def test_pytorch_shares_micro_batches_out_over_equal_rounds(m: int) -> None:
    """Where they are no multiple of the stages: 4 stages run 10 in two rounds of 5."""
    if m % max(1, m // 4):
        return
    job = grid(Layout(pp=4, schedule="interleaved", vpp=2), m)
    run = Run(of_torch(torch_schedules.ScheduleInterleaved1F1B, 4, m, 2), 1, 1, 1)
    assert by_stage(chunks_in_flight(job), 4) == run.most


def shared_out(blocks: int, parts: int) -> Iterator[int]:
    """The part of each block: equal shares, one block more for the earlier ones."""
    for part in range(parts):
        yield from [part] * (blocks // parts + (part < blocks % parts))


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(("stages", "chunks"), [(2, 2), (4, 2), (3, 3)])
@pytest.mark.parametrize("counts", [(12,), (3, 10), (1, 1, 17)])
def test_blocks_of_each_chunk(turned: bool, stages: int, chunks: int, counts: tuple[int, ...]) -> None:
    """Part after part laid on the stages by hand, in rounds or there and back again."""
    if turned and chunks != 2:
        return
    there = list(range(stages))
    laid = [*there, *reversed(there)] if turned else there * chunks
    expected: dict[tuple[int, int, int], int] = defaultdict(int)
    kinds = [group for group, count in enumerate(counts) for _ in range(count)]
    for part, kind in zip(shared_out(sum(counts), stages * chunks), kinds, strict=True):
        expected[kind, part // stages, laid[part]] += 1
    schedule = "zb-v" if turned else "interleaved"
    job = grid(Layout(pp=stages, schedule=schedule, vpp=chunks), stages)
    for kind, _ in enumerate(counts):
        found = [by_stage(held, stages) for held in blocks_in(job.spans(len(kinds)), [own == kind for own in kinds])]
        assert found == [[expected[kind, c, i] for i in range(stages)] for c in range(chunks)]


def test_layouts_of_different_schedules_stand_beside_each_other() -> None:
    layouts = (
        Layout(pp=4),
        Layout(pp=4, schedule="interleaved", vpp=3),
        Layout(pp=2, schedule="zb-v", vpp=2),
        Layout(),
    )
    shared = SharedSettings(framework="fsdp2", seq_len=512, global_batch=16)
    both = Grid(shared, layouts, ("bf16",), ("none",), (3,), ((),), (1,), every_stage=True)
    for i, layout in enumerate(layouts):
        alone = Grid(shared, (layout,), ("bf16",), ("none",), (3,), ((),), (1,), every_stage=True)
        for column in (
            in_flight,
            lambda g: sum(blocks_in(g.spans(25), [True] * 25)),
            lambda g: g.is_last,
            lambda g: g.is_first,
        ):
            together = np.broadcast_to(column(both), (4, 4, 1, 1, 1, 1, 1))[i].reshape(-1)
            assert together[: layout.pp].tolist() == by_stage(column(alone), layout.pp)


def test_model_chunks_have_the_only_schedule_that_has_them() -> None:
    answer = estimate(framework="megatron", vpp=3)
    assert (answer.strategy.pp_schedule, answer.strategy.vpp) == ("interleaved", 3)


def test_under_zb_v_the_first_stage_holds_embedding_and_head() -> None:
    job = grid(Layout(pp=4, schedule="zb-v", vpp=2), 8)
    assert by_stage(job.is_first, 4) == by_stage(job.is_last, 4) == [1, 0, 0, 0]
    answer = memcalc.estimate(
        model="llama-3.2-1b", gpu="h100", gpus=4, pp=4, pp_schedule="zb-v", global_batch=8, seq_len=512
    )
    # 16 blocks of 60.8 M parameters, four a stage, and a tied embedding of 128,256 x 2,048 once, on the first
    parameters = {t.name: t.bytes for t in answer.terms if t.component == "parameters"}
    assert answer.strategy.vpp == 2
    assert sum(parameters.values()) == pytest.approx(4 * (4 * 60_821_504 + 128_256 * 2_048 + 2_048), rel=0.01)


MIXED = {
    "n_layers": 10, "hidden": 64, "heads": 4, "ffn": 256, "vocab": 512, "gated": True, "norm": "rmsnorm",
    "positions": "rope", "max_positions": 4096,
}  # fmt: skip


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[Any, SharedSettings, list[Layout], tuple[int, ...], bool]:
    """A random model of one or two kinds of blocks, and several layouts of it."""
    stages = draw(st.sampled_from([2, 3, 4, 6, 8]))
    blocks = draw(st.integers(2 * stages, 4 * stages + 3))
    experts = draw(st.integers(1, blocks - 1)) if draw(st.booleans()) else 0
    moe = {"moe": {"experts": 4, "topk": 2, "ffn": draw(st.sampled_from([16, 512])), "first_dense": experts}}
    pattern = draw(st.sampled_from([{}, {"window": 64, "full_every": 2}, {"window": 64, "full_every": 3}]))
    model = from_flat({**MIXED, "n_layers": blocks, **(moe if experts else {}), **pattern})
    framework = draw(st.sampled_from(["fsdp2", "megatron"]))
    fixed: dict[str, Any] = {"kernels": "te"} if framework == "megatron" else {}
    if draw(st.booleans()):
        fixed |= {"embedding_in_split": draw(st.booleans()), "loss_in_split": draw(st.booleans())}
    runs = [("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-2p", 1), ("interleaved-zb", 2)]
    if draw(st.booleans()):
        fixed["first_stage_layers"] = 2
    else:
        runs += [("zb-v", 2), ("dualpipe-v", 2)]
    chosen = draw(st.lists(st.sampled_from(runs), min_size=1, max_size=3, unique=True))
    layouts = [Layout(dp=2, pp=stages, schedule=name, vpp=chunks) for name, chunks in chosen]
    sizes = tuple(draw(st.lists(st.sampled_from([1, 2, 4, 8]), min_size=1, max_size=2, unique=True)))
    batch = 2 * 8 * draw(st.integers(1, 2 * stages))
    shared = SharedSettings(framework=framework, seq_len=128, global_batch=batch, **fixed)
    return model, shared, layouts, sizes, draw(st.booleans())


@given(pipelines())
@drawn(60)
def test_short_rows_of_stages_have_the_peak(
    case: tuple[Any, SharedSettings, list[Layout], tuple[int, ...], bool],
) -> None:
    """The largest reserved bytes and the slowest stage are those of all stages; fewer rows, or as many."""
    model, fixed, layouts, sizes, offload = case
    gpu = catalog.gpu("h100")
    zeros = (1, 0) if fixed.framework == "megatron" else (3, 2)
    axes: Any = (("bf16-mixed",), ("none", "full", "every-2"), zeros, (("activations",) if offload else (),), sizes)
    groups = model.sequence
    every = Grid(fixed, tuple(layouts), *axes, every_stage=True)
    short = Grid(fixed, tuple(layouts), *axes, sequence=groups)
    assert short.num_stages <= every.num_stages
    node, shape = catalog.node_for(gpu), (len(layouts), 1, *every.shape[2:])
    all_, few = (costs_of(model, one, gpu, node) for one in (every, short))
    most, found = (computed(costs.reserved).max(axis=1, keepdims=True) for costs in (all_, few))
    assert np.array_equal(np.broadcast_to(found, shape), np.broadcast_to(most, shape))
    for slow, quick in zip(all_.times.parts, few.times.parts, strict=True):
        assert np.allclose(np.broadcast_to(quick, shape), np.broadcast_to(slow, shape), rtol=1e-12, atol=1e-15)


def test_a_deep_pipeline_needs_few_rows() -> None:
    """61 blocks, 3 of them dense, on 16 stages: first, its like, the mixed ones and the last."""
    job = grid(Layout(pp=16), 64, groups=(0,) * 3 + (1,) * 58)
    assert job.num_stages < 6
    assert {key for key, _ in groupby(np.ravel(job.stage))} >= {0, 15}


def estimate(**words: Any) -> Any:
    given_ = {"model": "gpt3-1.3b", "gpu": "h100", "gpus": 8, "pp": 4, "global_batch": 64, "seq_len": 512, **words}
    return memcalc.estimate(**given_)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"framework": "deepspeed", "pp_schedule": "zb-h1"}, "deepspeed runs 1f1b"),
        ({"framework": "megatron", "pp_schedule": "gpipe"}, "megatron runs 1f1b, interleaved"),
        ({"framework": "torchtitan@2024-04", "pp_schedule": "interleaved"}, "torchtitan runs 1f1b, gpipe"),
        ({"framework": "megatron", "pp_schedule": "interleaved", "vpp": 5}, "divisor of the 24 blocks"),
        ({"framework": "megatron", "pp_schedule": "interleaved", "global_batch": 12}, "multiple of pp = 4"),
        ({"framework": "fsdp2", "pp_schedule": "zb-v", "vpp": 4}, "exactly 2"),
        ({"framework": "fsdp2", "pp_schedule": "dualpipe-v", "global_batch": 8}, "at least 2 x pp = 8 micro-batches"),
        ({"framework": "fsdp2", "pp_schedule": "interleaved", "vpp": 1}, "at least 2"),
        ({"framework": "fsdp2", "vpp": 2}, "need --pp-schedule interleaved"),
        ({"framework": "fsdp2", "pp": 1, "pp_schedule": "gpipe"}, "pp above 1"),
        ({"framework": "fsdp2", "pp_schedule": "interleaved", "vpp": 7}, "at most the 24 blocks"),
        ({"pp_schedule": "zb-v", "settings": {"strategy.last_stage_layers": 3}}, "both ends"),
    ],
)
def test_what_a_framework_does_not_run_is_refused(words: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        estimate(**words)


def test_a_forks_schedule_is_said_to_be_one() -> None:
    answer = estimate(framework="megatron", pp_schedule="zb-2p")
    assert any("fork" in warning and "zb-2p" in warning for warning in answer.warnings)
    assert not any("fork" in warning for warning in estimate(framework="megatron").warnings)


def test_every_schedule_of_a_framework_has_a_name() -> None:
    known = Strategy.model_fields["pp_schedule"].annotation.__args__  # type: ignore[union-attr]
    for eras in FRAMEWORKS.values():
        for _, habits in eras:
            assert {*habits.schedules, *habits.fork_schedules} <= set(known)
            assert habits.schedules[0] == "1f1b"


def test_zero_bubble_keeps_more_than_1f1b_on_late_stages() -> None:
    """ZB-H1's last stage holds p micro-batches where 1F1B's holds one, and p - 1 gradients of logits besides."""
    peaks = {name: estimate(framework="megatron", pp_schedule=name).stages for name in ("1f1b", "zb-h1")}
    assert [s.stage for s in peaks["zb-h1"]] == [0, 1, 2, 3]
    logits = 2 * 512 * 50_304
    assert peaks["zb-h1"][3].allocated - peaks["1f1b"][3].allocated > 3 * logits


def test_chunks_that_cannot_be_are_named_by_a_search() -> None:
    with pytest.raises(InputError, match="divisor of the 24 blocks"):
        memcalc.plan(
            model="gpt3-1.3b", gpu="h100", gpus=8, framework="megatron", pp=4, pp_schedule="interleaved", vpp=5
        )


def test_a_search_tries_the_frameworks_own_schedules() -> None:
    plans = memcalc.plan(
        model="gpt3-1.3b", gpu="h100", gpus=8, framework="megatron", pp=4, global_batch=64, top=40, advice=False
    )
    tried = {(p.strategy.pp_schedule, p.strategy.vpp) for p in plans.plans}
    assert ("1f1b", 1) in tried
    chunked = {vpp for schedule, vpp in tried if schedule == "interleaved"}
    assert chunked
    assert chunked <= {2, 3, 6}  # 24 blocks on 4 stages: 6 a stage, in chunks of 3, 2 or 1
    one = next(p for p in plans.plans if p.strategy.vpp > 1)
    assert f"--pp-schedule interleaved --vpp {one.strategy.vpp}" in one.command


def test_waiting_gradients_of_logits() -> None:
    """2 bytes for each of 512 tokens and 50,304 words, of p - 1 micro-batches."""
    job = ModelOnGrid(
        catalog.model("gpt3-1.3b"),
        Grid(
            SharedSettings(framework="megatron", seq_len=512, global_batch=16, kernels="te"),
            (Layout(pp=4, schedule="zb-h1"),),
            ("bf16-mixed",),
            ("none",),
            (1,),
            ((),),
            (1,),
            every_stage=True,
        ),
    )
    ledger = build_ledger(job, overhead_of(catalog.gpu("h100"), job.grid).workspaces)
    term = next(t for t in ledger.terms if "wait for the head" in t.name)
    assert by_stage(term.bytes, 4) == [0, 0, 0, 3 * 2 * 512 * 50_304]
