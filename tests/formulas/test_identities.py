"""Published closed forms and tables, to the digit that their authors print."""

from decimal import ROUND_DOWN, ROUND_HALF_UP, Decimal
from fractions import Fraction

import pytest

from memcalc.formulas import (
    activations,
    communication,
    flops,
    gradients,
    offload,
    optimizer,
    optimizer_states,
    parameters,
    pipeline,
)
from memcalc.formulas.recompute import parse_policy
from memcalc.specs.block import Attention, Block, Mlp, Norm
from memcalc.trace.layers import BlockConfig
from memcalc.trace.template import trace

ADAMW = optimizer.OPTIMIZERS["adamw"]


def model_states(count: int, ranks: int, stage: int) -> int:
    """Return the bytes of 16-bit parameters and gradients, fp32 master and Adam moments on one rank."""
    share = optimizer_states.shard(count, ranks)
    weights = 2 * (share if stage >= 3 else count)
    grads = gradients.gradient_bytes(share if stage >= 2 else count, 2)
    updated = share if stage >= 1 else count
    total: int = weights + grads + optimizer_states.master_bytes(updated) + optimizer.moment_bytes(updated, ADAMW)
    return total


# ZeRO, arXiv:1910.02054, table 1: GB a device by data-parallel degree, for 7.5B, 128B and 1T parameters, each with
# P_os, P_os+g and P_os+g+p. The paper cuts figures of 100 and more to whole GB and rounds the smaller ones.
ZERO_TABLE_1 = {
    1: "120 120 120 2048 2048 2048 16000 16000 16000",
    4: "52.5 41.3 30 896 704 512 7000 5500 4000",
    16: "35.6 21.6 7.5 608 368 128 4750 2875 1000",
    64: "31.4 16.6 1.88 536 284 32 4187 2218 250",
    256: "30.4 15.4 0.47 518 263 8 4046 2054 62.5",
    1024: "30.1 15.1 0.12 513 257 2 4011 2013 15.6",
}
CELLS = [
    (count, ranks, stage, cell)
    for ranks, row in ZERO_TABLE_1.items()
    for (count, stage), cell in zip(
        [(count, stage) for count in (7_500_000_000, 128_000_000_000, 10**12) for stage in (1, 2, 3)],
        row.split(),
        strict=True,
    )
]


@pytest.mark.parametrize(("count", "ranks", "stage", "cell"), CELLS)
def test_zero_table_1(count: int, ranks: int, stage: int, cell: str) -> None:
    exact = Decimal(model_states(count, ranks, stage)) / 10**9
    printed = Decimal(cell)
    rounding = ROUND_DOWN if exact >= 100 else ROUND_HALF_UP
    assert exact.quantize(printed, rounding=rounding) == printed


# ZeRO, arXiv:1910.02054, section 3.1: 16 bytes a parameter, "at least 24 GB" for 1.5 billion.
def test_mixed_precision_adam_takes_16_bytes_a_parameter() -> None:
    assert model_states(1_500_000_000, 1, 0) == 24_000_000_000


# ZeRO, arXiv:1910.02054, figure 1: 7.5B on 64 devices, 120 GB without ZeRO.
def test_zero_figure_1_baseline() -> None:
    assert model_states(7_500_000_000, 64, 0) == 120_000_000_000


# Megatron-LM, docs/user-guide/features/dist_optimizer.md: bytes a parameter without and with the distributed optimizer.
@pytest.mark.parametrize(
    ("weight", "grad", "master", "without", "resident", "shared"),
    [(2, 2, 4 + 4, 20, 4, 16), (2, 4, 4, 18, 6, 12), (4, 4, 0, 16, 8, 8)],
    ids=["fp16", "bf16", "fp32"],
)
@pytest.mark.parametrize("ranks", [1, 2, 8, 64])
def test_megatron_bytes_a_parameter(
    *, weight: int, grad: int, master: int, without: int, resident: int, shared: int, ranks: int
) -> None:
    count = 64_000
    share = optimizer_states.shard(count, ranks)
    updated = master + Fraction(optimizer.moment_bytes(share, ADAMW), share)
    held = count * weight + gradients.gradient_bytes(count, grad)
    assert held + count * updated == without * count
    assert Fraction(held + share * updated) / count == resident + Fraction(shared, ranks)


# Megatron-LM, the same page: bf16 keeps fp32 main gradients.
def test_megatron_main_gradient_is_fp32() -> None:
    assert gradients.main_gradient_bytes(10) == gradients.gradient_bytes(10, 4)


def bert_block(hidden: int, heads: int) -> Block:
    """Return the block of Korthikanti et al., figure 2: LayerNorm, GELU, three dropouts, an inner width of 4h."""
    attention = Attention(heads=heads, kv_heads=heads, head_dim=hidden // heads, rotary=False, dropout=0.1)
    mlp = Mlp(ffn=4 * hidden, gated=False, activation="gelu")
    return Block(hidden=hidden, attention=attention, mlp=mlp, norm=Norm(kind="layernorm", bias=True), dropout=0.1)


def kept_bytes(block: Block, seq_len: int, tp: int, *, sp: bool, policy: str = "none") -> int:
    """Return the bytes that the block keeps for one sequence, but for the LayerNorms' statistics."""
    chosen = parse_policy(policy)
    shares = {"tp": tp, "sp": tp if sp else 1, "none": 1}
    setting = BlockConfig(kernels="fused", attention="eager", checkpointed=chosen.parts)
    # the paper leaves the mean and reciprocal deviation of a norm out: two fp32 numbers a token
    kept = [r.size for r in trace(block, setting, chosen.treatment).kept_records if "statistics" not in r.name]
    return sum(
        activations.saved_bytes(
            size.elements, seq_len, size.width, shares[size.shard], seq_len if size.unit == "pair" else 1
        )
        for size in kept
    )


# Korthikanti et al., arXiv:2205.05198, table 3 (22B, 175B, 530B, 1T): hidden size and heads; sequence 2048, t = 8.
SIZES = {"22B": (6144, 64), "175B": (12288, 96), "530B": (20480, 128), "1T": (25600, 160)}
SEQ_LEN = 2048


# Korthikanti et al., arXiv:2205.05198, table 2: activation bytes a layer, in units of sbh.
@pytest.mark.parametrize("tp", [1, 8])
@pytest.mark.parametrize(("hidden", "heads"), SIZES.values(), ids=SIZES)
def test_korthikanti_table_2(hidden: int, heads: int, tp: int) -> None:
    block, unit = bert_block(hidden, heads), SEQ_LEN * hidden
    scores = Fraction(5 * heads * SEQ_LEN, hidden)
    core = "selective-core-attn"
    assert kept_bytes(block, SEQ_LEN, 1, sp=False) == unit * (34 + scores)
    assert kept_bytes(block, SEQ_LEN, tp, sp=False) == unit * (10 + Fraction(24, tp) + scores / tp)
    assert kept_bytes(block, SEQ_LEN, tp, sp=True) == unit * (Fraction(34, tp) + scores / tp)
    assert kept_bytes(block, SEQ_LEN, tp, sp=False, policy=core) == unit * (10 + Fraction(24, tp))
    assert kept_bytes(block, SEQ_LEN, tp, sp=True, policy=core) == unit * Fraction(34, tp)
    assert kept_bytes(block, SEQ_LEN, 1, sp=False, policy="full") == 2 * unit


def test_checkpoints_of_each_module_keep_four_inputs() -> None:
    """huggingface/accelerate#4172: those of two norms, attention and MLP, 29 of 40.8 GB of Qwen3-0.6B at 131K tokens.

    All inputs of its 28 blocks but one block's stand beside the block that runs again.
    """
    tokens, hidden, layers = 131_072, 1024, 28
    attention = Attention(heads=16, kv_heads=8, head_dim=128, qk_norm="head")
    block = Block(hidden=hidden, attention=attention, mlp=Mlp(ffn=3072), norm=Norm())
    setting = BlockConfig(attention="flash", checkpointed=parse_policy("submodules").parts)
    kept = [record.size for record in trace(block, setting, "none").kept_records]
    inputs = sum(size.elements * size.width for size in kept if size.unit == "token") * tokens
    assert inputs == 4 * 2 * hidden * tokens
    assert inputs * (layers - 1) / 1e9 == pytest.approx(29, abs=0.5)


# Korthikanti et al., arXiv:2205.05198, section 5: for GPT-3 and MT-NLG 5as/h is 80 and 64, so that selective
# recomputation saves 70% and 65% of the activations for 2.7% and 1.6% more operations (digits cut, not rounded).
@pytest.mark.parametrize(
    ("size", "share", "saved", "operations"), [("175B", 80, 70, Decimal("2.7")), ("530B", 64, 65, Decimal("1.6"))]
)
def test_korthikanti_selective_recomputation(size: str, share: int, saved: int, operations: Decimal) -> None:
    hidden, heads = SIZES[size]
    block = bert_block(hidden, heads)
    everything = kept_bytes(block, SEQ_LEN, 8, sp=True)
    less = kept_bytes(block, SEQ_LEN, 8, sp=True, policy="selective-core-attn")
    assert Fraction(everything - less, SEQ_LEN * hidden // 8) == share
    assert 100 * (everything - less) // everything == saved
    attention = flops.attention_flops(SEQ_LEN, SEQ_LEN, hidden)
    matrices = flops.layer_matmul_flops(SEQ_LEN, hidden, q_dim=hidden, kv_dim=hidden, ffn=4 * hidden, gated=0)
    overhead = Decimal(100 * attention) / Decimal(matrices)
    assert Fraction(attention, matrices) == Fraction(SEQ_LEN, 6 * hidden)
    assert overhead.quantize(operations, rounding=ROUND_DOWN) == operations


# Korthikanti et al., arXiv:2205.05198, section 4.2.3, equation 5: the first stage holds p micro-batches of L/p layers.
@pytest.mark.parametrize("stages", [1, 2, 8, 16])
def test_first_stage_keeps_the_activations_of_all_layers(stages: int) -> None:
    layers = 96
    assert pipeline.in_flight_1f1b(0, stages, 512) * (layers // stages) == layers


# Korthikanti et al., arXiv:2205.05198, section 4.2.3: the interleaved schedule keeps L (1 + (p - 1) / (p m)) layers,
# where m is the number of model chunks a stage; in units of a chunk's L / (p m) layers.
@pytest.mark.parametrize(("stages", "chunks"), [(8, 3), (35, 3), (4, 8), (2, 2)])
def test_interleaved_first_stage_keeps_more(stages: int, chunks: int) -> None:
    held = pipeline.in_flight_interleaved(0, stages, 16 * stages, chunks)
    assert Fraction(held, stages * chunks) == 1 + Fraction(stages - 1, stages * chunks)


# Narayanan et al., arXiv:2104.04473, sections 2.2.1 and 2.2.2: (p - 1) / m, and (p - 1) / (v m) interleaved.
def test_bubbles() -> None:
    assert pipeline.bubble_fraction(4, 8) == 3 / 8
    assert pipeline.bubble_fraction(4, 8, chunks=2) == 3 / 16


# Narayanan et al., arXiv:2104.04473, section 2.2.1: GPipe holds m micro-batches, 1F1B at most p.
@pytest.mark.parametrize("stage", range(4))
def test_1f1b_holds_no_more_than_the_stages_behind(stage: int) -> None:
    assert pipeline.in_flight_gpipe(64) == 64
    assert pipeline.in_flight_1f1b(stage, 4, 64) == 4 - stage
    assert pipeline.in_flight_1f1b(stage, 4, 1) == 1


# Narayanan et al., arXiv:2104.04473, equation 3: 96 B s l h^2 (1 + s/6h + V/16lh) with recomputation of all layers.
@pytest.mark.parametrize(("layers", "hidden", "vocab"), [(24, 2304, 51200), (96, 12288, 51200), (128, 25600, 51200)])
def test_narayanan_equation_3(layers: int, hidden: int, vocab: int) -> None:
    tokens = 4 * SEQ_LEN
    layer = flops.layer_matmul_flops(tokens, hidden, q_dim=hidden, kv_dim=hidden, ffn=4 * hidden, gated=0)
    layer += flops.attention_flops(tokens, SEQ_LEN, hidden)
    total = flops.step_flops(layers * layer, layers * layer) + flops.step_flops(
        flops.logits_flops(tokens, hidden, vocab)
    )
    terms = 1 + Fraction(SEQ_LEN, 6 * hidden) + Fraction(vocab, 16 * layers * hidden)
    assert total == 96 * tokens * layers * hidden**2 * terms


# Narayanan et al., arXiv:2104.04473, equation 2: P = 12 l h^2 (1 + 13/12h + (V + s)/12lh); 174.6B for GPT-3.
def test_narayanan_equation_2() -> None:
    layers, hidden, vocab = 96, 12288, 51200
    block = parameters.attention_parameters(hidden, hidden, hidden) + parameters.mlp_parameters(
        hidden, 4 * hidden, gated=0
    )
    block += parameters.qkv_bias_parameters(hidden, hidden) + parameters.mlp_bias_parameters(4 * hidden, gated=0)
    block += 2 * hidden + 2 * parameters.norm_parameters(hidden, 2)
    tables = parameters.embedding_parameters(vocab, hidden) + parameters.embedding_parameters(SEQ_LEN, hidden)
    terms = 1 + Fraction(13, 12 * hidden) + Fraction(vocab + SEQ_LEN, 12 * layers * hidden)
    assert layers * block + tables == 12 * layers * hidden**2 * terms
    assert layers * block + tables == parameters.narayanan_parameters(layers, hidden, vocab, SEQ_LEN)
    assert (layers * block + tables) // 10**8 == 1746


# PaLM, arXiv:2204.02311, section 4.1: 540B at 238.3 thousand tokens/s on 6144 TPU v4 (275 TFLOP/s): MFU 46.2%,
# and 45.7% without attention; 118 layers, 48 heads of 256, sequences of 2048.
def test_palm_model_flops_utilization() -> None:
    peak = 6144 * 275 * 10**12
    whole = flops.model_flops_per_token(540_350_000_000, 118, 48 * 256, SEQ_LEN)
    alone = flops.model_flops_per_token(540_350_000_000, 0, 48 * 256, SEQ_LEN)
    assert round(100 * flops.model_flops_utilization(238_300, whole, peak), 1) == 46.2
    assert round(100 * flops.model_flops_utilization(238_300, alone, peak), 1) == 45.7


# ZeRO, arXiv:1910.02054, section 7: 2 P a step at stages 0 to 2, 3 P at stage 3 (elements, many ranks).
@pytest.mark.parametrize(("stage", "volume"), [(0, 2), (1, 2), (2, 2), (3, 3)])
def test_zero_communication_volume(stage: int, volume: int) -> None:
    ranks = 1024
    assert communication.zero_bytes(ranks, ranks, ranks, stage) == volume * (ranks - 1)


# Megatron-LM, arXiv:1909.08053, figure 3 and section 3: two all-reduces forward and two backward a layer; with
# sequence parallelism (arXiv:2205.05198, section 4.2.2) as much in all-gathers and reduce-scatters.
def test_sequence_parallelism_sends_as_much_as_tensor_parallelism() -> None:
    tokens, hidden, tp = SEQ_LEN, 12288, 8
    payload = 2 * tokens * hidden
    pair = communication.all_gather_bytes(payload, tp) + communication.reduce_scatter_bytes(payload, tp)
    assert communication.tensor_parallel_bytes(tokens, hidden, 2, tp) == 4 * pair


# ZeRO-Offload, arXiv:2101.06840, section 3: 2M bytes of gradients out and 2M of parameters back, 4M in all.
def test_zero_offload_traffic() -> None:
    count = 10**9
    assert offload.optimizer_offload_bytes(gradients.gradient_bytes(count, 2), 2 * count) == 4 * count


# 8-bit optimizers, arXiv:2110.02861, section 2: blocks of 2048, one fp32 scale each; 256 in bitsandbytes from 0.44 on.
@pytest.mark.parametrize("block", [256, 2048])
def test_8bit_adam_bytes_a_parameter(block: int) -> None:
    count = 2**20
    moments = optimizer.moment_bytes(count, optimizer.OPTIMIZERS["adamw-8bit"], block=block)
    assert Fraction(moments, count) == 2 * (1 + Fraction(4, block))


# 8-bit optimizers, arXiv:2110.02861, section 1: 8 bytes a parameter for Adam, 4 for momentum in 32 bits.
def test_32bit_states() -> None:
    assert optimizer.moment_bytes(1, ADAMW) == 8
    assert optimizer.moment_bytes(1, optimizer.OPTIMIZERS["sgd-momentum"]) == 4


# QLoRA, arXiv:2305.14314, section 3: double quantisation takes the scales from 0.5 to 0.127 bits a parameter.
def test_nf4_bits_a_parameter() -> None:
    count = 64 * 256 * 8
    scales = count // 64
    plain = count // 2 + 4 * scales
    double = count // 2 + optimizer_states.quantised_bytes(scales, block=256)
    assert Fraction(8 * plain, count) == Fraction(9, 2)
    assert float(Fraction(8 * double, count)) == parameters.quantized_bits(4, 64, 8, outer_block=256)
    assert round(float(Fraction(8 * double, count)), 3) == 4.127


# Adafactor, arXiv:1804.04235, section 3: n + m numbers for an n x m matrix in place of n m.
def test_adafactor_is_sublinear() -> None:
    assert optimizer_states.factored_bytes(512, 2048, 4) == 4 * (512 + 2048)
    states = optimizer.OPTIMIZERS["adafactor"].states
    assert states is not None
    assert states(optimizer.Weight("q", (512, 2048))) == 512 + 2048


# The fp32 copy of the logits: 4 b s V bytes.
def test_fp32_logits() -> None:
    assert activations.saved_bytes(128256, 2 * SEQ_LEN, 4) == 4 * 2 * SEQ_LEN * 128256


# One hidden state of GPT-3's width in fp32, a batch of 1024 sequences of 2048: 103 GB; 96 layers of it: 9.9 TB.
def test_one_hidden_state_of_gpt3() -> None:
    layer = activations.saved_bytes(12288, 1024 * SEQ_LEN, 4)
    assert layer // 10**9 == 103
    assert round(96 * layer / 10**12, 1) == 9.9
