"""NeMo-RL's YAML: what its tables, its `defaults` and its interpolation come to, answered as ``memcalc rl`` does.

What a file leaves out is as the example of its algorithm has it: NeMo-RL 0.5 (7ea279ab), examples/configs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from memcalc.convert.document import parse_document
from memcalc.convert.formats.nemo_rl import resolved
from memcalc.errors import InputError, MissingError, ObjectiveError
from memcalc.posttraining import rl
from memcalc.preflight.job import read_files
from memcalc.preflight.merge import merge
from memcalc.preflight.roles import role_words

GRPO = """\
grpo: {num_prompts_per_step: 48, num_generations_per_prompt: 12}
loss_fn: {reference_policy_kl_penalty: 0.02}
policy:
  model_name: Qwen/Qwen2.5-1.5B
  train_micro_batch_size: 2
  logprob_batch_size: 5
  max_total_sequence_length: 3072
  dtensor_cfg: {enabled: true, activation_checkpointing: false}
  dynamic_batching: {enabled: false}
  sequence_packing: {enabled: false}
  generation:
    backend: vllm
    max_new_tokens: 2048
    colocated: {enabled: true}
    vllm_cfg:
      {tensor_parallel_size: 2, gpu_memory_utilization: 0.55, max_model_len: "${policy.max_total_sequence_length}"}
    vllm_kwargs: {max_num_seqs: 96}
cluster: {gpus_per_node: 8, num_nodes: 2}
"""
PPO = """\
ppo: {num_prompts_per_step: 64}
policy:
  model_name: Qwen/Qwen2.5-1.5B
  max_total_sequence_length: 2048
  sequence_packing: {enabled: true, train_mb_tokens: "${mul:${policy.max_total_sequence_length}, 3}"}
value: {model_name: Qwen/Qwen2.5-0.5B, precision: bfloat16, train_micro_batch_size: 9}
cluster: {gpus_per_node: 4}
"""
DPO = """\
dpo: {reference_policy_kl_penalty: 0.1}
policy: {model_name: Qwen/Qwen2.5-1.5B, dtensor_cfg: {cpu_offload: true, lora_cfg: {enabled: true, dim: 24}}}
cluster: {gpus_per_node: 8}
"""


def words(folder: Path, text: str, name: str = "job.yaml", **given: Any) -> dict[str, Any]:
    (folder / name).write_text(text, encoding="utf-8")
    return role_words(merge(read_files([str(folder / name)]), {"gpu": "h100", **given}), ())


def findings(folder: Path, text: str) -> dict[str, str]:
    (folder / "job.yaml").write_text(text, encoding="utf-8")
    return {f.field: f.code for config in read_files([str(folder / "job.yaml")]) for f in config.findings}


def test_grpo(tmp_path: Path) -> None:
    assert words(tmp_path, GRPO) == {
        "algorithm": "grpo", "framework": "nemo-rl", "model": "qwen2.5-1.5b", "gpu": "h100", "gpus": 16,
        "prompt": 1024, "response": 2048, "micro_batch": 2, "logprob_batch": 5, "prompts": 48, "samples": 12,
        "reference": True, "engine": "vllm", "engine_tp": 2, "utilization": 0.55, "max_seqs": 96, "recompute": "none",
    }  # fmt: skip
    assert findings(tmp_path, GRPO) == {}


def test_what_a_config_of_grpo_leaves_out(tmp_path: Path) -> None:
    """512 tokens of prompt and response together, packs of four such sequences, 32 prompts of 16, one GPU."""
    text = "grpo: {val_period: 5}\npolicy: {model_name: Qwen/Qwen2.5-1.5B}\n"
    assert words(tmp_path, text) == {
        "algorithm": "grpo", "framework": "nemo-rl", "model": "qwen2.5-1.5b", "gpu": "h100", "gpus": 1, "prompt": 1,
        "response": 511, "micro_tokens": 2048, "prompts": 32, "samples": 16, "reference": True, "engine": "vllm",
        "engine_tp": 1, "utilization": 0.6, "recompute": "none",
    }  # fmt: skip


def test_ppo_packs_rows_and_has_a_critic(tmp_path: Path) -> None:
    found = words(tmp_path, PPO)
    assert (found["algorithm"], found["critic_model"], found["micro_tokens"]) == ("ppo", "qwen2.5-0.5b", 6144)
    assert (found["reference"], found["gpus"]) == (False, 4)


def test_a_critic_with_a_batch_of_its_own_is_a_warning(tmp_path: Path) -> None:
    same = PPO.replace(
        "max_total_sequence_length: 2048", "max_total_sequence_length: 2048\n  train_micro_batch_size: 9"
    )
    assert findings(tmp_path, same) == {}
    assert findings(tmp_path, same.replace("train_micro_batch_size: 9}", "train_micro_batch_size: 4}")) == {
        "value.train_micro_batch_size": "MC002"
    }


def test_pairs_and_rewards(tmp_path: Path) -> None:
    """1,024 tokens and two pairs, offloaded as FSDP 2 does it; of a reward model 8,192 tokens and one pair."""
    found = words(tmp_path, DPO)
    assert (found["prompt"] + found["response"], found["micro_batch"]) == (1024, 2)
    assert (found["lora"], found["offload"], "reference" in found) == ("24:all-linear", "params", False)
    reward = words(tmp_path, DPO.replace("dpo: {reference_policy_kl_penalty: 0.1}", "rm: {seed: 1}"))
    assert (reward["algorithm"], reward["prompt"] + reward["response"], reward["micro_batch"]) == ("reward", 8192, 1)


def test_packed_pairs_are_as_many_as_their_tokens(tmp_path: Path) -> None:
    packs = DPO.replace("policy: {", "policy: {sequence_packing: {enabled: true, train_mb_tokens: 6144}, ")
    assert words(tmp_path, packs)["micro_batch"] == 3


def test_engines_apart_take_gpus_of_the_cluster(tmp_path: Path) -> None:
    """Of two nodes one generates; on one node the GPUs that are stated."""
    apart = GRPO.replace(
        "{enabled: true}\n    vllm", "{enabled: false, resources: {gpus_per_node: 8, num_nodes: 1}}\n    vllm"
    )
    found = words(tmp_path, apart)
    assert (found["gpus"], found["engine_gpus"]) == (16, 8)
    node = apart.replace("num_nodes: 2}", "num_nodes: 1}").replace(
        "gpus_per_node: 8, num_nodes: 1}}", "gpus_per_node: 2}}"
    )
    found = words(tmp_path, node)
    assert (found["gpus"], found["engine_gpus"]) == (8, 2)
    with pytest.raises(InputError, match="must leave GPUs to train"):
        words(tmp_path, node.replace("gpus_per_node: 2}}", "gpus_per_node: 8}}"))


def test_checkpoints_of_modules_keep_their_inputs(tmp_path: Path) -> None:
    """parallelize.py wraps attention, MLP and norms of a block, not the block: never less than a whole block's."""
    found = words(tmp_path, GRPO.replace("activation_checkpointing: false", "activation_checkpointing: true"))
    assert found["recompute"] == "submodules"


def test_a_config_builds_on_another(tmp_path: Path) -> None:
    """A child's values go first, also where the parent names them; the parent's names follow."""
    (tmp_path / "base.yaml").write_text(GRPO, encoding="utf-8")
    child = "defaults: base.yaml\npolicy:\n  max_total_sequence_length: 6144\ncluster: {num_nodes: 4}\n"
    found = words(tmp_path, child, "child.yaml")
    assert (found["prompt"], found["response"], found["gpus"], found["samples"]) == (4096, 2048, 32, 12)
    grandchild = "defaults: [child.yaml]\ngrpo: {num_generations_per_prompt: 3}\n"
    found = words(tmp_path, grandchild, "grandchild.yaml")
    assert (found["prompt"], found["samples"]) == (4096, 3)


def test_a_parent_elsewhere_is_read_where_it_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "base.yaml").write_text(GRPO, encoding="utf-8")
    folder = tmp_path / "recipes"
    folder.mkdir()
    monkeypatch.chdir(folder)
    (folder / "child.yaml").write_text("defaults: ../base.yaml\ncluster: {num_nodes: 1}\n", encoding="utf-8")
    with pytest.raises(MissingError, match="Pass it as a FILE to read it"):
        read_files(["child.yaml"])
    for paths in (["child.yaml", "../base.yaml"], ["../base.yaml", "child.yaml"]):
        assert role_words(merge(read_files(paths), {"gpu": "h100"}), ())["gpus"] == 8


def test_overrides_behind_the_example_script(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(GRPO, encoding="utf-8")
    command = (
        "uv run examples/run_grpo.py --config base.yaml cluster.num_nodes=1 ++policy.logprob_batch_size=3 "
        "loss_fn.reference_policy_kl_penalty=0 policy.generation.vllm_kwargs.max_num_seqs=null"
    )
    found = words(tmp_path, command, "run.sh")
    assert (found["gpus"], found["logprob_batch"], found["reference"], "max_seqs" in found) == (8, 3, False, False)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("{enabled: true, activation", "{enabled: false, activation", "Megatron workers"),
        ("policy:\n", "policy:\n  megatron_cfg: {enabled: true}\n", "Megatron workers"),
        ("{enabled: true, activation", "{tensor_parallel_size: 4, activation", "has tensor parallelism of 4"),
        ("{enabled: true, activation", "{dp_replicate_size: 2, activation", "has replicas of the shards of 2"),
        ("backend: vllm", "backend: megatron", "generates by megatron"),
        ("backend: vllm", f"backend: {'a' * 5000}", "generates by aaa"),
        ("loss_fn:", "env: {reward_model: {enabled: true}}\nloss_fn:", "a reward model on GPUs of its own"),
        ("loss_fn:", "on_policy_distillation: {teachers: 1}\nloss_fn:", "distills from teachers"),
        ("grpo: {", "distillation: {", "trains by distillation of NeMo-RL"),
    ],
)
def test_what_is_not_counted_has_no_verdict(tmp_path: Path, old: str, new: str, says: str) -> None:
    with pytest.raises(ObjectiveError) as raised:
        words(tmp_path, GRPO.replace(old, new, 1))
    assert says in str(raised.value)
    assert len(str(raised.value)) < 400


def test_keys(tmp_path: Path) -> None:
    """A key that changes memory and is not counted, one that is of no example, and one that a run alone can tell."""
    more = GRPO.replace("policy:\n", "policy:\n  logprob_chunk_size: 1024\n  train_micro_bach_size: 1\n", 1)
    assert findings(tmp_path, more) == {"policy.logprob_chunk_size": "MC002", "policy.train_micro_bach_size": "MC001"}
    with pytest.raises(MissingError, match=r"oc\.env:NODES"):
        words(tmp_path, GRPO.replace("train_micro_batch_size: 2", 'train_micro_batch_size: "${oc.env:NODES}"'))


def test_names_of_other_values() -> None:
    text = """{"a": 3, "t": {"b": "${a}", "c": "${.b}", "d": "${mul:${a}, ${t.c}}", "e": "x-${a}"},
        "half": "${div:7, 2}", "circle": "${circle}", "lost": "${no.such}", "worker": "${oc.env:HOME}"}"""
    document = resolved(parse_document(Path("x.json"), text, "json"))
    assert document.data == {"a": 3, "t": {"b": 3, "c": 3, "d": 9, "e": "x-3"}, "half": 3.5}
    assert {key[0] for key in document.unknown} == {"circle", "lost", "worker"}


def test_the_reference_takes_turns_with_the_policy() -> None:
    """use_reference_model puts it in the policy's place: no byte more on a GPU, two fp32 copies on the host."""
    job: dict[str, Any] = {
        "algorithm": "grpo", "framework": "nemo-rl", "model": "qwen2.5-1.5b", "gpu": "h100", "gpus": 8,
        "prompt": 512, "response": 512, "micro_batch": 1, "samples": 8, "advice": False,
    }  # fmt: skip
    without, with_it = rl(**job, reference=False), rl(**job, reference=True)
    assert [phase.allocated for phase in with_it.phases if phase.name != "reference log-probs"] == [
        phase.allocated for phase in without.phases
    ]
    assert with_it.host - without.host == pytest.approx(2 * 4 * with_it.model.parameters, rel=0.01)


SFT = """\
sft: {max_num_epochs: 1}
policy: {model_name: meta-llama/Llama-3.2-1B, train_micro_batch_size: 2, max_total_sequence_length: 2048}
cluster: {gpus_per_node: 8}
"""


def test_fine_tuning(tmp_path: Path) -> None:
    """One sequence of 1,024 tokens where nothing is said (examples/configs/sft.yaml); a reference is nowhere."""
    found = words(tmp_path, SFT)
    assert found == {
        "algorithm": "sft", "framework": "nemo-rl", "model": "llama-3.2-1b", "gpu": "h100", "gpus": 8, "prompt": 1024,
        "response": 1024, "micro_batch": 2, "recompute": "none",
    }  # fmt: skip
    usual = words(tmp_path, "sft: {seed: 42}\npolicy: {model_name: meta-llama/Llama-3.2-1B}\n")
    assert (usual["prompt"] + usual["response"], usual["micro_batch"], usual["gpus"]) == (1024, 1, 1)
    packed = words(tmp_path, SFT.replace("policy: {", "policy: {sequence_packing: {enabled: true}, "))
    assert packed["micro_tokens"] == 4096
    script = f"uv run examples/run_sft.py --config {tmp_path}/job.yaml policy.train_micro_batch_size=4\n"
    (tmp_path / "job.yaml").write_text(SFT, encoding="utf-8")
    assert words(tmp_path, script, "run.sh")["micro_batch"] == 4


def test_fine_tuning_has_the_head_of_its_updates(tmp_path: Path) -> None:
    """NLLLossFn takes log-probabilities (LossInputType.LOGPROB) of logits in fp32, as the loss of GRPO does."""
    tuned = rl(**words(tmp_path, SFT))
    logits = next(phase.roles["logits"] for phase in tuned.phases if phase.name == "update")
    assert logits == 12 * 2 * 2048 * 128256
