"""What lies off the GPU: bytes counted by hand from the sources' allocations, and compared with what a node has.

Sources: DeepSpeed edaa722 (0.19.5), torch 2.13, ZeRO-Infinity (arXiv:2104.07857).
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

import memcalc
from memcalc import catalog
from memcalc.api import load_model
from memcalc.errors import CombinationError
from memcalc.formulas.offload import pinned_bytes
from memcalc.grid import Grid, Layout
from memcalc.ledger import computed
from memcalc.planner.axes import repeats
from memcalc.planner.budget import pools_of
from memcalc.planner.search import Wanted, search
from memcalc.specs.flat import from_flat
from memcalc.specs.model import Model
from memcalc.specs.options import SharedSettings
from memcalc.terms.host import off_gpu_terms
from memcalc.terms.model_on_grid import ModelOnGrid

LAYERS, HIDDEN, FFN, VOCAB, RANKS, LENGTH = 12, 1024, 4096, 32768, 8, 512
BLOCK = 4 * HIDDEN * HIDDEN + 2 * HIDDEN * FFN + 2 * HIDDEN
OWN = (LAYERS * BLOCK + VOCAB * HIDDEN + HIDDEN) // RANKS
"""A rank's share: 23,071,872 elements."""
LARGE = LAYERS * 2 * HIDDEN * FFN // RANKS + VOCAB * HIDDEN // RANKS
"""Of those, in tensors with at least 262,144 elements a rank: the MLP and the embedding, not the attention."""


def model(**changes: Any) -> Model:
    """Return a model whose parameters can be counted by hand."""
    return from_flat(
        {
            "name": "counted", "family": "custom", "n_layers": LAYERS, "hidden": HIDDEN, "heads": 16, "kv_heads": 16,
            "ffn": FFN, "vocab": VOCAB, "gated": False, "norm": "rmsnorm", "tied": True, "positions": "none",
            "max_positions": 4096, **changes,
        }
    )  # fmt: skip


def grid(framework: str, zero: int, *offload: str, **changes: Any) -> Grid:
    """Return one strategy of eight ranks; further fields by name."""
    return Grid(
        SharedSettings(
            framework=framework,
            seq_len=changes.pop("seq_len", LENGTH),
            global_batch=changes.pop("global_batch", RANKS),
            **changes.pop("fixed", {}),
        ),
        (changes.pop("layout", Layout(dp=RANKS)),),
        (changes.pop("precision", "bf16-mixed"),),
        (changes.pop("recompute", "none"),),
        (zero,),
        (offload,),
        (changes.pop("micro_batch", 1),),
        every_stage=True,
    )


def kept(of: Model, strategy: Grid) -> dict[tuple[str, str], int]:
    """Return the bytes of each term, by memory and name."""
    found: dict[tuple[str, str], int] = {}
    for term in off_gpu_terms(ModelOnGrid(of, strategy)):
        found[term.tier, term.name] = found.get((term.tier, term.name), 0) + int(np.max(term.bytes))
    return found


def up(size: int) -> int:
    """Return the next power of two."""
    return 1 << (size - 1).bit_length()


def beyond(*sizes: int) -> int:
    """Return what pinned buffers of these sizes take beyond them."""
    return sum(up(size) - size for size in sizes)


@pytest.mark.parametrize("zero", [1, 2])
@pytest.mark.parametrize("steps", [1, 4])
def test_deepspeed_stages_1_and_2(zero: int, steps: int) -> None:
    """``stage_1_and_2.py``: three fp32 buffers beside the moments, a 16-bit one, and the largest tensor's gradient."""
    found = kept(model(), grid("deepspeed", zero, "optimizer", global_batch=steps * RANKS))
    assert found == {
        ("host", "fp32 master weights"): 4 * OWN,
        ("host", "adamw moments"): 8 * OWN,
        ("host", "fp32 gradients of the optimizer"): 4 * OWN,
        ("host", "new weights on their way to the GPU"): 2 * OWN,
        ("host", "gradient on its way from the GPU"): 2 * VOCAB * HIDDEN,
        ("host", "pinned buffers rounded up"): beyond(4 * OWN, 4 * OWN, 2 * OWN, 2 * VOCAB * HIDDEN),
        **({("host", "accumulated gradients"): 2 * OWN} if steps > 1 else {}),
    }


def test_before_0_16_10_new_weights_went_to_the_gpu_without_a_buffer() -> None:
    """deepspeedai/DeepSpeed#7309 brought ``param_buffer_of_bit16_for_cpu_offload_groups``."""
    title = ("host", "new weights on their way to the GPU")
    assert title not in kept(model(), grid("deepspeed@0.16", 2, "optimizer"))
    assert title in kept(model(), grid("deepspeed@0.17", 2, "optimizer"))


def test_deepspeed_stage_3_in_host_memory() -> None:
    """``stage3.py``: a gradient buffer a sub-group, and one for the shares of all gradients."""
    found = kept(model(), grid("deepspeed", 3, "optimizer", "params", fixed={"sub_group_size": 10_000_000}))
    parts = (40_000_000, 40_000_000, 4 * (OWN - 20_000_000))
    assert found == {
        ("host", "weights"): 2 * OWN,
        ("host", "fp32 master weights"): 4 * OWN,
        ("host", "adamw moments"): 8 * OWN,
        ("host", "fp32 gradients of the optimizer"): 4 * OWN,
        ("host", "shares of the gradients"): 2 * OWN,
        ("host", "pinned buffers rounded up"): beyond(*parts, 2 * OWN, 2 * OWN),
    }


def test_deepspeed_stage_3_on_nvme() -> None:
    """Swap files hold tensors of at least 1 MiB; four buffers of a sub-group and five of weights stay on the host."""
    found = kept(model(), grid("deepspeed", 3, "optimizer", "params", fixed={"offload_to": "nvme"}))
    assert found == {
        ("nvme", "weights"): 2 * LARGE,
        ("nvme", "fp32 master weights"): 4 * OWN,
        ("nvme", "adamw moments"): 8 * OWN,
        ("nvme", "fp32 gradients of the optimizer"): 4 * LARGE,
        ("host", "fp32 gradients of the optimizer"): 4 * (OWN - LARGE),
        ("host", "shares of the gradients"): 2 * OWN,
        ("host", "buffers of the optimizer's swapper"): 4 * 4 * (OWN // 256 + 1) * 256,
        ("host", "buffer of weights that host memory keeps"): 2 * OWN,
        ("host", "buffers of the weights' swapper"): 5 * 2 * 100_000_256,
        ("host", "pinned buffers rounded up"): beyond(2 * OWN, 2 * OWN),
    }


def test_of_weights_on_nvme_host_memory_keeps_a_thousand_million() -> None:
    """``max_in_cpu``; where there are more, one sub-group's new weights pass through a buffer of their own."""
    spec = load_model("llama-2-70b")
    found = kept(spec, grid("deepspeed", 3, "params", layout=Layout(dp=8), fixed={"offload_to": "nvme"}))
    assert found["host", "buffer of weights that host memory keeps"] == 2 * 10**9
    assert found["host", "buffer of one sub-group's new weights"] == 2 * 10**9
    vectors = (2 * 80 + 1) * 8192
    parameters = 68_976_648_192
    assert found["nvme", "weights"] == pytest.approx(2 * (parameters - vectors) / 8, abs=2 * 8 * 80)


def test_on_cxl_everything_lies_where_the_path_to_the_cpu_puts_it() -> None:
    for framework, zero, offload in (
        ("deepspeed", 3, "optimizer"),
        ("fsdp2", 3, "params"),
        ("fsdp2", 3, "activations"),
    ):
        near = kept(model(), grid(framework, zero, offload))
        far = kept(model(), grid(framework, zero, offload, fixed={"offload_to": "cxl"}))
        assert far == {("cxl", name): size for (_, name), size in near.items()}


@pytest.mark.parametrize("ranks", [1, 4, 8])
def test_fsdp2_pins_each_shard_and_each_gradient(ranks: int) -> None:
    """The shapes are those of Transformers' own class, cut along the first dimension as ``_fsdp_param.py`` does."""
    sizes = {"hidden_size": 768, "intermediate_size": 2304, "num_hidden_layers": 3, "vocab_size": 30_000}
    heads = {"num_attention_heads": 12, "num_key_value_heads": 4, "tie_word_embeddings": False}
    with torch.device("meta"):
        real = LlamaForCausalLM(LlamaConfig(**sizes, **heads))
    shards = [4 * -(-weight.shape[0] // ranks) * weight[0].numel() for weight in real.parameters()]
    rounded = sum(up(shard) if shard > 4 * 768 else shard for shard in shards)  # the scales of norms are not rounded
    spec = model(
        n_layers=3, hidden=768, heads=12, kv_heads=4, ffn=2304, vocab=30_000, gated=True, tied=False, positions="rope"
    )
    found = kept(spec, grid("fsdp2", 3, "params", layout=Layout(dp=ranks)))
    assert found["host", "weights"] == sum(shards)
    assert found["host", "gradients"] == sum(shards)
    assert found["host", "adamw moments"] == 2 * sum(shards)
    assert found["host", "pinned tensors rounded up"] == 2 * (rounded - sum(shards))


def test_fsdp1_pins_each_flat_parameter() -> None:
    """``_flat_param.py``: ``_local_shard`` and ``_cpu_grad``, one of each for a block and for the root."""
    found = kept(model(), grid("fsdp1", 3, "params"))
    root = VOCAB * HIDDEN + HIDDEN
    shards = [4 * BLOCK // RANKS] * LAYERS + [4 * root // RANKS]
    assert found["host", "pinned tensors rounded up"] == 2 * beyond(*shards)


def test_an_optimizer_on_the_host_has_copies_of_what_it_updates() -> None:
    """As torchao ``CPUOffloadOptimizer``: weight and gradient of each tensor, pinned, and the states."""
    found = kept(model(), grid("fsdp2", 3, "optimizer"))
    assert found["host", "copy of the weights, for the step"] == 4 * OWN
    assert found["host", "copy of the gradients, for the step"] == 4 * OWN
    assert found["host", "adamw moments"] == 8 * OWN
    megatron = kept(model(), grid("megatron", 1, "optimizer"))
    assert megatron["host", "fp32 master weights"] == megatron["host", "copy of the gradients, for the step"]


@pytest.mark.parametrize(
    ("layers", "hidden", "states", "activations"),
    [(80, 10_240, 1.83, 0.05), (100, 20_480, 9.16, 0.12), (128, 25_600, 18.31, 0.20), (195, 65_536, 182.81, 0.76)],
)
def test_zero_infinity_published_needs(layers: int, hidden: int, states: float, activations: float) -> None:
    """Fig. 2a: TiB of the model's states, and of checkpoints of a node of 16 GPUs with 32 sequences of 1,024 tokens."""
    spec = model(n_layers=layers, hidden=hidden, heads=hidden // 128, kv_heads=hidden // 128, ffn=4 * hidden, vocab=64)
    strategy = grid(
        "deepspeed", 3, "optimizer", "params", "activations", layout=Layout(dp=16), seq_len=1024, micro_batch=2,
        global_batch=32, recompute="full",
    )  # fmt: skip
    found = kept(spec, strategy)
    node = {name: 16 * size / 2**40 for (_, name), size in found.items()}
    moved = node.pop("kept by blocks")
    assert sum(node.values()) - node["pinned buffers rounded up"] == pytest.approx(states, rel=2e-3)
    assert moved == pytest.approx(activations, abs=0.005)


class Counted(torch.autograd.graph.save_on_cpu):
    """``save_on_cpu`` that adds up what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.copied, pack = 0, self.pack_hook

        def counted(tensor: torch.Tensor) -> Any:
            self.copied += tensor.nbytes
            return pack(tensor)

        self.pack_hook = counted


def test_checkpoints_on_the_host_are_what_save_on_cpu_copies() -> None:
    layers, hidden, length = 3, 64, 48
    blocks = [torch.nn.Sequential(torch.nn.Linear(hidden, hidden), torch.nn.GELU()) for _ in range(layers)]
    flow = torch.randn(2, length, hidden, requires_grad=True)
    hooks = Counted()
    with hooks:
        for block in blocks:
            flow = checkpoint(block, flow, use_reentrant=False)
    spec = model(n_layers=layers, hidden=hidden, heads=4, kv_heads=4, ffn=128, vocab=96)
    strategy = grid(
        "fsdp2", 3, "activations", layout=Layout(), precision="fp32", recompute="full", seq_len=length, micro_batch=2,
        global_batch=2,
    )  # fmt: skip
    assert kept(spec, strategy) == {("host", "kept by blocks"): hooks.copied}


def test_pinned_bytes_are_powers_of_two() -> None:
    sizes = np.array([0, 1, 2, 3, 4095, 4096, 4097, 2**40 - 1, 2**40, 2**40 + 1])
    assert pinned_bytes(sizes).tolist() == [0, *(up(int(size)) for size in sizes[1:])]


def node_with(folder: Path, *, host: int, nvme: int) -> dict[str, Any]:
    """Write a node of eight H100 with so much of each memory, and return the words that name it."""
    text = (Path(__file__).resolve().parents[2] / "presets/nodes/hgx-h100-cxl.toml").read_text(encoding="utf-8")
    text = text.replace('"hgx-h100-cxl"', '"small"').replace("30_720_000_000_000", str(nvme))
    text = text.replace("host_memory_bytes = 2_199_023_255_552", f"host_memory_bytes = {host}")
    text = text.replace("capacity_bytes = 2_199_023_255_552", f"capacity_bytes = {host}", 1)
    (folder / "nodes").mkdir()
    (folder / "nodes" / "small.toml").write_text(text, encoding="utf-8")
    return {"model": "llama-2-7b", "gpu": "h100", "gpus": 8, "node": "small", "preset_dirs": [folder], "seq_len": 2048}


GIB = 2**30


def test_an_estimate_says_what_a_node_lacks(tmp_path: Path) -> None:
    job = node_with(tmp_path, host=64 * GIB, nvme=100 * GIB)
    words = {"framework": "deepspeed", "zero": 3, "offload": "optimizer", "offload_to": "nvme"}
    found = memcalc.estimate(**job, **words)
    for name, needed, size in (("host memory", found.host_memory, 64), ("NVMe", found.tier_memory, 100)):
        said = f"needs {needed / GIB:.1f} GiB of {name} per node; node small has {size}.0 GiB."
        assert (said in found.warnings) == (needed > size * GIB)
    ranks = {"host": found.host_memory, "nvme": found.tier_memory}
    for tier, size in ranks.items():
        assert size == 8 * sum(term.bytes for term in found.off_gpu if term.tier == tier)
    assert found.host_memory > 64 * GIB
    assert (found.verdict, found.reason.split(" lacks ")[0]) == ("does-not-fit", "host memory")
    assert memcalc.estimate(**job).off_gpu == ()


@pytest.mark.parametrize("framework", ["deepspeed", "fsdp2"])
def test_what_the_host_cannot_hold_does_not_fit(tmp_path: Path, framework: str) -> None:
    """To the byte of what is needed, and as `plan` has it; the GPU alone has room for it either way."""
    job = {
        "offload": "params",
        "zero": 3,
        "recompute": "full",
        "framework": framework,
        "micro_batch": 1,
        "optimizer_impl": "fused",
    }
    need = memcalc.estimate(
        model="llama-2-7b", gpu="h100", gpus=8, node="hgx-h100-cxl", seq_len=2048, **job
    ).host_memory
    verdicts = {}
    for short in (0, 1):
        folder = tmp_path / str(short)
        folder.mkdir()
        words = {**node_with(folder, host=need - short, nvme=100 * GIB), **job}
        found = memcalc.estimate(**words)
        verdicts[short] = found.verdict
        assert found.peak.device < found.budget.capacity
        assert bool(found.reason) == bool(short)
        assert bool(memcalc.plan(**words, advice=False).plans) == (found.verdict != "does-not-fit")
    assert verdicts == {0: "fits", 1: "does-not-fit"}


def test_an_unknown_host_memory_is_named_with_what_is_needed() -> None:
    found = memcalc.estimate(model="llama-2-7b", gpu="rtx-4090", gpus=8, offload="params")
    node = catalog.node_for(catalog.gpu("rtx-4090"))
    if node.host_memory_bytes is None:
        assert any(
            f"needs {found.host_memory / GIB:.1f} GiB of host memory per node; node {node.name}" in said
            for said in found.warnings
        )
    else:
        assert found.host_memory > node.host_memory_bytes or not any("host memory" in said for said in found.warnings)


def test_nothing_fits_where_host_memory_is_too_small(tmp_path: Path) -> None:
    """And more of it would do: the same job on the node with 2 TB."""
    job = node_with(tmp_path, host=32 * GIB, nvme=100 * GIB)
    answer = memcalc.plan(**job, offload="params")
    assert not answer.plans
    assert "Not enough memory off the GPU" in answer.too_large
    assert "node small has 32.0 GiB" in answer.too_large
    assert "GPU memory" not in answer.too_large
    assert memcalc.plan(**{**job, "node": "hgx-h100-cxl"}, offload="params", advice=False).plans


def test_where_both_are_too_small_both_are_named() -> None:
    job = {"model": "llama-2-70b", "gpu": "a100-40g", "gpus": 1, "offload": "optimizer", "zero": 3, "seq_len": 4096}
    said = memcalc.plan(**job, recompute="full").too_large
    assert "GiB of host memory per node" in said
    assert "It also needs" in said


def test_the_swappers_buffers_count_in_host_memory(tmp_path: Path) -> None:
    """States fit the drives; what they pass through on the way does not fit the host."""
    job = node_with(tmp_path, host=100 * GIB, nvme=30_000 * GIB)
    words = {"framework": "deepspeed", "offload": "optimizer", "offload_to": "nvme", "zero": 3}
    assert not memcalc.plan(**job, **words, advice=False).plans
    assert memcalc.plan(**job, **words, settings={"strategy.sub_group_size": 10_000_000}, advice=False).plans


def test_every_tier_is_searched_and_each_plan_can_be_run() -> None:
    job = {"model": "llama-2-13b", "gpu": "h100", "gpus": 2, "node": "hgx-h100-cxl", "framework": "deepspeed"}
    answer = memcalc.plan(
        **job,
        seq_len=2048,
        offload="optimizer/optimizer,params",
        offload_to="any",
        zero="3",
        top=24,
        rank_all=True,
        advice=False,
    )
    assert {plan.strategy.offload_to for plan in answer.plans} == {"cpu", "nvme", "cxl"}
    seen = set()
    for plan in answer.plans:
        where = (plan.strategy.offload_to, plan.host_memory > 0, plan.tier_memory > 0)
        assert where in {("cpu", True, False), ("nvme", True, True), ("cxl", False, True)}
        if where not in seen:
            seen.add(where)
            arguments = shlex.split(plan.command)
            words = dict(zip(arguments[2::2], arguments[3::2], strict=False))
            again = memcalc.estimate(**{name[2:].replace("-", "_"): value for name, value in words.items()})
            figures = (again.peak.device, again.host_memory, again.tier_memory)
            assert figures == (plan.peak.device, plan.host_memory, plan.tier_memory)


def test_no_strategy_is_searched_on_two_tiers() -> None:
    """Nothing offloaded has no tier, and activations stay in host memory beside NVMe."""
    assert repeats((), "cxl", ["cpu"])
    assert repeats(("activations",), "nvme", ["cpu"])
    assert not repeats(("activations",), "cxl", ["cpu", "nvme"])
    assert not repeats(("optimizer",), "nvme", ["cpu"])
    job = {"model": "llama-3.2-1b", "gpu": "h100", "gpus": 2, "node": "hgx-h100-cxl", "seq_len": 2048}
    one = memcalc.plan(**job, offload="none", top=1, advice=False).searched
    assert memcalc.plan(**job, offload="none", offload_to="any", top=1, advice=False).searched == one


@pytest.mark.parametrize(("zero", "tier"), [(0, "cpu"), (2, "nvme"), (1, "nvme")])
def test_deepspeed_refuses_what_it_would_not_do(zero: int, tier: str) -> None:
    job = {"model": "llama-2-7b", "gpu": "h100", "gpus": 8, "framework": "deepspeed", "node": "hgx-h100"}
    with pytest.raises(CombinationError, match="offload"):
        memcalc.estimate(**job, zero=zero, offload="optimizer", offload_to=tier)
    plans = memcalc.plan(
        **job, seq_len=2048, offload="optimizer", offload_to=tier, top=30, rank_all=True, advice=False
    ).plans
    assert zero not in {plan.strategy.zero for plan in plans}


@pytest.mark.parametrize(
    ("framework", "tier"),
    [
        *(("deepspeed", "cpu"), ("deepspeed", "nvme"), ("fsdp2", "cxl")),
        *(
            pytest.param(*row, marks=pytest.mark.slow)
            for row in (("deepspeed", "cxl"), ("fsdp2", "cpu"), ("fsdp2", "nvme"))
        ),
    ],
)
def test_search_agrees_with_a_loop_on_small_nodes(framework: str, tier: str) -> None:
    """Strategies that fit, counted one by one, on a node whose memories hold some of them."""
    chip, spec = catalog.gpu("h100"), load_model("llama-2-7b")
    node = catalog.node("hgx-h100-cxl")
    sizes = {"host": 120 * GIB, "nvme": 100 * GIB, "cxl": 110 * GIB}
    small = [known.model_copy(update={"capacity_bytes": sizes[known.name]}) for known in node.tiers]
    node = node.model_copy(update={"host_memory_bytes": sizes["host"], "tiers": tuple(small)})
    offloads = ((), ("optimizer",), ("params",), ("activations",), ("optimizer", "activations"))
    whole = Grid(
        SharedSettings(framework=framework, seq_len=2048, global_batch=64, offload_to=tier),
        (Layout(dp=8), Layout(dp=4, pp=2), Layout(dp=16)),
        ("bf16-mixed",),
        ("none", "full"),
        (2, 3),
        offloads,
        (1, 4),
    )
    free = Wanted(trusting=True)
    unlimited = search(spec, (whole,), chip, node.model_copy(update={"host_memory_bytes": None, "tiers": ()}), free)
    found = search(spec, (whole,), chip, node)
    fitting = 0
    for layout in whole.layouts:
        for recompute in whole.recomputes:
            for zero in whole.zeros:
                for offload in offloads:
                    for micro in whole.micro_batches:
                        one = Grid(whole.fixed, (layout,), ("bf16-mixed",), (recompute,), (zero,), (offload,), (micro,))
                        alone = search(
                            spec, (one,), chip, node.model_copy(update={"host_memory_bytes": None, "tiers": ()}), free
                        )
                        ranks = min(layout.gpus, node.gpus)
                        needs = dict.fromkeys(sizes, 0)
                        for term in off_gpu_terms(ModelOnGrid(spec, one)):
                            by_stage = np.broadcast_to(term.bytes, (1, one.num_stages, 1, 1, 1, 1, 1)).reshape(-1)
                            needs[term.tier] = needs[term.tier] + by_stage
                        roomy = all(np.max(need) * ranks <= sizes[name] for name, need in needs.items())
                        fitting += roomy and any(outcome.feasible for outcome in alone.values())
    assert sum(outcome.feasible for outcome in found.values()) == fitting
    assert 0 < fitting < sum(outcome.feasible for outcome in unlimited.values())


def test_rooms_are_those_whose_size_is_known() -> None:
    strategy = grid("deepspeed", 3, "optimizer", fixed={"offload_to": "nvme"})
    node = catalog.node("hgx-h100-cxl")
    rooms = pools_of(ModelOnGrid(model(), strategy), node)
    assert len(rooms) == 2
    unknown = node.model_copy(
        update={"host_memory_bytes": None, "tiers": tuple(t for t in node.tiers if t.name != "host")}
    )
    (room,) = pools_of(ModelOnGrid(model(), strategy), unknown)
    assert int(computed(room.need).max()) == (12 * OWN + 4 * LARGE)
    assert pools_of(ModelOnGrid(model(), grid("deepspeed", 3)), node) == ()
