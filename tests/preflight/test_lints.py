"""Each trap is found where a configuration stands in it, and not beside it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import memcalc
from memcalc.convert.config import JOB_KEYS, Config, Setting
from memcalc.convert.document import Document
from memcalc.preflight.job import estimate_merged
from memcalc.preflight.lints import LINTS, LintContext, lints
from memcalc.preflight.merge import merge

ROOT = Path(__file__).resolve().parents[2]
TRAPS_PAGE = ROOT / "docs" / "traps.md"
PACKAGE = ROOT / "memcalc"
JOB = {"model": "llama-2-7b", "gpu": "a100-80g", "gpus": 8, "seq_len": 2048, "micro_batch": 2, "accumulation": 2}


def scene(*more: dict[str, Any], **words: Any) -> LintContext:
    """A job of one file that says some words, and further files that say more."""
    files = [{**JOB, **words}, *more]
    configs = [
        Config(
            Document(Path(f"{place}.json"), "json", "{}", {}),
            "deepspeed",
            tuple(Setting(name, value, name) for name, value in said.items()),
        )
        for place, said in enumerate(files)
    ]
    job = merge(configs, {})
    return LintContext(job, tuple(configs), estimate_merged(job, ()))


def found(*more: dict[str, Any], **words: Any) -> dict[str, str]:
    """Codes with messages of what is found in a job."""
    asked = scene(*more, **words)
    listed = [*asked.job.findings, *lints(asked)]
    return {finding.code: finding.message for _, finding in listed}


ZERO3 = {"framework": "deepspeed", "zero": 3, "precision": "bf16-mixed"}
FSDP = {"framework": "fsdp2", "zero": 3}
STANDS_IN = {
    "MC101": {"framework": "ddp", "mixed": "bf16", "weights": "fp32"},
    "MC102": {**FSDP, "mixed": "bf16", "weights": "bf16"},
    "MC103": {"framework": "hf", "gpus": 1, "precision": "bf16", "optimizer": "adamw-8bit", "recompute": "full",
              "strategy.wide_embedding_moments": True},
    "MC104": {**FSDP, "precision": "bf16-mixed", "recompute": "full", "strategy.checkpoint": "reentrant"},
    "MC105": {"framework": "ddp", "precision": "bf16"},
    "MC106": {**ZERO3, "train_batch": 48},
    "MC107": {"framework": "megatron", "precision": "bf16-mixed", "sp": True},
    "MC108": {**FSDP, "precision": "bf16-mixed", "model": "llama-3-8b"},
    "MC109": {**ZERO3, "accumulation": 8},
    "MC110": {"framework": "torchtitan", "zero": 3, "precision": "bf16-mixed", "compile": "model", "recompute": "full"},
    "MC111": {**FSDP, "precision": "bf16-mixed", "evaluates": True, "eval_micro_batch": 8},
    "MC112": {**FSDP, "precision": "bf16-mixed", "varying_lengths": True},
    "MC113": {**ZERO3, "offload": ("optimizer",), "host_memory": 64 * 2**30},
    "MC114": {**FSDP, "precision": "bf16-mixed", "micro_batch": 1, "accumulation": 4, "recompute": "full"},
    "MC116": {"framework": "hf", "zero": 3, "precision": "bf16-mixed", "evaluates": True, "eval_micro_batch": 2},
    "MC117": {**FSDP, "precision": "bf16-mixed", "model": "mixtral-8x7b", "gpus": 16, "recompute": "full",
              "seq_len": 4096, "micro_batch": 8, "accumulation": 1},
    "MC118": {"engine": "trainer", "weights": "bf16", "mixed": "bf16"},
    "MC119": {"engine": "ddp", "weights": "fp16", "mixed": "fp16"},
    "MC120": {"framework": "megatron", "precision": "bf16-mixed", "gpus": 64, "zero": 1, "accumulation": 1,
              "strategy.overlap_comm": False, "strategy.overlap_param_gather": False},
}  # fmt: skip
STANDS_BESIDE = {
    "MC101": {"mixed": "no", "weights": "bf16"},
    "MC102": {"weights": "fp32"},
    "MC103": {"strategy.wide_embedding_moments": False},
    "MC104": {"strategy.checkpoint": "non-reentrant"},
    "MC105": {"framework": "hf", "zero": 3},
    "MC106": {"train_batch": 32},
    "MC107": {"tp": 2},
    "MC108": {"loss": "chunked"},
    "MC109": {"zero": 2},
    "MC110": {"compile": "blocks"},
    "MC111": {"eval_micro_batch": 2},
    "MC112": {"strategy.expandable_segments": True},
    "MC113": {"host_memory": 512 * 2**30},
    "MC114": {"accumulation": 1},
    "MC116": {"eval_accumulation": 1},
    "MC117": {"gpus": 8},
    "MC118": {"zero": 0},
    "MC119": {"lora": "16"},
    "MC120": {"strategy.overlap_comm": True, "strategy.overlap_param_gather": True},
}
"""What takes each job out of its trap."""


@pytest.mark.parametrize("code", STANDS_IN)
def test_a_trap_is_found_where_the_job_stands_in_it_alone(code: str) -> None:
    assert code in found(**STANDS_IN[code])
    assert code not in found(**{**STANDS_IN[code], **STANDS_BESIDE[code]})


def test_fp16_weights_count_as_their_edit_loads_them_where_their_gradients_are_scaled() -> None:
    """Accelerate casts what FSDP trains to fp32, DeepSpeed scales by itself, and without ``fp16`` nothing is scaled."""
    loaded = {"weights": "fp16", "mixed": "fp16"}
    assert scene(engine="ddp", **loaded).strategy.precision == "fp16-autocast"
    assert scene(engine="ddp", **loaded, gpu="v100-32g").estimate.components.parameters == 4 * 6_738_415_616
    assert "MC119" in found(engine="fsdp2", zero=3, casts_shards=False, **loaded)
    trains = ({"engine": "fsdp2", "zero": 3}, {"engine": "deepspeed", "zero": 2}, {"engine": "ddp", "mixed": "no"})
    assert not any("MC119" in found(**{**loaded, **words}) for words in trains)
    assert "MC101" in found(engine="ddp", weights="fp32", mixed="fp16")
    assert "MC101" not in found(engine="ddp", weights="fp32", mixed="fp16", gpu="v100-32g")


def test_replicas_are_proposed_where_they_are_smaller_alone() -> None:
    few = {**STANDS_IN["MC117"], "accumulation": 2, "micro_batch": 2, "seq_len": 2048}
    whole, halves = scene(**few).estimate, scene(**few, dp_replicate=2).estimate
    assert halves.peak.device > whole.peak.device
    assert "MC117" not in found(**few)


def test_reentrant_checkpoints_are_deepspeeds_own_and_the_trainer_keeps_the_graph() -> None:
    """With frozen weights those that are not fail under ZeRO-3 up to DeepSpeed 0.19.2 (transformers#47254)."""
    words = {"recompute": "full", "strategy.checkpoint": "reentrant"}
    assert "MC104" not in found(**ZERO3, lora="16", **words)
    own = found(framework="fsdp2", zero=3, lora="16", **words)["MC104"]
    trainers = found(framework="hf", zero=3, lora="16", engine="trainer", **words)["MC104"]
    assert ("embeddings" in own, "embeddings" in trainers) == (True, False)


def test_a_larger_batch_is_proposed_where_it_fits_and_is_faster() -> None:
    message = found(**STANDS_IN["MC114"])["MC114"]
    share = int(re.search(r"micro-batch 2 × 2 fits and is (\d+)% faster", message).group(1))
    small, large = (scene(**{**STANDS_IN["MC114"], "micro_batch": n, "accumulation": 4 // n}).estimate for n in (1, 2))
    speeds = [estimate.time.tokens_per_second_per_gpu for estimate in (small, large)]
    assert large.verdict == "fits"
    assert share == round(100 * (speeds[1] / speeds[0] - 1)) > 5
    bound = {**STANDS_IN["MC114"], "gpus": 1, "framework": "hf", "zero": 0, "lora": "16", "precision": "bf16"}
    assert "MC114" not in found(**bound)  # one GPU sends no messages


def test_what_the_files_evaluate_is_counted_and_nothing_else() -> None:
    words = {"framework": "hf", "zero": 3, "precision": "bf16-mixed", "recompute": "full", "eval_micro_batch": 256}
    silent, evaluating = (scene(**words, evaluates=evaluates).estimate for evaluates in (False, True))
    assert "evaluation" not in {occasion.name for occasion in silent.occasions}
    assert (silent.verdict, evaluating.verdict) == ("fits", "does-not-fit")
    assert silent.peak == evaluating.peak
    assert "workload.eval_micro_batch=256" in evaluating.command
    own = scene(**words, evaluates=True, **{"workload.eval_micro_batch": 1})
    assert own.estimate.verdict == "fits"


def test_kept_logits_are_of_all_ranks_in_fp32() -> None:
    message = found(**STANDS_IN["MC116"])["MC116"]
    assert f"{8 * 2 * 2048 * 32000 * 4 / 2**30:.1f} GiB of all ranks" in message


def test_a_policy_of_operators_under_compile_is_told_its_tag() -> None:
    words = {**STANDS_IN["MC110"], "compile": "blocks"}
    assert "MUST_SAVE" in found(**{**words, "recompute": "selective-ops"})["MC110"]
    assert "MC110" not in found(**{**words, "recompute": "selective-ops", "compile": "none"})


def test_the_optimizer_that_runs_is_that_of_the_later_file() -> None:
    said = found({"optimizer": "adamw", "engine": "deepspeed"}, optimizer="adamw-8bit", precision="bf16-mixed", zero=2)
    assert "adamw-8bit is set here, but another file selects adamw" in said["MC103"]
    assert "adamw-8bit" in said["MC003"]


def test_wide_moments_of_embeddings_are_six_bytes_a_weight_more() -> None:
    words = {"gpu": "a100-80g", "framework": "hf", "zero": 0, "precision": "bf16", "optimizer": "adamw-8bit"}
    narrow = memcalc.estimate(model="llama-3-8b", **words)
    wide = memcalc.estimate(model="llama-3-8b", **words, settings={"strategy.wide_embedding_moments": True})
    table = 128256 * 4096
    # two moments of 4 bytes for two of 1 byte with an fp32 scale for each 256 elements
    assert wide.components.optimizer - narrow.components.optimizer == table * 8 - table * 2 - 2 * 4 * table // 256


def test_host_memory_is_what_the_estimate_says_it_needs() -> None:
    asked = scene(**STANDS_IN["MC113"])
    # 6.74e9 parameters with an fp32 master and two moments, over 8 ranks of one node
    assert asked.estimate.host_memory > 12 * 6_738_415_616
    messages = [finding.message for _, finding in lints(asked) if finding.code == "MC113"]
    assert f"{asked.estimate.host_memory / 2**30:.1f} GiB" in messages[0]
    assert "64.0 GiB" in messages[0]


def test_a_job_that_asks_its_queue_for_too_little_host_memory_does_not_fit() -> None:
    enough, short = {**ZERO3, "offload": ("optimizer",)}, STANDS_IN["MC113"]
    assert scene(**enough).estimate.verdict == "fits"
    # 6.74e9 parameters with an fp32 master and two moments are 75 GiB, and 64 are requested
    estimate = scene(**short).estimate
    assert estimate.verdict == "does-not-fit"
    assert estimate.reason.startswith("host memory requested of the queue lacks ")
    assert scene(**{**short, "host_memory": 2**40}).estimate.verdict == "fits"
    assert scene(**{**ZERO3, "host_memory": 64 * 2**30}).estimate.verdict == scene(**ZERO3).estimate.verdict


def test_second_gradients_are_as_large_as_the_gradients() -> None:
    said = found(**STANDS_IN["MC105"])["MC105"]
    assert f"{2 * 6_738_415_616 / 2**30:.1f} GiB" in said


def test_every_code_has_its_section() -> None:
    page = TRAPS_PAGE.read_text(encoding="utf-8")
    sections = re.findall(r"^## (MC\d+)$", page, re.MULTILINE)
    source = "".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py"))
    assert sections == sorted(set(re.findall(r"\bMC\d{3}\b", source)))
    assert {*LINTS, *STANDS_IN} <= set(sections)


def test_facts_are_no_words_of_an_estimate() -> None:
    from memcalc.specs.options import WORDS

    assert not set(JOB_KEYS) & set(WORDS)
