"""Random small training jobs: the peak of a whole step, by memcalc and by PyTorch itself on fake tensors.

    python tests/differential.py --jobs 500 --seed 1
    python tests/differential.py --jobs 100 --first 50    # jobs 50 to 99 of the same

Each job is a family of Transformers (or torchtitan's plain Llama) with sizes, precision, recomputation, sharding,
tensor parallelism, optimizer, loss, adapters and accumulation drawn at random. The peak of the real class's
second step is compared with the replay of the same config. Jobs with tensor parallelism, replicas of shards
or a policy inside of blocks run the script that is written for them. Jobs that differ by more than a hundredth are
printed, largest first, each with the mechanism that is left out where that is known.
"""

from __future__ import annotations

import argparse
import random
import sys
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from autograd import exported, measure, models, parallel, timeline

import memcalc
from memcalc import api
from memcalc.allocator import replay
from memcalc.convert.formats import get_format, render_config
from memcalc.convert.formats.base import ConfigJob
from memcalc.convert.huggingface import from_huggingface
from memcalc.events import step_events
from memcalc.frameworks import habits_of
from memcalc.probe.live.cuda_like import cuda_like
from memcalc.specs.flat import from_flat
from memcalc.terms.build import build_ledger
from memcalc.terms.model_on_grid import ModelOnGrid
from memcalc.terms.overhead import Workspaces

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memcalc.specs.model import Model

DECODERS = (
    "gpt2", "gpt-neox", "opt", "bloom", "falcon-7b", "falcon-40b", "llama-2", "llama-3", "smollm2", "mistral",
    "mistral-window", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "gemma3-wide", "phi3", "olmo2", "starcoder2",
    "mixtral", "qwen3-moe", "gpt-oss", "deepseek-v2", "deepseek-v3", "titan",
)  # fmt: skip
PRECISIONS = {"bf16": "bf16", "fp32": "fp32", "fp32+autocast": "bf16-autocast"}
LAYERS_OF: dict[str, str | list[str]] = {
    "PEFT's own": "all-linear",
    "stacked": [],
    "stacked and attention": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "inner stack": [],
    "attention": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "all": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "all, shared gate": [
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
        "shared_expert_gate",
    ],
    "latent": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"],
    "latent, whole queries": ["q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"],
}
PARAMETERS_OF = {
    "stacked": ["experts.gate_up_proj", "experts.down_proj"],
    "stacked and attention": ["experts.gate_up_proj", "experts.down_proj"],
    "inner stack": ["experts.gate_up_proj"],
}
"""What has adapters though it is no layer, by PEFT's ``target_parameters``."""
AUTOCAST = "+autocast"
WORDS_OF = {
    "PEFT's own": "all-linear", "stacked": "experts_gate_up,experts_down", "inner stack": "experts_gate_up",
    "stacked and attention": "q,k,v,o,experts_gate_up,experts_down",
    "attention": "q,k,v,o", "all": "all-linear", "all, shared gate": "all-linear", "latent": "q_a,q_b,kv_a,kv_b,o",
    "latent, whole queries": "q,kv_a,kv_b,o",
}  # fmt: skip
"""The same in memcalc's words."""
ADAPTED = ("llama-2", "llama-3", "mistral", "qwen2", "qwen3", "gemma")
EVERY_ONLY_PLAIN = ("none", "full", "every-2", "every-3")
WITHIN_BLOCKS = (*EVERY_ONLY_PLAIN, "mlp", "attention", "selective-ops")
RULES = ("adamw", "adamw", "sgd-momentum", "sgd", "sgd + decay")
DECAY = " + decay"
"""Ends the name of a rule with weight decay."""
NO_ROWS = ("tied", "tie_word_embeddings", "heads", "n_head", "num_attention_heads", "kv", "kv_heads",
           "num_key_value_heads", "num_kv_heads")  # fmt: skip
"""Sizes that are not the rows of a weight: heads have 16 elements at least."""
SCRIPT = "the FSDP 2 script"
"""Jobs of a Llama that the exported script trains."""


@dataclass(frozen=True)
class Job:
    """One training job; ``sizes`` are fields of the family's own config."""

    family: str
    sizes: dict[str, Any]
    layers: int | None
    batch: int
    seq: int
    precision: str
    recompute: str
    rule: str
    optimizer: str
    loss: str
    attention: str
    framework: str
    ranks: int = 1
    micro_batches: int = 1
    reshard: bool = True
    reduce: str = "fp32"
    adapters: str = ""
    rank: int = 8
    dropout: float = 0.0
    tp: int = 1
    dp_replicate: int = 1

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in vars(self).items())


@dataclass(frozen=True)
class Outcome:
    """Peaks [bytes] of the second step, workspaces left out."""

    real: int
    closed: int
    replayed: int

    @property
    def error(self) -> float:
        """The replay's relative error."""
        return self.replayed / self.real - 1


# -------------------------------------------------------------------------------------------------------------- drawing


def sizes(family: str, draw: random.Random) -> dict[str, Any]:
    """Return sizes in the names of the family's config."""
    width, heads = draw.choice((128, 192, 256, 384)), draw.choice((4, 8))
    ffn, vocab = draw.choice((2, 3, 4)) * width + draw.choice((0, 16)), draw.choice((613, 1088, 2048, 4096))
    kv = draw.choice([n for n in (1, 2, 4, 8) if heads % n == 0])
    if family == "titan":
        return {"dim": width, "heads": heads, "kv": kv, "ffn": ffn, "vocab": vocab}
    if family == "gpt2":
        return {"n_embd": width, "n_head": heads, "n_inner": ffn, "vocab_size": vocab, "n_positions": 512}
    if family == "bloom":
        return {"hidden_size": width, "n_head": heads, "vocab_size": vocab}
    common = {"hidden_size": width, "num_attention_heads": heads, "vocab_size": vocab}
    if family == "opt":
        return common | {"word_embed_proj_dim": width, "ffn_dim": ffn}
    if family.startswith("falcon"):
        return common | {"ffn_hidden_size": ffn} | ({"num_kv_heads": kv} if family == "falcon-40b" else {})
    if family.startswith("deepseek"):
        return common | {"num_key_value_heads": heads, "intermediate_size": ffn}
    if family == "gpt-neox":
        return common | {"intermediate_size": ffn}
    tied = {"tie_word_embeddings": draw.random() < 0.3}
    return common | {"num_key_value_heads": kv, "intermediate_size": ffn} | tied


def draw_job(draw: random.Random) -> Job:
    """Return a job that the harness and memcalc can both run."""
    family = draw.choice((*DECODERS, SCRIPT, SCRIPT, SCRIPT))
    if family == SCRIPT:
        return draw_scripted(draw)
    adapters = draw.choice(("", "attention", "all")) if family in ADAPTED else ""
    sharding = "none" if adapters else draw.choice(("none", "none", "ddp", "fsdp2"))
    eager = family in {"bloom", "gemma2", "gpt-oss"}
    micro_batches = 1 if adapters else draw.choice((1, 1, 2, 3))
    rule = "adamw" if adapters else draw.choice(RULES)
    return Job(
        family=family,
        sizes=sizes(family, draw),
        layers=draw.choice((2, 3, 4, 6)),
        batch=draw.choice((1, 2, 3)),
        seq=draw.choice((32, 64, 128, 192)),
        precision="bf16" if adapters else ("fp32" if sharding == "fsdp2" else draw.choice(tuple(PRECISIONS))),
        recompute=draw.choice(("none", "full")) if adapters else draw.choice(EVERY_ONLY_PLAIN),
        rule=rule,
        optimizer="fused" if adapters else draw.choice(forms_of(rule, sharded=sharding == "fsdp2")),
        loss=draw.choice(("standard", "chunked")) if family == "titan" else "standard",
        attention="eager" if eager or (family != "titan" and draw.random() < 0.2) else "flash",
        framework="hf" if adapters else ("plain" if sharding == "none" else sharding),
        ranks=1 if sharding == "none" else draw.choice((2, 8)),
        micro_batches=micro_batches,
        reshard=draw.random() < 0.7,
        reduce=draw.choice(("fp32", "bf16")),
        adapters=adapters,
        rank=draw.choice((4, 8, 16)),
        dropout=draw.choice((0.0, 0.05)),
    )


def forms_of(rule: str, *, sharded: bool) -> tuple[str, ...]:
    """How an optimizer can step: DTensor has no fused SGD."""
    return ("foreach", "loop") if sharded and rule != "adamw" else ("foreach", "fused", "loop")


def draw_scripted(draw: random.Random) -> Job:
    """Return a job of the script that export writes for FSDP 2."""
    tp, dp_replicate, shards = draw.choice((1, 2, 4)), draw.choice((1, 1, 2)), draw.choice((2, 4))
    precision, rule = draw.choice(("bf16", "fp32", "bf16-mixed", "bf16-autocast")), draw.choice(RULES)
    sizes = {
        "hidden": draw.choice((256, 512)), "ffn": draw.choice((512, 768, 1024)), "vocab": draw.choice((2048, 4096)),
        "heads": 8, "kv_heads": 8 if precision == "fp32" else draw.choice((4, 8)), "tied": draw.random() < 0.3,
    }  # fmt: skip
    return Job(
        family=SCRIPT,
        sizes=sizes,
        layers=draw.choice((2, 3, 4, 6)),
        batch=draw.choice((1, 2, 3)),
        seq=draw.choice((32, 64, 128, 192)),
        precision=precision,
        recompute=draw.choice(WITHIN_BLOCKS),
        rule=rule,
        optimizer=draw.choice(forms_of(rule, sharded=True)),
        loss="standard",
        attention="efficient" if precision == "fp32" else "flash",
        framework="fsdp2",
        ranks=tp * dp_replicate * shards,
        micro_batches=draw.choice((1, 1, 2, 3)),
        reshard=draw.random() < 0.7,
        reduce=draw.choice(("fp32", "bf16")),
        tp=tp,
        dp_replicate=dp_replicate,
    )


def draw_jobs(count: int, seed: int) -> Iterator[Job]:
    """Return ``count`` jobs, the same for the same seed."""
    draw = random.Random(seed)  # noqa: S311
    for _ in range(count):
        yield draw_job(draw)


# -------------------------------------------------------------------------------------------------------------- PyTorch


def script(job: Job) -> str:
    """Return the script that is exported for a job."""
    spec = model_of(job)
    found = memcalc.estimate(model=spec, gpu="h100", **words_of(job))
    return render_config(get_format("fsdp2"), replace(ConfigJob.of(found, spec), model=spec.name))


def real_peak(job: Job) -> timeline.Event:
    """Train the real class on fake tensors and return the moment at which most bytes are live.

    One step is run, with the optimizer's states of an earlier one; DDP's buckets come with a first step alone.
    Gradients are added up in all micro-batches but the first, so that two stand for more.
    """
    job = replace(job, micro_batches=min(job.micro_batches, 2))
    steps = real_steps(job)
    return steps.peak(max(event.step for event in steps.events))


def real_steps(job: Job) -> timeline.Steps:
    """Train the real class."""
    if job.family == SCRIPT:
        return exported.steps_of(script(job), job.ranks, job.attention)
    common: dict[str, Any] = {
        "recompute": job.recompute, "optimizer": job.optimizer, "batch": job.batch, "seq": job.seq,
        "layers": job.layers, "attention": job.attention, "micro_batches": job.micro_batches, "rule": job.rule,
        "first": habits_of(job.framework).checkpoints_first, "steps": 2 if job.framework == "ddp" else 1,
    }  # fmt: skip
    if job.family == "titan":  # the table of rotations is as long as the sequence
        common |= {"longest": job.seq, "loss": job.loss}
    if job.adapters:
        return adapted_steps(job)
    if job.framework == "fsdp2":
        reduce = torch.float32 if job.reduce == "fp32" else torch.bfloat16
        return parallel.fsdp_timeline(job.family, job.ranks, reshard=job.reshard, reduce=reduce, **common, **job.sizes)
    if job.framework == "ddp":
        return parallel.ddp_timeline(job.family, job.ranks, precision=job.precision, **common, **job.sizes)
    return timeline.step_timeline(job.family, precision=job.precision, **common, **job.sizes)


def adapted_steps(job: Job) -> timeline.Steps:
    """Train fp32 adapters of PEFT over a frozen 16-bit base, or under autocast over one of fp32."""
    import peft

    with cuda_like("auto" if job.attention == "flash" else job.attention):
        base, _, config = measure.build(
            job.family, precision=job.precision.removesuffix(AUTOCAST), attention=job.attention, dropout=None,
            recompute="none", batch=job.batch,
            seq=job.seq, layers=job.layers, **job.sizes,
        )  # fmt: skip
        dtype, cast = next(base.parameters()).dtype, job.precision.endswith(AUTOCAST)
        if job.recompute == "full":
            base.gradient_checkpointing_enable({"use_reentrant": False})
        wanted = peft.LoraConfig(
            r=job.rank, target_modules=LAYERS_OF[job.adapters], lora_dropout=job.dropout, init_lora_weights=False,
            target_parameters=PARAMETERS_OF.get(job.adapters),
        )  # fmt: skip
        model = peft.get_peft_model(base, wanted).train()
        if job.recompute == "full":
            model.enable_input_require_grads()
        inputs = models.hf_inputs(job.family, config, job.batch, job.seq, dtype)

        def run() -> torch.Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=cast):
                loss: torch.Tensor = model(**inputs).loss
                return loss

        return timeline.train(model, run, timeline.adamw(model, job.optimizer), 1)


# -------------------------------------------------------------------------------------------------------------- memcalc


def model_of(job: Job) -> Model:
    """Return the model as a user's config.json, or an inline table, gives it."""
    if job.family == SCRIPT:
        config = {
            "hidden_size": job.sizes["hidden"], "intermediate_size": job.sizes["ffn"], "num_hidden_layers": job.layers,
            "num_attention_heads": job.sizes["heads"], "num_key_value_heads": job.sizes["kv_heads"],
            "vocab_size": job.sizes["vocab"], "tie_word_embeddings": job.sizes["tied"],
        }  # fmt: skip
        return from_flat({
            "name": "small", "n_layers": job.layers, "max_positions": 4096, "gated": True, "norm": "rmsnorm",
            "positions": "rope", "family": "llama", "hf_class": "LlamaForCausalLM", "hf_config": config, **job.sizes,
        })  # fmt: skip
    if job.family == "titan":
        s = job.sizes
        return from_flat({
            "n_layers": job.layers, "hidden": s["dim"], "heads": s["heads"], "kv_heads": s["kv"], "ffn": s["ffn"],
            "vocab": s["vocab"], "max_positions": 4096,
        })  # fmt: skip
    config = models.hf_config(job.family, layers=job.layers, **job.sizes)
    known = {*type(config)().to_dict(), "head_dim"}
    return from_huggingface({name: value for name, value in config.to_dict().items() if name in known})


def words_of(job: Job) -> dict[str, Any]:
    """Return the job in memcalc's words."""
    words: dict[str, Any] = {
        "framework": job.framework, "gpus": job.ranks, "seq_len": job.seq, "micro_batch": job.batch,
        "global_batch": job.batch * job.ranks // job.tp * job.micro_batches, "recompute": job.recompute,
        "optimizer": job.rule.removesuffix(DECAY), "loss": job.loss, "optimizer_impl": job.optimizer,
        "kernels": "fused" if job.family == "titan" else "model",
        "precision": PRECISIONS.get(job.precision, job.precision), "zero": 0,
        "settings": {"strategy.checkpoint": "non-reentrant"},
    }  # fmt: skip
    if job.family == SCRIPT:
        words |= {"zero": 3 if job.reshard else 2, "attention": job.attention}
        words |= {"tp": job.tp} if job.tp > 1 else {}
        words |= {"dp_replicate": job.dp_replicate} if job.dp_replicate > 1 else {}
        words["settings"] = {"strategy.reduce_dtype": job.reduce}
    elif job.family != "titan":
        words["attention"] = "sdpa" if job.attention == "flash" else job.attention
    if job.rule.endswith(DECAY):
        words["settings"] = words["settings"] | {"strategy.sgd_weight_decay": True}
    if job.family == SCRIPT:
        return words
    if job.framework == "fsdp2":
        words |= {"precision": "bf16-mixed", "zero": 3 if job.reshard else 2}
        words["settings"] = words["settings"] | {"strategy.reduce_dtype": job.reduce}
    if job.adapters:
        words |= {"lora": f"{job.rank}:{WORDS_OF[job.adapters]}"}
        words |= {} if job.precision.endswith(AUTOCAST) else {"adapter_dtype": "fp32", "autocast": False}
        words["settings"] = words["settings"] | {"workload.lora_dropout": job.dropout}
    return words


def ours(job: Job) -> tuple[int, int]:
    """Return the peak by the closed form, and by the replay [bytes]."""
    single = api.single(model=model_of(job), gpu="h100", **words_of(job))
    census = ModelOnGrid(single.job.model, single.grid)
    ledger = build_ledger(census, Workspaces(0, 0))
    replayed = replay(step_events(census, ledger, 0, observed=False)).peak_requested
    return int(np.max(ledger.peak())), replayed


def outcome(job: Job) -> Outcome:
    """Return the peaks of one job by both."""
    return Outcome(real_peak(job).live, *ours(job))


def left_out(job: Job) -> str:
    """Return the mechanism by which a job may differ, or nothing."""
    if job.framework == "fsdp2" and job.family == "titan":
        return "the last block is gathered ahead before a loss that runs outside of the model, not after it"
    rows = [size for name, size in job.sizes.items() if name not in NO_ROWS]
    if job.framework == "fsdp2" and any(size % (job.ranks // job.dp_replicate) for size in rows):
        return "FSDP 2 fills up the first dimension of every weight, not of experts alone"
    return ""


def told(job: Job, peaks: Outcome) -> str:
    """Return one job's errors in a line."""
    closed, named = peaks.closed / peaks.real - 1, left_out(job) or "not explained"
    return f"{peaks.error:+8.2%} replayed, {closed:+8.2%} closed, of {peaks.real:,} bytes, {named}: {job}\n"


def main() -> None:
    """Run jobs and print those that differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=500, help="draw so many")
    parser.add_argument("--first", type=int, default=0, help="the number of the first job that is run, for a part")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--within", type=float, default=0.01)
    asked = parser.parse_args()
    if not 0 <= asked.first < asked.jobs:
        parser.error(f"--first is {asked.first}, and must be one of the {asked.jobs} jobs that --jobs draws, from 0 on")
    rows, write = [], sys.stdout.write
    for number, job in islice(enumerate(draw_jobs(asked.jobs, asked.seed)), asked.first, None):
        try:
            rows.append((job, outcome(job)))
        except Exception as error:  # noqa: BLE001  # a job that cannot be run is told with the others
            write(f"{number}: {type(error).__name__}: {str(error)[:300]}: {job}\n")
    far = sorted((row for row in rows if abs(row[1].error) > asked.within), key=lambda row: -abs(row[1].error))
    for job, peaks in far:
        write(told(job, peaks))
    named = sum(bool(left_out(job)) for job, _ in far)
    median = np.median([abs(peaks.error) for _, peaks in rows])
    share = 1 - len(far) / len(rows)
    write(f"{len(rows)} jobs, {share:.1%} within {asked.within:.0%}, {named} of {len(far)} others named; ")
    write(f"median {median:.3%}\n")


if __name__ == "__main__":
    main()
