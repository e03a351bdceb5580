"""Flags of other tools, and the options here that say the same: what a wrong flag is answered with."""

from __future__ import annotations

_MICRO, _GLOBAL, _LENGTH, _GPUS = "--micro-batch N", "--global-batch N", "--seq-len N", "--gpus N"
_BF16, _FP16 = "--precision bf16-mixed", "--precision fp16-mixed"
_FULL, _NF4, _LORA = "--recompute full", "--quantize nf4", "--lora 16"
_FSDP, _DEEPSPEED = "--framework fsdp2", "--framework deepspeed"

_ANSWERS: dict[str, tuple[str, ...]] = {
    "--micro-batch N (per GPU) or --global-batch N (per step)": ("batch-size", "batch", "bs"),
    _MICRO: (
        "per-device-train-batch-size", "per-gpu-batch-size", "train-micro-batch-size-per-gpu", "micro-batch-size",
        "local-batch-size", "mbs", "device-batch-size",
    ),
    _GLOBAL: ("global-batch-size", "train-batch-size", "total-batch-size", "gbs", "effective-batch-size"),
    "--global-batch N (micro-batch x data-parallel ranks x accumulated steps)": (
        "gradient-accumulation-steps", "grad-accum", "gradient-accumulation", "accumulate-grad-batches", "accumulation",
        "grad-accumulation-steps",
    ),
    _FULL: (
        "gradient-checkpointing", "activation-checkpointing", "activation-checkpoint", "checkpoint-activations", "ac",
        "recompute-granularity", "enable-gradient-checkpointing", "gc", "checkpointing",
    ),
    "--recompute selective-core-attn": ("recompute-activations",),
    "--recompute selective-ops": ("selective-ac", "selective-activation-checkpointing"),
    "--zero N": ("zero-stage", "stage-zero", "sharding-strategy", "sharding", "zero-optimization"),
    "--zero 1": ("zero1", "zero-1", "use-distributed-optimizer"), "--zero 2": ("zero2", "zero-2"),
    "--zero 3": ("zero3", "zero-3"),
    _FSDP: ("fsdp", "use-fsdp", "fsdp2", "fully-shard"), "--framework fsdp1": ("fsdp1",),
    _DEEPSPEED: ("deepspeed", "use-deepspeed", "ds"), "--framework ddp": ("ddp", "use-ddp"),
    "--framework megatron": ("megatron", "use-megatron", "mcore"), "--framework torchtitan": ("torchtitan", "titan"),
    "--framework hf": ("hf", "accelerate", "trainer", "transformers"), "--framework NAME": ("backend", "engine"),
    f"{_LORA} {_NF4}": ("qlora", "use-qlora"), _NF4: ("load-in-4bit", "4bit", "bnb-4bit", "nf4", "bits"),
    "--quantize int8": ("load-in-8bit", "8bit", "int8"), "--quantize NAME": ("quantization", "quant", "quantise"),
    _LORA: ("lora-rank", "lora-r", "use-lora", "peft", "use-peft", "lora-dim", "rank-lora"),
    "--lora 16:q,v": ("lora-target-modules", "target-modules", "lora-targets"),
    "--offload optimizer or --offload params": ("cpu-offload", "offload-to-cpu", "fsdp-cpu-offload"),
    "--offload optimizer": ("offload-optimizer", "optimizer-cpu-offload", "offload-optimizer-device"),
    "--offload params": ("offload-param", "offload-params", "param-offload", "fsdp-offload-params"),
    "--offload activations": ("offload-activations", "activation-offloading", "activation-offload", "cpu-activations"),
    "--offload-to nvme": ("nvme", "nvme-offload", "offload-device"),
    _LENGTH: (
        "max-seq-length", "max-seq-len", "seq-length", "sequence-length", "sequence-len", "max-length",
        "context-length", "cutoff-len", "block-size", "model-max-length", "context", "ctx", "seqlen", "seq",
    ),
    _BF16: ("bf16", "bfloat16", "use-bf16"), _FP16: ("fp16", "half", "use-fp16"),
    "--precision fp8-mixed": ("fp8", "use-fp8", "fp8-format", "fp4-format"),
    "--precision fp32": ("fp32", "float32", "tf32"),
    "--precision NAME": ("mixed-precision", "dtype", "torch-dtype", "amp", "param-dtype", "model-dtype"),
    _GPUS: (
        "num-gpus", "n-gpus", "ngpus", "gpu-count", "num-devices", "devices", "nproc-per-node", "world-size", "n-gpu",
        "num-processes", "gpus-per-node",
    ),
    "--gpus N (GPUs of all nodes)": ("nnodes", "num-nodes", "nodes", "n-nodes"),
    "--gpus N (data parallelism is what tp, pp and cp leave)": (
        "data-parallel-size", "dp", "dp-size", "data-parallel", "data-parallel-shard-degree",
    ),
    "--tp N": ("tensor-parallel-size", "tensor-model-parallel-size", "tp-size", "tensor-parallel",
        "tensor-parallel-degree"),
    "--pp N": ("pipeline-parallel-size", "pipeline-model-parallel-size", "pp-size", "pipeline-parallel",
        "pipeline-parallel-degree"),
    "--cp N": ("context-parallel-size", "cp-size", "context-parallel", "ulysses", "sequence-parallel-size",
        "context-parallel-degree"),
    "--ep N": ("expert-parallel-size", "expert-model-parallel-size", "ep-size", "expert-parallel"),
    "--dp-replicate N": ("data-parallel-replicate-degree", "dp-replicate-size", "hsdp", "hybrid-shard",
        "num-distributed-optimizer-instances", "mics-shard-size", "zero-hpz-partition-size"),
    "--sp": ("sequence-parallel",),
    "--vpp N": ("virtual-pipeline-model-parallel-size", "num-virtual-stages-per-pipeline-rank"),
    "--optimizer NAME": ("optim", "optimiser", "optimizer-name"),
    "--optimizer adamw-8bit": ("adam8bit", "use-8bit-adam", "adamw-8bit", "bnb-adam"),
    "--attention flash": ("flash-attn", "use-flash-attn", "flash-attention", "use-flash-attention-2", "flash"),
    "--attention NAME": ("attn-implementation", "attn"),
    "--kernels fused": ("use-liger-kernel", "liger-kernel", "use-liger", "liger"),
    "--compile blocks": ("torch-compile", "use-compile"),
    "--model NAME": ("model-name", "model-name-or-path", "model-path", "hf-model", "base-model", "model-id", "params"),
    "--gpu NAME": ("gpu-type", "gpu-name", "device", "accelerator", "gpu-memory", "vram", "hardware"),
    "--output FILE": ("out", "o", "output-file"), "--format NAME": ("fmt", "json"),
    "--set strategy.expandable_segments=true": ("expandable-segments",),
    "--tight for the opposite (max and min leave a margin without it)": ("safe",),
}  # fmt: skip
ANSWERS = {flag: answer for answer, flags in _ANSWERS.items() for flag in flags}
"""By a flag without dashes in front, with dashes for underscores: what says it here."""


_SPLIT = "--zero N: trained models are counted as sharded, not as split over {}"
_ENGINE_FLAGS: dict[str, tuple[str, ...]] = {
    "--utilization X": (
        "gpu-memory-utilization", "mem-fraction-static", "vllm-gpu-memory-utilization", "gpu-util",
    ),
    "--max-seqs N": ("max-num-seqs", "max-running-requests", "vllm-max-num-seqs"),
    "--max-batched-tokens N": ("max-num-batched-tokens", "chunked-prefill-size", "max-prefill-tokens"),
    "--max-len N": ("max-model-len", "context-length", "seq-len", "max-seq-len", "vllm-max-model-len"),
    "--kv-dtype NAME": ("kv-cache-dtype",), "--eager": ("enforce-eager", "disable-cuda-graph"),
    "--quantization NAME": ("quantize", "quant"),
}  # fmt: skip
_ROLE_FLAGS: dict[str, tuple[str, ...]] = {
    **{answer: _ENGINE_FLAGS[answer] for answer in ("--utilization X", "--max-seqs N")},
    "--prompt N and --response N": ("seq-len", "max-length", "max-model-len", "max-seq-len", "cutoff-len"),
    "--prompt N": ("max-prompt-length", "prompt-max-len", "max-prompt-len", "prompt-length"),
    "--response N": ("max-completion-length", "max-response-length", "generate-max-len", "max-new-tokens",
        "response-length"),
    "--samples N": ("num-generations", "rollout-n", "n-samples-per-prompt", "num-generations-per-prompt", "n"),
    "--prompts N": ("train-batch-size", "global-batch", "num-prompts-per-step", "rollout-batch-size"),
    "--micro-tokens N": ("ppo-max-token-len-per-gpu", "max-token-len", "train-mb-tokens"),
    "--reference, or --no-reference": ("beta", "kl-coef", "init-kl-coef", "use-kl-loss"),
    "--engine-tp N (of an engine), and " + _SPLIT.format("heads"): (
        "tp", "tensor-parallel-size", "vllm-tensor-parallel-size", "tp-size", "tensor-model-parallel-size",
    ),
    _SPLIT.format("sequences"): ("cp", "sp", "ulysses", "ulysses-sequence-parallel-size", "context-parallel-size"),
    _SPLIT.format("pipeline stages"): ("pp", "pipeline-parallel-size", "pipeline-model-parallel-size"),
    _SPLIT.format("experts"): ("ep", "expert-parallel-size", "expert-model-parallel-size"),
}  # fmt: skip
BY_COMMAND = {
    command: {flag: answer for answer, flags in answers.items() for flag in flags}
    for command, answers in {"serve": _ENGINE_FLAGS, "rl": _ROLE_FLAGS}.items()
}
"""The same of a command whose options are other ones."""


def answer_for(option: str, command: str = "") -> str | None:
    """What to type in the place of another tool's flag; None where it is not known.

    >>> answer_for("--zero_stage"), answer_for("--frobnicate"), answer_for("--num-generations", "rl")
    ('--zero N', None, '--samples N')
    """
    flag = option.lstrip("-").partition("=")[0].lower().replace("_", "-")
    return BY_COMMAND.get(command, {}).get(flag) or ANSWERS.get(flag)
