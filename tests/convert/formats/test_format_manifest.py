"""Tasks of SkyPilot are read by their commands; manifests of Kubernetes are declined by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from memcalc.convert.document import read_document
from memcalc.convert.formats import recognise
from memcalc.errors import InputError, MissingError, ObjectiveError
from memcalc.preflight import check
from memcalc.results.check import Check

TASK = """\
name: sft
resources:
  accelerators: {accelerators}
num_nodes: 2
envs:
  MODEL: Qwen/Qwen2.5-7B
  TOKEN:
setup: |
  torchrun never.py --per_device_train_batch_size 64
run: |
  NP=$(($SKYPILOT_NUM_GPUS_PER_NODE * $SKYPILOT_NUM_NODES))

  torchrun --nnodes=$SKYPILOT_NUM_NODES --nproc_per_node=$SKYPILOT_NUM_GPUS_PER_NODE -m trl.scripts.sft \\
    --model_name_or_path ${{MODEL}} --per_device_train_batch_size 2 --max_length 1024 --bf16 true --ranks $NP
"""


def checked(folder: Path, text: str, **options: Any) -> Check:
    path = folder / "task.yaml"
    path.write_text(text, encoding="utf-8")
    result = check([str(path)], **options)
    assert isinstance(result, Check)
    return result


@pytest.mark.parametrize(
    ("asked", "gpu", "each"),
    [("H100:8", "h100", 8), ("{H100: 4}", "h100", 4), ("A100", "a100-40g", 1), ("A100-80GB:8", "a100-80g", 8)],
)
def test_a_task_says_what_it_asks_for_and_its_commands_what_they_train(
    tmp_path: Path, asked: str, gpu: str, each: int
) -> None:
    """SKYPILOT_NUM_GPUS_PER_NODE is the count of `accelerators` (SkyPilot, running-jobs/environment-variables)."""
    result = checked(tmp_path, TASK.format(accelerators=asked))
    hardware, workload = result.estimate.hardware, result.estimate.workload
    assert (hardware.gpu, hardware.gpus) == (gpu, 2 * each)
    assert (result.estimate.model.name, result.estimate.strategy.micro_batch) == ("qwen2.5-7b", 2)
    assert workload.seq_len == 1024
    unread = next(finding for finding in result.files[0].findings if "ranks" in finding.field)
    assert (unread.code, unread.line) == ("MC001", 14)


def test_of_several_gpus_one_is_asked_for(tmp_path: Path) -> None:
    text = TASK.format(accelerators="[L4:8, H100:8]")
    with pytest.raises(MissingError, match=r"--gpu .*resources\.accelerators asks for one of several"):
        checked(tmp_path, text)
    assert checked(tmp_path, text, gpu="h100").estimate.hardware.gpus == 16


@pytest.mark.parametrize("count", ["many", "0", "-8", "8e3"])
def test_a_number_of_gpus_that_is_none_is_refused(tmp_path: Path, count: str) -> None:
    with pytest.raises(InputError, match=rf"task\.yaml line 3: resources\.accelerators '{count}'"):
        checked(tmp_path, TASK.format(accelerators=f"H100:{count}"))


@pytest.mark.parametrize("other", ["3", "{any_of: 3}", "{ordered: {accelerators: H100:8}}", "{any_of: [3, [4]]}"])
def test_resources_of_another_form_ask_for_the_gpus(tmp_path: Path, other: str) -> None:
    text = TASK.format(accelerators="-").replace("resources:\n  accelerators: -\n", f"resources: {other}\n")
    with pytest.raises((InputError, MissingError), match=r"--gpu|must be a table"):
        checked(tmp_path, text)


def test_commands_that_train_nothing_say_so(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="must start a training"):
        checked(tmp_path, "resources: {accelerators: H100:8}\nrun: ls -l\n")


def test_a_manifest_of_kubernetes_is_declined_by_its_kind(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("apiVersion: batch/v1\nkind: Job\nspec: {template: {}}\n", encoding="utf-8")
    with pytest.raises(ObjectiveError, match=r"job\.yaml is a Kubernetes manifest \(Job\)"):
        recognise(read_document(path))


TESTED = """\
ENV_VARS:
  PYTORCH_CUDA_ALLOC_CONF: expandable_segments:True
MODEL_ARGS:
  --num-layers: 16
  --hidden-size: 1024
  --num-attention-heads: 16

  --seq-length: 1024
  --max-position-embeddings: 1024
  --vocab-size: 32000
  --micro-batch-size: 2
  --tensor-model-parallel-size: {degree}
  --bf16: true
  --sequence-parallel: false
  --num-experts: 8
  --moe-layer-freq: ([0]*2+[1]*14)
  --recompute-granularity: selective
  --recompute-modules: "[core_attn moe_act]"
  --no-such-flag: 1
{more}TEST_TYPE: regular
"""


def run_of(folder: Path, degree: str = "2", more: str = "", **options: Any) -> Check:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "model_config.yaml"
    path.write_text(TESTED.format(degree=degree, more=more), encoding="utf-8")
    result = check([str(path)], gpu="h100", **options)
    assert isinstance(result, Check)
    return result


def test_a_functional_test_of_megatron_is_its_command(tmp_path: Path) -> None:
    """tests/functional_tests/shell_test_utils/_run_training.sh: `true` is a flag alone, brackets hold words."""
    answer = run_of(tmp_path, gpus=8)
    plan, findings = answer.estimate.strategy, [finding for file in answer.files for finding in file.findings]
    assert (plan.tp, plan.sp, plan.precision, plan.micro_batch) == (2, False, "bf16-mixed", 2)
    assert (plan.recompute, plan.expandable_segments) == ("modules:core_attn,moe_act", True)
    assert not any("moe_layer_freq" in finding.field for finding in findings)
    assert next(finding.line for finding in findings if finding.field == "no_such_flag") == 19


def test_what_a_functional_test_leaves_to_its_run_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(MissingError, match=r"--gpus \(line of model_config.yaml: torchrun --nproc_per_node is"):
        run_of(tmp_path)
    with pytest.raises(MissingError, match="tensor_model_parallel_size is 'TP'"):
        run_of(tmp_path, "${TP}", gpus=8)


@pytest.mark.parametrize(
    ("folder", "more", "kind"),
    [
        ("test_cases/bert/a", "", "pretrain_bert.py, which trains an encoder with masked tokens"),
        ("a", "  --decoder-num-layers: 12\n", "--decoder-num-layers, which is for an encoder and a decoder"),
        ("a", "  --hybrid-layer-pattern: M*M*\n", "--hybrid-layer-pattern, which is for state-space blocks"),
    ],
)
def test_a_functional_test_of_another_model_is_declined(tmp_path: Path, folder: str, more: str, kind: str) -> None:
    with pytest.raises(ObjectiveError, match=kind):
        run_of(tmp_path / folder, more=more, gpus=8)
