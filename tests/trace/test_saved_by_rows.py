"""What blocks and heads of the decoders that a row of data describes keep for backward, against autograd."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from autograd import measure, mixer_kernels
from autograd.row_families import CODED, EAGER_ONLY, ROWS

from memcalc.convert.huggingface import from_huggingface
from memcalc.frameworks.losses import HF_NEW
from memcalc.trace.layers import BlockConfig
from memcalc.trace.template import Template, trace, trace_head

SEQ, BATCH = 40, 2
TOKENS = BATCH * SEQ
UNITS = {"token": TOKENS, "pair": TOKENS * SEQ, "row": SEQ, "filled_pair": TOKENS * 48, "filled_token": BATCH * 64,
         "square": SEQ * SEQ, "convolved": BATCH * (SEQ + 2), "scan_chunk": BATCH, "once": 1}  # fmt: skip
CLOSE = {
    "ministral3": 0.001, "granitemoe": 0.001, "granitemoeshared": 0.001, "granitemoehybrid": 0.001, "lfm2_moe": 0.001,
    "minimax_m2": 0.003, "hy_v3": 0.001, "ernie4_5_moe": 0.021, "biogpt": 0.034, "helium": 0.003, "aria_text": 0.001,
    "xglm": 0.13,
}  # fmt: skip
"""Families whose blocks are not followed to the byte, and by which part of the truth they are off at most."""
EXACT = tuple(name for name in (*ROWS, *CODED) if name not in CLOSE)
NO_AUTOCAST = ("jamba",)
"""Whose scan refuses what autocast gives it (:func:`memcalc.planner.as_is.scannable`)."""
RUNS = [("bf16", "flash", "none"), ("fp32+autocast", "eager", "none"), ("bf16", "eager", "full")]


RANDOM = (".rng_state", ".unused", ".philox_seed", ".philox_offset")
"""What a fused attention's random state is called."""


def saved_alone(template: Template) -> Template:
    """Return a checkpointed block without what a table of the model holds of it, which autograd does not save."""
    inputs = {index for index in template.kept if template.records[index].kind == "external"}
    return replace(template, kept=frozenset(inputs))


def size(template: Template) -> int:
    there = [record for record in template.kept_records if record.size.shard != "tp if single"]  # there are several
    return sum(record.size.bytes * UNITS[record.size.unit] for record in there)


def kept(saved: measure.Saved, place: str | int, precision: str) -> int:
    """Return what autograd keeps there, without labels and random states; copies of weights are the model's own."""
    return sum(
        storage.nbytes
        for storage in saved.at(place)
        if storage.shape
        and (storage.weight is None or precision == "bf16")
        and "NllLossBackward0.t" not in storage.node
        and not storage.node.endswith(RANDOM)
    )


def compared(family: str, precision: str, attention: str, recompute: str) -> list[tuple[int, int]]:
    """Return what the last block of each kind and the head keep: by the trace, and by autograd."""
    attention = "eager" if family in EAGER_ONLY else attention
    with mixer_kernels.installed(family):
        saved = measure.saved_bytes(
            family, precision=precision, attention=attention, recompute=recompute, seq=SEQ, batch=BATCH
        )
    model = from_huggingface(saved.config.to_dict())
    width = 2 if precision == "bf16" else 4
    residual = 4 if model.wide_residual else width
    setting = BlockConfig(
        weight=width, residual=residual, autocast=precision == "fp32+autocast", attention=attention, reentrant=False,
        sdpa=True,
    )  # fmt: skip
    pairs = []
    for index, group in enumerate(model.groups):
        place = max(i for i, own in enumerate(model.sequence) if own == index)
        window = group.block.attention.window if group.block.attention else None
        own = setting._replace(windowed=window is not None and window <= SEQ)
        if place > 0:  # the very first block also keeps what all share
            template = saved.as_kept(trace(group.block, own, recompute))
            shares = recompute == "full" and group.block.shares_keys
            pairs.append((size(saved_alone(template) if shares else template), kept(saved, place, precision)))
    head = trace_head(
        model.hidden, model.final_norm, model.vocab, setting, HF_NEW, "none", model.tail, softcap=model.head_softcap
    )
    return [*pairs, (size(head), kept(saved, "head", precision))]


@pytest.mark.parametrize("family", EXACT)
def test_blocks_and_heads_keep_what_autograd_saves(family: str) -> None:
    assert all(ours == real for ours, real in compared(family, *RUNS[0]))


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS[1:])
@pytest.mark.parametrize("family", EXACT)
def test_so_they_do_however_they_are_trained(family: str, run: tuple[str, str, str]) -> None:
    if family in NO_AUTOCAST and run[0] == "fp32+autocast":
        pytest.skip("the kernel takes one dtype")
    assert all(ours == real for ours, real in compared(family, *run))


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("family", CLOSE)
def test_others_come_close(family: str, run: tuple[str, str, str]) -> None:
    for ours, real in compared(family, *run):
        assert ours == pytest.approx(real, rel=CLOSE[family])
