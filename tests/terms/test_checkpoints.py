"""What saving and resuming hold, beside PyTorch's own state dicts on eight ranks that are only pretended."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import memcalc
from memcalc.results.details import Occasion

RANKS, HIDDEN, WIDE, LAYERS = 8, 512, 2048, 6
LLAMA = {"model": "llama-3.1-8b", "gpu": "h100", "gpus": 8, "seq_len": 4096, "recompute": "full"}
PARAMETERS = 8_030_261_248
TABLE = 128256 * 4096


class LocalBytes(TorchDispatchMode):
    """The most bytes of local tensors that lived at once; those inside of a DTensor count, its own shape does not."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes, self.most = dict[int, int](), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        for tensor in (leaf for leaf in tree_leaves(out) if type(leaf) in {torch.Tensor, torch.nn.Parameter}):
            self.count(tensor)
        return out

    def count(self, tensor: torch.Tensor) -> None:
        """Count a tensor's storage while it lives."""
        storage = tensor.untyped_storage()
        if tensor.device.type == "cpu" and storage._cdata not in self.sizes:
            self.sizes[storage._cdata] = storage.nbytes()
            weakref.finalize(storage, self.sizes.pop, storage._cdata)
            self.most = max(self.most, sum(self.sizes.values()))


@pytest.fixture
def sharded() -> Iterator[torch.nn.Module]:
    """A model under FSDP 2 whose ranks beside this one are pretended."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    mesh = init_device_mesh("cpu", (RANKS,))
    layers = [torch.nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(LAYERS)]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(HIDDEN, WIDE, bias=False))
    for module in (*model, model):
        fully_shard(module, mesh=mesh)
    yield model
    dist.destroy_process_group()


def test_fsdp2_gathers_tensor_by_tensor_and_keeps_all_where_nothing_leaves(sharded: torch.nn.Module) -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    whole = 4 * (LAYERS * HIDDEN * HIDDEN + HIDDEN * WIDE)
    with LocalBytes() as live:
        state = get_model_state_dict(sharded, options=StateDictOptions(full_state_dict=True))
    assert live.most == whole + whole // RANKS
    assert sum(tensor.nbytes for tensor in state.values()) == whole


def test_a_fresh_optimizer_of_fsdp2_takes_a_step_before_it_reads(sharded: torch.nn.Module) -> None:
    """Shards, their gradients of zero and two moments are there at once, before a file is read."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    optimizer = torch.optim.AdamW(sharded.parameters(), fused=True)
    for parameter in sharded.parameters():
        assert isinstance(parameter, DTensor)
    with LocalBytes() as live:
        for parameter in sharded.parameters():
            live.count(parameter.to_local())
        get_optimizer_state_dict(sharded, optimizer)
    share = 4 * (LAYERS * HIDDEN * HIDDEN + HIDDEN * WIDE) // RANKS
    assert live.most == pytest.approx(4 * share, rel=1e-3)


def test_an_optimizer_with_states_has_both_while_it_reads_others() -> None:
    """As DeepSpeed's stage 3, which makes them before it reads a checkpoint."""
    weight = torch.nn.Parameter(torch.zeros(1 << 16))
    optimizer = torch.optim.AdamW([weight])
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    kept = optimizer.state_dict()
    read = {**kept, "state": {0: {n: t.double() for n, t in kept["state"][0].items()}}}  # as of another device
    old = 2 * weight.nbytes
    del kept
    with LocalBytes() as live:
        for tensor in optimizer.state[weight].values():
            live.count(tensor)
        optimizer.load_state_dict(read)
    assert live.most == pytest.approx(2 * old, rel=1e-3)


def occasion(name: str, **words: Any) -> Occasion:
    return next(each for each in memcalc.estimate(**{**LLAMA, **words}).occasions if each.name == name)


def gpu_parts(each: Occasion) -> dict[str, int]:
    return {part.name: part.bytes for part in each.parts if part.tier == "gpu"}


def test_a_full_state_dict_of_fsdp1_stands_on_each_gpu_unless_it_leaves() -> None:
    """PyTorch 2.13: FullStateDictConfig() offloads nothing; Accelerate's leaves unit by unit, for rank 0's host."""
    plain = occasion("saving", framework="fsdp1", zero=3)
    assert gpu_parts(plain)["all weights, gathered"] == 4 * PARAMETERS
    left = occasion("saving", framework="hf", zero=3)
    assert gpu_parts(left)["weights that are gathered at once"] == 4 * (2 * TABLE + 4096)  # embedding, norm and head
    assert left.host == 4 * PARAMETERS


def test_what_is_written_can_be_told() -> None:
    told = {form: occasion("saving", framework="fsdp2", zero=3, settings={"strategy.state_dict": form})
            for form in ("sharded", "full", "full-on-gpu")}  # fmt: skip
    assert all(each.certain for each in told.values())
    states = told["sharded"].allocated
    assert told["full"].allocated - states == 4 * TABLE
    assert told["full-on-gpu"].allocated - states == 4 * PARAMETERS
    assert not occasion("saving", framework="fsdp2", zero=3).certain


def test_a_save_that_was_asked_for_and_does_not_fit_is_the_verdict() -> None:
    words = {"framework": "fsdp2", "gpu": "a100-40g", "gpus": 64, "micro_batch": 1, "seq_len": 1024}
    plain = memcalc.estimate(**{**LLAMA, **words}, zero=3)
    saved = memcalc.estimate(**{**LLAMA, **words}, zero=3, settings={"strategy.state_dict": "full-on-gpu"})
    assert (plain.verdict, saved.verdict) == ("fits", "fits")
    larger = {**LLAMA, **words, "model": "llama-2-13b"}
    assert memcalc.estimate(**larger, zero=3).verdict == "fits"
    failing = memcalc.estimate(**larger, zero=3, settings={"strategy.state_dict": "full-on-gpu"})
    assert failing.verdict == "does-not-fit"
    assert any(warning.startswith("saving runs out of memory") for warning in failing.warnings)


def test_resuming_deepspeed_has_the_moments_twice_at_stage_3_alone() -> None:
    """initialize_optimizer_states makes them; stage 3 replaces them, stages 1 and 2 copy into them."""
    share = -(-PARAMETERS // 8)
    twice, once = (occasion("resuming", framework="deepspeed", zero=zero) for zero in (3, 2))
    assert gpu_parts(twice)["adamw moments, read anew"] == pytest.approx(8 * share, rel=1e-4)
    assert "adamw moments, read anew" not in gpu_parts(once)
    assert once.host == pytest.approx(8 * 12 * share, rel=1e-4)  # master weights and moments of eight ranks


def test_resuming_fsdp2_has_the_bytes_of_a_step() -> None:
    result = memcalc.estimate(**LLAMA, framework="fsdp2", zero=3)
    resumed = next(each for each in result.occasions if each.name == "resuming")
    assert resumed.allocated == result.phases["step"]


@pytest.mark.parametrize(("framework", "zero", "copies"), [("hf", 0, 8), ("hf", 3, 8), ("deepspeed", 3, 1)])
def test_loading_takes_a_copy_of_the_weights_for_each_rank_that_reads(framework: str, zero: int, copies: int) -> None:
    loaded = occasion("loading", framework=framework, zero=zero)
    width = 4 if framework == "hf" else 2
    assert loaded.host == pytest.approx(copies * width * PARAMETERS, rel=1e-4)


def test_quantising_on_load_has_one_wide_tensor_beside_the_narrow_ones() -> None:
    words = {"framework": "hf", "gpus": 1, "precision": "bf16", "lora": "16", "quantize": "nf4"}
    parts = gpu_parts(occasion("loading", **words))
    assert parts["one 16-bit tensor before it is quantised"] == 2 * TABLE


def test_axolotl_casts_embedding_and_head_to_fp32_while_it_prepares_a_quantised_base() -> None:
    """loaders/model.py of 067b021c8: _convert_embedding_modules_dtype, module by module, before there are adapters."""
    words = {"framework": "hf", "gpus": 1, "precision": "bf16", "lora": "16", "quantize": "nf4"}
    loaded = occasion("loading", **words, settings={"strategy.kbit_passing": True})
    parts = gpu_parts(loaded)
    blocks = 32 * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 14336 * 4096)
    ends = 2 * TABLE + 4096
    assert loaded.certain
    assert "adapters" not in parts
    assert loaded.allocated == pytest.approx(blocks * (1 / 2 + 4 / 64) + 4 * ends + 2 * TABLE, rel=1e-3)
    assert parts["embedding and head, in fp32"] == 2 * ends


def test_a_base_that_cannot_be_prepared_does_not_fit() -> None:
    """Tables of 248,320 by 5,120: in fp32, with the last one in 16 bits beside it, more than a step takes for them."""
    words: dict[str, Any] = {"model": "qwen3.5-27b", "gpu": "rtx-3090", "gpus": 1, "framework": "hf", "images": 0}
    words |= {"lora": "4:q,v", "quantize": "nf4-dq", "recompute": "full", "loss": "fused-linear", "seq_len": 256}
    plain, passing = (memcalc.estimate(**words, settings={"strategy.kbit_passing": value}) for value in (False, True))
    assert plain.peak == passing.peak
    assert (plain.verdict, passing.verdict) == ("fits", "does-not-fit")
    assert passing.reason == "loading does not fit"


def test_terms_of_a_step_are_none_of_a_rest() -> None:
    """What stays between steps is weights and states: no gradient of FSDP, one buffer of Megatron-LM's."""
    rest = gpu_parts(occasion("saving", framework="fsdp2", zero=3))
    assert set(rest) == {"weights", "adamw moments", "BLAS workspaces"}
    evaluated = gpu_parts(occasion("evaluation", framework="megatron", precision="bf16-mixed"))
    assert evaluated["gradients"] == 4 * PARAMETERS
    assert set(chain(rest, evaluated)) >= {"weights", "gradients"}


MEGATRON = {"framework": "megatron", "model": "llama-3.1-8b", "precision": "bf16-mixed", "zero": 1}


def test_megatron_writes_shards_and_gathers_nothing_by_default() -> None:
    """Megatron-LM d98e8a64 training/checkpointing.py, _build_sharded_state_dict_metadata: dp_reshardable."""
    saved = occasion("saving", **MEGATRON)
    assert not saved.certain
    assert saved.host == 0
    rest = gpu_parts(saved)
    assert rest["gradients"] == 4 * PARAMETERS  # the buffer of main gradients stays
    assert "saving" not in {each.name for each in memcalc.estimate(**{**LLAMA, **MEGATRON, "zero": 0}).occasions}


def test_whole_states_of_megatron_go_through_the_gpu_with_nccl_alone() -> None:
    """get_parameter_state_dp_zero: fp32 weights and two moments on the host; over NCCL one of them on the GPU first.

    The receiving ranks' parts make up the whole buffer, and the rank's own part is sent from the GPU too.
    """
    forms = ("sharded", "full", "full-on-gpu")
    shards, gloo, nccl = (
        occasion("saving", **MEGATRON, settings={"strategy.state_dict": form}) for form in forms
    )  # fmt: skip
    assert gloo.allocated == shards.allocated
    assert gloo.host == 12 * PARAMETERS
    assert nccl.allocated - shards.allocated == 4 * PARAMETERS + 4 * -(-PARAMETERS // 8)
    assert nccl.host == 8 * gloo.host


def test_states_of_experts_are_gathered_apart() -> None:
    words = {**MEGATRON, "model": "mixtral-8x7b", "ep": 8}
    forms = ("sharded", "full-on-gpu")
    shards, nccl = (occasion("saving", **words, settings={"strategy.state_dict": form}) for form in forms)
    expert = 32 * 3 * 4096 * 14336  # one expert of each block on a rank, which no other rank has
    assert nccl.allocated - shards.allocated == 2 * 4 * expert


def test_what_nobody_knows_of_a_save_is_said() -> None:
    words = {**LLAMA, **MEGATRON, "optimizer": "muon", "settings": {"strategy.state_dict": "full"}}
    result = memcalc.estimate(**words)
    assert "saving" not in {each.name for each in result.occasions}
    assert any(warning.startswith("saving is not counted: strategy.state_dict") for warning in result.warnings)
