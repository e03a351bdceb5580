"""DeepSpeed's stage 3 updates a rank's shards in groups of tensors, and in fp16 looks for an overflow in all at once.

The reports are those of one job (Qwen3-4B with an untied head and 27 million parameters beside, DeepSpeed 0.16.4, one
A800): out of memory at a request of 5.17 GiB, the fp32 copy of a group of 1.388e9 gradients, and at one of 4.13 GiB, a
truth value of each of 4,438,523,920 gradients (``torch.isinf``).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import memcalc
from memcalc.results.estimates import Estimate

UNTIED = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 2560, "intermediate_size": 9728,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 36,
    "vocab_size": 151936, "max_position_embeddings": 40960, "tie_word_embeddings": False, "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
}  # fmt: skip
GIB = 2**30


def estimated(model: str, gpus: int, **words: Any) -> Estimate:
    """Estimate ZeRO-3 with FusedAdam."""
    job = {"precision": "bf16-mixed", "optimizer_impl": "fused", "recompute": "full", "framework": "deepspeed@2025-02"}
    return memcalc.estimate(
        **{
            "model": model,
            "gpu": "a100-80g",
            "gpus": gpus,
            "zero": 3,
            "seq_len": 1024,
            "micro_batch": 1,
            **job,
            **words,
        }
    )


def bytes_of(answer: Estimate, name: str) -> int:
    """Bytes of a term; 0 where there is none."""
    return sum(term.bytes for term in answer.terms if term.name == name)


def sizes_of(model: str) -> list[int]:
    """Elements of the weights of a class of Transformers, in the order of its modules, without vectors."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(**json.loads(Path(model).read_text(encoding="utf-8")))
    with torch.device("meta"):
        made = transformers.AutoModelForCausalLM.from_config(config)
    return [weight.numel() for weight in made.parameters() if weight.dim() > 1]


def groups_of(sizes: list[int], ranks: int, limit: int) -> list[int]:
    """DeepSpeed edaa722 runtime/zero/stage3.py, _create_fp16_sub_groups, of each tensor's share."""
    shares = [-(-size // ranks) for size in sizes]
    groups, group = list[int](), 0
    for at, share in enumerate(shares):
        group += share
        if group >= limit or at == len(shares) - 1:
            groups, group = [*groups, group], 0
    return groups


@pytest.fixture
def untied(tmp_path: Path) -> str:
    """The config of the job."""
    (tmp_path / "config.json").write_text(json.dumps(UNTIED), encoding="utf-8")
    return str(tmp_path / "config.json")


def test_the_largest_group_is_the_one_that_was_asked_for(untied: str) -> None:
    answer = estimated(untied, 1)
    copy = bytes_of(answer, "fp32 copy of the gradients")
    assert copy / GIB == pytest.approx(5.17, abs=0.005)
    assert copy == 2 * bytes_of(answer, "flattened gradients")


@pytest.mark.parametrize(("ranks", "limit"), [(1, 10**9), (2, 10**9), (4, 10**9), (1, 4 * 10**8), (2, 2 * 10**8)])
def test_groups_of_the_real_class(untied: str, ranks: int, limit: int) -> None:
    answer = estimated(untied, ranks, settings={"strategy.sub_group_size": limit})
    expected = max(groups_of(sizes_of(untied), ranks, limit))
    assert bytes_of(answer, "fp32 copy of the gradients") == pytest.approx(4 * expected, rel=2e-3)


def test_a_share_below_a_group_is_copied_whole(untied: str) -> None:
    answer = estimated(untied, 8)
    assert bytes_of(answer, "fp32 copy of the gradients") == pytest.approx(4 * answer.model.parameters / 8, rel=1e-6)


def test_fp16_looks_for_an_overflow_in_the_whole_share(untied: str) -> None:
    """An absolute value and a truth value of each gradient, 3 bytes, which the copies of the step leave free before."""
    narrow, wide = (estimated(untied, 1, precision=name) for name in ("fp16-mixed", "bf16-mixed"))
    title = "search for an overflow in the gradients, beyond the copies"
    copies = bytes_of(narrow, "fp32 copy of the gradients") + bytes_of(narrow, "flattened gradients")
    assert bytes_of(narrow, title) + copies == 3 * narrow.model.parameters
    assert bytes_of(wide, title) == 0
    before = estimated(untied, 1, precision="fp16-mixed", framework="deepspeed@0.6")
    assert bytes_of(before, title) == 0


def test_an_evaluation_has_the_gradients_buffer_and_ligers_logits() -> None:
    """ms-swift's examples/train/liger/sft.sh and cached_dataset/sft.sh: 42 and 44 GiB with an evaluation, 4 GPUs."""
    words = {"kernels": "fused", "loss": "fused-linear", "settings": {"workload.eval_micro_batch": 1}}
    answer = estimated("qwen2.5-7b", 4, seq_len=8192, framework="deepspeed@2025-04", **words)
    (evaluation,) = [occasion for occasion in answer.occasions if occasion.name == "evaluation"]
    assert 42 <= evaluation.allocated / GIB <= 44
    today = estimated("qwen2.5-7b", 4, seq_len=8192, framework="deepspeed", **words)
    (skipped,) = [occasion for occasion in today.occasions if occasion.name == "evaluation"]
    logits = 8192 * 152064 * 4
    assert evaluation.allocated - skipped.allocated > logits
