"""What an inference engine is told, each field with the option that sets it."""

from __future__ import annotations

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
