"""Blocks that are more than attention and an MLP: what is not modelled beside them is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

import memcalc
from memcalc.errors import CombinationError, UncountedError

GEMMA4 = ("gemma-4-31b", "gemma-4-12b", "gemma-4-26b-a4b")


@pytest.mark.parametrize("model", GEMMA4)
@pytest.mark.parametrize("framework", ["megatron", "torchtitan", "torchtune", "litgpt"])
def test_gemma_4_is_no_model_of_frameworks_with_model_code_of_their_own(model: str, framework: str) -> None:
    with pytest.raises(CombinationError, match=r"a model with norms of values.* is modelled under hf, fsdp2"):
        memcalc.estimate(model=model, gpu="h100", gpus=8, framework=framework)


@pytest.mark.parametrize("model", GEMMA4)
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"tp": 2}, "tensor parallelism is not modelled for norms of values"),
        ({"cp": 2}, "context parallelism is not modelled for norms of values"),
        ({"compile": "blocks"}, "torch.compile is not modelled for norms of values"),
        ({"kernels": "fused"}, "Liger 0.8 has none for some operators of a model with norms of values"),
        ({"attention": "flash"}, "has heads of more than 256 elements"),
    ],
)
def test_what_is_not_modelled_beside_norms_of_values(model: str, words: dict[str, Any], said: str) -> None:
    with pytest.raises(CombinationError, match=said):
        memcalc.estimate(model=model, gpu="h100", gpus=8, **words)


@pytest.mark.parametrize(
    ("words", "said"),
    [({"ep": 2}, "expert parallelism is not modelled"), ({"lora": "16", "quantize": "nf4"}, "leaves as they are")],
)
def test_experts_beside_a_dense_mlp_are_neither_divided_nor_quantised(words: dict[str, Any], said: str) -> None:
    with pytest.raises(CombinationError, match=said):
        memcalc.estimate(model="gemma-4-26b-a4b", gpu="h100", gpus=8, **words)


def test_a_search_leaves_out_what_is_not_modelled() -> None:
    plans = memcalc.plan(model="gemma-4-31b", gpu="h100", gpus=32, advice=False).plans
    assert plans
    assert {(plan.strategy.tp, plan.strategy.cp, plan.strategy.kernels) for plan in plans} == {(1, 1, "model")}


@pytest.mark.parametrize(
    ("model", "precision", "seq_len", "kernel"),
    [
        ("gemma-4-31b", "bf16-mixed", 512, "sdpa"),
        ("gemma-4-31b", "bf16-mixed", 2048, "efficient"),
        ("gemma-4-31b", "fp32", 2048, "efficient"),
        ("gemma-4-31b", "fp32", 512, "sdpa"),
        ("llama-3.1-8b", "fp32", 512, "math"),
    ],
)
def test_wide_heads_get_the_kernel_that_takes_them(model: str, precision: str, seq_len: int, kernel: str) -> None:
    """Transformers 5.24 repeats keys of more than 256 elements, with which fp32 has a fused kernel too."""
    words = {"framework": "fsdp2", "precision": precision, "seq_len": seq_len}
    assert memcalc.estimate(model=model, gpu="h100", gpus=8, **words).strategy.attention == kernel


def test_transformer_engine_has_no_module_for_a_short_convolution() -> None:
    with pytest.raises(UncountedError, match="TransformerEngine's modules are not modelled for short convolutions"):
        memcalc.estimate(model="lfm2-8b-a1b", gpu="h100", kernels="te")
