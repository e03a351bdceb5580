"""FSDP2 and torchtitan: sums by hand from the sources, figures of published logs, steps of PyTorch itself."""

from typing import Any

import pytest

import memcalc
from memcalc.grid import Grid, Layout
from memcalc.ledger import Ledger
from memcalc.specs.flat import from_flat
from memcalc.specs.model import Model
from memcalc.specs.options import SharedSettings
from memcalc.terms.build import build_ledger
from memcalc.terms.model_on_grid import ModelOnGrid
from memcalc.terms.overhead import Workspaces
from memcalc.units import GIB, MIB

U = 8192 * 4096
"""Elements of Llama 3 8B's hidden states for 8192 tokens."""
VOCAB, HIDDEN, FFN, LAYERS = 128_256, 4096, 14_336, 32
PARAMETERS = 8_030_261_248
BLOCK = 2 * HIDDEN * HIDDEN + 2 * HIDDEN * 1024 + 3 * HIDDEN * FFN + 2 * HIDDEN


def titan(era: str = "2025-02", **words: Any) -> Any:
    """Return the estimate of torchtitan's Llama 3 8B on eight H100, one sequence of 8192 tokens each."""
    job: dict[str, Any] = {
        "model": "llama-3-8b",
        "gpu": "h100",
        "gpus": 8,
        "seq_len": 8192,
        "micro_batch": 1,
        "global_batch": 8,
        "framework": f"torchtitan@{era}",
        "precision": "bf16-mixed",
        "zero": 3,
        "recompute": "selective-ops",
        "optimizer_impl": "foreach",
    }
    return memcalc.estimate(**(job | words))


def titan_ledger(**changes: Any) -> Ledger:
    """Return the ledger of the same job."""
    words: dict[str, Any] = {"kernels": "fused", "expandable_segments": True} | changes
    precision, zero = words.pop("precision", "bf16-mixed"), words.pop("zero", 3)
    fixed = SharedSettings(framework="torchtitan@2025-02", seq_len=8192, global_batch=8, **words)
    grid = Grid(fixed, (Layout(dp=8),), (precision,), ("selective-ops",), (zero,), ((),), (1,))
    return build_ledger(ModelOnGrid(memcalc.api.load_model("llama-3-8b", ()), grid), Workspaces(0, 0))


def units(answer: Any) -> float:
    """Return what a block keeps, in bytes for each element of its hidden states."""
    return float(answer.saved.per_block / U)


KEPT = [
    # x 2, wq 2, wv 2 kv, w1 2 f/h, attention 2, its logsumexp 4 a/h, w2 2
    ({"compile": "none"}, 2 + 2 + 0.5 + 7 + 2 + 0.03125 + 2),
    # the compiler drops w2's output, which nothing in backward reads
    ({"compile": "blocks"}, 2 + 2 + 0.5 + 7 + 2 + 0.03125),
    # the kernel of cuDNN was not in torchtitan's list until December 2025
    ({"compile": "blocks", "attention": "cudnn"}, 2 + 2 + 0.5 + 7),
    # op by op: 20 + 4 k + 8 f/h + 4 a/h with the keys repeated to all heads
    ({"recompute": "none"}, 20 + 4 + 28 + 0.03125),
    # compiled: 12 + 4 k + 6 f/h + 4 a/h, and the statistics of two norms
    ({"recompute": "none", "compile": "blocks"}, 12 + 4 + 21 + 0.03125 + 2 * 4 / HIDDEN),
    ({"recompute": "full"}, 2),
]


@pytest.mark.parametrize(("words", "expected"), KEPT)
def test_what_a_block_keeps(words: dict[str, Any], expected: float) -> None:
    assert units(titan(**words)) == pytest.approx(expected, abs=0.002)


def test_what_a_block_keeps_under_tensor_parallelism() -> None:
    """All but w2's partial sum is divided by two, and the two reduce-scatters' outputs are kept beside it."""
    divided = 2 + 2 + 0.5 + 7 + 2 + 0.03125 + 2 + 2
    answer = titan(tp=2, global_batch=4, loss="parallel")
    assert units(answer) == pytest.approx(divided / 2 + 2, abs=0.002)
    compiled = titan(tp=2, global_batch=4, loss="parallel", compile="blocks")
    assert units(compiled) == pytest.approx((divided - 2) / 2, abs=0.002)


def test_a_later_torchtitan_repeats_no_keys() -> None:
    """From January 2026 the kernel takes grouped queries, and one matmul makes queries, keys and values."""
    answer = titan(era="2026-02", recompute="none", compile="blocks")
    assert units(answer) == pytest.approx(12 + 1 + 21 + 0.03125 + 2 * 4 / HIDDEN, abs=0.002)
    packed = titan(era="2026-06", compile="blocks")
    assert units(packed) == pytest.approx(2 + 3 + 7 + 2 + 0.03125, abs=0.002)


def test_allocated_peak_as_pytorch_counts_it() -> None:
    """PyTorch 2.13 on fake tensors: 41,468,533,512 bytes at the log-softmax's backward, 4 MiB of them rotary tables.

    The sum by hand is 12 P / 8 + 32 * 15.53 u + 4 u + 12 n V. Beside it stand the root unit and the last block.
    """
    answer = titan(kernels="fused")
    assert answer.peak.phase == "loss"
    terms = {term.name: term.bytes for term in answer.terms if "loss" in term.phases}
    gathered = terms["gathered embedding, norm and head"] + terms["gathered block"]
    assert gathered == 2 * (2 * VOCAB * HIDDEN + HIDDEN) + 2 * BLOCK
    rest = answer.peak.allocated - gathered - terms["BLAS workspaces"]
    assert rest == pytest.approx(41_468_533_512 - 4 * MIB, rel=2e-5)


def test_reserved_is_the_sum_of_three_pools() -> None:
    """The compute stream's peak, all sharded gradients, and two gathers with the 16-bit copy of a shard."""
    root = 2 * VOCAB * HIDDEN + HIDDEN
    pools = 4 * PARAMETERS // 8 + 2 * root + 2 * BLOCK + 2 * root // 8
    dead_logits = 2 * 8192 * VOCAB
    ledger = titan_ledger()
    assert int(ledger.reserved().max()) == int(ledger.peak().max()) + pools + dead_logits


RESHARD = [
    # bytes that a log shows beside the default's 49.59 GiB (torchtitan 5940ddeb5)
    ({"zero": 2, "reshard": "never"}, 62.18 - 49.59),
    ({"reshard": "always"}, 49.41 - 49.59),
]


@pytest.mark.parametrize(("words", "measured"), RESHARD)
def test_resharding_policies(words: dict[str, Any], measured: float) -> None:
    change = int(titan_ledger(**words).reserved().max()) - int(titan_ledger().reserved().max())
    assert change / GIB == pytest.approx(measured, abs=0.3)


def test_never_resharding_keeps_all_other_blocks() -> None:
    change = titan(zero=2).peak.allocated - titan().peak.allocated
    assert change == (LAYERS - 1) * 2 * BLOCK


def test_a_later_torchtitan_shards_the_embedding_and_the_last_block() -> None:
    """From August 2025 the embedding is a unit of its own (83e694105): 2 V h and 2 P_block less, a prefetch more."""
    before, after = titan(kernels="fused"), titan(era="2025-08", kernels="fused")
    phases = ("loss",)
    flat = 2 * BLOCK
    assert before.phases[phases[0]] - after.phases[phases[0]] == 2 * VOCAB * HIDDEN + 2 * BLOCK - flat


LOSSES = [
    # bytes a logit: log-softmax, its gradient and that of nll; then the compiled loss; a chunk of an eighth at a time
    ({}, 12),
    ({"compile": "blocks+loss"}, 4),
    ({"loss": "chunked"}, 2 + 4 + 4 / 8),
]


@pytest.mark.parametrize(("words", "width"), LOSSES)
def test_generations_of_logits(words: dict[str, Any], width: float) -> None:
    answer = titan(kernels="fused", **words)
    named = ("logits and their gradients", "final norm, logits and loss")
    largest = max(term.bytes for term in answer.terms if term.name in named)
    # the final norm's input and output stand beside them
    assert largest == pytest.approx(width * 8192 * VOCAB, abs=8 * U)


def test_a_loss_on_chunks_of_hidden_states() -> None:
    """Eighths of 12 bytes a logit and the head's gradient; x, its norm, chunks and fp32 gradient beside them."""
    answer = titan(era="2026-06", loss="chunked", kernels="fused")
    largest = max(term.bytes for term in answer.terms if term.name == "final norm, logits and loss")
    hidden = (2 + 2 + 2 + 4) * U
    assert largest == pytest.approx(12 / 8 * 8192 * VOCAB + 2 * VOCAB * HIDDEN + hidden, rel=1e-3)


def test_gradients_of_a_pipeline_are_added_up_whole() -> None:
    """Unsharded weights of two bytes and gradients of four stay for all micro-batches (torch pipelining/stage.py)."""
    answer = titan(pp=2, zero=2, gpus=16, global_batch=32, recompute="full")
    first = {term.name: term.bytes for term in answer.terms}
    stage = PARAMETERS // 2
    assert first["unsharded gradients of earlier micro-batches"] == pytest.approx(4 * stage, rel=0.15)
    assert answer.strategy.pp == 2


def test_simple_fsdp_has_one_pool() -> None:
    """Gathers and reductions in the compute stream (torchtitan d9bdfbb20): only the dead logits are beyond the peak."""
    ledger = titan_ledger(fsdp_schedule="simple")
    assert {term.pool for term in (*ledger.terms, *ledger.holes)} == {"compute"}
    assert int(ledger.reserved().max()) == int(ledger.peak().max()) + 2 * 8192 * VOCAB


def test_float8_gathers_take_a_byte_a_weight() -> None:
    """The blocks' gathers shrink to a half, in the compute stream and in that of the all-gathers."""
    wide, narrow = (titan_ledger(precision="fp8-mixed", float8_all_gather=on).reserved().max() for on in (False, True))
    assert int(wide) - int(narrow) == 2 * BLOCK


def test_unknown_float8_recipes_are_refused_by_name() -> None:
    with pytest.raises(memcalc.errors.InputError, match=r"nvfp4.*rowwise"):
        titan(precision="fp8-mixed", settings={"strategy.float8": "nvfp4"})


CONTRADICTIONS = [
    ({"strategy.float8": "rowwise"}, {}, "fp8-mixed"),
    ({"strategy.float8_all_gather": "true"}, {}, "fp8-mixed"),
    ({"strategy.reshard": "never"}, {}, "zero 2"),
    ({"strategy.reshard": "always"}, {"zero": 2}, "zero 3"),
]


@pytest.mark.parametrize(("settings", "words", "said"), CONTRADICTIONS)
def test_contradictions_are_refused(settings: dict[str, str], words: dict[str, Any], said: str) -> None:
    with pytest.raises(memcalc.errors.CombinationError, match=said):
        titan(settings=settings, **words)


HARNESS = [
    # family, ranks, resharded, reduced in, recompute, optimizer, tokens, phase of the peak
    ("llama-2", 8, True, "fp32", "none", "foreach", 2048, "loss"),
    ("llama-2", 8, False, "fp32", "full", "fused", 2048, "loss"),
    ("llama-3", 64, False, "bf16", "none", "fused", 512, "loss"),
    ("llama-2", 64, False, "bf16", "none", "fused", 128, "backward-last"),
    ("llama-2", 8, True, "bf16", "full", "foreach", 128, "backward-first"),
    ("llama-3", 8, True, "fp32", "none", "foreach", 128, "backward-end"),
    ("llama-2", 64, True, "fp32", "full", "fused", 128, "backward-end"),
    ("smollm2", 8, True, "fp32", "full", "fused", 128, "backward-end"),
]
SHAPE = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 8}
HEADS = {"llama-2": 8, "llama-3": 2, "smollm2": 8}
"""Key-value heads by family; the last one's embedding is its head, too."""


def small_llama(family: str) -> Model:
    """Return the Llama of six blocks that the harness runs."""
    sizes = {"n_layers": 6, "hidden": 1024, "heads": 8, "head_dim": 128, "ffn": 2816, "vocab": 32_000}
    kinds = {"gated": True, "norm": "rmsnorm", "tied": family == "smollm2", "positions": "rope", "family": "llama"}
    return from_flat({"name": "small", "max_positions": 4096, "kv_heads": HEADS[family]} | sizes | kinds)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "ranks", "reshard", "reduce", "recompute", "optimizer", "tokens", "phase"), HARNESS)
def test_steps_of_pytorch(
    family: str, ranks: int, reshard: bool, reduce: str, recompute: str, optimizer: str, tokens: int, phase: str
) -> None:
    """Whole steps of Transformers' Llama on fake tensors: the live bytes, and the moment at which they are the most."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from autograd import parallel

    steps = parallel.fsdp_timeline(
        family,
        ranks,
        reshard=reshard,
        reduce=torch.float32 if reduce == "fp32" else torch.bfloat16,
        recompute=recompute,
        optimizer=optimizer,
        batch=1,
        seq=tokens,
        layers=6,
        vocab_size=32_000,
        num_key_value_heads=HEADS[family],
        **SHAPE,
    )
    answer = memcalc.estimate(
        model=small_llama(family),
        gpu="h100",
        gpus=ranks,
        seq_len=tokens,
        micro_batch=1,
        global_batch=ranks,
        framework="fsdp2",
        precision="bf16-mixed",
        zero=3 if reshard else 2,
        recompute=recompute,
        optimizer_impl=optimizer,
        settings={"strategy.reduce_dtype": reduce, "strategy.checkpoint": "non-reentrant"},
    )
    workspaces = sum(term.bytes for term in answer.terms if term.name == "BLAS workspaces")
    assert answer.peak.phase == phase
    assert answer.peak.allocated - workspaces == pytest.approx(steps.peak().live, rel=5e-4)


@pytest.mark.parametrize(("era", "ep", "kept"), [("2025-08", 8, 0), ("2025-09", 8, 2), ("2025-09", 1, 0)])
def test_selective_recomputation_keeps_what_all_to_all_exchanges_bring(era: str, ep: int, kept: int) -> None:
    """Since torchtitan c4e229115: six rows a token in each of 26 blocks, on their way to the experts and back."""
    job: dict[str, Any] = {
        "model": "deepseek-v2-lite", "gpu": "h100", "gpus": 8, "ep": ep, "seq_len": 4096, "micro_batch": 4, "zero": 3,
        "precision": "bf16-mixed", "recompute": "selective-ops", "attention": "efficient", "loss": "standard",
    }  # fmt: skip
    after, before = (memcalc.estimate(**job, framework=f"torchtitan@{name}").saved.total for name in (era, "2025-08"))
    assert after - before == 26 * kept * (4 * 4096 * 6) * 2048 * 2
