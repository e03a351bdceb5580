"""Post-training: phases and roles against the estimate they are made of, and verdicts against what happened."""

from __future__ import annotations

import json
from typing import Any

import pytest
from engines import RL_PAGE, filled, ran_answer, runs
from typer.testing import CliRunner

import memcalc
from memcalc.cli.app import app
from memcalc.errors import InputError, MissingError
from memcalc.report import render
from memcalc.report.posttraining import report
from memcalc.results.posttraining import Rl, RlPhase
from memcalc.units import GIB

GRPO: dict[str, Any] = {
    "algorithm": "grpo", "framework": "verl", "model": "qwen2.5-7b", "gpu": "h100", "gpus": 8, "prompt": 1024,
    "response": 2048, "micro_tokens": 16384,
}  # fmt: skip
DPO: dict[str, Any] = {
    "algorithm": "dpo", "framework": "trl", "model": "qwen2.5-7b", "gpu": "h100", "gpus": 8, "prompt": 1024,
    "response": 1024, "micro_batch": 1,
}  # fmt: skip
LARGE: dict[str, Any] = {**GRPO, "framework": "openrlhf", "model": "llama-3.1-8b", "micro_tokens": 32768}


def rl(words: dict[str, Any], **changes: Any) -> Rl:
    merged = {**words, **changes}
    return memcalc.rl(**{name: value for name, value in merged.items() if value is not None})


def phase(answer: Rl, name: str) -> RlPhase:
    return next(phase for phase in answer.phases if phase.name == name)


@pytest.mark.parametrize(("trainer", "width"), [("fsdp1", 2), ("fsdp2", 4)])
def test_whole_gradients_stand_in_the_place_of_their_shards_until_the_last_micro_batch(
    trainer: str, width: int
) -> None:
    """FSDP 1 adds up in the 16 bits of compute, FSDP 2 in those of the reduction; shards are fp32, of 8 ranks."""
    words = {**GRPO, "trainer": trainer, "micro_tokens": None, "micro_batch": 1, "prompt": 512, "response": 512}
    several, alone = ({**words, "mini_batch": samples} for samples in (64, 8))
    more = [
        phase(rl(job, whole_gradients=True), "update").allocated - phase(rl(job), "update").allocated
        for job in (several, alone)
    ]
    assert more[0] == pytest.approx(7_615_616_512 * (width - 4 / 8), rel=0.03)
    assert more[1] == 0


# ---------------------------------------------------------------- verdicts against what happened


def test_no_run_that_ran_out_is_said_to_fit() -> None:
    assert {run.verdict for run in runs() if run.outcome == "ran-out"} == {"tight", "no answer"}


@pytest.mark.slow
def test_unpadded_runs_fit_up_to_the_lengths_that_one_data_set_has() -> None:
    """Six sizes of one family met GSM8K at the largest micro-batch that ran: what decided is one distribution.

    With a chat template its questions and Qwen2.5's answers have 250 to 600 tokens, as models differ.
    """
    means = {}
    for run in runs():
        answer = ran_answer(run.id)
        if run.told.get("lora") and answer is not None and answer.longest_mean is not None:
            means[run.id] = answer.longest_mean
    assert len(means) == 9
    assert 250 <= min(means.values()) <= max(means.values()) <= 670
    assert means["rl134-101"] == means["rl134-100"]  # the one that ran out, and the one that did not


@pytest.mark.slow
def test_a_release_that_was_not_read_has_no_answer() -> None:
    assert {run.id for run in runs() if ran_answer(run.id) is None} == {"rl175", "rl175-flash"}


@pytest.mark.slow
def test_each_disagreement_has_its_reason() -> None:
    assert {run.id for run in runs() if not run.agrees and run.verdict != "tight"} == {
        run.id for run in runs() if run.explained
    }


@pytest.mark.slow
def test_the_table_of_runs_is_current() -> None:
    """`python tests/engines.py` writes it."""
    page = RL_PAGE.read_text(encoding="utf-8")
    assert filled(page) == page


# ---------------------------------------------------------------- what it is made of


def test_an_update_without_logits_is_the_estimate() -> None:
    """Whole-step peaks are those of the same terms: nothing is computed twice."""
    answer = rl(GRPO, logits="fused")
    alone = memcalc.estimate(
        model="qwen2.5-7b", gpu="h100", gpus=8, framework="fsdp1", zero=3, precision="bf16-mixed", recompute="full",
        seq_len=16384, micro_batch=1, loss="fused-linear", advice=False,
    )  # fmt: skip
    assert phase(answer, "update").roles["policy"] == alone.peak.allocated


def test_fine_tuning_is_the_estimate() -> None:
    """But for its logits, of which TRL makes a tile at a time."""
    words = {**DPO, "algorithm": "sft"}
    alone = memcalc.estimate(
        model="qwen2.5-7b", gpu="h100", gpus=8, framework="deepspeed", zero=3, recompute="full", seq_len=2048,
        micro_batch=1, advice=False,
    )  # fmt: skip
    (logits,) = (term.bytes for term in alone.terms if term.name == "logits and their gradients")
    assert phase(rl(words), "update").roles["policy"] == alone.peak.allocated - logits


def test_fine_tuning_by_verl_has_the_head_of_its_updates() -> None:
    """sft_loss of workers/utils/losses.py sums log-probabilities, which the engine makes as it does for GRPO."""
    tuned, online = (phase(rl(GRPO, algorithm=name), "update") for name in ("sft", "grpo"))
    assert tuned.roles["logits"] == 3 * 16384 * 152064 * 2
    assert tuned.roles == {name: size for name, size in online.roles.items() if name in tuned.roles}


def test_logits_are_of_all_tokens_or_of_the_response() -> None:
    """152,064 entries by 16,384 tokens are 4.64 GiB in 16 bits: verl holds them twice to read, thrice to train."""
    verl = rl(GRPO)
    assert phase(verl, "old log-probs").roles["logits"] == 2 * 16384 * 152064 * 2
    assert phase(verl, "update").roles["logits"] == 3 * 16384 * 152064 * 2
    trl = rl(GRPO, framework="trl@1.14", micro_tokens=None, micro_batch=2)
    assert phase(trl, "old log-probs").roles["logits"] == 2 * 2049 * 152064 * 8
    assert "logits" not in phase(rl(GRPO, logits="fused"), "update").roles


def test_a_reward_model_has_no_logits_and_two_rows() -> None:
    assert "logits" not in phase(rl(DPO, algorithm="reward"), "update").roles


def test_pairs_are_two_rows() -> None:
    """And a reference's logits are gone before backward is at its height."""
    pair, alone = (phase(rl(DPO, framework="trl@1.14", reference=r), "update").roles for r in (True, False))
    assert pair["logits"] == alone["logits"] == 2 * 2048 * 152064 * 16


def test_a_reference_is_a_share_of_16_bit_weights_and_adapters_have_none() -> None:
    parameters = rl(DPO).model.parameters
    assert phase(rl(DPO), "update").roles["reference"] == -(-2 * parameters // 8)
    assert "reference" not in phase(rl(DPO, lora=16), "update").roles


def test_the_critic_is_a_second_training_state() -> None:
    ppo = rl(GRPO, algorithm="ppo")
    update = phase(ppo, "update").roles
    assert update["critic"] == phase(ppo, "rollout").roles["policy"]
    assert "logits" not in phase(ppo, "critic update").roles
    assert [part.name for part in ppo.phases] == [
        "rollout", "old log-probs", "reference log-probs", "values", "update", "critic update",
        "weight sync", "wake-up",
    ]  # fmt: skip


def test_a_critic_without_checkpoints_is_trained_as_such_a_policy() -> None:
    """Its own micro-batch and checkpoints change its phases alone: they are those of a PPO that has them throughout."""
    kept = rl(GRPO, algorithm="ppo", recompute="none")
    own = rl(GRPO, algorithm="ppo", critic_recompute="none")
    assert phase(own, "critic update").roles["critic"] == phase(kept, "critic update").roles["critic"]
    assert phase(own, "update").roles["policy"] < phase(kept, "update").roles["policy"]
    with pytest.raises(InputError, match="grpo has no critic"):
        rl(GRPO, critic_micro_batch=2)


def test_an_engine_that_does_not_sleep_stays_in_every_phase() -> None:
    awake, asleep = rl(GRPO, sleep="0"), rl(GRPO, sleep="2")
    assert len({part.roles["engine"] for part in awake.phases}) == 1
    assert phase(asleep, "update").roles["engine"] < 4 * GIB < phase(awake, "update").roles["engine"]


def test_what_is_parked_is_gone_from_the_rollout_and_on_the_host() -> None:
    stays, gone = rl(GRPO), rl(GRPO, park="params,optimizer")
    left = phase(gone, "rollout").roles["policy"]
    states = phase(stays, "rollout").roles["policy"] - left
    assert left == 64 * 2**20  # two workspaces of cuBLAS, which nothing moves
    assert gone.host - stays.host == 8 * states
    assert phase(gone, "update").roles["policy"] == phase(stays, "update").roles["policy"]


def test_weights_of_engines_that_sleep_at_level_1_are_on_the_host() -> None:
    one, two = rl(GRPO, sleep="1"), rl(GRPO, sleep="2")
    weights = memcalc.serve(model="qwen2.5-7b", gpu="h100", tp=2, max_len=3072).stages[0].size("weights")
    assert one.host - two.host == 8 * weights


def test_engines_apart_leave_the_trainer_alone() -> None:
    apart = rl(GRPO, engine_gpus=4)
    assert {part.gpus for part in apart.phases} == {"trainer", "engine"}
    assert all("engine" not in part.roles for part in apart.phases if part.gpus == "trainer")
    assert list(phase(apart, "rollout").roles) == ["engine"]


def test_a_micro_batch_has_no_more_samples_than_a_rank_has_of_a_mini_batch() -> None:
    """8 samples of 3,072 tokens on 8 GPUs are one each, whatever the budget; log-probabilities are read of all."""
    bound = rl(GRPO, mini_batch=8, prompts=64, samples=4)
    one = rl(GRPO, mini_batch=8, micro_tokens=3072)
    assert phase(bound, "update").roles == phase(one, "update").roles
    assert phase(bound, "old log-probs").roles["logits"] == 2 * 16384 * 152064 * 2
    assert phase(rl(GRPO, mini_batch=64), "update").roles["logits"] == 3 * 16384 * 152064 * 2
    few, two = (rl(GRPO, micro_tokens=None, micro_batch=rows, mini_batch=16) for rows in (8, 2))
    assert phase(few, "update").roles == phase(two, "update").roles


def test_what_only_the_longest_samples_exceed_is_tight() -> None:
    """Where padding is removed; up to the mean that is named it does not run out, and at the next one it does."""
    words = {**GRPO, "micro_tokens": None, "micro_batch": 16, "gpus": 2, "park": "params,optimizer"}
    answer = rl(words)
    assert answer.verdict == "tight"
    mean = answer.longest_mean
    assert mean is not None
    assert rl(words, mean_length=mean).verdict == "tight"
    assert rl(words, mean_length=mean + 16).verdict == "does-not-fit"
    assert phase(rl(words, mean_length=1000), "update").roles["logits"] == 3 * 16_000 * 152064 * 2
    assert rl(words, padded=True).verdict == "does-not-fit"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"mean_length": 100}, "--mini-batch, of how many samples"),
        ({"mean_length": 4000, "mini_batch": 8}, "must be at most the longest prompt and response, 3,072"),
        ({"padded": True}, "--micro-tokens says how many tokens"),
        ({"framework": "trl", "micro_tokens": None, "mean_length": 100}, "pads samples to the longest of a batch"),
    ],
)
def test_what_is_said_of_lengths_has_a_use(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        rl(GRPO, **changes)


def test_a_reference_of_verl_stays_on_the_host_in_fp32() -> None:
    """Both of its engines give a model that is only read CPUOffload (fsdp/transformer_impl.py, forward_only)."""
    alone, beside = rl(GRPO), rl(GRPO, reference=True)
    assert all("reference" not in part.roles for part in beside.phases if part.name != "reference log-probs")
    assert beside.host - alone.host == pytest.approx(4 * alone.model.parameters, rel=1e-6)


MEGATRON: dict[str, Any] = {**GRPO, "trainer": "megatron", "gpus": 4, "tp": 4, "reference": True}
SHARE = 7_615_616_512 / 4
"""Parameters of Qwen2.5 7B on a rank of four that share each tensor, [1]."""


def test_what_megatron_workers_keep_between_phases() -> None:
    """16-bit weights, gradients in fp32, and three fp32 copies; all but the gradients go to the host where parked."""
    stays = phase(rl(MEGATRON), "rollout").roles
    assert stays["policy"] == pytest.approx(18 * SHARE, rel=0.03)
    assert stays["reference"] == pytest.approx(2 * SHARE, rel=0.01)
    parked = rl(MEGATRON, park="params,optimizer")
    away = phase(parked, "rollout").roles
    assert (away["policy"] < 0.06 * stays["policy"], "reference" in away) == (True, False)
    assert parked.host == pytest.approx(4 * (14 + 2) * SHARE, rel=0.01)
    optimizer = rl(MEGATRON, park="optimizer")
    assert phase(optimizer, "rollout").roles["policy"] == pytest.approx(6 * SHARE, rel=0.07)
    assert optimizer.host == pytest.approx(4 * 12 * SHARE, rel=0.01)


def test_states_of_the_optimizer_are_shared_by_data_parallel_ranks_of_megatron() -> None:
    alone, shared = (phase(rl(MEGATRON, gpus=gpus), "rollout").roles["policy"] for gpus in (4, 16))
    assert alone - shared == pytest.approx(12 * SHARE * 3 / 4, rel=0.01)


def test_gradients_of_megatron_are_not_there_while_parked_weights_are_read() -> None:
    kept, parked = (phase(rl(MEGATRON, park=park), "old log-probs").roles["policy"] for park in ("optimizer",
                    "params,optimizer"))  # fmt: skip
    assert kept - parked == pytest.approx(4 * SHARE, rel=0.01)


def test_logits_of_megatron_are_a_share_of_the_vocabulary_on_the_last_stage() -> None:
    """Of the tokens too where ranks share a sequence: 12 bytes with the entropy, 6 of the reference, 8 in an update."""
    entries = 16384 * 152064 / 4
    answer = rl(MEGATRON, recompute="full")
    found = [phase(answer, name).roles["logits"] for name in ("old log-probs", "reference log-probs", "update")]
    assert found == [pytest.approx(width * entries, rel=0.001) for width in (12, 6, 8)]
    spread = rl(MEGATRON, recompute="full", tp=2, cp=2, pp=2, gpus=8)
    assert phase(spread, "old log-probs").roles["logits"] == pytest.approx(12 * 16384 / 2 * 152064 / 2, rel=0.001)


@pytest.mark.parametrize("layout", [{"tp": 4}, {"tp": 2, "pp": 4}, {"tp": 2, "pp": 4, "vpp": 7}])
def test_an_update_by_megatron_is_its_own_estimate_with_wider_logits(layout: dict[str, int]) -> None:
    """The stage that holds most: as estimated, or the last one with 2 bytes more of each logit than in training."""
    job: dict[str, Any] = {"model": "qwen2.5-7b", "gpu": "h100", "gpus": 8, "precision": "bf16-mixed"}
    plain = memcalc.estimate(**job, framework="megatron", attention="flash", seq_len=16384, micro_batch=1,
                             recompute="none", **layout)  # fmt: skip
    heights = [stage.allocated for stage in plain.stages]
    last = max(sum(plain.stages[-1].phases[name].values()) for name in ("forward", "loss"))
    heights.append(last + 2 * 16384 * 152064 // layout["tp"])
    roles = phase(rl({**GRPO, "trainer": "megatron", **layout}, sleep="2"), "update").roles
    assert roles["policy"] + roles.get("logits", 0) == pytest.approx(max(heights), rel=0.001)


def test_the_script_that_ran_and_ran_out_at_its_update_is_tight() -> None:
    """Qwen2.5 32B on 8 H20, declared to be the least that it needs (verl examples/tuning, 3f388066); verl#3124."""
    answer = rl(
        {**MEGATRON, "model": "qwen2.5-32b", "gpu": "h20", "prompt": 2048, "response": 6144, "micro_tokens": None},
        gpus=8, tp=8, micro_batch=1, utilization=0.6, engine_tp=8, park="params,optimizer", prompts=512, samples=5,
    )  # fmt: skip
    assert (answer.verdict, answer.binding) == ("tight", "update")


def test_a_fused_kernel_of_megatron_workers_has_a_split_of_logits_and_gradients_of_the_head() -> None:
    """Of 38,016 entries 9,504 at once, which part them evenly; a token has 3,584 numbers twice, and the head each."""
    answer = rl(MEGATRON, recompute="full", logits="fused")
    trained = 2 * 16384 * (2 * 3584 + 9504) + 2 * 38016 * 3584
    assert phase(answer, "update").roles.get("logits", 0) in (0, trained)
    assert phase(answer, "old log-probs").roles["logits"] == 12 * 16384 * 38
    plain = rl(MEGATRON, recompute="full")
    saved = phase(plain, "update").allocated - phase(answer, "update").allocated
    assert saved == pytest.approx(8 * 16384 * 38016 - trained, rel=0.05)


def test_deepseek_v3_on_96_gpus_takes_what_verl_publishes() -> None:
    """docs/perf/dpsk.md@1dda039b: 66 GB of a GPU, which may be allocated or reserved, and 1,500 GB of a node's host."""
    answer = rl(
        MEGATRON, model="deepseek-v3", gpu="h20", gpus=96, tp=8, pp=12, ep=8, expert_tp=1, stage_split="last=6",
        prompt=2048, response=9632, micro_tokens=11680, mini_batch=256, logits="fused", park="params,optimizer",
        offload="optimizer", recompute="full", engine_tp=32, utilization=0.6,
    )  # fmt: skip
    update = phase(answer, "update")
    beside = sum(size for name, size in update.roles.items() if name in ("engine", "contexts"))
    assert update.allocated - beside < 66e9 < update.device - beside
    assert answer.host == pytest.approx(1500e9, rel=0.1)


@pytest.mark.parametrize("text", ["last", "first=0", "middle=3", "loss=1", "last=x"])
def test_a_split_of_stages_is_in_known_words(text: str) -> None:
    with pytest.raises(InputError, match=r"stage-split '.*': must be any of first=N, last=N, embedding and loss"):
        rl(MEGATRON, stage_split=text)


def test_layouts_of_megatron_are_not_searched() -> None:
    with pytest.raises(InputError, match="are not searched in post-training"):
        memcalc.plan_rl(**{**MEGATRON, "prompts": 128, "samples": 8})


def test_weights_under_adapters_of_verl_stay_in_fp32() -> None:
    """``from_pretrained(torch_dtype=model_dtype)``, fp32 unless told (config/engine/fsdp.yaml)."""
    wide, narrow = (phase(rl(GRPO, lora=16, precision=p), "rollout").roles["policy"] for p in (None, "bf16"))
    base = 2 * rl(GRPO).model.parameters // 8
    assert wide - narrow == pytest.approx(base, rel=0.02)  # besides that, adapters and their moments


def test_engines_are_told_of_their_step_and_of_graphs() -> None:
    plain, small = rl(GRPO), rl(GRPO, max_batched_tokens=2048, eager=True)
    assert small.rollout is not None
    assert plain.rollout is not None
    assert small.rollout.tokens > plain.rollout.tokens


def test_a_share_beside_a_trainer_that_parks_nothing_is_refused() -> None:
    answer = rl(GRPO, utilization=0.9)
    assert answer.verdict == "does-not-fit"
    assert answer.reason.startswith("rollout needs")  # it started before the optimizer had states
    assert answer.rollout is not None
    assert answer.rollout.largest_utilization is not None
    assert rl(GRPO, utilization=answer.rollout.largest_utilization).verdict == "fits"


def test_rounds_are_slow_and_no_failure() -> None:
    answer = rl(GRPO, prompts=1024, samples=16)
    assert answer.verdict == "fits"
    assert answer.rollout is not None
    assert answer.rollout.rounds == 16  # 4096 samples of each of 4 engines, 256 at a time
    assert any("slow, not a failure" in warning for warning in answer.warnings)


def test_the_change_that_is_named_makes_it_fit() -> None:
    answer = rl(LARGE, gpus=4)
    assert answer.verdict == "does-not-fit"
    assert answer.edit is not None
    words = answer.edit.change.replace("--", "").split()
    changes = {name.replace("-", "_"): value for name, value in zip(words[::2], words[1::2], strict=True)}
    again = rl(LARGE, gpus=4, **changes)
    assert again.verdict == answer.edit.verdict != "does-not-fit"


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"utilization": 1.5}, "utilization 1.5:"),
        ({"engine_tp": 3}, "engine-tp 3: must divide the 8 GPUs"),
        ({"engine_tp": 8}, "tp 8: must divide the 28 attention heads"),
        ({"engine_gpus": 8}, "engine-gpus 8: fewer than the 8 GPUs"),
        ({"framework": "verl@0.3"}, "the release that was read is verl@0.10"),
        ({"framework": "vrl"}, "did you mean 'verl'?"),
        ({"algorithm": "gpro"}, "did you mean 'grpo'?"),
        ({"engine": "vllm@0.6"}, "the oldest release modelled is vllm@0.8"),
        ({"micro_tokens": 2048}, "must hold one prompt with its response"),
        ({"micro_batch": 2}, "--micro-batch is given too"),
        ({"park": "gradients"}, "park 'gradients': must be one of optimizer, params"),
        ({"sleep": "3"}, "sleep '3':"),
        ({"trainer": "torchtitan"}, "verl@0.10 is counted as trained by fsdp1, fsdp2, megatron"),
        ({"tp": 2}, "tp 2: fsdp1 has no such layout"),
        ({"stage_split": "last=6"}, "stage-split 'last=6': fsdp1 has no such layout"),
        ({"trainer": "megatron", "tp": 3}, "gpus 8: must be a multiple of tp x pp x cp, 3"),
        ({"trainer": "megatron", "pp": "x"}, "pp 'x': must be a whole number"),
        ({"trainer": "megatron", "lora": 16}, "no figures for adapters by megatron"),
        ({"trainer": "megatron", "algorithm": "ppo"}, "no figures for a critic"),
        ({"trainer": "fsdp"}, "did you mean 'fsdp"),
        ({"algorithm": "sft", "trainer": "torchtitan"}, "counted as trained by"),
        ({"model": "vit-l-16", "engine": None}, "vit-l-16"),
    ],
)
def test_bad_input_is_one_sentence(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError) as raised:
        rl(GRPO, **changes)
    assert says in str(raised.value)


def test_a_model_without_a_vocabulary_has_no_log_probabilities() -> None:
    with pytest.raises(InputError, match="dpo reads log-probabilities of a language model"):
        rl(DPO, model="vit-l-16")


def test_words_of_a_rollout_are_refused_where_nothing_is_generated() -> None:
    with pytest.raises(InputError, match="dpo generates nothing"):
        rl(DPO, utilization=0.5)


@pytest.mark.parametrize("name", ["algorithm", "framework", "prompt", "response", "gpus", "micro_tokens"])
def test_what_only_the_user_knows_is_asked_for(name: str) -> None:
    with pytest.raises(MissingError, match="give --"):
        rl(GRPO, **{name: None})


def test_all_that_only_the_user_knows_is_asked_for_at_once() -> None:
    """The first line that anybody types names a model and GPUs; verl's config leaves its micro-batch open."""
    bare = {"model": "qwen2.5-7b", "gpu": "h100", "gpus": 8, "algorithm": "grpo"}
    with pytest.raises(MissingError) as framework:
        memcalc.rl(**bare)
    assert all(name in str(framework.value) for name in ("--framework (trl, verl,", "--prompt and --response"))
    with pytest.raises(MissingError) as batch:
        memcalc.rl(**bare, framework="verl")
    assert all(name in str(batch.value) for name in ("--prompt and --response", "--micro-tokens"))
    for ask in (memcalc.rl, memcalc.plan_rl):
        with pytest.raises(MissingError, match=r"--gpus; --algorithm \(grpo.*--prompt and --response"):
            ask(model="qwen2.5-0.5b", gpu="h100")


def run(words: dict[str, Any], *more: str) -> Any:
    typed = [part for name, value in words.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    return CliRunner().invoke(app, ["rl", *typed, *more])


def test_exit_codes_and_formats() -> None:
    text = run(GRPO, "--format", "json")
    assert text.exit_code == 0
    assert json.loads(text.stdout)["schema"] == "memcalc.rl/1"
    assert run({**GRPO, "utilization": 0.95}).exit_code == 1
    assert run({**GRPO, "utilization": 2}).exit_code == 2
    assert run({**GRPO, "framework": "verl", "micro_tokens": 16384} | {"gpus": 8}, "--format", "csv").exit_code == 0
    assert run({name: value for name, value in GRPO.items() if name != "micro_tokens"}).exit_code == 3


def test_a_length_beyond_all_bounds_is_a_sentence() -> None:
    with pytest.raises(InputError, match="response 999999999999:"):
        rl(GRPO, response=999_999_999_999, micro_tokens=None, micro_batch=1)


@pytest.mark.parametrize("words", [GRPO, {**GRPO, "algorithm": "ppo", "reward_model": "qwen2.5-7b"}])
def test_the_phases_are_readable_at_80_columns(words: dict[str, Any]) -> None:
    answer = rl(words)
    lines = render(report(answer), "rich", width=80, details=True).splitlines()
    first = next(at for at, line in enumerate(lines) if line.startswith("phase "))
    assert max(map(len, lines[first : first + 1 + len(answer.phases)])) <= 80
    for line, each in zip(lines[first + 1 :], answer.phases, strict=False):
        assert line.startswith(each.name)
        assert f"{each.allocated / GIB:.2f}" in line


@pytest.mark.parametrize(
    ("framework", "autocast", "width"),
    [("trl@1.14", True, 16), ("trl@1.14", False, 8), ("llamafactory", True, 16), ("llamafactory", False, 16)],
)
def test_logits_over_16_bit_weights_are_wide_under_autocast(framework: str, autocast: bool, width: int) -> None:
    """Accelerate 1.15 casts outputs to fp32 under autocast, LLaMA-Factory's DPO in any case (train/dpo/trainer.py).

    LLaMA-Factory 10175: DPO of a 4B with two pairs ran out of 80 GB where four sequences of SFT did not.
    """
    words: dict[str, Any] = {
        "model": "qwen3-4b",
        "gpu": "a100-80g",
        "gpus": 1,
        "algorithm": "dpo",
        "lora": "8:all-linear",
    }
    words |= {"trainer": "hf", "zero": 0, "precision": "bf16", "micro_batch": 2, "prompt": 2048, "response": 2048}
    answer = memcalc.rl(**words, framework=framework, autocast=autocast, recompute="full")
    logits = phase(answer, "update").roles["logits"]
    assert logits == pytest.approx(width * 4 * 4096 * 151_936, rel=0.13)  # TRL has a row's entropy beside 8 bytes


@pytest.mark.parametrize(
    ("words", "allocated"),
    [
        ({"model": "qwen2.5-0.5b", "prompt": 256, "response": 768}, 5_669_070_848),
        ({"model": "qwen2.5-1.5b", "prompt": 512, "response": 512, "lora": "16:all-linear"}, 5_551_214_592),
    ],
)
def test_dpo_of_trl_as_it_was_measured(words: dict[str, Any], allocated: int) -> None:
    """presets/runs/trainers-h200.toml, left_out: TRL 1.16 on an H200, 4 pairs a step; with logits it takes 24 GB."""
    told: dict[str, Any] = {"gpu": "h200", "gpus": 1, "algorithm": "dpo", "micro_batch": 4, "mini_batch": 4}
    told |= {"recompute": "full", "attention": "cudnn", "precision": "bf16", "autocast": True, **words}
    found = {}
    for framework in ("trl", "trl@1.14"):
        answer = memcalc.rl(**told, framework=framework)
        update = phase(answer, "update")
        found[framework] = update.allocated - update.roles["contexts"]
    assert found["trl"] == pytest.approx(allocated, rel=0.005)
    assert found["trl@1.14"] > 4 * allocated
