"""Adapters and quantised bases: counts against PEFT, bytes against the buffers themselves, tensors against autograd."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import memcalc
from memcalc.api import load_model
from memcalc.cli.app import app
from memcalc.errors import CombinationError, InputError, UncountedError
from memcalc.formulas import quantization as q
from memcalc.frameworks import habits_of
from memcalc.planner.adapted_layers import resolved_targets
from memcalc.results.estimates import Estimate
from memcalc.specs.adapters import Lora as Words
from memcalc.specs.adapters import parse_lora
from memcalc.specs.model import Model
from memcalc.terms.adapted_layers import block_quantised
from memcalc.terms.adapters import adapter_pairs, block_adapters
from memcalc.terms.parameters import block_count, model_count
from memcalc.terms.tensors import block_matrices, outside_matrices
from memcalc.trace.adapters import Lora
from memcalc.trace.layers import BlockConfig
from memcalc.trace.template import Template, trace

MISTRAL = load_model("mistral-7b-v0.1")
H, FFN, KV, HEADS, RANK = 4096, 14336, 1024, 32, 16
EXPERT = 3 * 2048 * 768
"""Weights of one of the experts of Qwen3-30B-A3B (its config.json)."""


# -------------------------------------------------------------------------------------------------------------- counts


def test_adapters_of_one_block_are_rank_times_inputs_and_outputs() -> None:
    """Hu et al., arXiv:2106.09685: A is r by n_in, B is n_out by r; the sizes of Mistral 7B are of its paper."""
    q_and_o, k_and_v = 2 * (H + H), 2 * (H + KV)
    assert block_adapters(MISTRAL.main.block, RANK, ("q", "k", "v", "o")) == (RANK * (q_and_o + k_and_v), 0)
    mlp = RANK * 3 * (H + FFN)
    assert block_adapters(MISTRAL.main.block, RANK, ("gate", "up", "down")) == (mlp, 0)


def test_published_count_of_trainable_parameters() -> None:
    """PEFT prints 4,194,304 for Llama-2-7B with r = 8 on q and v (all_linear with r = 16: 39,976,960)."""
    model = load_model("llama-2-7b")
    count = model.num_layers * block_adapters(model.main.block, 8, ("q", "v"))[0]
    assert count == 4_194_304
    every = ("q", "k", "v", "o", "gate", "up", "down")
    assert model.num_layers * block_adapters(model.main.block, 16, every)[0] == 39_976_960


def test_each_expert_has_its_own_adapters() -> None:
    block = load_model("mixtral-8x7b").main.block
    assert block_adapters(block, RANK, ("gate", "up", "down")) == (0, 8 * RANK * 3 * (H + FFN))


def test_experts_that_run_over_every_token_have_none() -> None:
    """As PEFT 0.21 counts them on the class: its shared expert alone."""
    block, hidden, ffn = load_model("llama-4-scout-17b-16e").main.block, 5120, 8192
    assert block_adapters(block, RANK, ("gate", "up", "down")) == (RANK * 3 * (hidden + ffn), 0)


STACKED = (
    "gpt-oss-20b", "hy3-295b-a21b", "jamba-v0.1", "phi-3.5-moe", "lfm2-8b-a1b", "kimi-linear-48b-a3b",
    "qwen1.5-moe-a2.7b", "granite-4.0-h-small", "gemma-4-26b-a4b",
)  # fmt: skip
"""A model of each class with stacked experts that PEFT leaves alone."""
UNLIKE = {"granite-4.0-h-small": ("out_proj",), "phi-3.5-moe": ("router",)}
"""Linear layers whose weight a kernel reads itself, or that return two tensors: an adapter does nothing, or fails."""


@pytest.mark.parametrize("name", STACKED)
def test_stacked_experts_have_no_adapters_and_stay_in_16_bits(name: str) -> None:
    """Against PEFT on the class, and the linear layers that bitsandbytes would replace, on the meta device."""
    import torch

    peft = pytest.importorskip("peft")
    import transformers

    model, hf = load_model(name), habits_of("hf")
    keys = {key: None if value == "null" else value for key, value in model.hf_config.items()}
    with torch.device("meta"):
        kind = getattr(transformers, str(model.hf_class))
        base = kind(kind.config_class(**keys))
        linear = {n: m for n, m in base.named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"}
        names = sorted({n.rpartition(".")[2] for n in linear} - {*UNLIKE.get(name, ())})
        replaced = sum(layer.weight.numel() for layer in linear.values() if type(layer) is torch.nn.Linear)
        real = peft.get_peft_model(base, peft.LoraConfig(r=RANK, target_modules=names))
    targets = resolved_targets(Words(rank=RANK, targets=("all-linear",)), model, hf)
    groups = [(group.count, group.block) for group in model.groups]
    ours = sum(n * sum(block_adapters(block, RANK, targets, stacked=True)) for n, block in groups)
    found = sum(p.numel() for p in real.parameters() if p.requires_grad)
    assert ours == found
    quantised = sum(n * block_quantised(block, "nf4", 0, stacked=True).elements for n, block in groups)
    assert quantised == replaced or model.unlisted_experts  # whose quantised base is refused


def test_adapters_of_stacked_experts_have_words_of_their_own() -> None:
    words: dict[str, Any] = {"model": "qwen3-30b-a3b", "gpu": "h100", "gpus": 8, "lora": "8:all-linear"}
    folded = memcalc.estimate(**words)
    assert folded.strategy.lora == "8:q,k,v,o,router,experts_gate,experts_up,experts_down"
    looped = memcalc.estimate(**words, framework="hf@4.49")
    assert looped.strategy.lora.endswith("router,gate,up,down")
    with pytest.raises(CombinationError, match="gpt-oss-20b has q, k, v, o"):
        memcalc.estimate(**{**words, "model": "gpt-oss-20b", "lora": "8:gate,up"})


def test_a_quantised_base_keeps_its_stacked_experts_in_16_bits() -> None:
    """Qwen3-30B-A3B has 48 blocks of 128 experts, each of three matrices of 2048 by 768 (its config.json)."""
    experts = 2 * 48 * 128 * 3 * 2048 * 768
    job: dict[str, Any] = {"model": "qwen3-30b-a3b", "gpu": "h200", "gpus": 1, "lora": "8:q,v", "quantize": "nf4"}
    stacked, looped = (memcalc.estimate(**job, framework=era).components.parameters for era in ("hf", "hf@4.49"))
    assert experts < stacked < 1.05 * experts
    assert looped < 0.35 * experts


def test_peft_casts_stacked_experts_that_nothing_quantises() -> None:
    """The function itself on a mixture in 16 bits, and Qwen3-30B-A3B's experts, which are most of its weights."""
    peft = pytest.importorskip("peft")
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 8, "moe_intermediate_size": 8, "num_experts": 4, "vocab_size": 16}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 4}
    few = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads)).bfloat16()
    prepared = peft.prepare_model_for_kbit_training(few, use_gradient_checkpointing=False)
    widths = {p.element_size() for n, p in prepared.named_parameters() if "experts" in n and p.ndim == 3}
    assert widths == {4}
    job: dict[str, Any] = {"model": "qwen3-30b-a3b", "gpu": "b200", "gpus": 1, "lora": "8:q,v", "framework": "hf"}
    narrow, wide = (
        memcalc.estimate(**job, quantize="nf4", settings={"strategy.kbit_experts": value}) for value in (False, True)
    )
    assert wide.components.parameters - narrow.components.parameters == 2 * 48 * 128 * EXPERT
    assert any("they take 32" in text for text in narrow.warnings)
    assert any("cast to fp32" in text for text in wide.warnings)
    with pytest.raises(CombinationError, match="needs --quantize nf4, nf4-dq or int8"):
        memcalc.estimate(**job, settings={"strategy.kbit_experts": True})


def of_qwen(**words: Any) -> Estimate:
    """Return an estimate of Qwen3-30B-A3B, whose experts axolotl quantises as it loads them."""
    job = {
        "gpus": 1,
        "seq_len": 1024,
        "global_batch": 1,
        "framework": "hf",
        "precision": "bf16",
        "loss": "fused-linear",
    }
    settings = {"strategy.quantize_experts": True, **words.pop("settings", {})}
    return memcalc.estimate(model="qwen3-30b-a3b", gpu="b200", **{**job, "lora": "8:q,v", **words}, settings=settings)


@pytest.mark.parametrize(("kind", "bytes_"), [("nf4", 1 / 2 + 4 / 64), ("int8", 1 + 4 * (2 * 768 + 2048) / EXPERT)])
def test_quantised_experts_are_stored_in_few_bits_and_made_whole_in_each_block(kind: str, bytes_: float) -> None:
    """Bytes by hand: NF4 has an fp32 scale for 64 weights, int8 one a row, and becomes fp32 (axolotl moe_quant.py)."""
    experts, one_block = 48 * 128 * EXPERT, 128 * EXPERT
    told, kept = ({"settings": {"strategy.quantize_experts": value}, "quantize": kind} for value in (True, False))
    ours, theirs = (of_qwen(recompute="none", **words) for words in (told, kept))
    saved = theirs.components.parameters - ours.components.parameters
    assert saved == pytest.approx((2 - bytes_) * experts, rel=1e-6)
    # without recomputation autograd keeps the whole weights of every block, for the gradients of the experts' inputs
    whole = 4 if kind == "int8" else 2
    grown = ours.components.activations - theirs.components.activations
    assert 48 * whole * one_block <= grown < 1.1 * 48 * whole * one_block
    again = of_qwen(recompute="full", **told)
    assert again.components.activations < 4 * whole * one_block


@pytest.mark.slow
def test_autograd_keeps_the_whole_weights_of_quantised_experts() -> None:
    """A block of the real class, whose weights a parametrization makes anew without a gradient, as bitsandbytes."""
    import torch
    from autograd import measure
    from torch.nn.utils import parametrize

    from memcalc.convert.huggingface import from_huggingface

    class Whole(torch.nn.Module):
        def forward(self, stored: torch.Tensor) -> torch.Tensor:
            return torch.empty_like(stored, dtype=torch.bfloat16)  # needs no gradient, as under no_grad

    def adapt(model: torch.nn.Module) -> torch.nn.Module:
        for name, parameter in list(model.named_parameters()):
            parameter.requires_grad_("embed" in name)  # the input of a block needs one, as with adapters
            place, _, last = name.rpartition(".")
            if parameter.ndim == 3:
                module, stored = model.get_submodule(place), torch.zeros_like(parameter, dtype=torch.uint8)
                setattr(module, last, torch.nn.Parameter(stored, requires_grad=False))
                parametrize.register_parametrization(module, last, Whole(), unsafe=True)
        return model

    saved = measure.saved_bytes("qwen3-moe", precision="bf16", dropout=False, adapt=adapt)
    theirs = sorted(k.nbytes for k in saved.at(1) if len(k.shape) == 3 and k.shape[0] == saved.config.num_experts)
    setting = BlockConfig(
        weight=2, residual=2, sdpa=True, dropout=False, reentrant=False, trainable=False, quantize="nf4",
        quantised_experts=True, lora=Lora(8, frozenset({"q"}), 4, folds=True),
    )  # fmt: skip
    kept = trace(from_huggingface(saved.config.to_dict()).main.block, setting).kept_records
    ours = sorted(r.size.elements * r.size.width for r in kept if r.name.endswith("weight, dequantised"))
    assert ours == theirs
    assert len(ours) == 2


def test_axolotls_own_figure_of_quantised_experts() -> None:
    """~63.4 GiB of one 80 GB GPU: examples/glm45/README.md and glm-45-air-qlora.yaml of axolotl 067b021c8."""
    air = memcalc.estimate(
        model="glm-4.5-air-106b", gpu="a100-80g", gpus=1, seq_len=2048, micro_batch=2, global_batch=4, framework="hf",
        precision="bf16", autocast=True, lora="16:q,k,v,o", quantize="nf4-dq", optimizer="adamw-8bit",
        recompute="full", loss="fused-linear", attention="flash",
        settings={
            "strategy.quantize_experts": True, "strategy.expandable_segments": True, "strategy.checkpoint": "reentrant",
        },
    )  # fmt: skip
    assert air.verdict == "fits"
    assert air.peak.reserved == pytest.approx(63.4 * 2**30, rel=0.03)


def test_quantised_experts_are_refused_where_nothing_is_known_of_them() -> None:
    with pytest.raises(CombinationError, match="needs --quantize nf4, nf4-dq or int8"):
        of_qwen()
    with pytest.raises(UncountedError, match="give --zero 0"):
        of_qwen(quantize="nf4", zero=3, gpus=2)
    assert of_qwen(quantize="nf4", gpus=2, global_batch=2).strategy.zero == 0


def test_experts_beside_a_dense_mlp_have_none() -> None:
    """As PEFT 0.21 counts them on the class: its dense MLP alone; and values that are keys have no projection."""
    model, hidden, ffn = load_model("gemma-4-26b-a4b"), 2816, 2112
    assert block_adapters(model.main.block, RANK, ("gate", "up", "down")) == (RANK * 3 * (hidden + ffn), 0)
    values = [block_adapters(group.block, RANK, ("v",))[0] for group in model.groups]
    assert values == [RANK * (hidden + 8 * 256) * (group.block.own_attention.window is not None)
                      for group in model.groups]  # fmt: skip


@pytest.mark.parametrize(
    "name", ["llama-2-7b", "gpt2", "phi-3-mini-3.8b", "mixtral-8x7b", "qwen2-7b", "deepseek-v2-lite"]
)
def test_matrices_are_what_the_census_counts_less_vectors(name: str) -> None:
    model = load_model(name)
    for group in model.groups:
        matrices = sum(m.elements for m in block_matrices(group.block))
        vectors = block_count(group.block).total - matrices
        assert 0 <= vectors < 0.01 * matrices
    assert outside_matrices(model)[0].elements == model_count(model).embedding


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("llama-2-7b", ("q", "v")), ("mixtral-8x7b", ("q", "v")), ("gpt2", ("qkv",)), ("phi-3-mini-3.8b", ("qkv",)),
        ("phi-2", ("q", "v", "up", "down")), ("nemotron-h-8b", ("q", "k", "v", "o")),
    ],
)  # fmt: skip
def test_targets_that_peft_takes_by_default(name: str, targets: tuple[str, ...]) -> None:
    assert resolved_targets(Words(rank=8), load_model(name), habits_of("hf")) == targets
    assert set(resolved_targets(Words(rank=8), load_model(name), habits_of("litgpt"))) <= {"q", "v", "qkv"}


PEFT_NAMES = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "o_proj"} | {
    name: f"{name}_proj" for name in ("gate", "up", "down")
}


@pytest.mark.parametrize("targets", [("q", "v"), ("q", "k", "v", "o"), tuple(PEFT_NAMES)])
@pytest.mark.parametrize("also", [(), ("embedding", "head")])
def test_counts_of_real_peft(targets: tuple[str, ...], also: tuple[str, ...]) -> None:
    peft = pytest.importorskip("peft")
    real = real_peft(peft, "mistral-7b-v0.1", targets, also, rank=8)
    model = MISTRAL
    saved = sum(m.elements for m in outside_matrices(model) if m.target in also)
    inside = sum(pair.parameters for pair in adapter_pairs(block_matrices(model.main.block), 8, targets))
    assert sum(p.numel() for p in real.parameters() if p.requires_grad) == model.num_layers * inside + saved


def real_peft(peft: Any, name: str, targets: tuple[str, ...], also: tuple[str, ...], rank: int) -> Any:
    """Return the real class with real adapters, on the meta device."""
    import torch
    import transformers

    model = load_model(name)
    keys = {key: None if value == "null" else value for key, value in model.hf_config.items()}
    with torch.device("meta"):
        kind = getattr(transformers, str(model.hf_class))
        base = kind(kind.config_class(**keys))
        saved = [{"embedding": "embed_tokens", "head": "lm_head"}[part] for part in also]
        names = [PEFT_NAMES[target] for target in targets]
        config = peft.LoraConfig(r=rank, target_modules=names, modules_to_save=saved or None)
        return peft.get_peft_model(base, config)


# --------------------------------------------------------------------------------------------------------------- bytes


def nf4_buffers(elements: int, *, double: bool) -> tuple[int, int]:
    """Return the bytes of the arrays that bitsandbytes 0.43.3 ``quantize_4bit`` allocates: weights, scales."""
    packed = np.zeros((elements + 1) // 2, np.uint8)
    blocks = -(-elements // 64)
    if not double:
        return packed.nbytes, np.zeros(blocks, np.float32).nbytes
    return packed.nbytes, np.zeros(blocks, np.uint8).nbytes + np.zeros(-(-blocks // 256), np.float32).nbytes


@pytest.mark.parametrize("elements", [4096 * 4096, 4096 * 14336, 1000 * 77, 63])
@pytest.mark.parametrize("double", [False, True])
def test_nf4_bytes_are_those_of_its_arrays(elements: int, double: bool) -> None:
    assert (q.four_bit_bytes(elements), q.nf4_state_bytes(elements, int(double))) == nf4_buffers(
        elements, double=double
    )


@pytest.mark.parametrize(("group", "bits"), [(128, 4), (64, 8), (0, 4)])
def test_gptq_bytes_are_those_of_its_buffers(group: int, bits: int) -> None:
    """Shapes of AutoGPTQ 0.7.1 qlinear_tritonv2.py, ``QuantLinear.__init__``."""
    inputs, outputs = 4096, 1024
    groups = -(-inputs // (group or inputs))
    qweight = np.zeros((inputs // 32 * bits, outputs), np.int32)
    qzeros = np.zeros((groups, outputs // 32 * bits), np.int32)
    scales, g_idx = np.zeros((groups, outputs), np.float16), np.zeros(inputs, np.int32)
    assert q.gptq_bytes(inputs, outputs, bits, group) == qweight.nbytes + qzeros.nbytes
    assert q.gptq_state_bytes(inputs, outputs, group) == scales.nbytes + g_idx.nbytes


def test_quantisation_takes_in_every_linear_layer_of_a_block_but_no_router_under_gptq() -> None:
    block = load_model("mixtral-8x7b").main.block
    router = H * 8
    assert block_quantised(block, "nf4", 0).elements - block_quantised(block, "gptq-int4", 128).elements == router


def test_qlora_paper_figures() -> None:
    """Dettmers et al., arXiv:2305.14314, section 3: scales cost 0.5 bits a weight, 0.127 after double quantisation."""
    n = 4096 * 4096
    assert q.nf4_state_bytes(n) * 8 / n == 0.5
    assert q.nf4_state_bytes(n, 1) * 8 / n == pytest.approx(0.127, abs=5e-4)


# ------------------------------------------------------------------------------------------- largest moment of a block


def token_bytes(template: Template) -> float:
    """Return the largest number of bytes a token, in units of the hidden size, less the block's own input."""
    largest = max(sum(n for (unit, *_), n in total.items() if unit == "token") for total in template.backward_peaks)
    return largest / H - sum(template.input_sum.values()) / H


def block_backward(*, norms: float, adapters: float) -> float:
    """Return the sum at the gradient of ``silu(gate) * up`` under a reentrant checkpoint, in bytes a token over h.

    Six tensors of width f; queries, keys, values and attention's output; the logsumexp; the block's output and the
    incoming gradient.
    """
    return (12 * FFN + 4 * H + 4 * KV + 4 * HEADS) / H + norms + adapters + 2 + 2


# Each of four targets: a mask of one byte, the dropped input, and the low-rank product.
AUTOCAST = 4 * (1 + 2 + 2 * RANK / H)
PLAIN = 4 * (1 + 4 + 4 * RANK / H)
FUSED_NORM, WRITTEN_NORM = 2 + 2 * 4 / H, 2 * (4 + 4 / H)


@pytest.mark.parametrize(
    ("autocast", "kernels", "expected"),
    [
        (True, "fused", block_backward(norms=FUSED_NORM, adapters=AUTOCAST)),
        (False, "fused", block_backward(norms=FUSED_NORM, adapters=PLAIN)),
        (False, "model", block_backward(norms=WRITTEN_NORM, adapters=PLAIN)),
    ],
)
def test_largest_moment_of_a_block_with_adapters(autocast: bool, kernels: str, expected: float) -> None:
    """Slopes that three campaigns of measured runs show for these sizes: 65.1, 73.1 and 79.1 h a token."""
    setting = BlockConfig(
        autocast=autocast,
        kernels=kernels,
        in_place=("norms",) if kernels == "fused" else (),
        trainable=False,
        lora=Lora(RANK, frozenset("qkvo"), 4, dropout=True),
    )
    assert token_bytes(trace(MISTRAL.main.block, setting, "full")) == pytest.approx(expected, abs=2e-3)


@pytest.mark.parametrize(
    ("autocast", "kernels", "slope"), [(True, "fused", 65.1), (False, "fused", 73.1), (False, "model", 79.1)]
)
def test_expected_slopes_are_the_measured_ones(autocast: bool, kernels: str, slope: float) -> None:
    expected = block_backward(
        norms=FUSED_NORM if kernels == "fused" else WRITTEN_NORM, adapters=AUTOCAST if autocast else PLAIN
    )
    assert expected == pytest.approx(slope, abs=0.1)


def test_frozen_base_keeps_no_input_of_its_linear_layers() -> None:
    names = {r.name for r in trace(MISTRAL.main.block, BlockConfig(trainable=False)).kept_records}
    assert "attention norm output" not in names
    assert "MLP product" not in names


def test_dequantised_weight_is_there_in_forward_and_backward() -> None:
    template = trace(MISTRAL.main.block, BlockConfig(trainable=False, quantize="nf4-dq"))
    copies = [r for r in template.records if r.kind == "dequantised" and r.size.bytes == 2 * H * FFN]
    assert len(copies) == 2 * 3
    assert not any(r.kind == "dequantised" for r in template.kept_records)


def test_so_is_each_of_latent_attention() -> None:
    """DeepSeek-V3: arXiv:2412.19437, section 4.2; each weight in 16 bits, once forward and once backward."""
    hidden, heads, queries, latent, nope, turned = 7168, 128, 1536, 512, 128, 64
    weights = (
        hidden * queries, queries * heads * (nope + turned), hidden * (latent + turned), latent * heads * 2 * nope,
        heads * nope * hidden,
    )  # fmt: skip
    template = trace(load_model("deepseek-v3").groups[0].block, BlockConfig(trainable=False, quantize="nf4"))
    copies = [r.size.bytes for r in template.records if r.kind == "dequantised"]
    assert [copies.count(2 * elements) for elements in weights] == [2] * 5


def test_experts_one_after_another_keep_what_their_loop_writes() -> None:
    """Mixtral in Transformers 4.48, frozen: what each of two experts a token keeps.

    Gate, its activation and up (6 f together), the output (for the routing weight's gradient) and the weighted output
    (for ``index_add_``).
    """
    block = load_model("mixtral-8x7b").main.block
    kept = trace(block, BlockConfig(trainable=False, expert_loop=True)).kept_records
    experts = [r for r in kept if r.name.startswith("expert") and "numbers" not in r.name and "weights" not in r.name]
    assert sum(r.size.bytes for r in experts) == 2 * (6 * FFN + 2 * H + 2 * H)


def test_residual_stream_is_wide_over_a_prepared_quantised_base_but_not_before_the_first_block() -> None:
    """Norms in fp32 give fp32 to ``Linear4bit``, which returns its input's dtype; the embedding stays in 16 bits."""
    tokens, words = 4096, {"lora": "16", "quantize": "nf4", "recompute": "full", "autocast": True, "zero": 0}
    narrow, wide = ({t.name: t.bytes for t in estimate(**words, settings=extra).terms} for extra in ({}, PREPARED))
    assert wide["block input"] == 2 * narrow["block input"] == 32 * 4 * H * tokens
    assert wide["first block's input, which is 16-bit"] == -2 * H * tokens


PREPARED = {"strategy.prepare_kbit": True}


def test_qlora_prepared_by_peft_as_it_was_measured() -> None:
    """presets/runs/trainers-h200.toml: Qwen2.5-1.5B, whose fp32 embedding is its head, of which autocast has a copy."""
    words: dict[str, Any] = {
        "model": "qwen2.5-1.5b", "gpu": "h200", "gpus": 1, "framework": "hf", "precision": "bf16", "quantize": "nf4-dq",
        "lora": "16:all-linear", "adapter_dtype": "fp32", "optimizer": "paged-adamw-8bit", "attention": "cudnn",
        "recompute": "full", "seq_len": 2048, "micro_batch": 4, "global_batch": 4, "advice": False,
    }  # fmt: skip
    settings = {**PREPARED, "strategy.autocast": True, "workload.lora_dropout": 0.0}
    norms, ends = (memcalc.estimate(**words, settings={**settings, "strategy.kbit_ends": it}) for it in (False, True))
    assert ends.peak.allocated == pytest.approx(18_642_484_736, rel=0.003)
    tied, first = 2 * 151_936 * 1536, 2 * 8192 * 1536  # and the first block's input, which is the embedding's output
    assert ends.peak.allocated - norms.peak.allocated == pytest.approx(2 * tied + first, rel=0.001)


def test_what_peft_casts_of_a_head_of_its_own() -> None:
    """PEFT 0.21 utils/other.py:209 casts what is not in 4 bits: two matrices of Llama 3.1 8B, one with a copy."""
    words: dict[str, Any] = {"model": "llama-3.1-8b", "gpu": "h200", "gpus": 1, "lora": "16", "quantize": "nf4"}
    words |= {"framework": "hf", "precision": "bf16", "recompute": "full", "advice": False}
    narrow, wide = (
        {term.name: term.bytes for term in memcalc.estimate(**words, settings=settings).terms}
        for settings in (
            {**PREPARED, "strategy.autocast": True},
            {**PREPARED, "strategy.autocast": True, "strategy.kbit_ends": True},
        )
    )
    matrix = 2 * 128_256 * 4096
    assert wide["frozen weights, nf4"] - narrow["frozen weights, nf4"] == 2 * matrix + 2 * 4096
    assert wide["autocast's 16-bit copy of the head"] == pytest.approx(matrix, rel=1e-4)
    assert "first block's input, which is 16-bit" not in wide


def test_peft_casts_all_that_is_not_quantised() -> None:
    """Its own function on a real model in 16 bits, of whose layers none is packed: all of them are fp32 after it."""
    peft = pytest.importorskip("peft")
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "vocab_size": 64}
    few = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1, num_key_value_heads=2)).bfloat16()
    prepared = peft.prepare_model_for_kbit_training(few, use_gradient_checkpointing=False)
    assert {prepared.get_input_embeddings().weight.element_size(), prepared.lm_head.weight.element_size()} == {4}


def test_hooks_of_fsdp_1_hold_the_checkpoints_of_a_frozen_base() -> None:
    words = {"recompute": "full", "gpus": 2, "zero": 3}
    with_adapters, full = ({t.name: t.bytes for t in estimate(**words, **w).terms} for w in ({"lora": "16"}, {}))
    name = "inputs of blocks and their gradients, held by FSDP's hooks"
    assert with_adapters[name] == (31 + 30) * 2 * H * 4096
    assert name not in full
    later = estimate(**words, lora="16", settings={"strategy.checkpoint": "non-reentrant"})
    assert name not in {t.name for t in later.terms}


@pytest.mark.parametrize(
    ("era", "reentrant", "shifted", "upcast"),
    [
        ("4.45", True, True, "model"),
        ("4.48", True, True, "loss"),
        ("4.49", True, False, "loss"),
        ("5.0", False, False, "loss"),
    ],
)
def test_eras_of_transformers(era: str, reentrant: bool, shifted: bool, upcast: str) -> None:
    """``loss/loss_utils.py`` and ``modeling_utils.py`` of those releases."""
    habits = habits_of(f"hf@{era}")
    loss = habits.losses["standard"]
    assert (habits.reentrant, loss.shifted_copy, loss.upcast) == (reentrant, shifted, upcast)


def test_adapters_of_old_peft_have_the_dtype_of_their_base() -> None:
    old = {"strategy.peft": "0.11"}
    assert estimate(lora="8", settings=old).strategy.adapter_dtype == "bf16"
    assert estimate(lora="8", quantize="nf4", settings=old).strategy.adapter_dtype == "fp32"
    assert estimate(lora="8").strategy.adapter_dtype == "fp32"


# ---------------------------------------------------------------------------------------------- tensors, on real PEFT


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp32+autocast"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize(
    ("family", "kernels"), [("llama-3", "model"), ("gpt2", "model"), ("phi3", "model"), ("llama-3", "dora")]
)
def test_a_block_keeps_what_real_peft_keeps(family: str, kernels: str, precision: str, dropout: float) -> None:
    """A middle block, whose input needs a gradient, on fake tensors; copies of weights and magnitudes are left out."""
    peft = pytest.importorskip("peft")
    from autograd import measure, models

    from memcalc.convert.huggingface import from_huggingface

    targets = {"llama-3": ("q", "v", "down"), "gpt2": ("qkv", "up"), "phi3": ("qkv", "gate_up", "down")}[family]
    names = {
        "llama-3": ["q_proj", "v_proj", "down_proj"],
        "gpt2": ["c_attn", "c_fc"],
        "phi3": ["qkv_proj", "gate_up_proj", "down_proj"],
    }[family]
    config = peft.LoraConfig(
        r=8, target_modules=names, lora_dropout=dropout, fan_in_fan_out=family == "gpt2", use_dora=kernels == "dora"
    )
    saved = measure.saved_bytes(
        family, precision=precision, dropout=False, adapt=lambda model: peft.get_peft_model(model, config)
    )
    model: Model = from_huggingface(saved.config.to_dict())
    width = 2 if precision == "bf16" else 4
    setting = BlockConfig(
        weight=width, residual=width, autocast=precision == "fp32+autocast", sdpa=True, dropout=True, reentrant=False,
        trainable=False, lora=Lora(8, frozenset(targets), 4, dropout=dropout > 0, kernels=kernels),
    )  # fmt: skip
    block = model.main.block.model_copy(update={"dropout": 0.0})
    kept = trace(block, setting).kept_records
    tokens = models.BATCH * models.SEQ
    ours = sum(r.size.bytes * tokens for r in kept if r.size.unit == "token" and r.kind != "weight copy")
    theirs = sum(
        k.nbytes
        for k in saved.at(1)
        if k.weight is None and k.shape and k.dtype.is_floating_point | (k.nbytes > 64)
        if kernels != "dora" or (len(k.shape) > 1 and k.shape[0] > 1)
    )
    assert ours == theirs


# -------------------------------------------------------------------------------------------------------- the interface


def estimate(**words: Any) -> Estimate:
    """Return an estimate of Mistral 7B on one or more A100."""
    job = {"gpus": 1, "seq_len": 4096, "micro_batch": 1, "global_batch": 8, "framework": "hf@4.48", "precision": "bf16"}
    return memcalc.estimate(model="mistral-7b-v0.1", gpu="a100-80g", **{**job, **words})


def test_states_are_of_the_adapters_alone() -> None:
    found = {t.name: t.bytes for t in estimate(lora="16:q,k,v,o", zero=0).terms}
    adapters = 32 * RANK * (2 * (H + H) + 2 * (H + KV))
    assert found["adapters"] == 4 * adapters
    assert found["adamw moments"] == 8 * adapters
    assert found["gradients"] == 4 * adapters
    assert found["frozen weights"] == 2 * model_count(MISTRAL).total


def test_dora_has_a_number_for_each_output_and_keeps_two_outputs_more() -> None:
    """PEFT's own runs (method_comparison/MetaMathQA/results, lora--llama-3.2-3B-rank32 with and without dora).

    They count 9,289,728 parameters, and 22.85 GiB reserved at the longest batches of 768 tokens; 20.76 without.
    """
    job: dict[str, Any] = {"model": "llama-3.2-3b", "gpu": "l40s", "framework": "hf", "precision": "bf16"}
    job |= {"lora": "32:q,v", "seq_len": 768, "micro_batch": 4, "global_batch": 4, "recompute": "none"}
    job |= {"autocast": False}  # use_amp of its default_training_params.json
    plain, dora = (memcalc.estimate(**job, settings={"strategy.lora_kernels": k}) for k in ("model", "dora"))
    assert {t.name: t.bytes for t in dora.terms}["adapters"] == 4 * 9_289_728
    assert plain.peak.reserved / 2**30 == pytest.approx(20.76, rel=0.01)
    assert dora.peak.reserved / 2**30 == pytest.approx(22.85, rel=0.01)


def test_dora_over_a_quantised_base_is_refused() -> None:
    with pytest.raises(InputError, match="DoRA has no figures over a quantized base"):
        estimate(lora="8", quantize="nf4", settings={"strategy.lora_kernels": "dora"})


def test_a_base_in_fp32_is_gathered_in_16_bits() -> None:
    """FSDP keeps the shard in the dtype that it was given, and casts it for the gather (MixedPrecision.param_dtype)."""
    words = {"framework": "fsdp1", "gpus": 2, "zero": 3, "precision": "bf16-mixed", "lora": "16:q,k,v,o"}
    narrow, wide = (
        {t.name: t.bytes for t in estimate(**words, settings={"strategy.frozen_fp32": value}).terms}
        for value in ("false", "true")
    )
    assert wide["frozen weights"] == 2 * narrow["frozen weights"] == 2 * model_count(MISTRAL).total
    assert {name for name in wide if wide[name] != narrow[name]} <= {"frozen weights", "cached and unused"}


@pytest.mark.parametrize(
    "words", [{"framework": "deepspeed"}, {"quantize": "nf4", "precision": "bf16-mixed"}, {"precision": "bf16"}]
)
def test_a_base_in_fp32_needs_fsdp_in_mixed_precision(words: dict[str, Any]) -> None:
    job = {"framework": "fsdp2", "gpus": 2, "zero": 3, "precision": "bf16-mixed", "lora": "16:q,k,v,o"}
    with pytest.raises(CombinationError, match="needs FSDP in mixed precision, over a base that is not quantized"):
        estimate(**{**job, **words}, settings={"strategy.frozen_fp32": "true"})


def test_quantised_base_is_sharded_and_its_scales_are_not() -> None:
    one, two = (
        {t.name: t.bytes for t in estimate(lora="16", quantize="nf4-dq", gpus=n, zero=3 if n > 1 else 0).terms}
        for n in (1, 2)
    )
    assert two["scales of the frozen weights"] == one["scales of the frozen weights"] > 0
    assert two["frozen weights, nf4-dq"] == pytest.approx(one["frozen weights, nf4-dq"] / 2, abs=1)


def test_saved_copies_are_trained_in_full() -> None:
    """PEFT casts adapters to fp32 and leaves copies of layers, with their states, in the dtype of the base."""
    without, with_ = (
        {t.name: t.bytes for t in estimate(lora="8", zero=0, also_train=also).terms}
        for also in (None, "embedding,head")
    )
    copies = 2 * 32000 * H
    assert with_["adamw moments"] == without["adamw moments"]
    assert with_["adamw moments of the trained copies"] == 2 * 2 * copies
    assert with_["weights of the trained copies"] == with_["gradients of the trained copies"] == 2 * copies


def test_resolved_words_are_shown() -> None:
    strategy = estimate(lora="16", quantize="nf4", adapter_dtype="bf16").strategy
    assert (strategy.lora, strategy.quantize, strategy.adapter_dtype) == ("16:q,v", "nf4", "bf16")


@pytest.mark.parametrize("lora", ["0", "-1", "q,v", "16:query", "16:all,q", ""])
def test_impossible_adapters_are_refused(lora: str) -> None:
    with pytest.raises(InputError, match="lora"):
        parse_lora(lora)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"lora": "16:qkv"}, "mistral-7b-v0.1 has q, k, v, o, gate, up, down, embedding, head"),
        ({"also_train": "head"}, "it needs --lora"),
        ({"lora": "16", "quantize": "nf4", "precision": "fp32"}, "a quantized base needs"),
        ({"lora": "16", "precision": "fp32", "autocast": True}, "bf16-autocast"),
        ({"lora": "16", "framework": "fsdp2", "precision": "bf16-mixed", "tp": 2, "gpus": 2}, "for Megatron-LM alone"),
    ],
)
def test_combinations_that_cannot_be_are_refused(words: dict[str, Any], said: str) -> None:
    with pytest.raises(CombinationError, match=said):
        estimate(**words)


def test_command_line_takes_them() -> None:
    line = "estimate --model llama-3-8b --gpu a100-80g --gpus 1 --framework hf --precision bf16 --lora 16:all-linear"
    result = CliRunner().invoke(app, [*line.split(), "--quantize", "nf4-dq", "--set", "workload.lora_dropout=0.1"])
    assert result.exit_code == 0, result.output
    assert "nf4-dq" in result.output


def test_a_search_with_adapters_fits_where_full_training_does_not() -> None:
    job: dict[str, Any] = {
        "model": "llama-3-8b",
        "gpu": "rtx-3090",
        "gpus": 1,
        "seq_len": 1024,
        "framework": "hf",
        "offload": "none",
    }
    assert not memcalc.plan(**job, precision="bf16", advice=False).plans
    assert memcalc.plan(**job, precision="bf16", lora="16", quantize="nf4", advice=False).plans


def test_layers_by_the_names_that_transformers_has() -> None:
    assert parse_lora("16:q_proj,v_proj,down_proj") == parse_lora("16:q,v,down")
    with pytest.raises(InputError, match="'query_proj' is none"):
        parse_lora("16:query_proj")
