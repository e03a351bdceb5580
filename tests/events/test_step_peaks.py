"""Peaks of whole training steps: the closed form and the replay, against PyTorch itself on fake tensors.

Real classes are trained for two steps by :mod:`autograd`; the second step's peak is compared with what memcalc says of
the same config, once summed over the phases and once played through the allocator (bytes as they were asked for).
Fake tensors have no BLAS workspaces, and so neither side counts any.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")

import torch
from autograd import measure, models, parallel, timeline
from covering import covering

from memcalc import api
from memcalc.allocator import replay
from memcalc.convert.huggingface import from_huggingface
from memcalc.events import step_events
from memcalc.ledger import Ledger
from memcalc.probe.live.cuda_like import cuda_like
from memcalc.probe.live.saved import Where
from memcalc.probe.live.timeline import Timeline
from memcalc.specs.flat import from_flat
from memcalc.specs.model import Model
from memcalc.terms.build import build_ledger
from memcalc.terms.model_on_grid import ModelOnGrid
from memcalc.terms.overhead import Workspaces

LAYERS, BATCH, SEQ = 4, 2, 128
LLAMA = {
    "hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 1088,
}  # fmt: skip
GPT2 = {"n_embd": 256, "n_head": 4, "n_inner": None, "vocab_size": 1088, "n_positions": 256}
MOE = {"num_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 192, "head_dim": 64}
SIZES: dict[str, dict[str, Any]] = {
    "llama-2": LLAMA,
    "llama-3": LLAMA,
    "gpt2": GPT2,
    "gemma2": LLAMA | {"head_dim": 64, "sliding_window": 64},
    "qwen3-moe": LLAMA | MOE,
    "titan": {"dim": 256, "heads": 4, "kv": 2, "ffn": 704, "vocab": 1088, "longest": SEQ},
}
FLAT = {"n_layers": LAYERS, "hidden": 256, "heads": 4, "kv_heads": 2, "ffn": 704, "vocab": 1088, "max_positions": 4096}
PRECISIONS = {"bf16": "bf16", "fp32": "fp32", "fp32+autocast": "bf16-autocast"}
WITHIN = 0.01


def model_of(family: str) -> Model:
    """Return the model as a user's config.json, or an inline table, gives it."""
    if family == "titan":
        return from_flat(FLAT)
    return from_huggingface(models.hf_config(family, layers=LAYERS, **SIZES[family]).to_dict())


def ours(family: str, **words: Any) -> tuple[ModelOnGrid, Ledger]:
    """Return census and ledger of one strategy, without workspaces."""
    settings = {"strategy.checkpoint": "non-reentrant"} | words.pop("settings", {})
    kernels = "fused" if family == "titan" else "model"
    words = {"seq_len": SEQ, "micro_batch": BATCH, "kernels": kernels} | words
    single = api.single(model=model_of(family), gpu="h100", settings=settings, **words)
    census = ModelOnGrid(single.job.model, single.grid)
    return census, build_ledger(census, Workspaces(0, 0))


def compare(steps: timeline.Steps, family: str, closed: float = WITHIN, **words: Any) -> None:
    """Assert that both figures are within a hundredth of the peak that PyTorch had; the first within ``closed``."""
    census, ledger = ours(family, **words)
    played = replay(step_events(census, ledger, 0, observed=False)).peak_requested
    assert int(np.max(ledger.peak())) == pytest.approx(steps.peak().live, rel=closed), "closed form"
    assert played == pytest.approx(steps.peak().live, rel=WITHIN), "replay"


# ------------------------------------------------------------------------------------------------------------- one GPU


@dataclass(frozen=True)
class Case:
    """One job on one GPU."""

    family: str
    precision: str
    recompute: str
    optimizer: str
    micro_batches: int = 1
    framework: str = "plain"
    attention: str = "flash"

    def __str__(self) -> str:
        parts = (self.family, self.precision, self.recompute, self.optimizer, str(self.micro_batches), self.framework)
        return " ".join(parts)


ONE_GPU = [
    Case("llama-2", "bf16", "none", "foreach"),
    Case("llama-3", "fp32+autocast", "every-2", "fused"),
    Case("llama-3", "fp32+autocast", "none", "fused", 2, "hf"),
    Case("titan", "bf16", "every-2", "fused"),
    Case("titan", "fp32+autocast", "every-2", "loop"),
    Case("gpt2", "bf16", "every-2", "fused"),
    Case("gpt2", "fp32+autocast", "none", "loop"),
    Case("gemma2", "fp32", "none", "fused", attention="eager"),
    Case("qwen3-moe", "fp32+autocast", "none", "fused"),
    Case("qwen3-moe", "bf16", "every-2", "fused"),
]
MORE = [
    Case("gpt2", "fp32", "full", "foreach", framework="hf"),
    Case("titan", "bf16", "full", "foreach", 2),
    Case("qwen3-moe", "bf16", "full", "foreach"),
    Case("gemma2", "bf16", "every-2", "loop", attention="eager"),
    Case("llama-3", "fp32", "full", "loop"),
    *(
        Case(family, precision, *passes, micro_batches)
        for family, precision, passes, micro_batches in covering(
            2, ("llama-3", "titan"), PRECISIONS, (("none", "foreach"), ("full", "fused"), ("every-2", "loop")), (1, 2)
        )
    ),
]


@pytest.mark.parametrize(
    "case",
    [*ONE_GPU[::3], *(pytest.param(c, marks=pytest.mark.slow) for c in (*ONE_GPU[1::3], *ONE_GPU[2::3], *MORE))],
    ids=str,
)
def test_one_gpu(case: Case) -> None:
    steps = timeline.step_timeline(
        case.family, precision=case.precision, recompute=case.recompute, optimizer=case.optimizer, batch=BATCH, seq=SEQ,
        layers=LAYERS, attention=case.attention, micro_batches=case.micro_batches, **SIZES[case.family],
    )  # fmt: skip
    words = {"attention": case.attention} if case.attention != "flash" else {}
    compare(
        steps, case.family, WITHIN, framework=case.framework, gpus=1, zero=0,
        global_batch=BATCH * case.micro_batches,
        precision=PRECISIONS[case.precision], recompute=case.recompute, optimizer_impl=case.optimizer, **words,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_the_gradient_of_a_head_is_counted_once(precision: str) -> None:
    """An untied head's gradient is one of those that stay until the step."""
    steps = timeline.step_timeline(
        "llama-3",
        precision=precision,
        recompute="full",
        optimizer="fused",
        batch=BATCH,
        seq=SEQ,
        layers=LAYERS,
        **LLAMA,
    )
    compare(
        steps, "llama-3", framework="hf", gpus=1, zero=0, global_batch=BATCH, precision=precision, recompute="full",
        optimizer_impl="fused",
    )  # fmt: skip


TIED = [("gpt2", "bf16"), ("gpt2", "fp32"), ("gemma2", "bf16")]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "precision"), TIED)
def test_the_gradient_of_a_tied_head_waits_for_the_embedding(family: str, precision: str) -> None:
    """The first block's backward holds it: AccumulateGrad runs when both uses of the weight have given theirs."""
    attention = "eager" if family == "gemma2" else "flash"
    steps = timeline.step_timeline(
        family, precision=precision, recompute="full", optimizer="loop", batch=BATCH, seq=SEQ, layers=LAYERS,
        attention=attention, **SIZES[family],
    )  # fmt: skip
    words = {"attention": attention} if attention != "flash" else {}
    compare(
        steps, family, framework="plain", gpus=1, zero=0, global_batch=BATCH, precision=PRECISIONS[precision],
        recompute="full", optimizer_impl="loop", **words,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------------- data parallel

DDP = [
    ("llama-3", "bf16", "none", "foreach", 2),
    ("titan", "fp32", "full", "fused", 1),
    pytest.param("llama-3", "fp32", "full", "loop", 2, marks=pytest.mark.slow),
    pytest.param("llama-3", "fp32+autocast", "none", "fused", 1, marks=pytest.mark.slow),
    pytest.param("titan", "bf16", "none", "foreach", 1, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("family", "precision", "recompute", "optimizer", "micro_batches"), DDP)
def test_ddp(family: str, precision: str, recompute: str, optimizer: str, micro_batches: int) -> None:
    """Buckets are a second copy of all gradients."""
    steps = parallel.ddp_timeline(
        family, 8, precision=precision, recompute=recompute, optimizer=optimizer, batch=BATCH, seq=SEQ, layers=LAYERS,
        micro_batches=micro_batches, **SIZES[family],
    )  # fmt: skip
    compare(
        steps, family, framework="ddp", gpus=8, zero=0, global_batch=8 * BATCH * micro_batches,
        precision=PRECISIONS[precision], recompute=recompute, optimizer_impl=optimizer,
    )  # fmt: skip


FSDP2 = [
    # family, ranks, resharded, reduced in, recompute, optimizer, tokens a sequence, micro-batches
    ("llama-3", 8, False, "fp32", "none", "foreach", 128, 2),
    ("titan", 8, True, "fp32", "full", "foreach", 32, 2),
    ("gpt2", 8, True, "fp32", "every-2", "loop", 128, 1),
    *(
        pytest.param(*row, marks=pytest.mark.slow)
        for row in (
            ("llama-3", 8, True, "fp32", "every-2", "loop", 128, 1),
            ("llama-3", 64, True, "bf16", "none", "fused", 128, 2),
            ("llama-3", 64, False, "bf16", "every-3", "fused", 32, 1),
            ("qwen3-moe", 8, True, "fp32", "full", "foreach", 128, 1),
            ("llama-3", 8, False, "bf16", "every-2", "fused", 32, 1),
            ("llama-3", 8, True, "fp32", "every-3", "loop", 32, 1),
            ("llama-3", 64, False, "bf16", "full", "fused", 32, 2),
            ("titan", 64, True, "bf16", "full", "fused", 32, 2),
            ("titan", 8, True, "fp32", "none", "foreach", 128, 2),
            ("titan", 8, True, "fp32", "every-2", "loop", 128, 1),
            ("gpt2", 64, True, "bf16", "none", "fused", 128, 1),
            ("gpt2", 8, False, "fp32", "full", "foreach", 128, 1),
            ("qwen3-moe", 8, True, "fp32", "every-2", "fused", 128, 1),
        )
    ),
]


@pytest.mark.parametrize(
    ("family", "ranks", "reshard", "reduce", "recompute", "optimizer", "seq", "micro_batches"), FSDP2
)
def test_fsdp2(
    family: str, ranks: int, reshard: bool, reduce: str, recompute: str, optimizer: str, seq: int, micro_batches: int
) -> None:
    steps = parallel.fsdp_timeline(
        family, ranks, reshard=reshard, reduce=torch.float32 if reduce == "fp32" else torch.bfloat16, batch=BATCH,
        recompute=recompute, optimizer=optimizer, seq=seq, layers=LAYERS, micro_batches=micro_batches, **SIZES[family],
    )  # fmt: skip
    compare(
        steps, family, framework="fsdp2", gpus=ranks, zero=3 if reshard else 2, seq_len=seq, precision="bf16-mixed",
        global_batch=ranks * BATCH * micro_batches, recompute=recompute, optimizer_impl=optimizer,
        settings={"strategy.reduce_dtype": reduce},
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ pipeline


def one_forward_one_backward(stage: int, stages: int, micro_batches: int) -> int:
    """Run one stage of TitanLlama by hand and return what micro-batches in flight keep before the first backward."""
    own = LAYERS // stages
    with cuda_like("auto"):
        model = models.TitanLlama(**SIZES["titan"], layers=LAYERS, dtype=torch.bfloat16)
        line = Timeline(Where(model, models.blocks_of(model)))
        for tensor in (*model.parameters(), *model.buffers()):
            line.add(tensor, "parameter")
        graphs = []
        with line:
            before = line.live
            for _ in range(min(stages - stage, micro_batches)):
                if stage == 0:
                    x = model.tok_embeddings(torch.zeros(BATCH, SEQ, dtype=torch.long))
                else:
                    x = torch.empty(BATCH, SEQ, 256, dtype=torch.bfloat16, requires_grad=True)
                for block in model.layers[stage * own : (stage + 1) * own]:
                    x = block(x, model.turns)
                graphs.append(x.grad_fn)
                del x
            return line.live - before - len(graphs) * BATCH * SEQ * 8 * (stage == 0)  # the tokens' numbers


@pytest.mark.parametrize(("stage", "stages", "micro_batches"), [(0, 2, 4), (0, 4, 8), (1, 4, 8), (2, 4, 8), (0, 4, 2)])
def test_micro_batches_in_flight(stage: int, stages: int, micro_batches: int) -> None:
    """What a stage holds where 1F1B turns to its first backward, in the events' own order."""
    census, ledger = ours(
        "titan", framework="fsdp2", gpus=stages, pp=stages, zero=2, precision="bf16", micro_batch=BATCH,
        global_batch=BATCH * micro_batches, recompute="none",
    )  # fmt: skip
    alive: dict[int, int] = {}
    names = {r.name for a in census_templates(census) for r in a.records} | {"embedding output"}
    for kind, key, size, _, name in step_events(census, ledger, stage, observed=False):
        if kind == "mark" and name == "loss":
            break
        if kind == "alloc" and name in names:
            alive[key] = size
        elif kind == "free":
            alive.pop(key, None)
    assert sum(alive.values()) == pytest.approx(one_forward_one_backward(stage, stages, micro_batches), rel=WITHIN)


def census_templates(census: ModelOnGrid) -> list[Any]:
    """Return the execution of each group's blocks."""
    from memcalc.terms.activations import groups_of

    return [a.template(census.grid.policies[0], a.settings[0], untreated=True) for a in groups_of(census)]


# ------------------------------------------------------------------------------------------------------------ adapters

TARGETS = {"attention": ["q_proj", "k_proj", "v_proj", "o_proj"]}
TARGETS["all"] = [*TARGETS["attention"], "gate_proj", "up_proj", "down_proj"]
LORA = [
    # targets, dropout, recompute, reentrant checkpoints, autocast
    ("attention", 0.05, "none", False, False),
    ("all", 0.05, "full", True, False),
    pytest.param("attention", 0.0, "full", False, False, marks=pytest.mark.slow),
    pytest.param("all", 0.05, "none", False, True, marks=pytest.mark.slow),
    *(
        pytest.param(targets, dropout, *checkpoints, autocast, marks=pytest.mark.slow)
        for targets, dropout, checkpoints, autocast in covering(
            3, TARGETS, (0.0, 0.05), (("none", False), ("full", True), ("full", False)), (False, True)
        )
    ),
]


def lora_steps(
    targets: str, dropout: float, recompute: str, *, reentrant: bool, autocast: bool, dora: bool = False
) -> timeline.Steps:
    """Train fp32 adapters of PEFT over a frozen 16-bit Llama."""
    peft = pytest.importorskip("peft")
    with cuda_like("auto"):
        base, _, config = measure.build(
            "llama-2", precision="bf16", attention="flash", dropout=None, recompute="none", batch=BATCH, seq=SEQ,
            layers=LAYERS, **LLAMA,
        )  # fmt: skip
        if recompute == "full":
            base.gradient_checkpointing_enable({"use_reentrant": reentrant})
        adapters = peft.LoraConfig(
            r=16, target_modules=TARGETS[targets], lora_dropout=dropout, init_lora_weights=False, use_dora=dora
        )
        model = peft.get_peft_model(base, adapters).train()
        if recompute == "full":
            model.enable_input_require_grads()
        inputs = models.hf_inputs("llama-2", config, BATCH, SEQ, torch.bfloat16)

        def run() -> Any:
            with torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext():
                return model(**inputs).loss

        return timeline.train(model, run, timeline.adamw(model, "fused"))


@pytest.mark.parametrize(("targets", "dropout", "recompute", "reentrant", "autocast"), LORA)
def test_adapters(targets: str, dropout: float, recompute: str, reentrant: bool, autocast: bool) -> None:
    steps = lora_steps(targets, dropout, recompute, reentrant=reentrant, autocast=autocast)
    settings = {"strategy.checkpoint": "reentrant" if reentrant else "non-reentrant", "workload.lora_dropout": dropout}
    compare(
        steps, "llama-2", framework="hf", gpus=1, zero=0, global_batch=BATCH, precision="bf16", recompute=recompute,
        optimizer_impl="fused", lora="16:q,k,v,o" if targets == "attention" else "16:all-linear", adapter_dtype="fp32",
        autocast=autocast, settings=settings,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("targets", "dropout", "recompute", "autocast"),
    [
        pytest.param("attention", 0.0, "none", False, marks=pytest.mark.slow),
        ("all", 0.05, "full", True),
        pytest.param("all", 0.0, "full", False, marks=pytest.mark.slow),
    ],
)
def test_adapters_with_magnitudes(targets: str, dropout: float, recompute: str, autocast: bool) -> None:
    """PEFT's DoRA, whose weights that stand beside the products are in the peaks."""
    steps = lora_steps(targets, dropout, recompute, reentrant=False, autocast=autocast, dora=True)
    settings = {"strategy.checkpoint": "non-reentrant", "workload.lora_dropout": dropout}
    compare(
        steps, "llama-2", framework="hf", gpus=1, zero=0, global_batch=BATCH, precision="bf16", recompute=recompute,
        optimizer_impl="fused", lora="16:q,k,v,o" if targets == "attention" else "16:all-linear", adapter_dtype="fp32",
        autocast=autocast, settings={**settings, "strategy.lora_kernels": "dora"},
    )  # fmt: skip
