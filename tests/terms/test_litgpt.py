"""litgpt's model code, head and adapters: sums by hand from its sources, for each block and token.

Letters: h hidden, f inner width, q and k the widths of queries and of keys, a heads, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import pytest

import memcalc
from memcalc.api import single
from memcalc.catalog import model as preset
from memcalc.frameworks import habits_of
from memcalc.frameworks.habits import rewritten
from memcalc.results.estimates import Estimate
from memcalc.specs.block import Block, Mlp, Norm
from memcalc.terms.order import spared_records
from memcalc.trace.adapters import Lora
from memcalc.trace.layers import BlockConfig
from memcalc.trace.template import Template, trace, trace_head

QUERIES_AND_VALUES = frozenset(("q", "v"))
EVERYTHING = frozenset(("q", "k", "v", "o", "gate", "up", "down", "head"))


def block_of(name: str, era: str = "litgpt@2023-10") -> Block:
    return rewritten(preset(name), habits_of(era).own_code).main.block


def adapters(targets: frozenset[str] = QUERIES_AND_VALUES, *, dropout: bool = True) -> BlockConfig:
    return BlockConfig(trainable=False, lora=Lora(8, targets, 2, dropout=dropout))


def token_bytes(template: Template) -> int:
    """Bytes a token, the low rank's few left out."""
    return sum(r.size.bytes for r in template.kept_records if r.size.unit == "token" and "adapter A" not in r.name)


def shapes(block: Block) -> tuple[int, int, int, int, int]:
    assert isinstance(block.mlp, Mlp)
    return block.hidden, block.mlp.ffn, block.attention.q_dim, block.attention.kv_dim, block.attention.heads


def test_adapters_on_queries_and_values_of_a_llama() -> None:
    block = block_of("llama-2-7b")
    h, f, q, k, a = shapes(block)
    norms, adapter, projection = 2 * (4 * h + 4), 3 * h + 2 * (q + k), 2 * (q + 2 * k)
    expected = norms + adapter + projection + 2 * q + 2 * q + 2 * q + 4 * a + 6 * f
    assert token_bytes(trace(block, adapters())) == expected


def test_grouped_keys_are_expanded_before_the_rotary_embedding() -> None:
    block = block_of("llama-3-8b")
    h, f, q, k, a = shapes(block)
    norms, adapter = 2 * (4 * h + 4), 3 * h + 2 * (q + k)
    assert token_bytes(trace(block, adapters())) == norms + adapter + 6 * q + 2 * q + 4 * a + 6 * f


def test_one_head_for_all_is_a_view_of_the_projection() -> None:
    block = block_of("falcon-7b")
    h, f, q, k, a = shapes(block)
    norms, adapter = 2 * h + 8, 3 * h + 2 * (q + k)
    assert token_bytes(trace(block, adapters())) == norms + adapter + 2 * (q + 2 * k) + 4 * q + 2 * q + 4 * a + 2 * f


def test_nothing_is_padded_where_all_three_have_adapters() -> None:
    block = block_of("llama-2-7b")
    _, _, q, k, _ = shapes(block)
    three = trace(block, adapters(frozenset(("q", "k", "v"))))
    assert token_bytes(trace(block, adapters())) - token_bytes(three) == 2 * (q + k)


def test_adapters_everywhere() -> None:
    block = block_of("llama-2-7b")
    h, f, q, k, _ = shapes(block)
    some, every = trace(block, adapters()), trace(block, adapters(EVERYTHING))
    # masks and dropped inputs of the projection, of gate and up, and of down; no padding
    assert token_bytes(every) - token_bytes(some) == 3 * q + 6 * h + 3 * f - 2 * (q + k)


def test_without_dropout_the_inputs_are_shared_and_no_mask_is_kept() -> None:
    block = block_of("llama-2-7b")
    h = block.hidden
    with_mask, without = (trace(block, adapters(dropout=on)) for on in (True, False))
    assert token_bytes(with_mask) - token_bytes(without) == h


@pytest.mark.parametrize(("era", "scaled"), [("2023-10", 10), ("2024-04", 8), ("2024-08", 10)])
def test_full_training_by_the_form_of_the_norm(era: str, scaled: int) -> None:
    block = block_of("llama-2-7b", f"litgpt@{era}")
    h, f, q, k, a = shapes(block)
    norms, attention = 2 * (scaled * h + 4), 2 * (q + 2 * k) + 4 * q
    # the attention's output is kept as the kernel made it and as the projection read it
    assert token_bytes(trace(block, BlockConfig())) == norms + attention + 4 * q + 4 * a + 8 * f


def test_16_bit_logits_are_gone_and_fp32_ones_are_held() -> None:
    hidden, vocab, parts = 512, 4096, 4
    loss = habits_of("litgpt@2023-10").losses["chunked"].of(512, trainable=False)
    assert loss.chunks == parts
    head = trace_head(hidden, Norm(kind="layernorm"), vocab, BlockConfig(trainable=False), loss, "none")
    logits = [dict(peak).get(("token", "none", False), 0) for peak in head.backward_peaks]
    assert head.kept_sum["token", "none", False] == 8 * vocab
    assert max(logits) == 8 * vocab + 8 * vocab // parts


def test_full_training_does_not_divide_the_head() -> None:
    hidden, vocab = 512, 4096
    loss = habits_of("litgpt@2024-04").losses["chunked"].of(512, trainable=True)
    head = trace_head(hidden, Norm(kind="layernorm"), vocab, BlockConfig(), loss, "none")
    assert max(dict(peak).get(("token", "none", False), 0) for peak in head.backward_peaks) == 12 * vocab


def spared_bytes(name: str) -> int:
    """Return what the first of a frozen model's blocks does not keep under adapters of queries and values."""
    job = single(model=name, gpu="a100-80g", framework="litgpt@2023-10", precision="bf16", lora="8:q,v",
                 recompute="none", settings={"workload.lora_dropout": "0.05"})  # fmt: skip
    spared = spared_records(job.census, 0, adapters(), job.census.grid.policies[0])
    return sum(record.size.bytes for record in spared)


def test_the_first_block_keeps_nothing_for_a_gradient_that_nobody_wants() -> None:
    sequential, parallel = block_of("llama-2-7b"), block_of("phi-1.5")
    h, f, *_ = shapes(parallel)
    norm, mask = 4 * sequential.hidden + 4, sequential.hidden
    assert spared_bytes("llama-2-7b") == norm + mask
    # with one norm for both branches, no gradient passes the MLP either
    assert spared_bytes("phi-1.5") == (2 * h + 8) + h + 2 * f


def estimate(**words: Any) -> Estimate:
    same = {"gpu": "a100-80g", "framework": "litgpt@2024-04", "precision": "bf16", "seq_len": 512, "loss": "chunked"}
    return memcalc.estimate(**{**same, **words})


def term(answer: Estimate, name: str) -> int:
    return sum(t.bytes for t in answer.terms if t.name == name)


QLORA = {
    "model": "llama-2-7b",
    "micro_batch": 2,
    "global_batch": 8,
    "recompute": "none",
    "zero": 0,
    "lora": "32:q,v",
    "adapter_dtype": "bf16",
    "quantize": "nf4",
    "optimizer": "paged-adamw",
}


def test_inputs_of_quantised_products_live_until_the_next_loss() -> None:
    layers, h, f, tokens = 32, 4096, 11008, 1024
    name = "inputs of quantised products, of the micro-batch before"
    old = estimate(**QLORA, settings={"strategy.bnb": "0.42"})
    # two norms' outputs, the attention's output as the projection read it, and the MLP's product
    assert term(old, name) == layers * (2 * 2 * h + 2 * h + 2 * f) * tokens
    assert old.peak.phase == "forward"
    assert term(estimate(**QLORA, settings={"strategy.bnb": "0.43"}), name) == 0
    first = {"strategy.bnb": "0.42", "workload.longest_first": True}
    assert term(estimate(**QLORA, settings=first), name) == 0


def test_lightning_quantises_the_head_too() -> None:
    blocks, head, embedding = 32 * (4 * 4096**2 + 3 * 4096 * 11008), 32000 * 4096, 32000 * 4096
    norms = (2 * 32 + 1) * 4096
    assert term(estimate(**QLORA), "frozen weights, nf4") == (blocks + head) // 2 + 2 * (embedding + norms)


def test_adapters_are_made_in_the_dtype_of_the_model() -> None:
    words = {key: value for key, value in QLORA.items() if key not in {"adapter_dtype", "quantize"}}
    parameters = 32 * 2 * 32 * (4096 + 4096)
    assert term(estimate(**words), "adapters") == 2 * parameters
    assert term(estimate(**{**words, "framework": "hf", "loss": "standard"}), "adapters") == 4 * parameters


def test_gradients_that_wait_for_synchronisation_are_whole() -> None:
    words = {"model": "tinyllama-1.1b", "gpus": 4, "micro_batch": 1, "zero": 3, "recompute": "full"}
    parameters = 1_100_048_384
    waiting, at_once = (estimate(**words, global_batch=batch) for batch in (16, 4))
    name = "unsharded gradients of earlier micro-batches"
    assert term(waiting, name) == 2 * parameters
    assert term(at_once, name) == 0
    shards = [t for t in waiting.terms if t.name == "gradients"]
    assert [(t.bytes, t.phases) for t in shards] == [(2 * parameters // 4, ("step",))]


def test_frozen_weights_of_a_mixed_flat_parameter_get_gradients() -> None:
    words = {"model": "tinyllama-1.1b", "gpus": 4, "micro_batch": 1, "zero": 3, "recompute": "full", "lora": "8:q,v"}
    answer = estimate(**words, adapter_dtype="bf16", global_batch=16)
    block = 2 * 2048**2 + 2 * 2048 * 256 + 3 * 2048 * 5632 + 2 * 2048
    adapter = 8 * (2048 + 2048 + 2048 + 256)
    assert term(answer, "unsharded gradients of earlier micro-batches") == 2 * 22 * (block + adapter)


def test_gradients_of_a_head_in_parts_are_added_out_of_place_once() -> None:
    hidden, vocab = 512, 4096
    loss = habits_of("torchtune").losses["chunked"].of(4096, trainable=True)
    head = trace_head(hidden, Norm(kind="layernorm"), vocab, BlockConfig(), loss, "none")
    # PyTorch adds the first two products of a shared weight into a third tensor, and later ones in place
    assert max(dict(peak).get(("once", "none", True), 0) for peak in head.backward_peaks) == 3 * hidden * vocab


def test_torchtune_compiles_the_loss_in_chunks_alone() -> None:
    losses = habits_of("torchtune@2024-11").losses
    assert losses["standard"].of(4096, trainable=True, compiled=True).kernel == "log-softmax"
    assert losses["chunked"].of(4096, trainable=True, compiled=True).kernel == "compiled"


@pytest.mark.parametrize(("month", "release"), [("2022-06", "4.20"), ("2023-12", "4.36"), ("2024-11", "4.46")])
def test_a_month_is_the_release_of_that_time(month: str, release: str) -> None:
    assert habits_of(f"hf@{month}") == habits_of(f"hf@{release}")
