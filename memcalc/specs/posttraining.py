"""What post-training and an inference engine are told, each field with the option that sets it."""

from typing import Annotated, Literal

from pydantic import Field

from memcalc.specs.options import options_of
from memcalc.specs.strict import Frozen, Option

ENGINE = "Engine"
"""The panel of ``--help`` for what only an engine is told."""
Dtype = Literal["bf16", "fp16", "fp32"]
CacheDtype = Literal["auto", "fp8", "bf16", "fp16", "fp32"]
Quantization = Literal["none", "fp8", "int8", "int4", "mxfp4"]


class EngineInputs(Frozen):
    """What an engine is told beside model, GPU and parallelism; what is 0 or empty is left to the engine's default."""

    # fmt: off
    engine: Annotated[
        str, Option("vllm or sglang, or one of a release, as in vllm@0.16.", panel=ENGINE, metavar="NAME[@VERSION]")
    ] = "vllm"
    utilization: Annotated[
        float,
        Option("Share of the GPU that the engine may take: gpu_memory_utilization, or mem_fraction_static.", "share",
            ENGINE, "X"),
        Field(gt=0, le=1),
    ] = 0.9
    max_len: Annotated[
        int, Option("Longest sequence, prompt and answer; the model's longest when left out.", "tokens", ENGINE, "N")
    ] = 0
    max_seqs: Annotated[
        int, Option("Sequences that run at once; the engine's default for the GPU when left out.", "sequences", ENGINE,
            "N")
    ] = 0
    max_batched_tokens: Annotated[
        int, Option("Tokens of one step; the engine's default for the GPU when left out.", "tokens", ENGINE, "N")
    ] = 0
    dtype: Annotated[Dtype, Option("What is computed in: {values}.", panel=ENGINE, metavar="NAME")] = "bf16"
    kv_dtype: Annotated[
        CacheDtype, Option("What keys and values are cached in: {values}; auto is --dtype.", panel=ENGINE,
            metavar="NAME")
    ] = "auto"
    quantization: Annotated[
        Quantization,
        Option("How weights are stored: {values}; mxfp4 is for routed experts only.", panel=ENGINE, metavar="NAME"),
    ] = "none"
    eager: Annotated[bool, Option("No CUDA graphs are captured (enforce_eager).", panel=ENGINE)] = False
    tower_parameters: Annotated[
        int,
        Option("Parameters that the model's preset lacks, such as a vision tower's; each rank has all of them.",
            "parameters", ENGINE, "N"),
    ] = 0
    other: Annotated[
        int,
        Option("What other processes hold on the GPU when the engine starts, such as a trainer.", "bytes", ENGINE,
            "SIZE", kind="bytes"),
    ] = 0
    # fmt: on


ENGINE_OPTIONS = tuple(options_of(EngineInputs))
"""Options of an engine, in their order."""
ENGINE_WORDS = tuple(option.name for option in ENGINE_OPTIONS)


ROLES, ROLLOUT = "Roles", "Rollout"
"""Panels of ``--help``."""
Algorithm = Literal["grpo", "dapo", "rloo", "ppo", "dpo", "kto", "orpo", "simpo", "reward", "sft"]
Logits = Literal["plain", "fused"]


class RlInputs(Frozen):
    """What post-training is told beside its model, its GPUs and how weights are trained."""

    # fmt: off
    algorithm: Annotated[Algorithm, Option("What is optimized: {values}.", panel=ROLES, metavar="NAME")]
    framework: Annotated[
        str,
        Option("trl, verl, openrlhf, nemo-rl or llamafactory, whose defaults are taken.", panel=ROLES,
            metavar="NAME[@VERSION]"),
    ]
    trainer: Annotated[
        str, Option("What shards and trains, a framework of memcalc estimate; --framework's usual one when left out.",
            panel=ROLES, metavar="NAME")
    ] = ""
    expert_tp: Annotated[
        int, Option("Tensor-parallel ranks of an expert, under --trainer megatron; as --tp when left out.", "ranks",
            ROLES, "N")
    ] = 0
    stage_split: Annotated[
        str, Option("Uneven stages under --trainer megatron: any of first=N and last=N, their blocks, embedding and "
            "loss, which count as a block.", panel=ROLES, metavar="LIST")
    ] = ""
    prompt: Annotated[int, Option("Longest prompt.", "tokens", ROLES, "N"), Field(gt=0)]
    response: Annotated[int, Option("Longest response.", "tokens", ROLES, "N"), Field(gt=0)]
    micro_batch: Annotated[
        int, Option("Samples, or pairs, of one forward and backward on a rank; the framework's default when left out.",
            "samples", ROLES, "N")
    ] = 0
    micro_tokens: Annotated[
        int, Option("Tokens of one micro-batch in the place of --micro-batch, where samples are packed.", "tokens",
            ROLES, "N")
    ] = 0
    logprob_batch: Annotated[
        int, Option("Samples of one pass of log-probabilities; as many as of an update when left out.", "samples",
            ROLES, "N")
    ] = 0
    logprob_tokens: Annotated[
        int, Option("Tokens of one pass of log-probabilities where samples are packed; as many as of an update when "
            "left out.", "tokens", ROLES, "N")
    ] = 0
    mini_batch: Annotated[
        int, Option("Samples of one optimizer step over all GPUs: a micro-batch holds no more than a rank's share.",
            "samples", ROLES, "N")
    ] = 0
    whole_gradients: Annotated[
        bool, Option("FSDP reduces gradients at a step's last micro-batch alone: until then they are unsharded.",
            panel=ROLES)
    ] = False
    mean_length: Annotated[
        int, Option("Mean of prompt and response, where padding is removed; the longest of both when left out.",
            "tokens", ROLES, "N")
    ] = 0
    padded: Annotated[
        bool, Option("Samples are padded to the longest length, by a framework that removes padding.", panel=ROLES)
    ] = False
    reference: Annotated[
        bool | None,
        Option("There is a reference model; by default where the algorithm and the framework's defaults need one.",
            panel=ROLES, kind="flag", negative=True),
    ] = None
    critic_model: Annotated[
        str, Option("PPO's critic; the policy's own architecture when left out.", panel=ROLES, metavar="NAME",
            completed_by="models")
    ] = ""
    critic_micro_batch: Annotated[
        int, Option("Samples of the critic's forward and backward on a rank; the policy's when left out.", "samples",
            ROLES, "N")
    ] = 0
    critic_micro_tokens: Annotated[
        int, Option("Tokens of the critic's micro-batch in the place of --critic-micro-batch.", "tokens", ROLES, "N")
    ] = 0
    critic_recompute: Annotated[
        Literal["", "none", "full"],
        Option("Whether the critic's blocks are checkpointed; as the policy's when left out.", panel=ROLES,
            metavar="NAME")
    ] = ""
    reward_model: Annotated[
        str, Option("A reward model on the same GPUs; a function when left out.", panel=ROLES, metavar="NAME",
            completed_by="models")
    ] = ""
    logits: Annotated[
        Logits, Option("plain, or fused: log-probabilities by a kernel that never holds the logits.", panel=ROLES,
            metavar="NAME")
    ] = "plain"
    entropy: Annotated[
        bool, Option("The entropy is computed with log-probabilities.", panel=ROLES)
    ] = False
    park: Annotated[
        str,
        Option("What of trained models leaves the GPU between its phases: none, optimizer or params,optimizer.",
            panel=ROLES, metavar="LIST"),
    ] = ""
    engine: Annotated[
        str, Option("The rollout's engine: vllm or sglang, or one of a release.", panel=ROLLOUT,
            metavar="NAME[@VERSION]")
    ] = "vllm"
    engine_tp: Annotated[
        int, Option("Ranks of one engine; the framework's default when left out.", "ranks", ROLLOUT, "N")
    ] = 0
    engine_gpus: Annotated[
        int, Option("GPUs that engines have to themselves; 0: they share those of the trainer.", "GPUs", ROLLOUT, "N")
    ] = 0
    utilization: Annotated[
        float, Option("Share of a GPU that an engine may take; the framework's default when left out.", "share",
            ROLLOUT, "X")
    ] = 0.0
    max_seqs: Annotated[
        int, Option("Sequences that an engine runs at once; the framework's default when left out.", "sequences",
            ROLLOUT, "N")
    ] = 0
    max_batched_tokens: Annotated[
        int, Option("Tokens of one step of an engine; the framework's default when left out.", "tokens", ROLLOUT, "N")
    ] = 0
    eager: Annotated[bool, Option("Engines capture no CUDA graphs (enforce_eager).", panel=ROLLOUT)] = False
    sleep: Annotated[
        Literal["", "0", "1", "2"],
        Option("What an engine frees outside the rollout: 0 nothing, 1 its cache, and weights to the host, "
            "2 both; the framework's default when left out.", panel=ROLLOUT, metavar="LEVEL"),
    ] = ""
    prompts: Annotated[
        int, Option("Prompts of one step over all GPUs, for the number of rounds.", "prompts", ROLLOUT, "N")
    ] = 0
    samples: Annotated[int, Option("Responses to each prompt.", "samples", ROLLOUT, "N")] = 0
    # fmt: on


RL_OPTIONS = tuple(options_of(RlInputs))
"""Options of post-training, in their order."""
RL_WORDS = tuple(option.name for option in RL_OPTIONS)
TRAINING = (
    "zero", "dp_replicate", "recompute", "lora", "quantize", "offload", "optimizer", "optimizer_impl", "precision",
    "autocast", "adapter_dtype", "attention", "kernels", "images",
)  # fmt: skip
"""Options of a training job that the trained models take as they are."""
LAYOUT = ("tp", "pp", "vpp", "cp", "ep")
"""Options of a training job that say how Megatron-LM lays the trained models out; no other trainer takes them."""
