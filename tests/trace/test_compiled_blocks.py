"""What a compiled block keeps: against PyTorch's partitioner, by a table of large blocks and by running it on small.

The table is of torch 2.13: AOT autograd with inductor's decompositions and ``min_cut_rematerialization_partition`` at
budget 1, over the classes of Transformers 5.23 (or a plain Llama) on fake CUDA tensors. Its bytes leave out the block's
input, weights and views of them.
"""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest

from memcalc.api import load_model
from memcalc.convert.huggingface import from_huggingface
from memcalc.specs.flat import from_flat
from memcalc.specs.model import Model
from memcalc.trace.layers import BlockConfig
from memcalc.trace.tape import Record
from memcalc.trace.template import Template, trace

RANDOM_STATE = 24
"""Bytes that fused attention keeps of the random generator, of which the trace knows nothing; 16 with a mask."""
PLAIN = {
    "llama-7b": {"n_layers": 32, "hidden": 4096, "heads": 32, "ffn": 11008, "vocab": 32000, "max_positions": 4096},
    "1b": {"n_layers": 16, "hidden": 2048, "heads": 32, "kv_heads": 8, "ffn": 8192, "vocab": 128256,
           "max_positions": 8192},
    "llama-3-70b": {"n_layers": 80, "hidden": 8192, "heads": 64, "kv_heads": 8, "ffn": 28672, "vocab": 128256,
                    "max_positions": 8192},
}  # fmt: skip
PHI_3 = {
    "model_type": "phi3", "hidden_size": 3072, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 32, "intermediate_size": 8192, "vocab_size": 32064, "max_position_embeddings": 4096,
    "sliding_window": 2047,
}  # fmt: skip
TABLE = [
    ("llama-7b", None, 1, 2048, 252_985_368), ("llama-3-8b", None, 1, 4096, 537_427_992),
    ("1b", None, 1, 4096, 294_158_360), ("llama-3-70b", None, 1, 2048, 529_023_000),
    ("llama-3.2-3b", None, 1, 4096, 344_358_936), ("llama-3.2-3b", None, 2, 2048, 344_358_936),
    ("qwen2.5-7b", None, 1, 4096, 621_248_536), ("qwen3-4b", None, 1, 4096, 429_031_448),
    ("phi-3-mini", True, 1, 4096, 461_930_512), ("olmo-2-7b", None, 1, 4096, 573_112_344),
    ("gemma-3-12b", False, 2, 2048, 655_032_344), ("gemma-3-12b", True, 2, 2048, 705_363_984),
    ("gemma-3-12b", True, 1, 4096, 722_141_200), ("gemma-3-1b", False, 1, 4096, 239_288_344),
    ("gemma-3-1b", True, 1, 4096, 272_842_768), ("gemma-3-1b", True, 2, 2048, 256_065_552),
    ("gemma-2-2b", None, 2, 2048, 637_861_888), ("gemma-2-9b", None, 2, 2048, 1_141_440_512),
]  # fmt: skip


def model_of(name: str) -> Model:
    if name in PLAIN:
        return from_flat(PLAIN[name])
    return from_huggingface(PHI_3) if name == "phi-3-mini" else load_model(name)


def bytes_of(record: Record, batch: int, seq: int) -> int:
    tokens = batch * seq
    units = {"token": tokens, "pair": tokens * seq, "filled_pair": tokens * seq, "filled_token": tokens, "once": 1}
    return record.size.bytes * units[record.size.unit]


@pytest.mark.parametrize(("name", "sliding", "batch", "seq", "expected"), TABLE)
def test_the_rule_gives_what_the_partitioner_keeps(
    name: str, sliding: bool | None, batch: int, seq: int, expected: int
) -> None:
    model = model_of(name)
    block = next(
        group.block
        for group in model.groups
        if sliding is None or (group.block.attention.window is not None) == sliding
    )
    eager = name.startswith("gemma-2-")
    setting = BlockConfig(
        compiled=True,
        sdpa=name not in PLAIN,
        attention="eager" if eager else "flash",
        windowed=sliding is True,
        reentrant=False,
    )
    template = trace(block, setting)
    assert 0 in template.kept  # the block's input, which the table leaves out
    kept = sum(bytes_of(record, batch, seq) for record in template.kept_records) - 2 * batch * seq * block.hidden
    state = 0 if eager else 16 if sliding else RANDOM_STATE
    assert kept + state == expected


def settings(**fields: Any) -> BlockConfig:
    return BlockConfig(sdpa=True, reentrant=False, **fields)


@pytest.mark.parametrize(("name", "hidden", "queries", "keys"), [
    ("llama-3-8b", 12, 0, 4), ("qwen2.5-7b", 12, 0, 4), ("qwen3-4b", 8, 6, 6), ("olmo-2-7b", 8, 6, 6),
    ("gemma-3-12b", 10, 6, 6),
])  # fmt: skip
def test_closed_forms(name: str, hidden: int, queries: int, keys: int) -> None:
    """Bytes a token by family, beside 6 for each unit of the MLP; logsumexp and statistics are fp32 and left out."""
    block = model_of(name).main.block
    spec, mlp = block.attention, block.mlp
    records = trace(block, settings(compiled=True)).kept_records
    assert all(r.size.width == 4 for r in records if "statistics" in r.name or "logsumexp" in r.name)
    ffn: int = mlp.ffn  # type: ignore[union-attr]
    assert sum(r.size.bytes for r in records if r.size.width == 2) == (
        hidden * block.hidden + queries * spec.q_dim + keys * spec.kv_dim + 6 * ffn
    )


def peak(template: Template) -> int:
    return max(sum(each.values()) for each in template.backward_peaks)


def product_waits(template: Template) -> bool:
    """Whether the product of gate and up goes after the gradients of both are made."""
    names = [(event >= 0, template.names[event if event >= 0 else ~event]) for event in template.backward]
    last_made = max(at for at, each in enumerate(names) if each == (True, "gradient of a factor of MLP product"))
    return names.index((False, "MLP product")) > last_made


def test_nothing_is_left_to_drop_under_full_recomputation() -> None:
    """The graph of a checkpointed block is told to compute all of it again, so that its input alone is kept.

    Inductor's code for it has one kernel that reads gate, up and the product's gradient, and writes the product beside
    the gradients of both: six tensors of the MLP's width at once.
    """
    block = model_of("llama-3-8b").main.block
    plain, both = (trace(block, settings(compiled=compiled), "full") for compiled in (False, True))
    assert plain.kept == both.kept == {0}
    assert peak(both) < peak(plain)
    assert (product_waits(plain), product_waits(both)) == (False, True)


def test_a_kept_tensor_goes_with_the_last_backward_that_reads_it() -> None:
    """Forward starts and ends, and so does backward, with what is kept and with nothing else."""
    template = trace(model_of("gemma-3-12b").main.block, settings(compiled=True))
    alive = set(template.at_start)
    for event in template.forward:
        alive.add(event) if event >= 0 else alive.discard(~event)
    assert alive == template.kept | {template.output}
    for event in template.backward:
        alive.add(event) if event >= 0 else alive.discard(~event)
    assert not alive & template.kept


SMALL = ("llama-3", "qwen2", "qwen3", "gemma", "gemma3", "gemma3-wide", "olmo2", "mistral-window", "opt", "starcoder2")
EAGER = ("llama-3", "gemma3", "gemma2", "bloom", "gpt2")
BATCH, SEQ = 2, 64


def kept_by_the_partitioner(family: str, attention: str, policy: str = "none") -> int:
    """Return the bytes of the distinct storages that the middle block's forward graph hands to its backward.

    A ``policy`` is put round the block before it is compiled; the random generator's state that a checkpoint keeps is
    left out. Statistics of layer norms are counted as the GPU's fp32 ones; the CPU's have the width of the input.
    """
    torch = pytest.importorskip("torch")
    from autograd import models
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    from memcalc.probe.live.step_models import _policy, wrap_blocks

    sizes: dict[int, int] = {}

    def cut(joint: Any, inputs: Any, *, num_fwd_outputs: int, **options: Any) -> Any:
        forward, backward = min_cut_rematerialization_partition(
            joint, inputs, num_fwd_outputs=num_fwd_outputs, **options
        )
        outputs = next(node for node in forward.graph.nodes if node.op == "output").args[0]
        for node in outputs[num_fwd_outputs:]:
            value = node.meta.get("val")
            if not isinstance(value, torch.Tensor):
                continue
            shape, memory = tuple(value.shape), value.untyped_storage()
            given = node.op == "placeholder" and not (len(shape) == 3 and shape[0] == BATCH)
            if not given and value.dtype != torch.uint8 and memory.nbytes() > RANDOM_STATE:
                narrow = value.dtype.itemsize == 2 and shape[-1] == 1
                sizes[memory._cdata] = memory.nbytes() * (2 if narrow else 1)
        return forward, backward

    config = models.hf_config(family)
    model = models.hf_model(family, config, dtype=torch.bfloat16, eager=attention == "eager")
    block: Any = list(models.blocks_of(model).values())[1]
    if policy == "selective-ops":  # AOT autograd traces forward twice: a policy counts anew each time, as torchtitan's
        from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

        again = {"use_reentrant": False, "context_fn": lambda: create_selective_checkpoint_contexts(_policy())}
        block.forward = partial(checkpoint, block.forward, **again)
    else:
        wrap_blocks({"middle": block}, policy)
    torch._dynamo.reset()
    backend = aot_autograd(
        fw_compiler=lambda graph, _: graph.forward,
        bw_compiler=lambda graph, _: graph.forward,
        partition_fn=cut,
        decompositions=select_decomp_table(),
    )
    block.forward = torch.compile(block.forward, backend=backend, dynamic=False)
    inputs = models.hf_inputs(family, config, BATCH, SEQ, torch.bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model(**inputs).loss.backward()
    return sum(sizes.values())


@pytest.mark.slow
@pytest.mark.parametrize(("family", "attention"), [(f, "flash") for f in SMALL] + [(f, "eager") for f in EAGER])
def test_the_partitioner_itself_on_small_classes(family: str, attention: str) -> None:
    """A real class, compiled on the CPU up to the point where code would be generated."""
    pytest.importorskip("transformers")
    from autograd import models

    model = from_huggingface(models.hf_config(family).to_dict())
    block = model.main.block
    window = block.attention.window
    setting = settings(compiled=True, attention=attention, windowed=window is not None and window <= SEQ)
    kept = sum(bytes_of(record, BATCH, SEQ) for record in trace(block, setting).kept_records)
    assert kept == kept_by_the_partitioner(family, attention)


@pytest.mark.parametrize(
    ("family", "policy"),
    [(f, "selective-ops") for f in ("olmo2", "gemma3", "qwen2", "starcoder2")]
    + [pytest.param(f, "selective-ops", marks=pytest.mark.slow) for f in ("llama-3", "qwen3", "mistral-window")]
    + [pytest.param("llama-3", "full", marks=pytest.mark.slow)],
)
def test_a_checkpoint_inside_of_a_compiled_block(family: str, policy: str) -> None:
    """The down projection's output, which the policy stores, is kept where a norm reads it, and else is not.

    Layers with a bias (Qwen2's queries, keys and values, all of StarCoder2's) are no ``mm`` to the policy.
    """
    pytest.importorskip("transformers")
    from autograd import models

    block = from_huggingface(models.hf_config(family).to_dict()).main.block
    window = block.attention.window
    setting = settings(compiled=True, windowed=window is not None and window <= SEQ)
    records = trace(block, setting, policy).kept_records
    assert sum(bytes_of(record, BATCH, SEQ) for record in records) == kept_by_the_partitioner(family, "flash", policy)


EXPERTS = load_model("qwen3-30b-a3b").main.block
IN_PARTS = BlockConfig(dropout=False, stops_early=False, compiled=True, compiled_parts=True)


def kept_outputs(setting: BlockConfig) -> set[str]:
    kept = trace(EXPERTS, setting, "selective-ops").kept_records
    return {record.name for record in kept} - {"block input"}


def test_a_policy_around_compiled_modules_keeps_attention_and_no_matmul() -> None:
    """As :func:`test_what_a_policy_sees_of_a_compiled_module`; exchanges are called between the modules, in eager."""
    assert kept_outputs(IN_PARTS) == {"attention output", "attention logsumexp"}
    assert "query projection output" in kept_outputs(IN_PARTS._replace(compiled_parts=False))
    assert len(kept_outputs(IN_PARTS._replace(exchanges_rows=True, keeps_exchange=True))) == 4


def test_a_block_without_experts_is_compiled_whole() -> None:
    block = load_model("qwen3-0.6b").main.block
    settings = (IN_PARTS._replace(compiled_parts=parts) for parts in (False, True))
    kept = [trace(block, setting, "selective-ops").kept_records for setting in settings]
    assert kept[0] == kept[1]


@pytest.mark.slow
def test_what_a_policy_sees_of_a_compiled_module() -> None:
    """Inductor writes a matmul's output where it wants it (``aten.mm.out``) and calls attention by its own name."""
    import torch
    from torch import nn
    from torch.nn.functional import scaled_dot_product_attention
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    class Attend(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.out = nn.Linear(64, 192, bias=False), nn.Linear(64, 64, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = (part.view(2, 32, 4, 16).transpose(1, 2) for part in self.into(x).chunk(3, dim=-1))
            heads = scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.out(heads.transpose(1, 2).reshape(2, 32, 64))

    seen: list[str] = []

    def policy(_: Any, operator: Any, *__: Any, **___: Any) -> CheckpointPolicy:
        seen.append(str(operator))
        return CheckpointPolicy.PREFER_RECOMPUTE

    attend = torch.compile(Attend(), fullgraph=True)
    x = torch.randn(2, 32, 64, requires_grad=True)
    for _ in range(2):  # Dynamo compiles in the first
        seen.clear()
        contexts = lambda: create_selective_checkpoint_contexts(policy)  # noqa: E731
        checkpoint(attend, x, use_reentrant=False, context_fn=contexts).sum().backward()
    assert seen == ["aten.mm.out", "aten._scaled_dot_product_flash_attention_for_cpu.default", "aten.mm.out"]
