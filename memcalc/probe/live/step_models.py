"""A real model with its optimizer and one batch, built from a row of the suite."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from memcalc.frameworks import habits_of
from memcalc.probe.measure.suite import SHAPES

DTYPES = {
    "fp32": torch.float32,
    "bf16-autocast": torch.float32,
    "fp16-autocast": torch.float32,
    "bf16-mixed": torch.float32,
    "bf16": torch.bfloat16,
}
"""Of the weights as they are made; those of bf16-mixed are what FSDP shards."""
LEARNING_RATE = 1e-5
"""Small: the values are random, and only their sizes matter."""
TARGETS = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "o_proj"}
ALL_LINEAR = (*TARGETS.values(), "gate_proj", "up_proj", "down_proj")


@dataclass
class Training:
    """Everything that a step needs."""

    model: nn.Module
    blocks: dict[str, nn.Module]
    """The repeated blocks by module path."""
    loss: Callable[[], torch.Tensor]
    """Forward pass and loss of one micro-batch."""
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    """Of the loss, under fp16; else it passes everything on."""
    micro_batches: int
    """Of one optimizer step."""


Adapt = Callable[[nn.Module, Mapping[str, nn.Module]], nn.Module]
"""Takes a model and its blocks, and returns what is trained in its place."""


def build(job: Mapping[str, Any], device: str, adapt: Adapt | None = None) -> Training:
    """Return what a job trains, on `device`, with random weights and tokens; `adapt` may shard the model."""
    run, config = job["run"], job["config"]
    strategy, workload = run["strategy"], run["workload"]
    choose_attention(strategy["attention"])
    model = _model(config, strategy, workload, device)
    blocks = decoder_blocks(model)
    recompute = strategy["recompute"]
    if recompute == "selective-ops":
        for block in blocks.values():
            _selective(block)
    else:
        wrap_blocks(blocks, recompute, first=habits_of(strategy["framework"]).checkpoints_first)
    if adapt:
        model = adapt(model, blocks)
    micro_batch, seq_len = workload["micro_batch"], workload["seq_len"]
    tokens = torch.randint(0, config["vocab_size"], (micro_batch, seq_len), device=device)
    return Training(
        model=model,
        blocks=blocks,
        loss=partial(_loss, model, tokens, tokens.clone(), _autocast(strategy), device),
        optimizer=_optimizer(model, strategy["optimizer_impl"]),
        scaler=torch.amp.GradScaler(device, enabled=strategy["precision"] == "fp16-autocast"),
        micro_batches=workload["global_batch"] // micro_batch,
    )


def load_classes() -> None:
    """Import the classes that rows are made of, without a look at the device."""
    from transformers import AutoConfig, AutoModelForCausalLM

    for kind in sorted({shape["model_type"] for shape in SHAPES.values()}):
        with contextlib.suppress(KeyError, ValueError):  # a release without that class fails in the row's own process
            AutoModelForCausalLM._model_mapping[type(AutoConfig.for_model(kind))]
    with contextlib.suppress(ImportError):
        import peft  # noqa: F401


def choose_attention(name: str) -> None:
    """Leave PyTorch only the kernel of a row; a row whose kernel is not available fails.

    The switches hold for the process, so that what is computed again in backward has the same kernel.
    """
    switches = torch.backends.cuda
    switches.enable_flash_sdp(name in {"flash", "eager", "sdpa"})
    switches.enable_mem_efficient_sdp(name in {"efficient", "eager", "sdpa"})
    switches.enable_math_sdp(name in {"math", "eager", "sdpa"})
    if hasattr(switches, "enable_cudnn_sdp"):
        switches.enable_cudnn_sdp(name == "cudnn")


def decoder_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the blocks of the longest list of like modules, by module path."""
    lists = {path: module for path, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    layered = {
        path: blocks
        for path, blocks in lists.items()
        if len(blocks) and all(type(block).__name__.endswith(("Layer", "Block")) for block in blocks)
    }
    path = min(layered, key=lambda path: path.count("."))
    return {f"{path}.{index}": block for index, block in enumerate(layered[path])}


def _model(
    config: Mapping[str, Any], strategy: Mapping[str, Any], workload: Mapping[str, Any], device: str
) -> nn.Module:
    """Return the class of Transformers in training mode; under adapters, PEFT's over a frozen base."""
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = dict(config)
    settings = AutoConfig.for_model(fields.pop("model_type"), **fields)
    settings.use_cache = False
    kernel = "eager" if strategy["attention"] == "eager" else "sdpa"
    # Weights are made where they stay, one tensor at a time and filled in place, as a checkpoint is loaded
    with torch.device(device):
        model: nn.Module = AutoModelForCausalLM.from_config(
            settings, dtype=DTYPES[strategy["precision"]], attn_implementation=kernel
        )
    with contextlib.suppress(AttributeError, ValueError):
        model.set_experts_implementation("grouped_mm")  # of mixtures of experts; other classes have none
    if strategy.get("lora"):
        model = _adapted(model, strategy, workload, device)
    return model.train()


def _adapted(base: nn.Module, strategy: Mapping[str, Any], workload: Mapping[str, Any], device: str) -> nn.Module:
    """Return the model with LoRA adapters over its frozen weights; without checkpoints its input needs no gradient."""
    from peft import LoraConfig, get_peft_model

    rank, _, targets = strategy["lora"].partition(":")
    names = ALL_LINEAR if targets == "all-linear" else tuple(TARGETS[word] for word in targets.split(","))
    options = LoraConfig(r=int(rank), target_modules=list(names), lora_dropout=workload.get("lora_dropout", 0.0))
    with torch.device(device):
        model: nn.Module = get_peft_model(base, options)
    if strategy["recompute"] != "none":
        base.enable_input_require_grads()
    return model


def _autocast(strategy: Mapping[str, Any]) -> torch.dtype | None:
    """Return the dtype of autocast, where there is one."""
    if strategy["precision"] == "fp16-autocast":
        return torch.float16
    return torch.bfloat16 if strategy["precision"] == "bf16-autocast" or strategy.get("autocast") else None


def _loss(
    model: nn.Module, tokens: torch.Tensor, labels: torch.Tensor, autocast: torch.dtype | None, device: str
) -> torch.Tensor:
    """Run forward and loss; Transformers computes the loss where labels are given."""
    with torch.autocast(device, autocast) if autocast else contextlib.nullcontext():
        loss: torch.Tensor = model(input_ids=tokens, labels=labels).loss
    return loss


def _optimizer(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    """Return AdamW over what is trained, in one of its three forms."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=LEARNING_RATE, foreach=kind == "foreach", fused=kind == "fused")


# ------------------------------------------------------------------------------------------- selective recomputation


def _contexts() -> Any:
    """Return those of one forward, whose products are counted from the first: a compiler traces it twice."""
    return create_selective_checkpoint_contexts(_policy())


def _selective(block: nn.Module) -> None:
    """Checkpoint a block as torchtitan's selective recomputation of operators does."""
    forward = block.forward

    def run(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # Keyword arguments are bound to the function, as Transformers does it: they are no inputs of the checkpoint
        return checkpoint(
            lambda *inputs: forward(*inputs, **kwargs), hidden, *args, use_reentrant=False, context_fn=_contexts
        )

    block.forward = run


def _policy() -> Callable[..., CheckpointPolicy]:
    """Return a policy that keeps attention, and every second matrix product from the first on."""
    counts = {True: 0, False: 0}
    aten = torch.ops.aten
    saved_operators = {
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
    }

    def decide(context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        if operator is aten.mm.default:
            counts[context.is_recompute] += 1
        odd = operator is aten.mm.default and counts[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if odd or operator in saved_operators else CheckpointPolicy.PREFER_RECOMPUTE

    return decide


def recompute_groups(policy: str, count: int, *, first: bool = False) -> list[range]:
    """Return the runs of blocks that share one checkpoint: ``none``, ``full``, ``every-N`` or ``segments-K``.

    Of every N blocks the last has one, as in torchtitan, or the ``first``, as in Transformers.
    """
    if policy == "none":
        return []
    if policy == "full":
        return [range(i, i + 1) for i in range(count)]
    word, _, number = policy.rpartition("-")
    if word == "every":
        return [range(i, i + 1) for i in range(0 if first else int(number) - 1, count, int(number))]
    size = -(-count // int(number))
    return [range(i, min(i + size, count)) for i in range(0, count, size)]


def wrap_blocks(blocks_by_path: Mapping[str, nn.Module], policy: str, *, first: bool = False) -> None:
    """Checkpoint blocks, given by path, by ``policy``: separately in each list of blocks (encoder, decoder)."""
    if policy == "submodules":
        for block in blocks_by_path.values():
            for module in block.children():
                _wrap([module])
        return
    lists: dict[str, list[nn.Module]] = {}
    for path, block in blocks_by_path.items():
        lists.setdefault(path.rpartition(".")[0], []).append(block)
    for blocks in lists.values():
        for group in recompute_groups(policy, len(blocks), first=first):
            _wrap([blocks[i] for i in group])


def _wrap(group: list[nn.Module]) -> None:
    if len(group) == 1:
        forward = group[0].forward
        # Transformers binds the keyword arguments to the function, and so does this: they are not saved as inputs
        group[0].forward = lambda *args, **kwargs: checkpoint(
            lambda *inputs: forward(*inputs, **kwargs), *args, use_reentrant=False
        )
        return
    forwards = [block.forward for block in group]
    tuples: list[bool] = []

    def run(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        for forward in forwards:
            out = forward(hidden, *args, **kwargs)
            hidden = out[0] if isinstance(out, tuple) else out
        tuples[:] = [isinstance(out, tuple)]
        return out

    def first(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(lambda *inputs: run(*inputs, **kwargs), hidden, *args, use_reentrant=False)

    group[0].forward = first
    for block in group[1:]:
        block.forward = lambda hidden, *_, **__: (hidden,) if tuples[0] else hidden
