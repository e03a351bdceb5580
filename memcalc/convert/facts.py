"""What files say of a job that is no word of :func:`memcalc.estimate` itself, but from which words follow."""

from __future__ import annotations

__all__ = ["FACTS"]

FACTS = {
    "model": "a preset's name, a name on the Hub, the path of a model, or its sizes as a flat table",
    "model.vocab": "tokens of the vocabulary, where sizes are stated and it is left to a tokenizer",
    "attention_library": "te where Transformer Engine picks the attention kernel by the GPU",
    "gpu": "the GPU's name, as the queue calls it",
    "node": "the kind of host",
    "nodes": "hosts",
    "gpus_per_node": "GPUs of each host",
    "accumulation": "micro-batches that a rank adds up before a step",
    "engine": "what runs the ranks: trainer, ddp, fsdp1, fsdp2 or deepspeed",
    "mixed": "arithmetic of autocast, or of FSDP's and DeepSpeed's own mixed precision: no, fp16 or bf16",
    "weights": "dtype in which the script loads the weights: fp32, fp16 or bf16",
    "eval_micro_batch": "sequences a rank evaluates at a time",
    "evaluates": "whether the job evaluates while it trains",
    "sharded": "stage of sharding where there are several GPUs, of a runtime that shards nothing on one",
    "varying_lengths": "whether batches differ in length from one to the next",
    "checkpoints_wrapped": "whether the Trainer applies checkpointing to a model that FSDP has wrapped",
    "accelerated": "whether Accelerate prepares the model: autocast stands over FSDP's casts too",
    "sync_each_batch": "whether FSDP reduces the gradients of each micro-batch, instead of those of the last alone",
    "trl": "whether TRL's trainer runs, which changes a few of the Trainer's defaults",
    "filled_in": "DeepSpeed's sizes that are `auto`, for Accelerate to fill in from the model's width",
    "script_loads": "whether a script of its own loads the model, in a dtype that no file says",
    "train_batch": "sequences an optimizer step over all ranks, where the file says the whole instead of its parts",
    "host_memory": "host memory of each node that the job asks for [bytes]",
    "time_limit": "how long the job may run [s]",
}
"""Each name, and what its value is."""
