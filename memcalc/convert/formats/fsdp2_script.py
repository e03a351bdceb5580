"""The script that `memcalc export --to fsdp2` writes: what stands before and after the plan's own constants."""

from __future__ import annotations

__all__ = ["BODY", "MARKER", "TOP"]

MARKER = "# memcalc fsdp2 script 1"
"""First line of the script, by which it is known again."""

TOP = f'''{MARKER}
"""{{title}}, trained with PyTorch's fully_shard (FSDP2) and Transformers' own model class.

Needs PyTorch 2.6 (before, fully_shard was in torch.distributed._composable.fsdp) and Transformers 5.
The constants are the plan: the code follows them, and `memcalc check` reads them.
"""

'''

BODY = '''
import contextlib
import os

if EXPANDABLE_SEGMENTS:  # before PyTorch makes its allocator
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import torch
import torch.distributed as dist
import transformers
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel


def build(device):
    """Return the model with random weights; no rank ever holds all of it."""
    config = {config}
    with torch.device("meta"):
        kernels = {"attn_implementation": "eager" if ATTENTION == "EAGER" else "sdpa"}
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, WEIGHTS), **kernels)
    shard(model)
    model.to_empty(device="cpu" if OFFLOAD else device)
    model.tie_weights()
    model.init_weights()  # your own weights: set_model_state_dict of torch.distributed.checkpoint.state_dict
    for buffer in model.buffers():
        buffer.data = buffer.to(device)
    return model.train()


def shard(model):
    """Checkpoint what the plan computes again; shard each block, then the rest as the root."""
    dtypes = MixedPrecisionPolicy(param_dtype=getattr(torch, COMPUTE), reduce_dtype=getattr(torch, REDUCE))
    offload = CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if OFFLOAD else OffloadPolicy()
    lists = (module for module in model.modules() if isinstance(module, torch.nn.ModuleList) and len(module))
    blocks = next(found for found in lists if type(found[0]).__name__ in model._no_split_modules)
    for index in range(len(blocks))[slice(*CHECKPOINTED_BLOCKS)]:
        if CHECKPOINTED_PART:
            setattr(blocks[index], CHECKPOINTED_PART, checkpoint_wrapper(getattr(blocks[index], CHECKPOINTED_PART)))
        else:
            blocks[index] = checkpoint_wrapper(blocks[index])
    for block in blocks:
        fully_shard(block, mp_policy=dtypes, offload_policy=offload, reshard_after_forward=RESHARD)
    # backward begins with the root, so it stays whole after forward
    fully_shard(model, mp_policy=dtypes, offload_policy=offload, reshard_after_forward=False)


def make_optimizer(model):
    return getattr(torch.optim, OPTIMIZER)(model.parameters(), lr=3e-4, **OPTIMIZER_OPTIONS)


def batches(vocabulary, device):
    """Yield MICRO_BATCH sequences of SEQ_LEN tokens: your own loader goes here, with other data on each rank."""
    while True:
        yield torch.randint(vocabulary, (MICRO_BATCH, SEQ_LEN), device=device)


def train_step(model, optimizer, data):
    """Run a step. Gradients are reduced after each micro-batch, so that only their shards are added up."""
    total = 0.0
    with contextlib.nullcontext() if ATTENTION == "EAGER" else sdpa_kernel(getattr(SDPBackend, ATTENTION)):
        for _ in range(ACCUMULATION):
            tokens = next(data)
            with torch.autocast(tokens.device.type, torch.bfloat16, enabled=AUTOCAST):
                loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss / ACCUMULATION
            loss.backward()
            total += loss.detach()
    optimizer.step()
    optimizer.zero_grad()
    return total


def main():
    """Train STEPS steps and print what the GPU held beside what memcalc predicted."""
    if int(os.environ.get("WORLD_SIZE", "1")) != GPUS:
        raise SystemExit(f"The plan is for {GPUS} GPUs: start as many processes with torchrun.")
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("cuda:nccl,cpu:gloo" if cuda else "gloo")
    model = build(device)
    torch.manual_seed(dist.get_rank())
    optimizer, data = make_optimizer(model), batches(model.config.vocab_size, device)
    for step in range(STEPS):
        loss = train_step(model, optimizer, data)
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.3f}, {GPUS * MICRO_BATCH * ACCUMULATION} sequences")
    for name, size in PREDICTED.items() if dist.get_rank() == 0 else ():
        measured = f"{getattr(torch.cuda, f'max_memory_{name}')() / 2**30:.2f} GiB" if cuda else "not measured"
        print(f"{name}: {measured}, predicted {size / 2**30:.2f} GiB")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
'''
