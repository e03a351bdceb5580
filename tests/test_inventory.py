"""Bytes that a block keeps for backward: against PyTorch's own figures, PyTorch run here, and the textbook."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from memcalc.api import load_model
from memcalc.formulas.inventory import block_inventory, dense_saved
from memcalc.formulas.recompute import keeps, parse_policy
from memcalc.grid import Fixed, Grid, Layout
from memcalc.specs.model import Model
from memcalc.terms import Census
from memcalc.terms.activations import groups_of

ALONE = Layout()


def kept_a_token(
    model: Model,
    seq_len: int,
    precision: str = "bf16",
    layout: Layout = ALONE,
    recompute: str = "none",
    **fixed: str,
) -> float:
    """Return the bytes that one block keeps, a token and hidden unit, as the grid of one strategy gives them."""
    shared = Fixed("fsdp2", seq_len, layout.dp, **fixed)
    block = groups_of(Census(model, Grid(shared, (layout,), (precision,), (recompute,), (3,), ((),), (1,))))[0]
    total = block.checkpoint * np.minimum(block.field("checkpoints"), 1)
    for saved in block.inventory:
        total = total + block.bytes_of(saved) * np.minimum(block.kept_blocks(saved), 1)
    return int(np.max(total)) / (seq_len * model.hidden)


MEASURED: list[tuple[str, int, dict[str, Any], float]] = [
    ("bert-large", 512, {"attention": "eager"}, 74.016),
    ("bert-large", 512, {"attention": "flash"}, 34.078),
    ("gpt2", 1024, {"attention": "eager"}, 138.021),
    ("gpt2", 1024, {"attention": "flash"}, 58.083),
    ("llama-2-7b", 2048, {"attention": "flash"}, 45.533),
    ("llama-3-8b", 2048, {"attention": "flash"}, 49.033),
    ("llama-2-7b", 2048, {"attention": "flash", "kernels": "fused"}, 37.533),
    ("llama-2-7b", 2048, {"attention": "eager"}, 141.502),
    ("llama-2-7b", 2048, {"attention": "flash", "precision": "bf16-autocast"}, 55.533),
    ("llama-2-7b", 2048, {"attention": "efficient", "precision": "fp32"}, 83.033),
    ("llama-2-7b", 2048, {"recompute": "full"}, 2.0),
    ("gpt2", 1024, {"recompute": "full"}, 2.0),
    ("llama-2-7b", 2048, {"recompute": "full", "precision": "fp32"}, 4.0),
]
"""Unique storages saved for backward, parameters left out, of the real Transformers 5.23 classes on PyTorch 2.13."""


@pytest.mark.parametrize(("name", "seq_len", "choice", "expected"), MEASURED)
def test_blocks_keep_what_pytorch_keeps(name: str, seq_len: int, choice: dict[str, Any], expected: float) -> None:
    assert kept_a_token(load_model(name), seq_len, **choice) == pytest.approx(expected, abs=5e-4)


@pytest.mark.parametrize(("attention", "expected"), [("eager", 88.021), ("flash", 56.083)])
def test_gpt2_without_dropout(attention: str, expected: float) -> None:
    model, seq_len = load_model("gpt2"), 1024
    block = model.groups[0].block
    saved = block_inventory(block, kernels="model", attention=attention, dropout=False)
    bytes_ = sum(s.elements * s.widths[0] * (seq_len if s.quadratic else 1) for s in saved if not s.ops_only)
    assert bytes_ / block.hidden == pytest.approx(expected, abs=5e-4)


BATCH, TOKENS, HIDDEN, HEADS = 2, 48, 64, 4


def llama(layers: int, attention: str) -> Any:
    """Return a small Llama with grouped queries."""
    config = transformers.LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=160,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        vocab_size=128,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation=attention,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


def gpt2(layers: int, attention: str, dropout: float = 0.0) -> Any:
    """Return a small GPT-2."""
    config = transformers.GPT2Config(
        n_embd=HIDDEN,
        n_layer=layers,
        n_head=HEADS,
        vocab_size=128,
        n_positions=64,
        bos_token_id=None,
        eos_token_id=None,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        attn_implementation=attention,
        use_cache=False,
    )
    return transformers.GPT2LMHeadModel(config)


def bert(layers: int, attention: str, dropout: float = 0.0) -> Any:
    """Return a small BERT."""
    config = transformers.BertConfig(
        hidden_size=HIDDEN,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        intermediate_size=256,
        vocab_size=128,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        attn_implementation=attention,
    )
    return transformers.BertModel(config, add_pooling_layer=False)


def storages_saved(model: Any) -> int:
    """Return the bytes of all storages that autograd keeps in a forward pass, parameters and buffers left out."""
    model = model.to(torch.bfloat16).train()
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(torch.zeros(BATCH, TOKENS, dtype=torch.long))
    assert output is not None
    return sum(storage.nbytes() for storage in saved.values())


def inventory_bytes(model: Model, attention: str) -> int:
    """Return the inventory's bytes of one block as PyTorch computes on a CPU.

    A CPU differs from a GPU in two ways: statistics of a LayerNorm are kept in the dtype of its input instead of fp32,
    and a dropout mask is a tensor of that dtype instead of one byte.
    """
    total = 0
    for saved in block_inventory(model.groups[0].block, kernels="model", attention=attention):
        on_cpu = 2 if saved.name.endswith(("mask", "mean and rstd")) else saved.widths[0]
        count = saved.elements * BATCH * TOKENS * (TOKENS if saved.quadratic else 1)
        total += 0 if saved.ops_only else count * on_cpu
    return total


@pytest.mark.parametrize(
    ("build", "attention"),
    [
        (llama, "sdpa"),
        (llama, "eager"),
        (gpt2, "sdpa"),
        (gpt2, "eager"),
        (bert, "sdpa"),
        (bert, "eager"),
        (lambda layers, attention: gpt2(layers, attention, dropout=0.1), "eager"),
        (lambda layers, attention: bert(layers, attention, dropout=0.1), "eager"),
    ],
    ids=[
        "llama-flash",
        "llama-eager",
        "gpt2-flash",
        "gpt2-eager",
        "bert-flash",
        "bert-eager",
        "gpt2-eager-dropout",
        "bert-eager-dropout",
    ],
)
def test_inventory_is_what_pytorch_saves_here(build: Callable[..., Any], attention: str, tmp_path: Path) -> None:
    """Two blocks less one block is one block: to the byte, through the converter of the real configuration."""
    two = build(2, attention)
    two.config.save_pretrained(tmp_path)
    model = load_model(str(tmp_path / "config.json"))
    kernel = "flash" if attention == "sdpa" else "eager"
    assert inventory_bytes(model, kernel) == storages_saved(two) - storages_saved(build(1, attention))


TEXTBOOK = [
    ("without parallelism", Layout(), "none", lambda _, scores: 34 + 5 * scores),
    ("tensor parallelism", Layout(tp=8), "none", lambda t, scores: 10 + 24 / t + 5 * scores / t),
    ("with sequence parallelism", Layout(tp=8, sp=True), "none", lambda t, scores: 34 / t + 5 * scores / t),
    ("selective", Layout(), "selective-core-attn", lambda *_: 34),
    ("tensor parallelism, selective", Layout(tp=8), "selective-core-attn", lambda t, _: 10 + 24 / t),
    ("both, selective", Layout(tp=8, sp=True), "selective-core-attn", lambda t, _: 34 / t),
    ("full", Layout(tp=8), "full", lambda *_: 2),
]


@pytest.mark.parametrize(
    ("layout", "recompute", "formula"), [row[1:] for row in TEXTBOOK], ids=[r[0] for r in TEXTBOOK]
)
@pytest.mark.parametrize("name", ["megatron-22b", "gpt3-175b", "megatron-530b"])
def test_textbook(name: str, layout: Layout, recompute: str, formula: Callable[[int, float], float]) -> None:
    """Korthikanti et al. 2022 (arXiv:2205.05198), table 2; the paper leaves out a LayerNorm's statistics, 16/h.

    Megatron computes a GELU in one kernel, so the kernels are the fused ones.
    """
    model, seq_len = load_model(name), 2048
    scores = model.groups[0].block.attention.heads * seq_len / model.hidden
    sequence = layout.tp if layout.sp else 1
    statistics = 0 if recompute == "full" else 16 / model.hidden / sequence
    kept = kept_a_token(model, seq_len, layout=layout, recompute=recompute, attention="eager", kernels="fused")
    assert kept == pytest.approx(formula(layout.tp, scores) + statistics, rel=1e-9)


@pytest.mark.parametrize("activation", ["gelu_python", "gelu", "relu"])
def test_selective_operators_keep_the_output_of_a_matmul_whatever_the_activation(activation: str) -> None:
    """The policy stores what matmuls write: of an ungated MLP the up projection, f elements a token, and no more."""
    policy = parse_policy("selective-ops")
    saved = dense_saved("MLP", 3072, activation, "model", gated=False, part="mlp")
    assert sum(tensor.elements for tensor in saved if keeps(policy, tensor)) == 3072
