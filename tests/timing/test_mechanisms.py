"""Each mechanism of the step-time model alone: counted by hand, or moved by what it depends on and by nothing else."""

from __future__ import annotations

from math import ceil
from typing import Any

import numpy as np
import pytest
from fits.ranges import step_of
from fits.throughput import job_of

from memcalc import api, catalog
from memcalc.errors import InputError
from memcalc.runs import read_unfitted
from memcalc.timing import rates_for
from memcalc.timing.rates import Hardware, Rates, hardware_of, kernels_of
from memcalc.timing.times import message_seconds, seconds
from memcalc.timing.work import Work, work_of
from memcalc.validation import Presets

LLAMA: dict[str, Any] = {
    "model": "llama-2-7b", "gpu": "a100-80g", "gpus": 8, "seq_len": 4096, "micro_batch": 1, "recompute": "none",
    "global_batch": 64,
}  # fmt: skip
PARAMETERS, LAYERS, HIDDEN = 6_738_415_616, 32, 4096
EXPERTS: dict[str, Any] = {
    "model": "qwen3-30b-a3b", "gpu": "h100", "gpus": 16, "framework": "megatron", "seq_len": 4096, "micro_batch": 1,
    "recompute": "none", "global_batch": 64, "zero": 1, "expert_imbalance": 1,
}  # fmt: skip
"""48 blocks 2048 wide, of 128 experts eight a token."""


def single(job: dict[str, Any], **words: Any) -> Any:
    return api.single(**{**job, **words})


def work(job: dict[str, Any], **words: Any) -> Work:
    one = single(job, **words)
    return work_of(one.census, one.job.node)


def times(job: dict[str, Any], *, node: dict[str, Any] | None = None, rates: dict[str, Any] | None = None,
          **words: Any) -> dict[str, float]:  # fmt: skip
    """Parts of a step [s], on a node and by rates of which some are other than they are."""
    one = single(job, **words)
    changed = one.job.node.model_copy(update=node or {})
    hardware = hardware_of(one.job.gpu, changed, one.grid)
    found = seconds(work_of(one.census, changed), hardware, rates_for(one.job.gpu, one.grid)._replace(**(rates or {})))
    return {name: float(np.max(part)) for name, part in found._asdict().items()}


def total(value: Any) -> float:
    return float(np.max(value))


def test_fsdp_reduces_once_a_step_under_no_sync_and_after_each_micro_batch_without() -> None:
    """Accelerate's ``sync_each_batch`` leaves no_sync out: 8 micro-batches then reduce 8 times, 7 of 8 shares each."""
    sent = {}
    for whole in (False, True):
        one = {
            "framework": "hf",
            "zero": 3,
            "precision": "bf16-mixed",
            "settings": {"strategy.whole_accumulation": whole},
        }
        messages = work(LLAMA, **one).messages
        each = messages.repeats.reductions * messages.reduction.volume
        sent[whole] = 8 * total(each) + total(messages.gradients.volume)
    once = 2 * PARAMETERS * 7 // 8
    assert sent == {False: pytest.approx(8 * once, rel=1e-4), True: pytest.approx(once, rel=1e-4)}


# ------------------------------------------------------------------------------------------------------ rates and host


def test_rates_follow_the_stack_of_kernels() -> None:
    """TransformerEngine, compiled blocks and operators one by one have rates of their own; so has cuDNN's attention."""
    stacks = {
        "te": {"framework": "megatron", "zero": 1, "gpu": "h100"},
        "compiled": {"framework": "torchtitan", "zero": 3, "gpu": "h100", "compile": "blocks"},
        "model": {"framework": "fsdp2", "zero": 3, "gpu": "h100", "kernels": "model"},
        "fused": {"framework": "fsdp2", "zero": 3, "gpu": "h100", "kernels": "fused"},
    }
    found = {}
    for name, words in stacks.items():
        one = single(LLAMA, **words)
        assert kernels_of(one.grid) == name
        found[name] = rates_for(one.job.gpu, one.grid)
    assert len({float(np.max(each.passes)) for each in found.values()}) == 4
    assert found["te"].matmul > found["model"].matmul
    assert found["te"].attention > found["model"].attention, "cuDNN beside FlashAttention 2 on Hopper"


def test_each_generation_of_flash_attention_has_its_rate() -> None:
    """The second is about twice the first (its abstract); the third, 1.5 to 2 times the second, is of Hopper."""
    fast = {
        gpu: [
            rates_for(one.job.gpu, one.grid).attention
            for version in (1, 2, 3)
            for one in [single(LLAMA, gpu=gpu, settings={"strategy.flash_version": version})]
        ]
        for gpu in ("a100-80g", "h100")
    }
    for first, second, third in fast.values():
        assert second == pytest.approx(2 * first)
        assert third >= second
    assert fast["a100-80g"][2] == fast["a100-80g"][1]
    assert 1.5 <= fast["h100"][2] / fast["h100"][1] <= 2


@pytest.mark.parametrize(
    ("era", "gpu", "alike"), [("2025-09", "h100", "flash"), ("2025-11", "h100", "cudnn"), ("2026-05", "b200", "cudnn")]
)
def test_attention_takes_the_time_of_the_kernel_that_computes_it(era: str, gpu: str, alike: str) -> None:
    """Since October 2025 torchtitan asks for cuDNN's first (6a3a9da95), whatever the memory of a kernel is called."""
    attention = {
        (framework, kernel): float(np.max(rates_for(one.job.gpu, one.grid).attention))
        for framework, kernel in (("fsdp2", "flash"), ("fsdp2", "cudnn"), (f"torchtitan@{era}", "flash"))
        for one in [single(LLAMA, gpu=gpu, framework=framework, zero=3, attention=kernel)]
    }
    assert attention["fsdp2", "cudnn"] > attention["fsdp2", "flash"]
    assert attention[f"torchtitan@{era}", "flash"] == attention["fsdp2", alike]


def test_attention_on_blackwell_is_cudnn_s_then_flexattention_s_then_flashattention_2_s() -> None:
    """FlashAttention 2 reaches 362 TFLOP/s on a B200 (tritonbench PR #171), of the peak of 2,250.

    FlexAttention's kernel, torchtitan's since June 2026, has half of FlashAttention 4's 1,300, and cuDNN more.
    """
    flash, cudnn, flex = (
        float(np.max(rates_for(one.job.gpu, one.grid).attention))
        for words in (
            {"framework": "fsdp2", "attention": "flash"},
            {"framework": "fsdp2", "attention": "cudnn"},
            {"framework": "torchtitan@2026-07", "attention": "flash"},
        )
        for one in [single(LLAMA, gpu="b200", zero=3, seq_len=16384, **words)]
    )
    assert flash < 1.1 * 362 / 2250 < flex < cudnn < 1300 / 2250


@pytest.mark.parametrize(
    ("gpu", "best"), [("rtx-4090", 164.81e12), ("rtx-3090", 76.58e12), ("l40s", 269.15e12), ("a10", 56e12)]
)
def test_products_of_a_card_are_near_the_best_that_was_measured_and_not_above(gpu: str, best: float) -> None:
    """Published rates of PyTorch's products, far from the data sheet on both sides (45 and 108% of it)."""
    one = single(LLAMA, gpu=gpu, gpus=1, framework="hf")
    rates = rates_for(one.job.gpu, one.grid)
    assert 0.85 * best <= rates.matmul * one.job.gpu.peak_flops["bf16"] <= best
    assert rates.attention < rates.matmul


def test_a_generation_needs_flash_attention() -> None:
    with pytest.raises(InputError, match="attention is efficient; use --attention flash"):
        single(LLAMA, attention="efficient", settings={"strategy.flash_version": 1})


def test_a_host_that_launches_too_slowly_hides_messages() -> None:
    """max(device + messages, launches): the thread that launches kernels launches collectives too."""
    job = {**LLAMA, "model": "gpt2", "framework": "megatron", "tp": 2, "seq_len": 256}
    slow_host, one_rank = {"launch": 1e-3}, {"model": "gpt2", "framework": "megatron", "tp": 1, "seq_len": 256}
    waiting = times(job, rates=slow_host)
    alone = times(job)
    assert waiting["host"] > 10 * waiting["compute"]
    assert waiting["communication"] < 0.01 * alone["communication"] + times(LLAMA, **one_rank)["communication"]


ALONE: dict[str, Any] = {
    "model": "gpt2", "gpu": "h100", "gpus": 1, "framework": "hf", "seq_len": 1024, "micro_batch": 2,
    "global_batch": 8, "recompute": "full",
}  # fmt: skip
NO_HOST = {"launch": 1e-12, "visit": 0.0, "loop": 0.0}


def test_one_process_has_its_device_s_time_or_its_host_s() -> None:
    """What processes that wait for each other take in a step is none of its time; its own loop is."""
    free, looped, both = (times(ALONE, rates=NO_HOST | rates) for rates in ({}, {"loop": 9e12}, {"fixed": 9.0}))
    device = free["compute"] + free["recompute"] + free["optimizer"]
    assert sum(free.values()) == pytest.approx(device)
    assert sum(looped.values()) == pytest.approx(device + 9)
    assert both == free
    # Launches of all four micro-batches, of what is computed again at the price of forward, then the update
    kernels = work(ALONE)
    first, again = kernels.once, kernels.again
    of = 4 * (total(first.launches) + 0.5 * total(first.launches_backward) + total(again.launches))
    slow = times(ALONE, rates=NO_HOST | {"launch": 1e-2, "launch_backward": 0.5, "relaunch": 1.0})
    assert sum(slow.values()) == pytest.approx(1e-2 * of + free["optimizer"])


def test_a_device_that_waited_in_forward_does_not_catch_up_in_backward() -> None:
    """A third of a micro-batch is forward: what launches take beyond it stands before a backward that has no host."""
    one = {**ALONE, "global_batch": 2, "recompute": "none"}
    free = times(one, rates=NO_HOST)
    launch = 2 * free["compute"] / 3 / total(work(one).once.launches)
    waited = times(one, rates=NO_HOST | {"launch": launch, "launch_backward": 0.0})
    assert sum(waited.values()) - sum(free.values()) == pytest.approx(free["compute"] / 3)


def test_a_scaled_loss_makes_the_host_wait_before_the_update() -> None:
    """``GradScaler.step`` reads ``found_inf``: what the host does after it is beside no kernel of backward."""
    job = {**ALONE, "optimizer_impl": "loop"}
    rates = NO_HOST | {"visit": 10e-3 / 1e-12 / total(work(job).tensors)}
    plain, scaled = (times(job, precision=name, rates=rates) for name in ("bf16-autocast", "fp16-autocast"))
    assert plain["host"] == pytest.approx(0, abs=1e-9)
    assert scaled["host"] == pytest.approx(10e-3 - scaled["optimizer"])


def test_collectives_of_a_graph_are_not_called_by_the_host() -> None:
    """A graph of the whole iteration launches them; one of attention and router leaves them to Python."""
    of = {name: single(EXPERTS, cuda_graphs=name) for name in ("none", "partial", "full")}
    none, partial, full = (float(np.max(rates_for(one.job.gpu, one.grid).call)) for one in of.values())
    assert full < none / 5 < none == partial


def test_bitsandbytes_updates_one_tensor_after_the_other_and_waits_for_each() -> None:
    """``Optimizer8bit.step`` (95f9af3) synchronizes in its loop: no update is beside a kernel of backward."""
    rates = NO_HOST | {"visit": 10e-3 / 1e-12 / total(work(ALONE).tensors)}
    fused, one_by_one = (times(ALONE, optimizer=name, rates=rates) for name in ("adamw", "adamw-8bit"))
    assert fused["host"] == pytest.approx(0, abs=1e-9)
    assert one_by_one["host"] == pytest.approx(10e-3 - one_by_one["optimizer"])
    of = {name: single(ALONE, optimizer=name, optimizer_impl="fused") for name in ("adamw", "paged-adamw-8bit", "lion")}
    visits = {name: float(np.max(rates_for(one.job.gpu, one.grid).visit)) for name, one in of.items()}
    assert visits["adamw"] == 0 < visits["paged-adamw-8bit"] == visits["lion"]


def test_selective_checkpoints_pass_a_mode_of_python_and_compiled_ones_none() -> None:
    """Each operator of forward passes it, and each that runs again (torch/utils/checkpoint.py)."""
    job = {**ALONE, "framework": "torchtitan", "recompute": "selective-ops"}
    eager, compiled, full = (work(job, **words).again for words in ({}, {"compile": "blocks"}, {"recompute": "full"}))
    assert total(eager.dispatched) == 2 * total(work(job).once.launches)
    assert total(compiled.dispatched) == total(full.dispatched) == 0


def test_an_update_of_one_tensor_after_the_other_takes_its_visits() -> None:
    of_one, of_lists = (work(ALONE, optimizer_impl=impl) for impl in ("loop", "foreach"))
    assert total(of_one.tensors) == total(of_lists.tensors)
    loop, lists = (single(ALONE, optimizer_impl=impl) for impl in ("loop", "foreach"))
    assert rates_for(loop.job.gpu, loop.grid).visit > rates_for(lists.job.gpu, lists.grid).visit == 0
    slow = NO_HOST | {"visit": 1e-2 / 1e-12}
    assert sum(times(ALONE, optimizer_impl="loop", rates=slow).values()) == pytest.approx(1e-2 * total(of_one.tensors))
    sharded = {"framework": "fsdp2", "zero": 3, "optimizer_impl": "loop"}
    assert times(ALONE, **sharded, rates=slow)["host"] < 1, "an engine that shards has the constants of clusters"


def test_updated_weights_are_gathered_beside_the_next_forward_where_the_framework_does_so() -> None:
    """Hooks of forward dispatch Megatron-LM's where ``--overlap-param-gather`` is given; DeepSpeed's step ends with it.

    Megatron-LM d98e8a64 ``core/distributed/param_and_grad_buffer.py``: ``async_op``.
    """
    job: dict[str, Any] = {**LLAMA, "gpus": 64, "zero": 1}
    waits = {"settings": {"strategy.overlap_param_gather": False}}
    megatron, waiting = times(job, framework="megatron"), times(job, framework="megatron", **waits)
    gathered = work(job, framework="megatron").messages.parameters
    least = 0.5 * total(gathered.volume) / (8 * 50e9)
    assert waiting["communication"] - megatron["communication"] > least
    overlapped: dict[str, Any] = {"framework": "deepspeed", "settings": {"strategy.overlap_comm": True}}
    ends = total(work(job, **overlapped).messages.parameters.volume) / (8 * 50e9)
    assert times(job, **overlapped)["communication"] > ends


def test_fewer_adapters_slow_what_runs_beside_their_traffic_less() -> None:
    """A channel of NCCL takes a multiprocessor, and each adapter has as many (nccl src/graph/connect.cc)."""
    job = {**LLAMA, "gpus": 64, "framework": "fsdp2", "zero": 3}
    each = {number: times(job, node={"adapters": number})["communication"] for number in (8, 4, 2)}
    assert each[8] - each[4] == pytest.approx(2 * (each[4] - each[2]), rel=1e-6)
    assert each[8] > each[4]
    assert times(job)["communication"] == each[8]  # one a GPU where none is stated


def test_a_step_has_a_time_of_its_own_and_each_message_one_for_its_ranks() -> None:
    before, after = (times(LLAMA, framework="megatron", zero=1, rates={"fixed": value}) for value in (0.0, 0.5))
    assert after["host"] - before["host"] == pytest.approx(0.5)
    messages = work(LLAMA, framework="megatron", gpus=64, zero=1).messages
    hardware = Hardware(1, 1, 1, 1, 300e9, 25e9, 1)
    known: Any = dict.fromkeys(Rates._fields, 1.0)
    rates = Rates(**{**known, "call": 1e-3, "latency": 1e-5, "latency_between": 1e-4, "between": 0.5})
    of = messages.gradients
    by_hand = total(of.volume) / min(300e9, 8 * 0.5 * 25e9) + total(of.calls) * (1e-3 + 64 * 1e-4)
    assert total(message_seconds(of, hardware, rates, wide=True)) == pytest.approx(by_hand)


@pytest.mark.parametrize(("name", "use"), [("inside_tensor", "tensor"), ("inside", "data")])
def test_links_have_a_rate_for_each_use(name: str, use: str) -> None:
    """What kernels wait for reaches another share of the link than large gathers that stream."""
    job = {"tensor": {"framework": "megatron", "tp": 8}, "data": {"framework": "fsdp2", "zero": 3}}
    for kind, words in job.items():
        plain, slower = times(LLAMA, **words), times(LLAMA, **words, rates={name: 0.01})
        assert (slower["communication"] > 2 * plain["communication"]) == (kind == use)


def test_the_optimizer_moves_its_bytes_by_its_implementation() -> None:
    """28 bytes a parameter in fp32: three are read and written, the gradient is read; foreach passes more often."""
    words = {"gpus": 1, "framework": "fsdp2", "precision": "fp32", "zero": 3}
    fused, foreach = (work(LLAMA, **words, optimizer_impl=impl) for impl in ("fused", "foreach"))
    assert total(fused.updated) == total(foreach.updated) == PARAMETERS * (3 * 2 * 4 + 4)
    seconds_of = [times(LLAMA, **words, optimizer_impl=impl)["optimizer"] for impl in ("fused", "foreach")]
    assert seconds_of[0] < seconds_of[1] / 1.5


# ------------------------------------------------------------------------------------------- messages of data parallel


def test_what_of_fsdp_no_pass_hides_by_hand() -> None:
    """The first unit's gather and the last one's reduction where all else fits beside a pass; beyond it, the rest."""
    free = {"hidden": 0.0, "hidden_between": 0.0, "call": 0.0, "latency": 0.0, "latency_between": 0.0, "inside": 1.0}
    for link in (300e9, 1e9):
        found = times(LLAMA, framework="fsdp2", zero=3, rates=free, node={"intra_link_bytes_per_s": link})
        gather, reduction = (7 / 8 * PARAMETERS * width / link for width in (2, 4))
        busy = (found["compute"] + found["host"] - float(rates_of_one("fixed"))) / 8  # of one of eight micro-batches
        forward, backward = busy / 3, busy - busy / 3
        over = max(gather - forward, 0) + max(gather + reduction - backward, 0)
        ends = (gather + (gather + reduction) / 2) / (LAYERS + 1)
        assert found["communication"] / 8 == pytest.approx(over + ends, rel=1e-3)
        assert (over > 0) == (link == 1e9)


def rates_of_one(name: str) -> Any:
    return catalog.step_time().value(name, "any")


def test_hidden_messages_still_slow_what_they_hide_behind() -> None:
    none, half = (times(LLAMA, framework="fsdp2", zero=3, rates={"hidden": share}) for share in (0.0, 0.5))
    assert half["communication"] > 2 * none["communication"]


@pytest.mark.parametrize(
    ("words", "bucket"),
    [
        ({"framework": "megatron", "zero": 1}, 64e6),  # 10^6 a rank, at least 40 x 10^6 elements
        ({"framework": "megatron", "zero": 1, "gpus": 8}, 40e6),
        ({"framework": "ddp", "precision": "fp32"}, 25 * 2**20 / 4),
        ({"framework": "deepspeed", "zero": 1}, 5e8),
    ],
)
def test_gradients_are_reduced_in_the_buckets_of_the_framework(words: dict[str, Any], bucket: float) -> None:
    messages = work(LLAMA, **{"gpus": 64, **words}).messages
    calls = total(messages.gradients.calls) / (2 if words["framework"] == "ddp" else 1)
    assert calls == ceil(PARAMETERS / bucket)


def test_gradients_travel_in_the_dtype_that_they_are_reduced_in() -> None:
    for framework, zero, name in (("megatron", 1, "gradients"), ("fsdp2", 3, "reduction")):
        wide, narrow = (
            work(LLAMA, framework=framework, zero=zero, settings={"strategy.reduce_dtype": dtype}).messages
            for dtype in ("fp32", "bf16")
        )
        assert total(getattr(wide, name).volume) == 2 * total(getattr(narrow, name).volume)
        assert total(getattr(narrow, name).volume) == pytest.approx(7 / 8 * 2 * PARAMETERS, rel=1e-3)


@pytest.mark.parametrize(("sp", "reductions"), [(False, 5), (True, 4)])
def test_layers_of_scaling_reduce_what_they_read_apart_by_hand(sp: bool, reductions: int) -> None:
    """Two all-reduces forward, and back those of qkv, gate and up; whole logits are gathered, in 16 bits."""
    found = work(LLAMA, framework="deepspeed@scaling", zero=1, tp=2, sp=sp).messages
    hidden, logits = 2 * 4096 * HIDDEN, 4096 * 32000
    assert total(found.tensor.volume) == (LAYERS * reductions + 2) * hidden + logits
    assert total(found.tensor.calls) == LAYERS * reductions
    assert not total(found.tensor_beside.volume)


def test_scaling_reduces_all_gradients_to_each_rank_in_fp32() -> None:
    found = work(LLAMA, framework="deepspeed@scaling", zero=1).messages
    assert total(found.gradients.volume) == pytest.approx(2 * 4 * PARAMETERS * 7 / 8)
    assert total(found.parameters.volume) == pytest.approx(2 * PARAMETERS * 7 / 8)


def test_replicas_of_shards_join_them_between_nodes() -> None:
    """HSDP: gathers stay with eight ranks; 2 (r - 1) / r of a shard in fp32 go to the other replicas."""
    messages = work(LLAMA, framework="fsdp2", zero=3, gpus=32, dp_replicate=4).messages
    assert (total(messages.gather.ranks), total(messages.between.ranks)) == (8, 4)
    assert total(messages.between.volume) == pytest.approx(2 * 3 / 4 * PARAMETERS / 8 * 4, rel=1e-3)
    assert total(messages.between.in_node) == 1


def test_a_zero_group_smaller_than_dp_gathers_in_the_group() -> None:
    messages = work(LLAMA, framework="megatron", zero=1, gpus=64, dp_replicate=8).messages
    whole = work(LLAMA, framework="megatron", zero=1, gpus=64).messages
    assert (total(messages.parameters.ranks), total(messages.gradients_between.ranks)) == (8, 8)
    assert (total(whole.parameters.ranks), total(whole.gradients_between.calls)) == (64, 0)


def test_gradients_hide_behind_one_micro_batch_alone() -> None:
    """With m micro-batches 1 / m of the step can hide them: at a fixed batch, more ranks leave less."""
    words = {"framework": "megatron", "zero": 1, "node": {"internode_bytes_per_s_per_gpu": 1e9}, "global_batch": 512}
    few, many = (times(LLAMA, gpus=gpus, **words)["communication"] for gpus in (64, 512))
    assert many > few


WOVEN: dict[str, Any] = {
    "framework": "megatron", "tp": 1, "pp": 4, "zero": 1, "pp_schedule": "interleaved", "vpp": 8,
    "gpus": 32, "settings": {"strategy.overlap_comm": True},
}  # fmt: skip
"""Four stages of eight blocks, each a chunk, in 8 replicas."""
UNHINDERED = {"hidden": 0.0, "hidden_between": 0.0, "window": 1.0}
"""Hidden traffic costs nothing, so that what is left is waited for."""


@pytest.mark.parametrize(("batch", "share"), [(4, 31 / 32), (16, 31 / 128), (64, 31 / 512)])
def test_interleaved_stages_wait_for_messages_where_the_pipeline_fills_and_drains(batch: int, share: float) -> None:
    """``get_pp_rank_microbatches``: 2 (p - rank - 1) + (v - 1) p chunks come first, v p - 1 on average, of v m."""
    words = {**WOVEN, "gpus": 4, "global_batch": batch}
    alone, whole = (
        times(LLAMA, **words, rates={**UNHINDERED, "call": 0.0, "latency": 0.0, "inside_tensor": inside})
        for inside in (1e9, 1e-3)
    )
    link = catalog.gpu("a100-80g").nvlink_bytes_per_s or 0
    sent = batch * total(work(LLAMA, **words).messages.pipeline.volume) / (1e-3 * link)
    assert whole["communication"] - alone["communication"] == pytest.approx(share * sent, rel=1e-6)


def test_reductions_of_all_chunks_but_one_run_beside_a_group_of_micro_batches() -> None:
    """``grad_sync_func`` is called when a chunk has had its last micro-batch: the next chunks' passes are ahead."""
    still = {**UNHINDERED, "latency": 0.0, "latency_between": 0.0, "call": 0.0}
    waited = {}
    for name, more in {"woven": {}, "plain": {"pp_schedule": "1f1b", "vpp": 1}}.items():
        slow, fast = (
            times(LLAMA, **{**WOVEN, **more}, rates={**still, "inside": rate, "between": rate}) for rate in (0.08, 1e9)
        )
        waited[name] = slow["communication"] - fast["communication"]
    messages = work(LLAMA, **WOVEN).messages
    link = 0.08 * (catalog.gpu("a100-80g").nvlink_bytes_per_s or 0)
    sent = (total(messages.gradients.volume) + total(messages.parameters.volume)) / link
    assert waited["woven"] == pytest.approx(sent / 8, rel=1e-3)
    assert waited["plain"] > 2 * waited["woven"]


# -------------------------------------------------------------------------------------- context and pipeline parallel


def test_context_parallel_ranks_exchange_by_kind_by_hand() -> None:
    """Keys and values of 512 tokens to seven others, three times; or a quarter of four tensors each way, 7/8 of it."""
    tokens = 512
    one = 2 * tokens * HIDDEN
    for kind, volume, name in (
        ("ring", 3 * 7 * 2 * one, "context"),
        ("allgather", 3 * 7 * 2 * one, "context_waited"),
        ("a2a", 2 * 7 / 8 * 4 * one, "context_waited"),
    ):
        messages = work(LLAMA, framework="megatron", zero=1, cp=8, cp_kind=kind).messages
        assert total(getattr(messages, name).volume) == LAYERS * volume
        other = {"context": "context_waited", "context_waited": "context"}[name]
        assert total(getattr(messages, other).volume) == 0


def test_attention_runs_beside_a_ring_alone() -> None:
    """As many bytes, and at 32k tokens as long an attention: the ring costs what it slows, the gather all of it."""
    words = {"framework": "megatron", "zero": 1, "cp": 8, "seq_len": 32768, "global_batch": 8}
    ring, gather = (times(LLAMA, **words, cp_kind=kind)["communication"] for kind in ("ring", "allgather"))
    assert ring < gather


def test_an_exchange_of_heads_between_nodes_has_one_adapter_a_rank() -> None:
    """Half of what sixteen ranks exchange crosses, by each rank's own adapter; a ring enters a node once, by all."""
    here, apart = (work(LLAMA, framework="megatron", zero=1, cp=cp, gpus=16, cp_kind="a2a").messages.context_waited
                   for cp in (8, 16))  # fmt: skip
    one = 2 * 256 * HIDDEN
    assert total(apart.volume) == LAYERS * 2 * 4 * one * 8 / 16
    assert (total(here.in_node), total(apart.in_node)) == (8, 1)


def test_chunks_of_a_stage_send_what_a_stage_sends_each() -> None:
    words = {"framework": "megatron", "zero": 1, "pp": 4}
    plain = work(LLAMA, **words).messages.pipeline
    woven = work(LLAMA, **words, pp_schedule="interleaved", vpp=2).messages.pipeline
    assert total(plain.volume) == 2 * 2 * 4096 * HIDDEN
    assert (total(woven.volume), total(woven.calls)) == (2 * total(plain.volume), 2 * total(plain.calls))


# --------------------------------------------------------------------------------------------------- narrow precisions


@pytest.mark.parametrize(
    ("framework", "gpu", "kind", "least"),
    [
        ("megatron", "h100", "delayed", 0.5), ("megatron", "h100", "tensorwise", 0.5),
        ("megatron", "h100", "blockwise", 0.5), ("megatron", "b200", "mxfp8", 0.5), ("megatron", "b200", "nvfp4", 0.25),
        ("torchtitan", "h100", "tensorwise", 0.5), ("torchtitan", "h100", "rowwise", 0.5),
        ("torchtitan", "b200", "mxfp8", 0.5),
    ],
)  # fmt: skip
def test_narrow_products_are_faster_and_never_by_all_of_their_peak(
    framework: str, gpu: str, kind: str, least: float
) -> None:
    """Head, scores and norms stay as they are, and operands are cast."""
    words = {"framework": framework, "gpu": gpu, "model": "llama-3-8b", "zero": 1 if framework == "megatron" else 3,
             "seq_len": 8192, "global_batch": 8}  # fmt: skip
    if framework == "torchtitan":
        words["compile"] = "blocks"
    plain = times(LLAMA, **words)
    narrow = times(LLAMA, **words, precision="fp8-mixed", settings={"strategy.float8": kind})
    assert least < narrow["compute"] / plain["compute"] < 1


def test_each_recipe_has_a_rate_of_its_own() -> None:
    table = catalog.step_time()
    known = {row.of for row in table.constant if row.name == "float8"}
    assert known == {
        "tensorwise", "rowwise", "TransformerEngine delayed", "TransformerEngine tensorwise", "blockwise", "mxfp8",
        "nvfp4", "TransformerEngine delayed, Blackwell", "TransformerEngine tensorwise, Blackwell",
    }  # fmt: skip


# -------------------------------------------------------------------------------------------------- mixtures of experts


def test_experts_that_tp_does_not_split_share_tokens_with_their_neighbours() -> None:
    """EP 8 beside TP 2: with one rank an expert eight neighbours stay in a node; with two they span it and the next."""
    folded, split = (work(EXPERTS, tp=2, sp=True, ep=8, settings={"strategy.etp": etp}).messages.expert
                     for etp in (1, 2))  # fmt: skip
    assert total(folded.outside) == 0 < total(folded.inside)
    assert total(split.outside) > 0


def test_a_rack_is_a_node_to_its_experts() -> None:
    """64 ranks share the NVLink domain of 72; of nodes of eight they cross the network."""
    words = {**EXPERTS, "gpus": 64, "ep": 64}
    rack = work(words, gpu="gb200", node="gb200-nvl72").messages.expert
    nodes = work(words, gpu="b200", node="dgx-b200").messages.expert
    assert total(rack.outside) == 0 < total(nodes.outside)


def test_what_a_split_expert_reduces_by_hand() -> None:
    """Attention's reduction alone where no rank shares an expert; beside it eight rows a token where two do."""
    attention = 2 * 4096 * 2048  # half of 2 x 2 bytes
    for etp, rows in ((1, 0), (2, 8)):
        messages = work(EXPERTS, tp=2, sp=True, ep=8, settings={"strategy.etp": etp}).messages
        assert total(messages.tensor_beside.volume) == 48 * (1 + rows) * attention


def test_a_block_waits_for_its_numbers_of_tokens_and_less_where_they_are_known() -> None:
    """3 ms a block and micro-batch, of which 0.4 stay with a capacity."""
    free, padded = (
        times(EXPERTS, ep=8, settings={"strategy.experts_padded": known})["host"] for known in (False, True)
    )
    micro_batches = 64 / 16
    assert free - padded == pytest.approx(micro_batches * 48 * rates_of_one("wait") * 0.6, rel=1e-3)


def test_rows_of_an_expert_fill_whole_tiles() -> None:
    """512 tokens are 32 rows of each of 128 experts, 2,048 are 128: either fills one tile."""
    words = {**EXPERTS, "gpus": 1, "seq_len": 512, "global_batch": 4}
    few, many = (total(work(words, micro_batch=size).once.linear) for size in (1, 4))
    assert many < 2 * few


def test_an_uneven_router_is_waited_for_in_products_and_exchange() -> None:
    even, uneven = (work(EXPERTS, ep=8, expert_imbalance=share) for share in (1, 2))
    assert total(uneven.messages.expert.inside) == 2 * total(even.messages.expert.inside)
    assert total(uneven.once.linear) > 1.3 * total(even.once.linear)


def test_hooks_of_deepspeed_s_stage_3_stand_around_every_module() -> None:
    """13 a block of Llama: it, attention and its four layers, MLP with three and the activation, two norms."""
    job = {**LLAMA, "framework": "deepspeed", "precision": "bf16-mixed"}
    sharded, again = work(job, zero=3), work(job, zero=3, recompute="full")
    assert total(sharded.once.hooked) == total(again.once.hooked) == 2 * 13 * LAYERS
    assert (total(sharded.again.hooked), total(again.again.hooked)) == (0, 13 * LAYERS)
    for others in ({"framework": "deepspeed", "zero": 2}, {"framework": "fsdp2", "zero": 3}):
        assert total(work(job, **others).once.hooked) == 0


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("qwen-019-s", 2.1), ("qwen-020-s", 2.2), ("qwen-021-s", 2.2),  # 1.8B at 256, 512 and 1,024 tokens
        ("qwen-043-s", 4.0), ("qwen-044-s", 4.0),  # 7B on two GPUs at 256 and 512
    ],
)  # fmt: skip
def test_short_steps_under_stage_3_take_as_long_as_qwen_s(name: str, published: float) -> None:
    """Seconds of eight micro-batches on A100 (QwenLM/Qwen README), which gave the hooks' time no constant."""
    run = next(run for run in read_unfitted().run if run.id == name)
    job = job_of(run, Presets())
    assert job.measured == pytest.approx(published, rel=1e-3)
    assert step_of(job, catalog.step_time()) == pytest.approx(published, rel=0.15)


def test_tiles_of_a_loss_are_multiplied_again_in_backward() -> None:
    """Four products with the head where Liger's loss has three: 2 FLOP a token, column and width each."""
    job = {"model": "llama-3.2-1b", "gpu": "h100", "gpus": 1, "framework": "hf", "zero": 0, "seq_len": 2048,
           "micro_batch": 4, "global_batch": 4, "loss": "fused-linear"}  # fmt: skip
    liger, trl = (total(work(job, settings={"strategy.tiled_loss": tiled}).once.plain) for tiled in ("false", "true"))
    assert trl - liger == 2 * 4 * 2048 * 2048 * 128_256
    assert trl / liger == pytest.approx(4 / 3)


def test_backward_of_fused_adapters_is_launched_by_python() -> None:
    job = {"model": "llama-3.1-8b", "gpu": "h100", "gpus": 1, "framework": "hf", "zero": 0, "seq_len": 2048,
           "micro_batch": 2, "global_batch": 2, "lora": "16"}  # fmt: skip
    plain, fused = (single(job, settings={"strategy.lora_kernels": kernels}) for kernels in ("model", "fused"))
    assert rates_for(plain.job.gpu, plain.grid).launch_backward < 0.5
    assert rates_for(fused.job.gpu, fused.grid).launch_backward == 1.0


def test_rows_that_travel_once_are_sorted_once_by_hand() -> None:
    """Of 8 experts a token 5.25 ranks of 8 are met: 16 rows less 5.25 of each exchange, four of them, 48 blocks."""
    everywhere, once = (total(work(EXPERTS, ep=8, moe_dispatcher=name).once.written) for name in ("alltoall", "deepep"))
    ranks = 8 * (1 - (7 / 8) ** 8)
    assert everywhere - once == pytest.approx(48 * 4 * 2 * 4096 * 2048 * (16 - ranks))


@pytest.mark.parametrize(("recompute", "exchanges"), [("full", 2), ("modules:moe", 2), ("modules:mlp", 0)])
def test_rows_of_experts_that_run_again_are_sorted_once_too(recompute: str, exchanges: int) -> None:
    """Megatron-LM's `mlp` is that of blocks without experts: nothing of these runs again, and nothing is spared."""
    rows = 2 * 4096 * 2048 * (16 - 8 * (1 - (7 / 8) ** 8))
    words = {**EXPERTS, "ep": 8, "recompute": recompute}
    both, one = (total(work(words, moe_dispatcher=name).again.written) for name in ("alltoall", "deepep"))
    assert both - one == pytest.approx(48 * exchanges * rows)
    assert one >= 0


@pytest.mark.parametrize(("tp", "gpus", "here"), [(2, 16, 2), (8, 16, 8), (3, 6, 3), (3, 24, 1), (6, 24, 2)])
def test_groups_that_are_no_whole_part_of_a_node_lie_in_several(tp: int, gpus: int, here: int) -> None:
    """Of nodes of eight GPUs: the third group of three has ranks 6, 7 and 8, of which the last is in another node."""
    job = {**LLAMA, "model": "gpt3-175b", "seq_len": 2048, "global_batch": gpus // tp}
    message = work(job, framework="megatron", zero=1, tp=tp, gpus=gpus).messages.tensor
    assert total(message.in_node) == here
