"""Blocks with windows, soft-capped scores and sinks against a table of the real classes' bytes.

The figures are of Transformers 5.23 on PyTorch 2.13, one block on fake CUDA tensors with its config as on the Hub:
bytes kept for backward, largest sum of forward and of backward (with the weights' gradients), the input and weights
left out. Their run called backward on the block's output and held that output and its gradient until the end.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import pytest

pytest.importorskip("transformers")

from autograd import measure, models, timeline

from memcalc.api import load_model
from memcalc.convert.huggingface import from_huggingface
from memcalc.specs.block import Block
from memcalc.trace.layers import BlockConfig
from memcalc.trace.tape import Record, Tape, Tensor
from memcalc.trace.template import Template, trace

TABLE: list[tuple[str, str, int, int, bool, tuple[int, int, int]]] = [
    ("gpt-oss-20b", "eager", 1, 8192, True, (11_035_672_704, 26_231_209_984, 27_973_905_728)),
    ("gpt-oss-20b", "eager", 2, 2048, True, (2_296_610_944, 3_451_928_576, 5_131_709_760)),
    ("gpt-oss-20b", "eager", 2, 2048, False, (2_296_610_944, 3_451_928_576, 5_131_709_760)),
    ("gpt-oss-20b", "flash", 1, 8192, True, (2_325_151_872, 2_939_224_320, 3_139_031_168)),
    ("gpt-oss-20b", "flash", 2, 2048, False, (1_162_576_000, 1_469_612_288, 2_330_480_768)),
    ("gemma-2-9b", "eager", 1, 8192, True, (10_855_047_168, 13_446_985_728, 16_041_184_256)),
    ("gemma-2-9b", "eager", 2, 2048, True, (2_206_326_784, 2_353_127_424, 2_552_286_208)),
    ("gemma-2-9b", "eager", 2, 2048, False, (2_206_326_784, 2_353_127_424, 2_552_286_208)),
    ("gemma-2-9b", "flash", 2, 2048, True, (1_099_292_672, 1_246_093_312, 1_392_870_400)),
    ("gemma-2-2b", "eager", 1, 8192, False, (5_712_809_984, 6_765_454_336, 8_055_740_928)),
    ("gemma-2-2b", "eager", 2, 2048, True, (1_245_810_688, 1_340_182_528, 1_434_533_376)),
    ("gemma-2-2b", "flash", 2, 2048, True, (692_293_632, 786_665_472, 881_016_320)),
    ("gemma-3-12b", "sdpa", 1, 8192, True, (2_945_906_704, 3_260_479_504, 3_575_011_856)),
    ("gemma-3-12b", "sdpa", 1, 8192, False, (2_744_580_120, 3_059_152_920, 3_373_685_272)),
    ("gemma-3-12b", "sdpa", 2, 2048, True, (1_422_653_456, 1_579_939_856, 1_737_202_192)),
    ("gemma-3-12b", "sdpa", 2, 2048, False, (1_372_321_816, 1_529_608_216, 1_686_870_552)),
    ("gemma-3-12b", "eager", 2, 2048, True, (2_210_920_448, 2_368_206_848, 2_550_062_592)),
    ("gemma-3-12b", "eager", 2, 2048, False, (2_210_920_448, 2_368_206_848, 2_550_062_592)),
    ("gemma-3-1b", "sdpa", 1, 8192, True, (1_053_216_784, 1_147_588_624, 1_257_850_640)),
    ("gemma-3-1b", "sdpa", 1, 8192, False, (918_999_064, 1_013_370_904, 1_123_632_920)),
    ("gemma-3-1b", "sdpa", 2, 2048, True, (476_286_992, 523_472_912, 586_565_392)),
    ("gemma-3-1b", "sdpa", 2, 2048, False, (459_509_784, 506_695_704, 569_788_184)),
    ("gemma-3-1b", "eager", 2, 2048, True, (673_353_728, 720_539_648, 783_632_128)),
]
"""Preset, attention, sequences, their length, whether the block has the window, and the three sums [bytes]."""

RANDOM_STATE, ALIGNED, SAMPLED = 24, 128, 2e-4
"""Bytes of the random generator's state that a fused kernel keeps, and of the ends of gpt-oss's experts' rows; and by
how much of themselves sums with experts may differ, whose biases' gradients come in another order."""


def block_of(name: str, *, sliding: bool) -> Block:
    model = load_model(name)
    return next(g.block for g in model.groups if (g.block.attention.window is not None) == sliding)


def size_of(record: Record, batch: int, seq: int) -> int:
    """Return a tensor's bytes; lengths of the table are multiples of what kernels fill rows and keys up to.

    None of what a kernel of CUDA allocates and frees within itself, which fake tensors do not show.
    """
    if record.kind == "workspace":
        return 0
    tokens = batch * seq
    units = {
        "token": tokens, "filled_token": tokens, "pair": tokens * seq, "filled_pair": tokens * seq,
        "sink_pair": tokens * (seq + 1), "once": 1,
    }  # fmt: skip
    there = {"tp if batched": batch > 1, "tp if single": batch == 1}.get(record.size.shard, True)
    return there * record.size.bytes * units[record.size.unit] * (2 if record.kind == "gradient" else 1)


def new_sum(tape: Tape, before: Tensor | None, value: Tensor) -> Tensor:
    """Add gradients as autograd does with fake tensors: never in place, because a subclass might not allow it."""
    return value if before is None else tape.new("sum of gradients", before.size)


def largest(template: Template, events: Iterable[int], start: int, batch: int, seq: int) -> int:
    live = most = start
    for event in events:
        size = size_of(template.records[event if event >= 0 else ~event], batch, seq)
        live += size if event >= 0 else -size
        most = max(most, live)
    return most


@pytest.mark.parametrize(("name", "attention", "batch", "seq", "sliding", "expected"), TABLE)
def test_a_block_needs_what_its_class_needs(
    name: str, attention: str, batch: int, seq: int, *, sliding: bool, expected: tuple[int, int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(Tape, "_sum", new_sum)
    block = block_of(name, sliding=sliding)
    sdpa = attention == "sdpa"
    setting = BlockConfig(
        attention="flash" if sdpa else attention, sdpa=sdpa, windowed=sliding, reentrant=False, dropout=False
    )
    template = trace(block, setting)
    incoming = size_of(template.records[template.incoming], batch, seq)
    kept = sum(size_of(template.records[i], batch, seq) for i in template.kept - template.at_start)
    backward = [event for event in template.backward if ~event != template.incoming]
    ours = (
        kept,
        largest(template, template.forward, 0, batch, seq),
        largest(template, backward, kept + 2 * incoming, batch, seq),
    )
    # A single sequence's queries are contiguous a head as they are; the trace, whatever the batch, counts their copy
    single = 2 * seq * block.attention.q_dim if attention == "eager" and batch == 1 and not block.is_moe else 0
    slack = RANDOM_STATE + ALIGNED * block.is_moe
    assert abs(ours[0] - expected[0]) <= slack
    assert abs(ours[1] - expected[1] - single) <= slack
    assert ours[2] == pytest.approx(expected[2], rel=SAMPLED if block.is_moe else 0, abs=RANDOM_STATE)


@pytest.mark.parametrize(("name", "batch", "seq"), [("gemma-3-12b", 2, 2048), ("gemma-3-1b", 1, 8192)])
def test_a_window_costs_its_own_mask_and_the_repeated_heads(name: str, batch: int, seq: int) -> None:
    """2·b·s² + 4·T·(q - k); a single key-value head is repeated as a view."""
    attention = block_of(name, sliding=True).attention
    kept = []
    for sliding in (True, False):
        setting = BlockConfig(attention="flash", sdpa=True, reentrant=False, dropout=False, windowed=sliding)
        records = trace(block_of(name, sliding=sliding), setting).kept_records
        kept.append(sum(size_of(record, batch, seq) for record in records))
    repeated = 4 * batch * seq * (attention.q_dim - attention.kv_dim) * (attention.kv_heads > 1)
    assert kept[0] - kept[1] == 2 * batch * seq**2 + repeated


BATCH, SEQ = 2, 512
"""Long enough that the scores decide the forward of a small block."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", ["gpt2", "gpt-neox", "opt", "llama-3", "qwen3", "gemma2", "gemma3", "phi3", "olmo2", "bert", "gpt-oss"]
)
def test_a_forward_with_written_out_attention_needs_what_its_class_needs(family: str) -> None:
    """The narrow scores live beside their fp32 copy and its softmax, and repeated keys are not copied once more."""
    steps = timeline.step_timeline(
        family, precision="bf16", attention="eager", batch=BATCH, seq=SEQ, steps=1, dropout=False
    )
    events = [event for event in steps.events if event.phase == "forward"]
    middle = next(event.part for event in events if event.part.endswith(".1"))
    first = next(place for place, event in enumerate(events) if event.part == middle)
    real = max(event.live for event in events[first:] if event.part == middle) - events[first - 1].live
    block = from_huggingface(models.hf_config(family, dropout=False).to_dict()).groups[-1].block
    template = trace(block, BlockConfig(attention="eager", reentrant=False, dropout=False))
    ours = largest(template, template.forward, 0, BATCH, SEQ)
    assert abs(ours - real) <= ALIGNED * block.is_moe


@pytest.mark.parametrize("kernels", ["model", "fused", "te"])
def test_norms_of_queries_and_keys_lower_nothing(kernels: Literal["model", "fused", "te"]) -> None:
    """Where one kernel runs each, 2·T·(q + k) and fp32 statistics, 4 bytes a head, are kept beside what was.

    Source: TransformerEngine ``pytorch/ops/basic/rmsnorm.py``: ``save_for_backward(x, rstdevs)``.
    """
    block = load_model("llama-3-8b").main.block
    attention = block.attention
    normed = block.model_copy(update={"attention": attention.model_copy(update={"qk_norm": "head"})})
    setting = BlockConfig(kernels=kernels, dropout=False)
    plain, more = (trace(each, setting) for each in (block, normed))
    extra = sum(size_of(r, BATCH, SEQ) for r in more.kept_records) - sum(
        size_of(r, BATCH, SEQ) for r in plain.kept_records
    )
    heads = attention.heads + attention.kv_heads
    least = BATCH * SEQ * (2 * (attention.q_dim + attention.kv_dim) + 4 * heads)
    assert extra > least if kernels == "model" else extra == least
    for name in ("forward", "backward"):
        peaks = []
        for each in (plain, more):
            kept = sum(size_of(r, BATCH, SEQ) for r in each.kept_records) if name == "backward" else 0
            peaks.append(largest(each, getattr(each, name), kept, BATCH, SEQ))
        assert peaks[1] > peaks[0]


def test_written_out_attention_keeps_less_in_fp32_than_in_bf16() -> None:
    """A softmax in fp32 is kept once where its result is no cast; in bf16 its narrow copy is kept beside it.

    So fp32 lowers what a job allocates where scores rule: it is no fault of the estimate.
    """
    kept = {}
    for precision, width in (("bf16", 2), ("fp32", 4)):
        sizes: dict[str, Any] = {"attention": "eager", "dropout": False, "batch": BATCH, "seq": SEQ}
        saved = measure.saved_bytes("bloom", precision=precision, **sizes)
        model = from_huggingface(saved.config.to_dict())
        setting = BlockConfig(weight=width, residual=width, attention="eager", reentrant=False, dropout=False)
        records = trace(model.main.block, setting).kept_records
        kept[precision] = sum(k.nbytes for k in saved.at(1) if k.weight is None and k.dtype.is_floating_point)
        assert kept[precision] == sum(size_of(record, BATCH, SEQ) for record in records)
    assert kept["fp32"] < kept["bf16"]
