"""DeepSpeed without ZeRO: which optimizer runs, and what its step allocates, by its source and by running it.

Which one: runtime/engine.py, ``get_data_types`` and ``_do_optimizer_sanity_check``, at v0.12.3, v0.17.5, v0.17.6 and
edaa722. fp16 has ``FP16_Optimizer`` over FusedAdam and ``FP16_UnfusedOptimizer`` over any other in every release; bf16
has ``BF16_Optimizer``, adding up in fp32, until 0.17.5, and since 0.17.6 those of fp16, in a pipeline
``BF16_Optimizer`` in bf16.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from terms.test_deepspeed import PARAMETERS, RANKS, amount, grid, ledger
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import memcalc
from memcalc.errors import InputError
from memcalc.frameworks import habits_of
from memcalc.grid import Layout

SHARE = -(-PARAMETERS // RANKS)
OF_THE_STEP = (
    "weights", "master", "moments", "gradients in fp32", "flat gradients", "gradients that the step reads",
    "flattened gradients", "fp32 copy of the gradients", "temporaries of the step",
)  # fmt: skip
"""Terms of the states and of what the step adds to them."""
WHOLE, OLD = "deepspeed", "deepspeed@0.17.5"

# Bytes a parameter at the height of the step: weights + gradients + (masters + moments) + fp32 gradients.
# FP16_Optimizer (fused_optimizer.py): `_flatten_dense_tensors([p.grad.to(fp32) ...])`, before `p.grad = None`.
# FP16_UnfusedOptimizer: `fp32_param.grad = fp16_param.grad.to(fp32)`, with nothing flattened; 16-bit gradients stay.
# BF16_Optimizer: `fp32_groups_gradients_flat` for life, masters of a partition, and no copy.
TABLE = [
    (WHOLE, "fp16-mixed", {}, 2 + 2 + 12 + 4 + 4, 0),
    (WHOLE, "bf16-mixed", {}, 2 + 2 + 12 + 4 + 4, 0),
    (WHOLE, "fp16-mixed", {"optimizer_impl": "loop"}, 2 + 2 + 12 + 4, 0),
    (WHOLE, "fp16-mixed", {"optimizer": "lion", "optimizer_impl": "loop"}, 2 + 2 + 8 + 4, 0),
    (OLD, "fp16-mixed", {}, 2 + 2 + 12 + 4 + 4, 0),
    (OLD, "bf16-mixed", {}, 2 + 2 + 4, 12),
    ("deepspeed@0.12", "bf16-mixed", {}, 2 + 2 + 4, 12),
    ("deepspeed@0.5", "fp16-mixed", {}, 2 + 2 + 12 + 4 + 4, 0),
]


@pytest.mark.parametrize(("framework", "precision", "words", "whole", "shared"), TABLE)
def test_bytes_of_the_step(framework: str, precision: str, words: dict[str, Any], whole: int, shared: int) -> None:
    found = amount(ledger(0, framework, precision=precision, **words), "step", *OF_THE_STEP)
    temporaries = amount(ledger(0, framework, precision=precision, **words), "step", "temporaries of the step")
    assert found - temporaries == whole * PARAMETERS + shared * SHARE


def test_bf16_gradients_live_in_fp32_until_0_17_5() -> None:
    """Whole on every rank, from the first forward on; fp16 has none, and neither has a release since."""
    for framework, precision, each in ((OLD, "bf16-mixed", 4), (OLD, "fp16-mixed", 0), (WHOLE, "bf16-mixed", 0)):
        book = ledger(0, framework, precision=precision)
        assert amount(book, "forward", "gradients in fp32") == each * PARAMETERS


def test_a_bf16_pipeline_adds_up_in_bf16_since_0_17_6() -> None:
    """``BF16_Optimizer`` with ``grad_acc_dtype`` bf16: a flat buffer of 2 bytes, and a partition's copy in fp32."""
    book = ledger(0, precision="bf16-mixed", layout=Layout(dp=4, pp=2))
    masters = amount(book, "step", "fp32 master weights", stage=0)
    weights = (amount(book, "step", "weights", stage=0) - masters) // 2
    assert amount(book, "forward", "flat gradients", stage=0) == 2 * weights
    assert amount(book, "step", "fp32 copy of the gradients", stage=0) == pytest.approx(4 * weights / 4, abs=64)
    assert amount(book, "step", "flattened gradients", stage=0) == 0
    assert masters == pytest.approx(4 * weights / 4, abs=64)
    assert amount(ledger(0, precision="bf16-mixed"), "forward", "flat gradients") == 0


def test_zero_stages_are_as_they_were() -> None:
    """Only stage 0 has wrappers of its own."""
    for stage in (1, 2, 3):
        new, old = (ledger(stage, name, precision="bf16-mixed") for name in ("deepspeed@0.17.6", OLD))
        assert [int(part) for part in new.peak().reshape(-1)] == [int(part) for part in old.peak().reshape(-1)]


def test_the_release_that_changed_it() -> None:
    assert habits_of("deepspeed@0.17.5") is not habits_of("deepspeed@0.17.6")
    assert habits_of("deepspeed@0.17.6") is habits_of("deepspeed@0.18.2")
    assert grid(0, OLD).habits.zero_optimizer != grid(0).habits.zero_optimizer


@pytest.mark.parametrize(
    ("framework", "precision", "width"),
    [(WHOLE, "bf16-mixed", "fp32"), (WHOLE, "fp16-mixed", "fp32"), (OLD, "bf16-mixed", "bf16")],
)
def test_a_width_that_the_engine_refuses_is_refused(framework: str, precision: str, width: str) -> None:
    words: dict[str, Any] = {"framework": framework, "precision": precision, "gpus": 2}
    words["settings"] = {"strategy.grad_accum_dtype": width}
    with pytest.raises(InputError, match="grad_accum_dtype"):
        memcalc.estimate(model="gpt2", gpu="a100-40g", zero=0, **words)
    assert memcalc.estimate(model="gpt2", gpu="a100-40g", zero=1, **words).peak.allocated > 0


def test_a_search_leaves_such_a_stage_out() -> None:
    """With fp32 gradients a plan has ZeRO, whichever stage is faster."""
    words = {"framework": "deepspeed", "gpus": 8, "precision": "bf16-mixed", "seq_len": 1024, "global_batch": 64}
    found = memcalc.plan(
        model="gpt2", gpu="a100-40g", settings={"strategy.grad_accum_dtype": "fp32"}, **words, advice=False
    )
    assert {plan.strategy.zero for plan in found.plans} <= {1, 2, 3}


# ------------------------------------------------------------------------------------------------------ the real engine

LAYERS, SIDE = 8, 64
COUNT = LAYERS * SIDE * SIDE
"""Parameters, all in tensors of one size, whose bytes hide none of a scalar's."""


class Live(TorchDispatchMode):
    """The bytes of the storages that live, and the most of them at once."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes, self.most = dict[int, int](), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.count(leaf)
        return out

    def count(self, tensor: torch.Tensor) -> None:
        """Count a tensor's storage while it lives."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self.sizes:
            self.sizes[storage._cdata] = storage.nbytes()
            weakref.finalize(storage, self.sizes.pop, storage._cdata)
            self.most = max(self.most, sum(self.sizes.values()))

    @property
    def now(self) -> float:
        """Bytes a parameter that live."""
        return sum(self.sizes.values()) / COUNT


def measured(build: Callable[[list[torch.nn.Parameter]], Any]) -> tuple[float, float, float]:
    """Return the bytes a parameter before a step, at its height, and after it."""
    with Live() as live:
        weights = [
            torch.nn.Parameter(torch.full((SIDE, SIDE), 0.5, dtype=torch.bfloat16), requires_grad=True)
            for _ in range(LAYERS)
        ]
        engine = build(weights)
        for weight in weights:
            weight.grad = torch.full((SIDE, SIDE), 0.25, dtype=torch.bfloat16)
        if hasattr(engine, "update_hp_grads"):
            engine.update_hp_grads()
        before, live.most = live.now, 0
        engine.step()
        height, after = live.most / COUNT, live.now
    return before, height, after


@pytest.fixture
def deepspeed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """DeepSpeed itself on the CPU, one rank, its norm without a group."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    return pytest.importorskip("deepspeed", reason="pip install --no-deps deepspeed py-cpuinfo hjson einops ninja")


def adam(weights: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW in one kernel, which allocates nothing in a step."""
    return torch.optim.AdamW(weights, fused=True)


@pytest.mark.usefixtures("deepspeed")
def test_the_real_fused_wrapper_stands_at_24_bytes() -> None:
    """Over an optimizer without temporaries: 16 before the step, 24 at its height, and 14 without any gradient."""
    from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer

    before, height, after = measured(
        lambda weights: FP16_Optimizer(adam(weights), low_precision_dtype=torch.bfloat16, clip_grad=1.0)
    )
    assert [before, height, after] == pytest.approx([16, 24, 14], abs=0.05)


@pytest.mark.usefixtures("deepspeed")
def test_the_real_unfused_wrapper_stands_at_20_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.runtime.fp16 import unfused_optimizer

    monkeypatch.setattr(unfused_optimizer.dist, "get_rank", lambda *_: 1)
    before, height, after = measured(
        lambda weights: unfused_optimizer.FP16_UnfusedOptimizer(adam(weights), low_precision_dtype=torch.bfloat16)
    )
    assert [before, height, after] == pytest.approx([16, 20, 16], abs=0.05)


@pytest.mark.usefixtures("deepspeed")
@pytest.mark.parametrize(("width", "before", "height"), [(torch.float32, 20, 20), (torch.bfloat16, 18, 22)])
def test_the_real_bf16_optimizer(width: torch.dtype, before: int, height: int) -> None:
    """On one rank: fp32 gradients of 4 bytes for life, or a flat buffer of 2 and the partition's copy of 4."""
    import deepspeed.comm as dist
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer

    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    try:
        dist.init_distributed("gloo", dist_init_required=False)
        group = torch.distributed.group.WORLD
        stated = SimpleNamespace(enabled=True, immediate_grad_update=False)

        def build(weights: list[torch.nn.Parameter]) -> Any:
            names = {weight: str(index) for index, weight in enumerate(weights)}
            optimizer = BF16_Optimizer(
                adam(weights), names, stated, clip_grad=1.0, dp_process_group=group, grad_acc_dtype=width
            )
            # the first step makes the moments
            for weight in weights:
                weight.grad = torch.full((SIDE, SIDE), 0.25, dtype=torch.bfloat16)
            optimizer.update_hp_grads()
            optimizer.step()
            optimizer.clear_lp_grads(set_to_none=True)
            return optimizer

        found = measured(build)
    finally:
        torch.distributed.destroy_process_group()
    assert found[:2] == pytest.approx((before, height), abs=0.05)
