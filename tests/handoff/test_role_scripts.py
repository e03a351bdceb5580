"""Scripts that ``memcalc rl --write`` writes: ``memcalc check`` reads them back to the same bytes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import memcalc
from memcalc.cli.app import app
from memcalc.errors import CombinationError
from memcalc.handoff.role_scripts import role_script
from memcalc.preflight import check
from memcalc.results.posttraining import Rl

SHARED: dict[str, Any] = {"model": "qwen2.5-0.5b", "gpu": "h100", "gpus": 4, "prompt": 512, "response": 768}
VERL: dict[str, Any] = {**SHARED, "algorithm": "grpo", "framework": "verl"}
TRL: dict[str, Any] = {**SHARED, "framework": "trl", "micro_batch": 2}
HALVES: dict[str, Any] = {"prompt": 512, "response": 512}
"""As a file of pairs is read, which says their length alone."""
ONLINE: dict[str, Any] = {**TRL, "algorithm": "grpo", "samples": 4, "max_seqs": 16, "engine_tp": 2}
ALONE: dict[str, Any] = {"trainer": "hf", "gpus": 1, "precision": "bf16-autocast", "optimizer_impl": "fused"}
JOBS = {
    "verl, tokens": {**VERL, "micro_tokens": 8192, "park": "params,optimizer", "reference": True, "samples": 5},
    "verl, samples": {**VERL, "micro_batch": 4, "logprob_batch": 8, "trainer": "fsdp2", "gpus": 16, "sleep": "0"},
    "verl, short": {
        **VERL,
        "micro_batch": 8,
        "mini_batch": 20,
        "samples": 5,
        "padded": True,
        "eager": True,
        "max_batched_tokens": 2048,
    },
    "verl, a step": {**VERL, "micro_batch": 4, "prompts": 64, "samples": 8},
    "verl, PPO": {**VERL, "algorithm": "ppo", "micro_batch": 4, "reference": False, "recompute": "none"},
    "verl, PPO by tokens": {
        **VERL,
        "algorithm": "ppo",
        "micro_tokens": 4096,
        "logprob_tokens": 9000,
        "reference": True,
    },
    "verl, replicas": {**VERL, "gpus": 8, "dp_replicate": 2, "micro_batch": 4, "logprob_tokens": 4096},
    "verl, adapters": {**VERL, "lora": "16:all-linear", "micro_batch": 4, "sleep": "1", "entropy": True},
    "verl, 16 bits": {**VERL, "precision": "bf16", "logits": "fused", "micro_batch": 1, "offload": "activations"},
    "trl, GRPO": {**ONLINE, "sleep": "2", "reference": True},
    "trl, a step": {**TRL, "algorithm": "grpo", "prompts": 64, "samples": 4, "engine_tp": 2, "sleep": "2"},
    "trl, RLOO": {**ONLINE, "algorithm": "rloo", "zero": 2, "reference": False, "utilization": 0.2},
    "trl, DPO": {**TRL, **HALVES, "algorithm": "dpo", "lora": 8, "adapter_dtype": "bf16", "precision": "bf16-mixed"},
    "trl, DPO alone": {**TRL, **ALONE, "algorithm": "dpo", "reference": False},
    "trl, KTO": {**TRL, **HALVES, "algorithm": "kto", "recompute": "none"},
    "trl, ORPO": {**TRL, "algorithm": "orpo"},
    "trl, reward": {**TRL, "algorithm": "reward", **ALONE, "trainer": "ddp", "gpus": 4},
}


@pytest.mark.parametrize("name", JOBS)
def test_what_is_written_is_read_back_to_the_same_bytes(tmp_path: Path, name: str) -> None:
    job = JOBS[name]
    path = tmp_path / "run.sh"
    path.write_text(role_script(**job), encoding="utf-8")
    answer = check([str(path)])
    assert isinstance(answer, Rl)
    expected = memcalc.rl(**job)
    assert (answer.phases, answer.host, answer.verdict) == (expected.phases, expected.host, expected.verdict)
    assert not [text for text in answer.warnings if "run.sh" in text or "not counted" in text]


@pytest.mark.parametrize(
    ("job", "says"),
    [
        ({**VERL, "framework": "openrlhf"}, "settings are written for trl and verl"),
        ({**VERL, "algorithm": "dpo", "micro_batch": 1}, "verl's settings are of grpo, dapo, rloo, ppo"),
        ({**VERL, "micro_batch": 1, "sleep": "1"}, "verl's engines sleep at level 2 here"),
        ({**VERL, "micro_batch": 1, "mini_batch": 12, "samples": 5}, "verl counts prompts: a multiple of --samples"),
        ({**ONLINE, "eager": True}, "it has no mini-batch, and sets its engine's step and graphs itself"),
        ({**VERL, "micro_batch": 1, "zero": 2}, "verl shards weights, gradients and states"),
        ({**VERL, "micro_batch": 1, "attention": "eager"}, "verl's settings have nothing for it"),
        ({**VERL, "micro_batch": 1, "reward_model": "qwen2.5-0.5b"}, "models beside the policy are not written"),
        ({**ONLINE, "engine_gpus": 2}, "TRL's server is a command of its own"),
        ({**ONLINE, "max_seqs": 6}, "a multiple of 4 sequences"),
        ({**ONLINE, "prompts": 64}, "TRL's engine takes its samples of a step at once"),
        ({**TRL, "algorithm": "grpo", "prompts": 63}, "a step of TRL has a multiple of 8 samples"),
        ({**TRL, "algorithm": "dpo", "lora": 8, "precision": "bf16-mixed"}, "say --adapter-dtype bf16"),
        ({**TRL, "algorithm": "dpo", "trainer": "ddp"}, "say --precision bf16-autocast"),
        ({**TRL, "algorithm": "sft"}, "written for its other trainers"),
    ],
)
def test_what_settings_cannot_say_is_refused(job: dict[str, Any], says: str) -> None:
    with pytest.raises(CombinationError) as raised:
        role_script(**job)
    assert says in str(raised.value)


def test_a_step_of_trl_has_the_samples_that_were_asked_for() -> None:
    """GRPOConfig 1.16: a generation has micro-batch × ranks × steps samples, and steps are those of accumulation."""
    script = role_script(**JOBS["trl, a step"])
    (steps,) = re.findall(r"--gradient_accumulation_steps (\d+)", script)
    assert "steps_per_generation" not in script
    assert 2 * 4 * int(steps) == 64 * 4
    shown, stated = (memcalc.rl(**JOBS["trl, a step"], **limit) for limit in ({}, {"max_seqs": 2 * 2 * int(steps)}))
    assert shown.phases == stated.phases


def test_a_step_of_verl_is_no_smaller_than_its_mini_batch() -> None:
    """ActorConfig.validate refuses a train_batch_size below ppo_mini_batch_size, which is 256 by default."""
    script = role_script(**VERL, micro_batch=4, prompts=64)
    sizes = dict(re.findall(r"(train_batch_size|ppo_mini_batch_size)=(\d+)", script))
    assert sizes == {"train_batch_size": "64", "ppo_mini_batch_size": "64"}


def test_a_script_of_verl_has_what_it_does_not_start_without() -> None:
    """utils/config.py, validate_config: a batch of the reference too; critic.yaml: its own model and strategy."""
    script = role_script(**VERL, micro_batch=4, reference=True)
    assert "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4" in script
    script = role_script(**{**VERL, "algorithm": "ppo"}, micro_batch=4, trainer="fsdp2")
    assert {
        "critic.model.path=Qwen/Qwen2.5-0.5B",
        "critic.strategy=fsdp2",
        "critic.ppo_micro_batch_size_per_gpu=4",
    } <= {line.strip(" \\") for line in script.splitlines()}


def test_replicas_of_the_shards_hold_their_states_twice() -> None:
    """HSDP over 2 × 4 ranks: a rank has an fp32 weight and two moments of a quarter, not an eighth, of all weights."""
    job = {**VERL, "gpus": 8, "micro_batch": 1}
    updates = [memcalc.rl(**job, dp_replicate=replicas).phases[-3] for replicas in (1, 2)]
    assert {phase.name for phase in updates} == {"update"}
    more = updates[1].roles["policy"] - updates[0].roles["policy"]
    assert more > 12 * 494_032_768 * (1 / 4 - 1 / 8)


def test_the_command_writes_beside_its_answer(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    job = {**VERL, "micro_batch": 1}
    typed = ["rl", *(part for name, value in job.items() for part in (f"--{name.replace('_', '-')}", str(value)))]
    shown = CliRunner().invoke(app, [*typed, "--write", str(path)])
    assert shown.exit_code == 0
    assert path.read_text(encoding="utf-8") == role_script(**job)
    assert CliRunner().invoke(app, [*typed, "--write", str(path)]).exit_code == 2
