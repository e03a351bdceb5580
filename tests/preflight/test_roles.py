"""Files of post-training: what TRL's and verl's say of roles, rollout and lengths, answered as ``memcalc rl`` does.

Defaults are those of TRL 1.10 (trainer/grpo_config.py, dpo_config.py, rloo_config.py) and verl 0.10
(trainer/config/ppo_trainer.yaml).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

import memcalc
from memcalc.cli.app import app
from memcalc.convert.config import Finding
from memcalc.errors import IdleError, InputError, MissingError, ObjectiveError
from memcalc.preflight import check, check_estimate
from memcalc.preflight.job import read_files
from memcalc.preflight.merge import merge
from memcalc.preflight.roles import role_words
from memcalc.results.posttraining import Rl, RlDiff

if TYPE_CHECKING:
    from pathlib import Path

GRPO = """\
model_name_or_path: Qwen/Qwen2.5-1.5B-Instruct
output_dir: out
per_device_train_batch_size: 4
gradient_accumulation_steps: 4
num_generations: 16
max_completion_length: 768
use_vllm: true
vllm_gpu_memory_utilization: 0.25
vllm_enable_sleep_mode: true
beta: 0.04
"""
DPO = """\
model_name_or_path: Qwen/Qwen2.5-1.5B-Instruct
output_dir: out
per_device_train_batch_size: 2
max_length: 2048
beta: 0.1
"""
VERL = """\
set -x
MODEL=Qwen/Qwen2.5-1.5B-Instruct
ray job submit -- python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\
    data.max_prompt_length=1024 data.max_response_length=$((2 * 1024)) data.train_batch_size=256 \\
    actor_rollout_ref.model.path=$MODEL \\
    actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24576 \\
    actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.fsdp_config.param_offload=True \\
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=True actor_rollout_ref.actor.strategy=fsdp2 \\
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=8 \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 +actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \\
    trainer.n_gpus_per_node=4 trainer.nnodes=2 trainer.logger="['console']"
"""


def words(folder: Path, name: str, text: str, **given: Any) -> dict[str, Any]:
    """Return what a file comes to, in the words of ``memcalc rl``."""
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return role_words(merge(read_files([str(path)]), {"gpu": "h100", **given}), ())


def asked(folder: Path, name: str, text: str, **given: Any) -> str:
    with pytest.raises(MissingError) as raised:
        words(folder, name, text, **given)
    return str(raised.value)


# ---------------------------------------------------------------- what files say


def test_grpo_of_trl(tmp_path: Path) -> None:
    """64 samples of a step on 4 GPUs are 4 prompts of 16, and an engine gets the 16 of its rank."""
    found = words(tmp_path, "grpo.yaml", GRPO, gpus=4, settings={"rl.prompt": "1k"})
    assert found == {
        "algorithm": "grpo", "framework": "trl", "model": "qwen2.5-1.5b", "gpu": "h100", "gpus": 4, "trainer": "ddp",
        "prompt": "1k", "response": 768, "micro_batch": 4, "samples": 16, "prompts": 4, "max_seqs": 16,
        "utilization": 0.25, "sleep": "2", "reference": True, "recompute": "full", "precision": "bf16-autocast",
        "optimizer": "adamw", "optimizer_impl": "fused",
    }  # fmt: skip


def test_responses_that_trl_generates_at_once(tmp_path: Path) -> None:
    """128 of them are 8 micro-batches of 4 on 4 GPUs: 8 prompts of 16, and 32 sequences of each rank's engine."""
    given: dict[str, Any] = {"gpus": 4, "settings": {"rl.prompt": "1k"}}
    found = words(tmp_path, "grpo.yaml", GRPO + "generation_batch_size: 128\n", **given)
    assert (found["prompts"], found["max_seqs"]) == (8, 32)
    with pytest.raises(InputError, match="generation_batch_size 72: must be a multiple of the 16 samples"):
        words(tmp_path, "grpo.yaml", GRPO + "generation_batch_size: 72\n", **given)
    with pytest.raises(InputError, match="takes one of both"):
        words(tmp_path, "grpo.yaml", GRPO + "generation_batch_size: 64\nsteps_per_generation: 4\n", **given)


def test_defaults_of_grpo_and_rloo(tmp_path: Path) -> None:
    """GRPO has no KL term by default, and RLOO has one of 0.05."""
    short = "model_name_or_path: Qwen/Qwen2.5-1.5B\nuse_vllm: true\nnum_generations: {}\n"
    grpo = words(tmp_path, "a.yaml", short.format(8), gpus=1, settings={"rl.prompt": 512})
    assert (grpo["response"], grpo["reference"], grpo["micro_batch"]) == (512, False, 8)
    (tmp_path / "b.yaml").write_text(short.format(2), encoding="utf-8")
    rloo = words(tmp_path, "b.sh", f"trl rloo --config {tmp_path / 'b.yaml'}", gpus=1, settings={"rl.prompt": 512})
    assert (rloo["algorithm"], rloo["reference"], rloo["samples"]) == ("rloo", True, 2)


@pytest.mark.parametrize(
    ("script", "algorithm"), [("dpo", "dpo"), ("kto", "kto"), ("orpo", "orpo"), ("reward", "reward"), ("cpo", "simpo")]
)
def test_a_script_of_trl_names_what_is_optimized(tmp_path: Path, script: str, algorithm: str) -> None:
    """max_length is that of prompt and response together."""
    command = f"python trl/scripts/{script}.py --model_name_or_path Qwen/Qwen2.5-1.5B --output_dir x --max_length 2048"
    found = words(tmp_path, "run.sh", command)
    assert (found["algorithm"], found["prompt"] + found["response"], found["micro_batch"]) == (algorithm, 2048, 8)


def test_what_dpo_of_trl_says_of_its_reference(tmp_path: Path) -> None:
    assert "reference" not in words(tmp_path, "dpo.yaml", DPO, gpus=1)
    assert words(tmp_path, "dpo.yaml", DPO + "precompute_ref_log_probs: true\n", gpus=1)["reference"] is False
    assert words(tmp_path, "dpo.yaml", DPO + "use_liger_kernel: true\n", gpus=1)["logits"] == "fused"
    assert words(tmp_path, "dpo.yaml", DPO, gpus=1, seq_len=512)["response"] == 256


def test_a_server_of_its_own_has_gpus_of_its_own(tmp_path: Path) -> None:
    text, prompt = GRPO + "vllm_mode: server\n", {"rl.prompt": 1024}
    assert "--set rl.engine_gpus=" in asked(tmp_path, "grpo.yaml", text, gpus=6, settings=prompt)
    found = words(tmp_path, "grpo.yaml", text, gpus=6, settings={**prompt, "rl.engine_gpus": 2})
    assert (found["gpus"], found["engine_gpus"]) == (8, 2)


@pytest.mark.parametrize(
    ("line", "engine_gpus"),
    [
        ("max_prompt_length: 512\n", "2"), ("vllm_max_model_len: 1280\n", "2"), ("vllm_device: auto\n", "1"),
        ("max_prompt_length: 512\nvllm_mode: colocate\n", ""), ("vllm_device: cuda:0\n", ""), ("", ""),
    ],
)  # fmt: skip
def test_engines_of_older_releases_of_trl_have_gpus_of_their_own(tmp_path: Path, line: str, engine_gpus: str) -> None:
    """trainer/grpo_config.py: `server` by default from 0.18 to 0.29, `colocate` from 1.0; before it `vllm_device`."""
    settings = {"rl.prompt": 512} | ({"rl.engine_gpus": 2} if engine_gpus == "2" else {})
    found = words(tmp_path, "grpo.yaml", GRPO + line, gpus=4, settings=settings)
    assert str(found.get("engine_gpus", "")) == engine_gpus


def _batches_of_verl(folder: Path, overrides: str) -> tuple[int, int]:
    lines = VERL.replace(
        "actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24576",
        overrides,
    )
    found = words(folder, "run.sh", lines)
    return found["micro_batch"], found.get("logprob_batch", 0)


def test_gradients_that_verl_reduces_once_a_step_are_whole_until_then(tmp_path: Path) -> None:
    key = "actor_rollout_ref.actor.fsdp_config.use_no_sync_for_gradient_accumulation"
    for value, whole in (("True", True), ("False", False)):
        text = VERL.replace("actor_rollout_ref.rollout.name=vllm", f"actor_rollout_ref.rollout.name=vllm {key}={value}")
        assert words(tmp_path, "run.sh", text).get("whole_gradients") is whole


def test_verl_0_9_0_which_always_defers_reductions_is_named_where_it_would_not_fit(tmp_path: Path) -> None:
    """v0.9.0, transformer_impl.py, _gradient_sync_context asks no key (PR 7095); PR 7458 brought it."""
    key = "actor_rollout_ref.actor.fsdp_config.use_no_sync_for_gradient_accumulation"
    large = VERL.replace("Qwen2.5-1.5B-Instruct", "Qwen2.5-7B-Instruct")
    for text, noted in ((VERL, False), (large, True), (f"{large.rstrip()} {key}=False\n", False)):
        (tmp_path / "run.sh").write_text(text, encoding="utf-8")
        answer = memcalc.check([str(tmp_path / "run.sh")], gpu="h100")
        assert answer.verdict == "fits"
        assert any("verl 0.9.0" in warning for warning in answer.warnings) is noted
    whole = memcalc.check([str(tmp_path / "run.sh")], gpu="h100", settings={"rl.whole_gradients": "true"})
    assert whole.verdict == "tight"


def test_batches_of_all_ranks_and_of_ranks_that_share_sequences(tmp_path: Path) -> None:
    """Of 64 rows 8 ranks have 8 each; 4 groups of 2 have 16, and a rank half of them (workers/fsdp_workers.py)."""
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    total = f"{actor}.ppo_micro_batch_size=64 {rollout}.log_prob_micro_batch_size=128"
    each = f"{actor}.ppo_micro_batch_size_per_gpu=16 {rollout}.log_prob_micro_batch_size_per_gpu=64"
    shared = f"{actor}.ulysses_sequence_parallel_size=2"
    assert _batches_of_verl(tmp_path, total) == _batches_of_verl(tmp_path, f"{total} {shared}") == (8, 16)
    assert _batches_of_verl(tmp_path, each) == (16, 64)
    assert _batches_of_verl(tmp_path, f"{each} {shared}") == (8, 32)


def test_passes_of_log_probabilities_of_verl_have_budgets_of_their_own(tmp_path: Path) -> None:
    """The reference's counts too, and samples where only the update is by tokens (workers/fsdp_workers.py)."""
    reads = {part: f"actor_rollout_ref.{part}.log_prob_max_token_len_per_gpu" for part in ("rollout", "ref")}
    by_samples = "actor_rollout_ref.ref.log_prob_use_dynamic_bsz=False "
    by_samples += "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=16"
    for line, tokens in (
        (f"{reads['rollout']}=49152", 49152),
        (f"{reads['rollout']}=30000 {reads['ref']}=40000", 40000),
        (f"{reads['rollout']}=24576 {reads['ref']}=24576", 0),
        (f"{reads['rollout']}=12288 {reads['ref']}=12288", 12288),
        (by_samples, 16 * 3072),
    ):
        assert words(tmp_path, "run.sh", f"{VERL.rstrip()} {line}\n").get("logprob_tokens", 0) == tokens


def test_ranks_that_share_states_in_verl_are_fewer_where_fsdp_size_says_so(tmp_path: Path) -> None:
    """workers/fsdp_workers.py, create_device_mesh: of 8 ranks two groups of 4, each with all states."""
    size = "actor_rollout_ref.actor.fsdp_config.fsdp_size"
    for ranks, replicas in ((4, 2), (8, None), (16, None), (-1, None)):
        found = words(tmp_path, "run.sh", f"{VERL.rstrip()} {size}={ranks}\n")
        assert found.get("dp_replicate") == replicas


def test_what_verl_is_told_and_does_not_count_is_said_only_where_it_changes_something(tmp_path: Path) -> None:
    off = "actor_rollout_ref.actor.fsdp_config.fsdp_size=-1 actor_rollout_ref.actor.ulysses_sequence_parallel_size=1"
    for line, says in ((off, 0), ("actor_rollout_ref.rollout.expert_parallel_size=2", 1)):
        (tmp_path / "run.sh").write_text(VERL.rstrip() + f" {line}\n", encoding="utf-8")
        found = read_files([str(tmp_path / "run.sh")])
        assert sum(finding.code == "MC002" for config in found for finding in config.findings) == says
    others = {
        "reward_model.model.update=after": "trains a second model as its reward",
        "distillation.enabled=True": "holds a teacher beside",
        "async_training.staleness_threshold=0.5": "fully asynchronous trainer",
        "actor_rollout_ref.hybrid_engine=False": "hybrid_engine false",
    }
    for line, message in others.items():
        with pytest.raises(ObjectiveError, match=message):
            words(tmp_path, "run.sh", f"{VERL.rstrip()} {line}\n")


@pytest.mark.parametrize("module", ["verl.trainer.main_ppo_async", "verl.trainer.main_ppo_pipeline", "main_ppo_split"])
def test_a_trainer_that_gives_its_roles_gpus_of_their_own_is_declined(tmp_path: Path, module: str) -> None:
    """Forks' modules, and verl's examples/split_placement: half of the GPUs for the critic, by main_ppo's arguments."""
    with pytest.raises(ObjectiveError, match=f"{module}.*GPUs of their own"):
        words(tmp_path, "run.sh", VERL.replace("verl.trainer.main_ppo ", f"{module} "))
    assert words(tmp_path, "run.sh", VERL.replace("main_ppo ", "main_ppo_format "))["gpus"] == 8


def test_engines_of_one_step_off_policy_have_the_gpus_that_it_names(tmp_path: Path) -> None:
    """In verl's experimental/one_step_off_policy: a table `rollout` of its own, beside the 8 GPUs that train."""
    more = "actor_rollout_ref.hybrid_engine=False rollout.nnodes=1 rollout.n_gpus_per_node=2"
    found = words(tmp_path, "run.sh", f"{VERL.rstrip()} {more}\n")
    assert (found["engine_gpus"], found["gpus"]) == (2, 10)


def test_a_validation_by_verl_trains_nothing(tmp_path: Path) -> None:
    """trainer/ppo/ray_trainer.py, fit(): it returns after the first validation."""
    with pytest.raises(IdleError, match=r"starts no training \(trainer.val_only\)"):
        words(tmp_path, "run.sh", f"{VERL.rstrip()} trainer.val_only=True\n")
    assert words(tmp_path, "run.sh", f"{VERL.rstrip()} trainer.val_only=False\n")["gpus"] == 8


def test_adapters_of_verls_critic_are_told_as_not_counted(tmp_path: Path) -> None:
    """trainer/config/critic/dp_critic.yaml has lora_rank; it was said to be no setting of verl's."""
    ppo = VERL.replace("adv_estimator=grpo", "adv_estimator=gae").rstrip()
    for rank, code in ((16, ["MC002"]), (0, [])):
        (tmp_path / "run.sh").write_text(f"{ppo} critic.model.lora_rank={rank}\n", encoding="utf-8")
        found = [finding for config in read_files([str(tmp_path / "run.sh")]) for finding in config.findings]
        assert [finding.code for finding in found if finding.field == "critic.model.lora_rank"] == code


@pytest.mark.parametrize("path", ["adapters/first", "$1"])
def test_adapters_to_go_on_with_are_asked_for(tmp_path: Path, path: str) -> None:
    """A path makes it a LoRA job (workers/fsdp_workers.py); it was counted as training all weights."""
    line = f"{VERL.rstrip()} actor_rollout_ref.model.lora_adapter_path={path}\n"
    assert "--lora (line of run.sh" in asked(tmp_path, "run.sh", line)
    assert words(tmp_path, "run.sh", line, lora="16")["lora"] == "16"


def test_references_of_hydra_are_followed(tmp_path: Path) -> None:
    text = (
        "actor_rollout_ref:\n  model: {path: Qwen/Qwen2.5-1.5B}\n  actor: {ppo_micro_batch_size_per_gpu: 4}\n"
        "  rollout: {log_prob_micro_batch_size_per_gpu: '${actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu}'}\n"
        "  ref: {ulysses_sequence_parallel_size: '${actor_rollout_ref.actor.ulysses_sequence_parallel_size}'}\n"
        "data: {max_prompt_length: '${data.max_response_length}', max_response_length: '${oc.env:N,256}'}\n"
    )
    found = words(tmp_path, "verl.yaml", text)
    assert (found["logprob_batch"], found["prompt"], found["response"]) == (4, 512, 512)


def test_overrides_of_verl(tmp_path: Path) -> None:
    assert words(tmp_path, "run.sh", VERL) == {
        "algorithm": "grpo", "framework": "verl", "model": "qwen2.5-1.5b", "gpu": "h100", "gpus": 8,
        "trainer": "fsdp2", "prompt": 1024, "response": 2048, "micro_tokens": 24576, "prompts": 256, "samples": 8,
        "reference": True, "park": "params,optimizer", "engine": "vllm", "engine_tp": 1, "utilization": 0.6,
        "max_seqs": 256, "sleep": "2", "recompute": "full", "max_batched_tokens": 8192, "mini_batch": 2048,
    }  # fmt: skip


@pytest.mark.parametrize("path", ["$HOME/models/Qwen2.5-3B", "${1}/Qwen/Qwen2.5-3B-Instruct"])
def test_a_model_in_a_folder_that_only_a_run_knows_is_the_model_of_its_name(tmp_path: Path, path: str) -> None:
    """So most of verl's scripts name theirs; a name of which a part is open stays a question."""
    assert words(tmp_path, "run.sh", VERL.replace("path=$MODEL", f"path={path}"))["model"].endswith("qwen2.5-3b")
    for other in (path.replace("Qwen2.5-3B", "Qwen2.5-$SIZE"), f"{path}/checkpoint-100"):
        assert "--model (line of run.sh" in asked(tmp_path, "run.sh", VERL.replace("path=$MODEL", f"path={other}"))


def test_defaults_of_verl_and_its_yaml(tmp_path: Path) -> None:
    """PPO, 512 and 512 tokens, 1024 prompts, engines of 2 ranks that may take half, on 8 GPUs; no KL, no reference."""
    text = "actor_rollout_ref:\n  model: {path: Qwen/Qwen2.5-1.5B}\n  actor: {ppo_micro_batch_size_per_gpu: 4}\n"
    found = words(tmp_path, "verl.yaml", text)
    assert found == {
        "algorithm": "ppo", "framework": "verl", "model": "qwen2.5-1.5b", "gpu": "h100", "gpus": 8,
        "trainer": "fsdp1", "prompt": 512, "response": 512, "micro_batch": 4, "prompts": 1024, "samples": 1,
        "reference": False, "park": "none", "engine": "vllm", "engine_tp": 2, "utilization": 0.5, "max_seqs": 256,
        "sleep": "2", "recompute": "full", "max_batched_tokens": 8192, "mini_batch": 256,
    }  # fmt: skip


def test_what_the_critic_of_verl_has_of_its_own(tmp_path: Path) -> None:
    """32,768 tokens are its default; the older key of all 8 ranks comes to 4 samples on each; blocks may be kept."""
    ppo = VERL.replace("adv_estimator=grpo", "adv_estimator=gae")
    found = words(tmp_path, "run.sh", ppo)
    assert (found["critic_micro_tokens"], "critic_recompute" in found) == (32768, False)
    more = (
        "critic.use_dynamic_bsz=False critic.ppo_micro_batch_size=32 critic.model.enable_gradient_checkpointing=False "
    )
    found = words(tmp_path, "run.sh", ppo.replace("trainer.nnodes", more + "trainer.nnodes"))
    assert (found["critic_micro_batch"], found["critic_recompute"]) == (4, "none")
    assert "critic_micro_batch" not in words(
        tmp_path, "run.sh", VERL.replace("trainer.nnodes", more + "trainer.nnodes")
    )


def test_a_config_of_verl_lies_over_the_one_that_it_builds_on(tmp_path: Path) -> None:
    """Hydra's `defaults` and `--config-name`; one over another's trainer is declined, and a model has no default."""
    base = "defaults: [ppo_trainer, _self_]\nactor_rollout_ref:\n  model: {path: Qwen/Qwen2.5-1.5B}\n"
    (tmp_path / "base.yaml").write_text(base + "  actor: {ppo_micro_batch_size_per_gpu: 4}\n", encoding="utf-8")
    over = "defaults:\n- base\ndata: {max_prompt_length: 2048}\nactor_rollout_ref: {rollout: {n: 5}}\n"
    found = words(tmp_path, "grpo_run.yaml", over)
    assert (found["model"], found["micro_batch"], found["prompt"], found["samples"]) == ("qwen2.5-1.5b", 4, 2048, 5)
    command = "python3 -m verl.trainer.main_ppo --config-path=. --config-name=grpo_run actor_rollout_ref.rollout.n=3"
    found = words(tmp_path, "run.sh", command)
    assert (found["micro_batch"], found["prompt"], found["samples"]) == (4, 2048, 3)
    for other in ("main_ppo --config-name=grpo_trainer", "main_grpo"):  # of forks, whose defaults are their own
        named = asked(tmp_path, "run.sh", f"python3 -m verl.trainer.{other} actor_rollout_ref.rollout.n=3")
        assert (
            f"algorithm.adv_estimator is not said, and {other.rpartition('=')[2].replace('main_grpo', 'verl')}" in named
        )
    with pytest.raises(ObjectiveError, match="ppo_veomni_trainer"):
        words(tmp_path, "other.yaml", over.replace("base", "ppo_veomni_trainer"))
    nameless = "actor_rollout_ref: {actor: {ppo_micro_batch_size_per_gpu: 4}}\n"
    assert "--model (line of verl.yaml" in asked(tmp_path, "verl.yaml", nameless)


_ENGINE = "actor_rollout_ref.actor.megatron"
MEGATRON = VERL.replace("main_ppo ", "main_ppo --config-name=ppo_megatron_trainer ").replace(
    "fsdp_config", "megatron"
).replace("strategy=fsdp2", "strategy=megatron")  # fmt: skip


def megatron(folder: Path, *more: str, script: str = MEGATRON) -> dict[str, Any]:
    return words(folder, "run.sh", script.rstrip() + " \\\n    " + " ".join(more) + "\n")


def noticed(folder: Path) -> list[Finding]:
    """Return what was noticed in a script and what it starts."""
    return [finding for config in read_files([str(folder / "run.sh")]) for finding in config.findings]


def test_a_layout_of_megatron_workers_of_verl(tmp_path: Path) -> None:
    """By strategy, config or model_engine; ranks of a ring have their budgets together, and share a sequence's row."""
    layout = [f"{_ENGINE}.{name}_parallel_size={size}" for name, size in (
        ("tensor_model", 2), ("pipeline_model", 2), ("context", 2), ("expert_model", 1), ("expert_tensor", 1),
    )]  # fmt: skip
    more = [
        *layout,
        f"{_ENGINE}.virtual_pipeline_model_parallel_size=2",
        "actor_rollout_ref.ref.megatron.param_offload=True",
    ]
    recompute = {"granularity": "full", "method": "uniform", "num_layers": 1}
    more += [f"+{_ENGINE}.override_transformer_config.recompute_{name}={value}" for name, value in recompute.items()]
    found = megatron(tmp_path, *more)
    expected = {
        "trainer": "megatron", "tp": 2, "pp": 2, "cp": 2, "vpp": 2, "ep": 1, "expert_tp": 1, "recompute": "full",
        "attention": "flash", "park": "params,optimizer", "micro_tokens": 49152, "reference": True,
    }  # fmt: skip
    assert {name: found[name] for name in expected} == expected
    rows = MEGATRON.replace("use_dynamic_bsz=True", "use_dynamic_bsz=False")
    more += ["actor_rollout_ref.actor.ppo_micro_batch_size=3", "actor_rollout_ref.rollout.log_prob_micro_batch_size=4"]
    more.append("actor_rollout_ref.model.use_fused_kernels=True")
    found = megatron(tmp_path, *more, script=rows)  # of the one rank of 8 GPUs that remains
    assert (found["micro_batch"], found["logprob_batch"], found["logits"]) == (3, 4, "fused")


def test_uneven_stages_of_megatron_workers_of_verl(tmp_path: Path) -> None:
    override = f"+{_ENGINE}.override_transformer_config"
    sizes = [f"{override}.num_layers_in_{end}_pipeline_stage={size}" for end, size in (("first", "null"), ("last", 6))]
    more = [*sizes, f"{override}.account_for_loss_in_pipeline_split=True"]
    assert megatron(tmp_path, *more)["stage_split"] == "last=6,loss"
    assert "stage_split" not in megatron(tmp_path, sizes[0], f"{override}.account_for_loss_in_pipeline_split=False")


@pytest.mark.parametrize("chosen", ["model_engine=megatron", "--config-name=ppo_megatron_trainer.yaml",
                                    "actor@actor_rollout_ref.actor=megatron_actor"])  # fmt: skip
def test_what_chooses_megatron_workers_of_verl(tmp_path: Path, chosen: str) -> None:
    """Blocks are checkpointed as Megatron-LM is told alone, and nothing leaves the GPU by default."""
    plain = VERL.replace("actor_rollout_ref.actor.strategy=fsdp2", "").replace("main_ppo ", f"main_ppo {chosen} ")
    found = words(tmp_path, "run.sh", plain)
    assert (found["trainer"], found["recompute"], found["park"]) == ("megatron", "none", "none")
    told = plain.replace("trainer.nnodes", "actor_rollout_ref.model.enable_gradient_checkpointing=True trainer.nnodes")
    assert words(tmp_path, "run.sh", told)["recompute"] == "none"
    assert [finding.severity for finding in noticed(tmp_path) if "checkpointing" in finding.field] == ["note"]


def test_a_release_of_megatron_has_the_layout_of_the_script(tmp_path: Path) -> None:
    script = MEGATRON.replace("main_ppo ", f"main_ppo {_ENGINE}.tensor_model_parallel_size=4 ")
    found = words(tmp_path, "run.sh", script, settings={"rl.trainer": "megatron@core-0.14"})
    assert (found["trainer"], found["tp"]) == ("megatron@core-0.14", 4)


def test_an_optimizer_of_megatron_workers_on_the_host(tmp_path: Path) -> None:
    override = "actor_rollout_ref.actor.optim.override_optimizer_config"
    more = [f"+{override}.{name}" for name in (
        "optimizer_cpu_offload=True", "use_precision_aware_optimizer=True", "overlap_cpu_optimizer_d2h_h2d=True",
    )]  # fmt: skip
    assert megatron(tmp_path, *more, f"+{override}.optimizer_offload_fraction=1")["offload"] == "optimizer"
    assert [finding.field for finding in noticed(tmp_path) if "optim" in finding.field] == []
    with pytest.raises(ObjectiveError, match=r"fraction 0.5: memcalc has no figures for a part of the optimizer"):
        megatron(tmp_path, *more, f"+{override}.optimizer_offload_fraction=0.5")
    assert megatron(tmp_path, f"{_ENGINE}.use_distributed_optimizer=False")["zero"] == 0


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ("actor_rollout_ref.model.lora.rank=32", "adapters"),
        ("actor_rollout_ref.model.use_remove_padding=False", "padded samples"),
        ("actor_rollout_ref.ref.megatron.tensor_model_parallel_size=4", "a reference with another layout"),
        ("actor_rollout_ref.ref.megatron.param_offload=False", "a reference that stays on the GPU"),
        (f"+{_ENGINE}.override_transformer_config.pipeline_model_parallel_layout=Et*4L", "uneven stages"),
        (f"+{_ENGINE}.override_transformer_config.fp8=e4m3", "8-bit products"),
        (f"+{_ENGINE}.override_transformer_config.moe_token_dispatcher_type=allgather", "tokens of all ranks"),
        (f"{_ENGINE}.use_megatron_fsdp=True", "Megatron-FSDP"),
        (f"{_ENGINE}.dtype=float16", "other weights than bf16"),
        ("actor_rollout_ref.actor.optim.optimizer=muon", "another optimizer than Adam"),
        ("actor_rollout_ref.actor.optim.use_precision_aware_optimizer=True", "optimizer states below fp32"),
    ],
)
def test_what_has_no_figures_by_megatron_workers_of_verl(tmp_path: Path, more: str, says: str) -> None:
    with pytest.raises(ObjectiveError) as raised:
        megatron(tmp_path, more)
    key, _, value = more.lstrip("+").partition("=")
    sentence = str(raised.value).lower()
    assert f"{key} {value}".lower() in sentence
    assert f"no figures for {says}".lower() in sentence
    assert sentence.endswith("by verl's megatron workers.")


def test_adapters_and_a_kernel_without_logits_of_verl(tmp_path: Path) -> None:
    """Beside adapters verl keeps the engine's weights, on the host."""
    more = "actor_rollout_ref.model.lora_rank=32 actor_rollout_ref.model.use_fused_kernels=True "
    found = words(tmp_path, "run.sh", VERL.replace("trainer.nnodes", more + "trainer.nnodes"))
    assert (found["lora"], found["sleep"], found["logits"]) == ("32:all-linear", "1", "fused")


def test_what_verl_says_of_padding_and_of_its_engine(tmp_path: Path) -> None:
    more = "actor_rollout_ref.model.use_remove_padding=False actor_rollout_ref.rollout.enforce_eager=True "
    more += "actor_rollout_ref.actor.use_dynamic_bsz=False actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 "
    more += "actor_rollout_ref.actor.ppo_mini_batch_size=32 actor_rollout_ref.rollout.max_num_batched_tokens=4096 "
    found = words(tmp_path, "run.sh", VERL.replace("trainer.nnodes", more + "trainer.nnodes"))
    assert (found["padded"], found["eager"], found["mini_batch"]) == (True, True, 256)
    assert (found["micro_batch"], found["max_batched_tokens"]) == (4, 4096)


def test_what_is_counted_as_verl_says_it_is_no_finding(tmp_path: Path) -> None:
    more = "actor_rollout_ref.actor.ulysses_sequence_parallel_size=1 actor_rollout_ref.actor.fsdp_config.fsdp_size=-1 "
    more += "actor_rollout_ref.ref.fsdp_config.param_offload=True actor_rollout_ref.rollout.max_model_len=3072 "
    more += "critic.model.fsdp_config.param_offload=True "
    path = tmp_path / "run.sh"

    def findings(added: str) -> list[str]:
        path.write_text(VERL.replace("trainer.nnodes", added + "trainer.nnodes"), encoding="utf-8")
        return [finding.message for config in read_files([str(path)]) for finding in config.findings]

    assert findings(more) == findings("")
    assert findings(more.replace("=1 ", "=2 ")) == findings("")  # two ranks have two budgets of tokens between them
    assert len(findings(more.replace("size=-1 ", "size=4 ").replace("3072", "8192"))) == len(findings("")) + 1


OPENRLHF = """\
python3 -m openrlhf.cli.train_ppo_ray --actor.num_nodes 1 --actor.num_gpus_per_node 4 --vllm.num_engines 2 \\
    --vllm.tensor_parallel_size 2 --train.colocate_all --vllm.gpu_memory_utilization 0.5 \\
    --actor.model_name_or_path Qwen/Qwen2.5-1.5B --reward.model_name_or_path Qwen/Qwen2.5-0.5B \\
    --rollout.batch_size 256 --rollout.n_samples_per_prompt 4 --data.max_len 2048 --rollout.max_new_tokens 1536 \\
    --ds.zero_stage 3 --actor.gradient_checkpointing_enable --ds.packing_samples --vllm.enable_sleep \\
    --ds.enable_sleep --train.dynamic_batch_enable --algo.kl.init_coef 0 --ds.adam_offload
"""


def test_ppo_of_openrlhf_where_all_roles_share_the_gpus(tmp_path: Path) -> None:
    """Its engines sleep at level 1, and DeepSpeed keeps the 16-bit weights; 16,192 tokens are its own default."""
    assert words(tmp_path, "run.sh", OPENRLHF) == {
        "algorithm": "ppo", "framework": "openrlhf", "model": "qwen2.5-1.5b", "gpu": "h100", "gpus": 4,
        "prompt": 512, "response": 1536, "micro_tokens": 16192, "reference": False, "reward_model": "qwen2.5-0.5b",
        "park": "optimizer", "engine_tp": 2, "utilization": 0.5, "sleep": "1", "prompts": 256, "samples": 4,
        "recompute": "full", "zero": 3, "offload": "optimizer",
    }  # fmt: skip


def test_names_of_older_releases_of_openrlhf_say_the_same(tmp_path: Path) -> None:
    """Until 0.10.1 (cli/train_ppo_ray.py of v0.9.0): no dots; prompt and response are each cut by themselves."""
    older = {
        "train.colocate_all": "colocate_all_models", "actor.model_name_or_path": "pretrain",
        "reward.model_name_or_path": "reward_pretrain", "rollout.batch_size": "rollout_batch_size",
        "rollout.n_samples_per_prompt": "n_samples_per_prompt", "data.max_len 2048": "prompt_max_len 512",
        "rollout.max_new_tokens": "generate_max_len", "ds.zero_stage": "zero_stage",
        "actor.gradient_checkpointing_enable": "gradient_checkpointing --bf16 --flash_attn",
        "ds.packing_samples": "packing_samples", "ds.enable_sleep": "deepspeed_enable_sleep",
        "train.dynamic_batch_enable": "use_dynamic_batch", "algo.kl.init_coef": "init_kl_coef",
        "ds.adam_offload": "adam_offload", "actor.num_": "actor_num_", "vllm.": "vllm_",
    }  # fmt: skip
    text = OPENRLHF
    for name, before in older.items():
        text = text.replace(f"--{name}", f"--{before}")
    assert words(tmp_path, "run.sh", text) == words(tmp_path, "run.sh", OPENRLHF)
    assert not [finding for config in read_files([str(tmp_path / "run.sh")]) for finding in config.findings]
    found = words(tmp_path, "run.sh", text.replace("--use_dynamic_batch ", "").replace("--generate_max_len 1536", ""))
    assert (found["micro_batch"], found["response"]) == (4, 1024)


def test_engines_of_asynchronous_openrlhf_have_gpus_of_their_own(tmp_path: Path) -> None:
    """`colocate_all` is then of DeepSpeed's models alone (cli/train_ppo_ray.py); they were counted on the same GPUs."""
    found = words(tmp_path, "run.sh", f"{OPENRLHF.rstrip()} --train.async_enable --vllm.enforce_eager\n")
    assert (found["gpus"], found["engine_gpus"], found["eager"]) == (8, 4, True)


def test_dpo_of_openrlhf(tmp_path: Path) -> None:
    """512 tokens, 8 pairs and stage 2 are its defaults; the reader says nothing of a stage that is the framework's."""
    command = "deepspeed --num_gpus 8 --module openrlhf.cli.train_dpo --model.model_name_or_path Qwen/Qwen2.5-1.5B"
    assert words(tmp_path, "run.sh", command) == {
        "algorithm": "dpo", "framework": "openrlhf", "model": "qwen2.5-1.5b", "gpu": "h100", "gpus": 8,
        "prompt": 256, "response": 256, "micro_batch": 8, "recompute": "none",
    }  # fmt: skip


# ---------------------------------------------------------------- what is asked for, and refused


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("grpo.yaml", GRPO, "--set rl.prompt=… (the longest prompt of the data"),
        ("grpo.yaml", GRPO.replace("use_vllm: true\n", ""), "--set rl.engine=… (use_vllm is off"),
        (
            "run.sh",
            VERL.replace("use_dynamic_bsz=True", "use_dynamic_bsz=False"),
            "is not set, and verl has no default",
        ),
        ("run.sh", OPENRLHF.replace("--train.colocate_all ", ""), "gives each role GPUs of its own"),
        ("run.sh", OPENRLHF.replace("--ds.zero_stage", "--zero_stage"), "which no release takes together"),
        ("run.sh", VERL.replace("path=$MODEL", "path=$WHERE/x"), "model.path is 'WHERE', known only at run time"),
        ("run.sh", VERL.replace("max_prompt_length=1024", "max_prompt_length=$LONGEST"), "--set rl.prompt=…"),
    ],
)
def test_what_no_file_says_is_asked_for(tmp_path: Path, name: str, text: str, says: str) -> None:
    assert says in asked(tmp_path, name, text, gpus=8)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("adv_estimator=grpo", "adv_estimator=grpoo", "did you mean 'grpo'?"),
        ("data.max_prompt_length=1024", "data.max_prompt_length=long", "must be a whole number from 1"),
        ("strategy=fsdp2", "strategy=veomni", "trains by verl's veomni"),
    ],
)
def test_bad_values_are_one_sentence(tmp_path: Path, old: str, new: str, says: str) -> None:
    with pytest.raises((InputError, ObjectiveError)) as raised:
        words(tmp_path, "run.sh", VERL.replace(old, new))
    assert says in str(raised.value)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"tp": 2}, "tp 2: grpo takes the options of memcalc rl"),
        ({"settings": {"rl.prompt": 512, "strategy.reduce_dtype": "bf16"}}, "grpo takes the options of memcalc rl"),
        ({"settings": {"rl.promt": 512}}, "did you mean 'rl.prompt'?"),
        ({"settings": {"rl.prompt": "abc"}}, "must be a whole number of tokens"),
        ({"settings": {"rl.prompt": 512, "rl.engine_tp": 3}}, "must divide the 8 GPUs of the engines"),
    ],
)
def test_what_is_given_and_does_not_count_is_refused(tmp_path: Path, given: dict[str, Any], says: str) -> None:
    path = tmp_path / "grpo.yaml"
    path.write_text(GRPO, encoding="utf-8")
    with pytest.raises(InputError) as raised:
        check([str(path)], gpu="h100", gpus=8, **{"settings": {"rl.prompt": 512}, **given})
    assert says in str(raised.value)


def test_pairs_of_a_model_that_sees_images_are_counted_as_text_alone_where_that_is_said(tmp_path: Path) -> None:
    path = tmp_path / "dpo.yaml"
    path.write_text(DPO.replace("Qwen/Qwen2.5-1.5B-Instruct", "Qwen/Qwen2.5-VL-3B-Instruct"), encoding="utf-8")
    with pytest.raises(ObjectiveError, match="for text alone give --images 0"):
        check([str(path)], gpu="h100", gpus=8)
    answer = check([str(path)], gpu="h100", gpus=8, images=0)
    assert isinstance(answer, Rl)
    assert any(warning.startswith("no file says what ranks share") for warning in answer.warnings)


def test_words_of_post_training_beside_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "sft.yaml"
    path.write_text(DPO.replace("beta: 0.1\n", "packing: true\n"), encoding="utf-8")
    with pytest.raises(InputError, match="the files train on the next token"):
        check([str(path)], gpu="h100", gpus=8, settings={"rl.prompt": 512})


def test_a_key_that_verl_has_not_is_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(VERL.replace("memory_utilization", "memory_utilisation"), encoding="utf-8")
    (config,) = [each for each in read_files([str(path)]) if each.format == "verl"]
    (finding,) = [finding for finding in config.findings if finding.code == "MC001"]
    assert finding.suggestion == "did you mean actor_rollout_ref.rollout.gpu_memory_utilization?"


# ---------------------------------------------------------------- the answer


def test_check_answers_as_memcalc_rl_does(tmp_path: Path) -> None:
    found = words(tmp_path, "grpo.yaml", GRPO, gpus=4, settings={"rl.prompt": "1k"})
    answer = check([str(tmp_path / "grpo.yaml")], gpu="h100", gpus=4, settings={"rl.prompt": "1k"})
    assert isinstance(answer, Rl)
    again = memcalc.rl(**found)
    assert (answer.phases, answer.verdict, answer.edit, answer.command) == (
        again.phases, again.verdict, again.edit, again.command,
    )  # fmt: skip


def test_exit_codes_and_formats_of_the_command(tmp_path: Path) -> None:
    path = tmp_path / "dpo.yaml"
    path.write_text(DPO, encoding="utf-8")
    typed = ["check", str(path), "--gpu", "h100", "--gpus", "1"]
    good = CliRunner().invoke(app, [*typed, "--format", "json"])
    assert good.exit_code == 0
    assert json.loads(good.stdout)["schema"] == "memcalc.rl/1"
    brief = CliRunner().invoke(app, [*typed[:3], "a10", "--gpus", "1", "--brief"])
    assert brief.exit_code == 1
    assert brief.stdout.startswith("memcalc: does not fit: dpo of qwen2.5-1.5b needs ")
    for more in (["--fix"], ["--format", "sarif"]):
        assert CliRunner().invoke(app, [*typed, *more]).exit_code == 2


def test_such_files_have_no_estimate_and_are_compared_as_post_training(tmp_path: Path) -> None:
    path = tmp_path / "dpo.yaml"
    path.write_text(DPO, encoding="utf-8")
    difference = memcalc.diff(str(path), "micro_batch=1", gpu="h100", gpus=1)
    assert isinstance(difference, RlDiff)
    told = words(tmp_path, "dpo.yaml", DPO, gpus=1)
    for side, size in ((difference.a, 2), (difference.b, 1)):
        assert side.phases == memcalc.rl(**told | {"micro_batch": size}, advice=False).phases
    with pytest.raises(ObjectiveError, match="train by DPO"):
        check_estimate([str(path)], gpu="h100", gpus=1)


# ---------------------------------------------------------------- verl's supervised fine-tuning

TUNED = (
    "torchrun --standalone --nnodes=1 --nproc-per-node=8 -m verl.trainer.sft_trainer data.train_batch_size=96 "
    "data.max_length=4096 model.path=Qwen/Qwen3-8B engine=fsdp optim=fsdp engine.strategy=fsdp2 engine.fsdp_size=4 "
)
TUNED_WORDS = {
    "algorithm": "sft", "framework": "verl", "model": "qwen3-8b", "gpu": "h100", "gpus": 8, "trainer": "fsdp2",
    "prompt": 2048, "response": 2048, "mini_batch": 96, "park": "none", "recompute": "full",
}  # fmt: skip


def test_fine_tuning_by_verl(tmp_path: Path) -> None:
    """A group that is chosen as a whole (`engine=fsdp`) leaves what stands beside it of the same table."""
    found = words(tmp_path, "run.sh", f"{TUNED} model.lora_rank=16 data.max_token_len_per_gpu=16384 optim.lr=1e-5\n")
    sharded = {"dp_replicate": 2, "lora": "16:all-linear", "micro_tokens": 16384}
    assert found == {**TUNED_WORDS, **sharded}
    answer = memcalc.check([str(tmp_path / "run.sh")], gpu="h100")
    assert not [text for text in answer.warnings if "is not a setting" in text]


def test_what_verls_fine_tuning_does_by_default(tmp_path: Path) -> None:
    """trainer/config/sft_trainer_engine.yaml: 8,192 tokens a rank, of rows of up to 1,024, by FSDP 1."""
    line = "python3 -m verl.trainer.sft_trainer_ray model.path=Qwen/Qwen3-8B trainer.n_gpus_per_node=4\n"
    found = words(tmp_path, "run.sh", line)
    usual = {"gpus": 4, "trainer": "fsdp1", "prompt": 512, "response": 512, "micro_tokens": 8192, "mini_batch": 256}
    assert found == {**TUNED_WORDS, **usual}


@pytest.mark.parametrize(
    ("overrides", "batch"),
    [
        ("data.use_dynamic_bsz=False data.micro_batch_size_per_gpu=2", {"micro_batch": 2}),
        ("data.use_dynamic_bsz=False", {"micro_batch": 4}),
        ("data.use_dynamic_bsz=False engine.ulysses_sequence_parallel_size=2", {"micro_batch": 2}),
        ("data.max_token_len_per_gpu=2048", {"micro_tokens": 4096}),
        ("data.max_token_len_per_gpu=2048 engine.ulysses_sequence_parallel_size=2", {"micro_tokens": 4096}),
        ("data.max_token_len_per_gpu=8192 engine.ulysses_sequence_parallel_size=2", {"micro_tokens": 8192}),
    ],
)
def test_micro_batches_of_verls_fine_tuning(tmp_path: Path, overrides: str, batch: dict[str, int]) -> None:
    """Ranks that share sequences take equal parts of a micro-batch; a budget below a row would stop the job."""
    found = words(tmp_path, "run.sh", f"{TUNED} {overrides}\n")
    assert {name: found[name] for name in ("micro_batch", "micro_tokens") if name in found} == batch


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ("engine=megatron", "fine-tunes by verl's megatron"),
        ("engine.strategy=veomni", "fine-tunes by verl's veomni"),
        ("data.pad_mode=right", "pads its rows"),
    ],
)
def test_what_of_verls_fine_tuning_has_no_figures(tmp_path: Path, overrides: str, says: str) -> None:
    with pytest.raises(ObjectiveError, match=says):
        words(tmp_path, "run.sh", f"{TUNED} {overrides}\n")


def test_a_config_of_verls_fine_tuning_is_asked_for_its_gpus(tmp_path: Path) -> None:
    """The trainer takes them from torchrun."""
    text = (
        "data: {max_length: 4096, max_token_len_per_gpu: 8192}\nmodel: {path: Qwen/Qwen3-8B}\n"
        "engine: {strategy: fsdp2}\ntrainer: {n_gpus_per_node: 8}\n"
    )
    assert "--gpus" in asked(tmp_path, "sft.yaml", text)
    assert words(tmp_path, "sft.yaml", text, gpus=8)["trainer"] == "fsdp2"


# ---------------------------------------------------------------- what a script of verl's leaves to a run, or to itself


def test_a_reward_model_whose_path_a_run_knows_is_not_left_out(tmp_path: Path) -> None:
    judged = VERL.rstrip() + " reward_model.enable=True reward_model.model.path=$HOME/models/MyJudge\n"
    assert "--set rl.reward_model=… (line of run.sh: reward_model.model.path" in asked(tmp_path, "run.sh", judged)
    given = words(tmp_path, "run.sh", judged, settings={"rl.reward_model": "llama-3-8b"})
    assert given["reward_model"] == "llama-3-8b"


def test_a_reward_model_in_an_engine_of_its_own_has_no_verdict(tmp_path: Path) -> None:
    text = VERL.rstrip() + " reward_model.enable=True reward_model.use_reward_loop=True reward_model.model.path=a/b\n"
    with pytest.raises(ObjectiveError, match="judges by a reward model in an engine of its own"):
        words(tmp_path, "run.sh", text)


@pytest.mark.parametrize("module", ["recipe.sppo.main_sppo", "recipe.spin.main_spin", "my.train_agent"])
def test_another_main_with_verls_arguments_is_asked_what_it_optimizes(tmp_path: Path, module: str) -> None:
    """The default of verl itself is PPO with a critic, which SPPO, SPIN and others have not."""
    text = VERL.replace("algorithm.adv_estimator=grpo", "").replace("verl.trainer.main_ppo ", f"{module} ")
    assert asked(tmp_path, "run.sh", text).startswith("not in run.sh: --set rl.algorithm=… (line of run.sh: ")
    assert words(tmp_path, "run.sh", text, settings={"rl.algorithm": "grpo"})["algorithm"] == "grpo"
    known = VERL.replace("verl.trainer.main_ppo ", f"{module} ")
    assert words(tmp_path, "run.sh", known)["algorithm"] == "grpo"


def test_distillation_with_verls_arguments_is_declined(tmp_path: Path) -> None:
    with pytest.raises(ObjectiveError, match="trains by GKD"):
        words(tmp_path, "run.sh", VERL.replace("verl.trainer.main_ppo ", "main_gkd "))


@pytest.mark.parametrize(
    ("value", "layers"),
    [("all-linear", "all-linear"), ("[q_proj,v_proj]", "q,v"), ('\'["gate_proj", "down_proj"]\'', "gate,down")],
)
def test_layers_of_verls_adapters(tmp_path: Path, value: str, layers: str) -> None:
    """A list was counted as the layers that a rank alone stands for."""
    part = "actor_rollout_ref.model"
    text = VERL.rstrip() + f" {part}.lora_rank=8 {part}.target_modules={value}\n"
    assert words(tmp_path, "run.sh", text)["lora"] == f"8:{layers}"


@pytest.mark.parametrize("override", ["override_config.attn_implementation=eager", "override_config=KERNEL"])
def test_attention_of_verls_model(tmp_path: Path, override: str) -> None:
    """It was said to make another model of it, and not counted."""
    spelled = override.replace("KERNEL", '"{attn_implementation: eager}"')
    text = VERL.rstrip() + f" +actor_rollout_ref.model.{spelled}\n"
    assert words(tmp_path, "run.sh", text)["attention"] == "eager"
    answer = memcalc.check([str(tmp_path / "run.sh")], gpu="h100")
    assert not any("override_config" in text for text in answer.warnings)


def test_another_model_in_verls_overrides_is_told(tmp_path: Path) -> None:
    text = VERL.rstrip() + " +actor_rollout_ref.model.override_config.num_hidden_layers=4\n"
    words(tmp_path, "run.sh", text)
    answer = memcalc.check([str(tmp_path / "run.sh")], gpu="h100")
    assert any("the model is not the preset" in text for text in answer.warnings)


@pytest.mark.parametrize(
    "override", ["async_resources.actor_train.n_gpus_per_node=4", "rllm.async_training.enable=True"]
)
def test_roles_of_verls_arguments_that_have_gpus_of_their_own(tmp_path: Path, override: str) -> None:
    with pytest.raises(ObjectiveError, match=override.partition(".")[0]):
        words(tmp_path, "run.sh", VERL.rstrip() + f" {override}\n")


def test_what_changes_nothing_in_verls_arguments_is_no_warning(tmp_path: Path) -> None:
    """The actor's own strategy is put over that of its engine (workers/config/actor.py); -u is Python's."""
    part = "actor_rollout_ref"
    idle = f"{part}.model.target_modules=all-linear {part}.actor.fsdp_config.strategy=fsdp"
    text = VERL.replace("python3 -m", "python3 -u -m").rstrip() + f" {idle}\n"
    assert words(tmp_path, "run.sh", text)["trainer"] == "fsdp2"
    answer = memcalc.check([str(tmp_path / "run.sh")], gpu="h100")
    assert not [warning for warning in answer.warnings if "is not a setting" in warning]


EASY_R1 = """\
data: {max_prompt_length: 2048, max_response_length: 2048, rollout_batch_size: 512}
algorithm: {adv_estimator: grpo, use_kl_loss: true}
worker:
  actor:
    global_batch_size: 128
    micro_batch_size_per_device_for_update: 1
    micro_batch_size_per_device_for_experience: 2
    model: {model_path: Qwen/Qwen2.5-7B-Instruct}
    offload: {offload_params: true, offload_optimizer: true}
    colour: red
  rollout: {n: 5, tensor_parallel_size: 2}
  ref: {fsdp: {enable_cpu_offload: true}}
"""


def test_easy_r1_is_read_by_its_own_keys(tmp_path: Path) -> None:
    """EasyR1 b44b311 dp_actor.py: micro-batches of as many tokens as that many of the longest samples have.

    Its defaults (config.py) are 0.6 of each GPU for the engine, which sleeps with its weights in host memory.
    """
    (tmp_path / "config.yaml").write_text(EASY_R1, encoding="utf-8")
    script = tmp_path / "run.sh"
    flags = "data.max_response_length=4096 trainer.n_gpus_per_node=4"
    script.write_text(f"python3 -m verl.trainer.main config=config.yaml {flags}\n", encoding="utf-8")
    configs = read_files([str(script)])
    config = next(config for config in configs if config.format == "verl")
    said = {setting.name: setting.value for setting in config.settings}
    assert (said["rl.micro_tokens"], said["rl.logprob_tokens"]) == (6144, 2 * 6144)
    assert (said["rl.mini_batch"], said["rl.prompts"], said["rl.samples"]) == (640, 512, 5)
    assert (said["rl.utilization"], said["rl.sleep"], said["rl.park"]) == (0.6, "1", "params,optimizer")
    assert (said["rl.trainer"], said["recompute"], said["rl.reference"]) == ("fsdp1", "full", True)
    places = {setting.name: (setting.field, setting.default) for setting in config.settings}
    assert places["rl.mini_batch"] == ("worker.actor.global_batch_size", False)
    assert places["rl.utilization"] == ("worker.rollout.gpu_memory_utilization", True)
    assert [finding.field for finding in config.findings if finding.code == "MC001"] == ["worker.actor.colour"]
    result = check([str(script)], gpu="h100")
    assert isinstance(result, Rl)
    assert result.hardware.gpus == 4


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("worker.actor.model.lora.rank=64", "adapters over 16-bit weights by EasyR1"),
        ("worker.actor.optim.strategy=adamw_bf16", "another optimizer than AdamW"),
        ("algorithm.adv_estimator=gae", "its critic"),
        ("worker.actor.ulysses_size=2", "sequences that ranks share"),
        ("worker.ref.fsdp.enable_cpu_offload=false", "a reference that stays on the GPUs"),
    ],
)
def test_what_easy_r1_does_otherwise_is_refused_by_its_key(tmp_path: Path, change: str, said: str) -> None:
    (tmp_path / "config.yaml").write_text(EASY_R1, encoding="utf-8")
    script = tmp_path / "run.sh"
    script.write_text(f"python3 -m verl.trainer.main config=config.yaml {change}\n", encoding="utf-8")
    with pytest.raises(ObjectiveError, match=f"{change.replace('=', ' ')}: memcalc has no figures for {said}"):
        check([str(script)], gpu="h100")


def test_search_r1_samples_by_agents(tmp_path: Path) -> None:
    """Search-R1 a14dc3a trainer/ppo/ray_trainer.py repeats each prompt `n_agent` times before it generates."""
    script = tmp_path / "run.sh"
    script.write_text(VERL.replace("rollout.n=8", "rollout.n_agent=5"), encoding="utf-8")
    settings = [setting for config in read_files([str(script)]) for setting in config.settings]
    assert [setting.value for setting in settings if setting.name == "rl.samples"] == [5]


@pytest.mark.parametrize(
    ("size", "gpus", "gpu", "tp", "enough"),
    [
        ("1.5B", 2, "rtx-4090", 2, True), ("3B", 4, "a100-40g", 2, True), ("7B", 8, "a100-40g", 2, True),
        ("32B", 16, "a100-80g", 4, True), ("72B", 32, "a100-80g", 8, True), ("7B", 4, "a100-40g", 2, False),
        ("32B", 8, "a100-80g", 4, False),
    ],
)  # fmt: skip
def test_easy_r1_needs_the_gpus_that_its_readme_says(
    tmp_path: Path, size: str, gpus: int, gpu: str, tp: int, *, enough: bool
) -> None:
    """README of EasyR1 b44b311, full fine-tuning by AMP; half of the GPUs are those of its 16-bit mode alone."""
    (tmp_path / "config.yaml").write_text(EASY_R1, encoding="utf-8")
    each = min(gpus, 8)
    flags = {
        "worker.actor.model.model_path": f"Qwen/Qwen2.5-{size}-Instruct",
        "worker.rollout.tensor_parallel_size": tp,
        "trainer.n_gpus_per_node": each,
        "trainer.nnodes": gpus // each,
    }
    script = tmp_path / "run.sh"
    words = " ".join(f"{key}={value}" for key, value in flags.items())
    script.write_text(f"python3 -m verl.trainer.main config=config.yaml {words}\n", encoding="utf-8")
    result = check([str(script)], gpu=gpu)
    assert isinstance(result, Rl)
    assert (result.verdict != "does-not-fit") is enough
