"""Head and loss of torchtitan and of earlier Transformers, by era: generations of logits that are alive together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import memcalc
from memcalc import api, catalog
from memcalc.allocator import replay
from memcalc.convert.huggingface import from_huggingface
from memcalc.errors import CombinationError
from memcalc.events.log import Log
from memcalc.events.passing import INPUT, WEIGHT, Chunked
from memcalc.frameworks import habits_of, losses
from memcalc.runs import read_runs
from memcalc.specs.block import Norm
from memcalc.specs.model import Tail
from memcalc.terms.gradients import made_in_forward
from memcalc.trace.layers import BlockConfig
from memcalc.trace.template import Sum, trace_head
from memcalc.validation import predict

VOCAB = 1_000_000
TABLE = [
    # PyTorch 2.13 on fake tensors, bf16, DTensor plans of torchtitan: bytes a token and entry of the vocabulary, at the
    # height of forward, after it, and at the height of backward; of the rank's part under loss parallel
    ("torchtitan@2024-04", "parallel", (12, 8, 20)),  # float() in the model; pred lives until the next one
    ("torchtitan@2024-08", "parallel", (14, 4, 16)),  # e29b6b4d4: float() in the loss, del pred
    ("torchtitan@2024-04", "standard", (8, 8, 16)),
    ("torchtitan@2024-08", "standard", (10, 4, 12)),
]


def of_vocabulary(sums: Sum) -> float:
    """Return what grows with the vocabulary, for each entry of it."""
    return sum(round(size / VOCAB) for (unit, _, gradient), size in sums.items() if unit == "token" and not gradient)


@pytest.mark.parametrize(("framework", "loss", "expected"), TABLE)
def test_generations_of_logits(framework: str, loss: str, expected: tuple[int, int, int]) -> None:
    shard: Any = "tp" if loss == "parallel" else "gathered"
    setting, how = BlockConfig(gathers_logits=True), habits_of(framework).losses[loss]
    head = trace_head(8, Norm(), VOCAB, setting, how, shard, Tail())
    heights = [max(map(of_vocabulary, peaks)) for peaks in (head.forward_peaks, head.backward_peaks)]
    assert (heights[0], of_vocabulary(head.kept_sum), heights[1]) == expected


def test_an_earlier_torchtitan_needs_one_more_fp32_shard_under_tensor_parallelism() -> None:
    """4·T·V / t more at the height of the loss, where nothing is said of the loss (loss parallel since 2024-03-05)."""
    tokens, ranks = 8192, 8
    heights = []
    for era in ("2024-04", "2024-08"):
        answer = memcalc.estimate(
            model="llama-3-8b", gpu="h100", gpus=2 * ranks, framework=f"torchtitan@{era}", tp=ranks, sp=True, zero=3,
            seq_len=tokens, micro_batch=1, global_batch=2, recompute="full", precision="bf16-mixed",
        )  # fmt: skip
        heights.append(sum(t.bytes for t in answer.terms if t.name == "logits and their gradients"))
    assert heights[0] - heights[1] == 4 * tokens * catalog.model("llama-3-8b").vocab // ranks


CLASSES = [
    # PyTorch 2.13 on fake tensors, the loss of Transformers 4.40's class, four sequences, bf16: bytes a token and
    # entry of the vocabulary at the height of forward, after it, and at the height of backward
    ("gpt2-xl", False, (6, 2, 6)),
    ("gpt2-xl", True, (12, 4, 12)),
    ("llama-2-7b", False, (12, 4, 12)),
    ("llama-2-7b", True, (12, 4, 12)),
]


@pytest.mark.parametrize(("name", "autocast", "expected"), CLASSES)
def test_some_classes_left_16_bit_logits_as_they_are(name: str, autocast: bool, expected: tuple[int, int, int]) -> None:
    """GPT-2's had no ``float()`` before the library's own loss, Llama's had."""
    how = habits_of("hf@4.40").losses["standard"]
    head = trace_head(8, Norm(), VOCAB, BlockConfig(autocast=autocast), how, "gathered", catalog.model(name).tail)
    heights = [max(map(of_vocabulary, peaks)) for peaks in (head.forward_peaks, head.backward_peaks)]
    assert (heights[0], of_vocabulary(head.kept_sum), heights[1]) == expected


@pytest.mark.parametrize("kind", ["gpt2", "gpt_neox", "opt", "bloom", "falcon", "mpt", "stablelm", "gpt_bigcode"])
def test_a_config_file_of_such_a_class_is_read_so(kind: str) -> None:
    """Those of ``models/*/modeling_*.py`` of 4.40 whose logits stay as they are; Phi's and StarCoder 2's do not."""
    assert from_huggingface({"model_type": kind}).tail.narrow_before_446
    assert not from_huggingface({"model_type": "phi"}).tail.narrow_before_446


def test_gpt2_with_zero3_takes_what_was_published() -> None:
    """25,361 MiB allocated, and 40 GB of an A100: ColossalAI-Pytorch-lightning, benchmark/gpt (2022), 40 sequences.

    Lightning's ``DeepSpeedStrategy`` has buckets of 2e8, which the script leaves as they are.
    """
    answer = memcalc.estimate(
        model="gpt2-xl", gpu="a100-40g", gpus=4, framework="deepspeed@2022-09", zero=3, precision="fp16-mixed",
        seq_len=1024, micro_batch=40, recompute="full", attention="eager",
        settings={"strategy.reduce_bucket_size": 200_000_000},
    )  # fmt: skip
    assert answer.peak.allocated == pytest.approx(25_361 * 2**20, rel=0.06)
    assert answer.verdict == "fits"


@pytest.mark.parametrize(("adapters", "published"), [("64:q,k,v,o", 34.6), ("64:all-linear", 35.9)])
def test_ligers_cross_entropy_is_given_the_fp32_copy_of_transformers(adapters: str, published: float) -> None:
    """GiB allocated: whitecircle/halo, agent-docs/optimization/peft.md (2026), Qwen3-8B, 16,384 tokens, one B300.

    ``ForCausalLMLoss`` casts before it calls the function that Liger replaces, and still holds the 16-bit logits.
    """
    answer = memcalc.estimate(
        model="qwen3-8b", gpu="b300", gpus=1, framework="hf", precision="bf16", seq_len=16384, micro_batch=1,
        global_batch=1, recompute="full", attention="flash", loss="fused-kernel", kernels="fused", lora=adapters,
        autocast=False,
    )  # fmt: skip
    assert answer.peak.allocated == pytest.approx(published * 2**30, rel=0.02)


def test_the_loss_of_trl_in_tiles_as_it_was_measured() -> None:
    """SFTTrainer of TRL 1.16 on an H200 (trainers-h200/sft-qwen15b-bf16w-none-4x1024), at its height in the loss.

    It has the head's gradient in fp32 and in 16 bits beside a tile, of 4 tokens less, as a row's last has no label.
    """
    words: dict[str, Any] = {
        "model": "qwen2.5-1.5b", "gpu": "h200", "gpus": 1, "framework": "hf", "precision": "bf16", "seq_len": 1024,
        "micro_batch": 4, "global_batch": 4, "optimizer_impl": "fused", "recompute": "none", "attention": "cudnn",
        "loss": "fused-linear", "advice": False,
    }  # fmt: skip
    tiled = memcalc.estimate(**words, settings={"strategy.autocast": True, "strategy.tiled_loss": True})
    assert tiled.peak.phase == "loss"
    assert tiled.peak.allocated == pytest.approx(23_000_742_400, rel=0.003)
    size = {term.phases: term.bytes for term in tiled.terms if term.name == "loss in tiles"}
    assert size["forward",] == 268_173_312 + 4 * 65_536
    liger = memcalc.estimate(**words, settings={"strategy.autocast": True})
    assert liger.peak.allocated < 0.96 * tiled.peak.allocated


def test_a_head_that_is_cast_tile_by_tile_has_no_copy_of_its_own() -> None:
    """TRL 1.16 kernels/chunked_logprob.py: w_chunk, in place of what autocast keeps of a whole fp32 head."""
    words: dict[str, Any] = {"model": "qwen2.5-0.5b", "gpu": "h200", "gpus": 1, "framework": "hf", "seq_len": 1024}
    words |= {"precision": "bf16-autocast", "loss": "fused-linear", "advice": False}
    names = {
        tiled: {term.name for term in memcalc.estimate(**words, settings={"strategy.tiled_loss": tiled}).terms}
        for tiled in (True, False)
    }
    assert names[False] - names[True] == {"autocast's 16-bit copy of the head", "loss in chunks of rows"}


RUNS = Path(__file__).resolve().parents[2] / "presets" / "runs"


def returned_height(loss: str, *, autocast: bool) -> float:
    """Return bytes a token and entry of the vocabulary at the height of forward, by the code of both libraries.

    A function that keeps its logits stands in for Liger's, which writes the gradient over them.
    """
    torch, operations = pytest.importorskip("torch"), pytest.importorskip("accelerate.utils.operations")
    transformers = pytest.importorskip("transformers.loss.loss_utils")
    from memcalc.probe.live.saved import Where
    from memcalc.probe.live.timeline import Timeline

    class InPlace(torch.autograd.Function):  # type: ignore[misc,name-defined]
        @staticmethod
        def forward(ctx: Any, logits: Any) -> Any:
            """Keep the logits."""
            ctx.save_for_backward(logits.detach())
            return logits.new_zeros(())

    tokens, vocab, hidden = 512, 2048, 2
    x, labels = torch.zeros(1, tokens, hidden, dtype=torch.bfloat16), torch.zeros(1, tokens, dtype=torch.long)
    weight = torch.nn.Parameter(torch.zeros(vocab, hidden, dtype=torch.bfloat16))

    def forward() -> dict[str, Any]:
        logits = torch.nn.functional.linear(x, weight)
        return {"loss": transformers.ForCausalLMLoss(logits, labels, vocab), "logits": logits}

    run = operations.convert_outputs_to_fp32(torch.autocast("cpu", torch.bfloat16)(forward)) if autocast else forward
    with pytest.MonkeyPatch.context() as patch:
        if loss == "fused-kernel":
            patch.setattr(torch.nn.functional, "cross_entropy", lambda logits, *_, **__: InPlace.apply(logits))
        with Timeline(Where(torch.nn.Module(), [])) as line:
            run()
    return max(event.live for event in line.events) / (tokens * vocab)


@pytest.mark.parametrize(
    ("loss", "autocast", "expected"),
    [("fused-kernel", True, 10), ("fused-kernel", False, 6), ("standard", True, 10), ("standard", False, 10)],
)
def test_logits_that_accelerate_widens_beside_those_of_the_loss(loss: str, autocast: bool, expected: int) -> None:
    """The standard loss has let go of its fp32 copy by then, which Liger's writes its gradient over and keeps."""
    assert returned_height(loss, autocast=autocast) == pytest.approx(expected, abs=0.05)
    heights = {}
    for framework in ("hf", "deepspeed"):
        how, setting = habits_of(framework).losses[loss], BlockConfig(autocast=autocast)
        head = trace_head(8, Norm(), VOCAB, setting, how, "gathered", Tail())
        heights[framework] = max(map(of_vocabulary, head.forward_peaks))
    # DeepSpeed's engine does without Accelerate's autocast (accelerator.py: native_amp)
    assert heights == {"hf": expected, "deepspeed": 6 if loss == "fused-kernel" else 10}


def test_ligers_cross_entropy_under_accelerate_allocates_and_reserves_what_was_measured() -> None:
    """Of 21.87 GiB 4.6 are the copy that the model returns."""
    [run] = [run for run in read_runs([str(RUNS / "trainers-h200.toml")]).run if "liger-ce-" in run.id]
    peak = predict(run).peak
    assert peak.allocated == pytest.approx(run.measured.allocated, rel=2e-3)
    assert peak.reserved == pytest.approx(run.measured.reserved, rel=2e-3)


def test_the_heads_gradient_is_made_in_forward_by_one_loss_and_in_backward_by_the_one_in_tiles() -> None:
    """Liger's ``fused_linear_cross_entropy_forward`` against TRL's ``ChunkedLogProbFunction.backward``."""
    words: dict[str, Any] = {"model": "qwen2.5-1.5b", "gpu": "h200", "gpus": 1, "framework": "hf", "seq_len": 1024}
    words |= {"loss": "fused-linear"}
    made = {
        tiled: int(np.max(made_in_forward(api.single(**words, settings={"strategy.tiled_loss": tiled}).census)))
        for tiled in (False, True)
    }
    assert made == {False: 151_936 * 1536, True: 0}


def heights(steps: int, *, copies: bool, apart: bool, lets_go: bool, wide: bool) -> float:
    """Return the height of Liger's forward in bytes for each weight of the head, as PyTorch runs its operators.

    A head of 32 columns, and a vocabulary of which a chunk has 32 rows: a logit counts as much as a weight.
    """
    torch = pytest.importorskip("torch")
    from memcalc.probe.live.saved import Where
    from memcalc.probe.live.timeline import Timeline

    vocab, hidden, rows = 65_536, 32, 32

    class Linear(torch.autograd.Function):  # type: ignore[misc,name-defined]
        @staticmethod
        def forward(ctx: Any, x: Any, weight: Any) -> Any:
            """The operators of ops/fused_linear_cross_entropy.py, by release; the kernel itself allocates nothing."""
            at_input, at_head = torch.zeros_like(x), torch.zeros_like(weight)
            for start in range(0, len(x), rows):
                chunk = x[start : start + rows]
                logits = chunk @ weight.t()
                if copies:
                    logits = logits.float()
                    logits = logits.to(torch.bfloat16)
                    scaled = logits * 0.5
                gradient = scaled if copies else logits
                at_input[start : start + rows] = gradient @ weight
                if apart:
                    at_head += torch.mm(gradient.t(), chunk).float()
                if lets_go:
                    del logits, gradient
            ctx.save_for_backward(at_input, at_head)
            return x.new_zeros(())

    dtype = torch.float32 if wide else torch.bfloat16
    x = torch.zeros(steps * rows, hidden, dtype=dtype)
    weight = torch.nn.Parameter(torch.zeros(vocab, hidden, dtype=dtype))
    with Timeline(Where(torch.nn.Module(), [])) as line, torch.autocast("cpu", torch.bfloat16):
        Linear.apply(x, weight)
    return max(event.live for event in line.events) / (vocab * hidden) - (4 if wide else 2)


RELEASES = [
    # what the release does, and how it is counted: bytes of a logit, and of a weight of the head beside its gradient
    ("LIGER_03", {"copies": True}),
    ("LIGER_05", {}),
    ("LIGER_06", {"apart": True}),
    ("LIGER", {"lets_go": True}),
]


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(("release", "does"), RELEASES)
def test_the_height_of_ligers_loss_by_release(release: str, does: dict[str, bool], *, wide: bool) -> None:
    """The events that are written of it are as high, in bytes for each weight of the head, as the code of the time."""
    linear = getattr(losses, release)
    vocab, hidden, rows = 65_536, 32, 32
    weight = 4 if wide else 2
    told = Chunked(3 * rows, vocab, hidden, 2, 3 * rows * hidden * weight, vocab * hidden, weight, linear)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("memcalc.events.passing.chunk_rows", lambda *_: rows)
        log = Log()
        stays = told.forward(log)
    from_code = {"copies": False, "apart": False, "lets_go": False} | does
    head = vocab * hidden
    assert replay(log.events).peak_requested / head == pytest.approx(heights(3, wide=wide, **from_code), abs=0.02)
    assert {name: key > 0 for name, key in stays.keys.items() if key} == {INPUT: True, WEIGHT: True}


def test_a_loss_in_chunks_by_the_release_of_its_time() -> None:
    """Liger 0.6.3 to 0.8.2 made a chunk's gradient of the whole head, and its fp32 copy: Liger-Kernel#1232."""
    chunk = {}
    for framework in ("hf@4.45", "hf@4.57", "hf@5.12", "hf"):
        answer = memcalc.estimate(
            model="llama-3-8b", gpu="h200", gpus=1, framework=framework, precision="bf16", seq_len=8192, micro_batch=1,
            loss="fused-linear", recompute="full", optimizer_impl="fused", advice=False,
        )  # fmt: skip
        chunk[framework] = sum(term.bytes for term in answer.terms if term.name == "loss in chunks of rows")
    vocab, hidden, rows, given = 128_256, 4096, 256, 2 * 8192 * 4096
    logits = vocab * rows
    assert chunk["hf@4.45"] == 8 * logits + given
    assert chunk["hf@4.57"] == 4 * logits + given
    assert chunk["hf"] == 2 * logits + given
    assert chunk["hf@5.12"] - chunk["hf@4.57"] == 6 * vocab * hidden  # its issue says 3 GB


def test_what_losses_with_the_head_in_them_reserve_as_it_was_measured() -> None:
    """On an H200, where a lump in their place left out 2 to 4%, and whole gradients that stay until backward ends."""
    rows = {
        "liger-llama1b-bf16w-gc-4x4096": 0.002, "sft-llama1b-fp32w-liger-4x2048": 0.002,
        "sft-qwen3-4b-bf16w-2x4096": 0.005, "sft-qwen05b-fp32w-8x1024": 0.025,
    }  # fmt: skip
    runs = {run.id.partition("/")[2]: run for run in read_runs([str(RUNS / "trainers-h200.toml")]).run}
    for name, most in rows.items():
        assert predict(runs[name]).peak.reserved == pytest.approx(runs[name].measured.reserved, rel=most), name


def test_capped_logits_let_go_of_what_they_were_made_of() -> None:
    """One variable has them, their quotient, its ``tanh`` and the product: Gemma 2 reserved 36.1 GiB on an H200."""
    [run] = [run for run in read_runs([str(RUNS / "trainers-h200.toml")]).run if "gemma2" in run.id]
    assert predict(run).peak.reserved == pytest.approx(run.measured.reserved, rel=0.01)
    setting, how = BlockConfig(autocast=True), habits_of("hf").losses["standard"]
    told: Any = 8, Norm(), VOCAB, setting, how, "gathered", Tail()
    plain, capped = trace_head(*told), trace_head(*told, softcap=True)
    alive, most = 0, 0
    for event in capped.forward:
        size = capped.records[~event if event < 0 else event].size
        if size.elements == VOCAB and size.width == 2:
            alive += 1 if event >= 0 else -1
            most = max(most, alive)
    assert most == 2
    assert of_vocabulary(capped.kept_sum) - of_vocabulary(plain.kept_sum) == 2


UNCAST = {
    "thunder-474-02": 32_000,
    "thunder-940-eager": 32_000,
    "thunder-1156-zero2": 128_256,
    "thunder-1175-16384": 49_152,
}
"""Jobs of Lightning Thunder's benchmark, which gives a model's bf16 logits to ``cross_entropy``, and their words."""


@pytest.mark.parametrize("name", UNCAST)
def test_a_loop_of_ones_own_may_leave_logits_in_16_bits(name: str) -> None:
    """Its printed peaks are 4 bytes a token and word below those of litgpt, whose wrapper makes logits fp32."""
    [run] = [run for run in read_runs([str(RUNS / "reports.toml")]).run if run.id == name]
    wide = run.model_copy(update={"strategy": run.strategy | {"uncast_loss": False}})
    printed, tokens = run.measured.figures["allocated"], run.workload["seq_len"] * run.workload["micro_batch"]
    assert predict(run).peak.allocated == pytest.approx(printed, rel=2e-3)
    assert predict(wide).peak.allocated - printed == pytest.approx(4 * tokens * UNCAST[name], rel=0.03)


@pytest.mark.parametrize(
    "words",
    [{"loss": "chunked"}, {"loss": "fused-linear"}, {"framework": "hf", "precision": "bf16-autocast"}],
)  # fmt: skip
def test_logits_stay_in_16_bits_in_a_plain_cross_entropy_alone(words: dict[str, Any]) -> None:
    given = {"framework": "litgpt", "loss": "standard", "precision": "bf16"} | words
    with pytest.raises(CombinationError, match="uncast_loss"):
        memcalc.estimate(
            model="llama-3-8b",
            gpu="h100",
            seq_len=1024,
            micro_batch=1,
            settings={"strategy.uncast_loss": True},
            **given,
        )
