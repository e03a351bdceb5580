"""What FSDP 1 and 2, the Trainer over them and DistributedDataParallel, and torchtitan can be told.

The script for FSDP 2 is :mod:`memcalc.convert.formats.fsdp2`. Beside it stand Accelerate 1.15 (utils/dataclasses.py,
utils/fsdp_utils.py), Transformers 5.23 (training_args.py, trainer.py) and axolotl 0.18, which run what the script does
not: adapters, experts, encoders. torchtitan: config/job_config.py of 0.2.2.
"""

from __future__ import annotations

from memcalc.frameworks import needs
from memcalc.frameworks.capability import EITHER, SPLITS, Capabilities, Clash, Support, offloads, support_of
from memcalc.specs.strategy import OPTIMIZERS

# What Transformers' classes have (5.23): modules by which a part of a block is computed again, and plans for TP.

WITH_PARTS = (
    "CohereForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM", "GemmaForCausalLM", "GlmForCausalLM",
    "LlamaForCausalLM", "MistralForCausalLM", "Olmo2ForCausalLM", "OlmoForCausalLM", "Phi3ForCausalLM",
    "PhiForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "SmolLM3ForCausalLM", "Starcoder2ForCausalLM",
)  # fmt: skip
"""Classes whose blocks have ``self_attn`` and ``mlp``."""
TENSOR_PARALLEL = (
    "ApertusForCausalLM", "ArceeForCausalLM", "Cohere2ForCausalLM", "CohereForCausalLM", "Ernie4_5ForCausalLM",
    "Exaone4ForCausalLM", "GPTNeoXForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM", "GemmaForCausalLM",
    "GraniteForCausalLM", "LlamaForCausalLM", "MistralForCausalLM", "NemotronForCausalLM", "OlmoForCausalLM",
    "PhiForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "SeedOssForCausalLM", "SmolLM3ForCausalLM",
    "Starcoder2ForCausalLM",
)  # fmt: skip
"""Classes whose plan (``base_model_tp_plan``) divides every matrix and what it makes by heads and by width, so that one
all-reduce ends each branch. Those of GLM, Olmo 2 and Phi 3 gather a branch's tensors whole in between. GPT-J's came
with 5.24 alone: with an earlier version its script would divide nothing."""


PYTORCH_SCHEDULES = ("1f1b", "interleaved", "gpipe", "interleaved-zb", "zb-v", "dualpipe-v")
PYTORCH_OPTIMIZERS = ("adamw", "sgd", "sgd-momentum")
FORMS = ("foreach", "fused", "loop")
ACTIVATIONS = ("activations", "params,activations", "optimizer,activations", "optimizer,params,activations")
"""What moves activations."""
EVERY_COMPILE = ("none", "blocks", "blocks+loss", "model", "loss")


def recompute(*direct: str) -> Support:
    """Policies that are told; all others need code."""
    return Support(
        ("none", "full", *direct), {kind: says for kind, says in needs.RECOMPUTE.items() if kind not in direct}
    )


SCRIPT = Capabilities(
    zero=Support(("3", "2")),
    precision=Support(
        ("bf16-mixed", "bf16", "fp32", "bf16-autocast", "fp16-mixed"),
        {"fp16-autocast": needs.FP16, "fp8-mixed": needs.FP8},
    ),
    recompute=Support(
        ("none", "full", "every", "block", "mlp", "attention", "selective-ops"),
        needs.RECOMPUTE,
        {"mlp": WITH_PARTS, "attention": WITH_PARTS},
    ),
    offload=offloads(("none", "params", "activations", "params,activations"), {"optimizer": needs.OPTIMIZER_OFFLOAD}),
    offload_to=Support(("cpu",), needs.TIER),
    optimizer=support_of(PYTORCH_OPTIMIZERS, OPTIMIZERS, needs.OPTIMIZER),
    optimizer_impl=Support(FORMS),
    loss=Support(("standard",), needs.LOSS),
    parallel=Support(("dp", "hsdp", "tp"), needs.PARALLEL, {"tp": TENSOR_PARALLEL}),
    uneven=support_of((), SPLITS, needs.SPLIT),
    compile=support_of(("none", "blocks"), EVERY_COMPILE, needs.COMPILE),
    reduce_dtype=Support(("fp32", "bf16")),
    clashes=(
        Clash(
            ("compile", ("blocks",)),
            ("offload", ACTIVATIONS),
            "compile the blocks yourself (the script offloads activations of blocks that are not compiled)",
        ),
        Clash(("offload", ACTIVATIONS), ("parallel", ("tp",)), needs.TENSOR_OFFLOAD),
        Clash(
            ("optimizer", ("sgd", "sgd-momentum")),
            ("optimizer_impl", ("fused",)),
            # PyTorch 2.13 torch/distributed/tensor/_ops: aten._fused_adamw_ is there, aten._fused_sgd_ is not
            why="FSDP 2's sharded tensors have no fused SGD: --optimizer-impl foreach or loop",
        ),
    ),
    script="dense decoders that are trained whole",
)
"""FSDP 2 as memcalc's script runs it."""
_CHECKPOINTED_ALONE = Clash(("recompute", ("none", "every")), ("offload", ACTIVATIONS), needs.ACTIVATION_OFFLOAD)
"""``offload`` of Transformers' and Accelerate's checkpointing moves what checkpoints keep (modeling_utils.py)."""
_FORMS = (
    Clash(("optimizer", ("adamw",)), ("optimizer_impl", ("loop",)), needs.FORM),
    Clash(("optimizer", ("sgd", "sgd-momentum")), ("optimizer_impl", ("fused", "loop")), needs.FORM),
    Clash(("optimizer", ("adafactor", "galore-adamw", "muon")), ("optimizer_impl", ("foreach", "fused")), needs.FORM),
)
"""What the Trainer's names of optimizers have (training_args.py, OptimizerNames; trainer_optimizer.py)."""
_OPTIMIZERS = support_of(
    (name for name in OPTIMIZERS if name not in ("muon", "soap")), OPTIMIZERS, needs.OPTIMIZER, muon=needs.MUON
)
LAUNCHED = Capabilities(
    zero=Support(("3", "2")),
    precision=support_of(
        ("bf16-mixed", "fp16-mixed", "fp32", "bf16"),
        ("bf16-autocast", "fp16-autocast"),
        needs.AUTOCAST,
        **{"fp8-mixed": needs.FP8},
    ),
    recompute=recompute(),
    offload=offloads(("none", "params", "activations", "params,activations"), {"optimizer": needs.OPTIMIZER_OFFLOAD}),
    offload_to=Support(("cpu",), needs.TIER),
    optimizer=_OPTIMIZERS,
    optimizer_impl=Support(FORMS),
    loss=support_of(
        ("standard", "fused-kernel", "fused-linear"), (), chunked=needs.CHUNKED, parallel=needs.LOSS["parallel"]
    ),
    parallel=Support(("dp", "hsdp"), needs.PARALLEL),
    uneven=support_of((), SPLITS, needs.SPLIT),
    compile=support_of(("none", "blocks", "model"), EVERY_COMPILE, needs.COMPILE),
    reduce_dtype=Support(("fp32", "bf16")),
    clashes=(_CHECKPOINTED_ALONE, *_FORMS),
)
"""FSDP 2 under Accelerate, the Trainer and axolotl."""
FSDP2 = SCRIPT._replace(tuned=LAUNCHED)
FSDP1 = LAUNCHED._replace(recompute=recompute("every"), parallel=Support(("dp", "hsdp")), uneven=Support())
"""FSDP 1 under Accelerate, whose hybrid strategies shard within a node."""
_TITAN_PRECISIONS = ("bf16-mixed", "fp32", "bf16", "fp8-mixed")
TITAN_PIPELINED = ("LlamaForCausalLM", "Llama4ForCausalLM", "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM")
TITAN_RINGED = (*TITAN_PIPELINED[:2], "Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
"""Classes of Transformers whose models torchtitan 0.2.2 cuts into stages (models/*/__init__.py, ``pipelining_fn``), and
those whose sequences it splits (models/*/model/args.py): FlexAttention has no context parallelism."""
TITAN = Capabilities(
    zero=Support(("3", "2", "0")),
    precision=support_of(
        _TITAN_PRECISIONS, ("fp16-mixed", "fp16-autocast"), needs.FP16, **{"bf16-autocast": needs.AUTOCAST}
    ),
    recompute=recompute("every", "selective-ops"),
    offload=offloads(
        ("none", "params"), {"optimizer": needs.OPTIMIZER_OFFLOAD, "activations": needs.ACTIVATION_OFFLOAD}
    ),
    offload_to=Support(("cpu",), needs.TIER),
    optimizer=support_of(("adamw",), OPTIMIZERS, "register the optimizer in components/optimizer.py yourself"),
    optimizer_impl=Support(FORMS),
    loss=Support(("standard", "parallel"), {name: says for name, says in needs.LOSS.items() if name != "parallel"}),
    parallel=Support(
        ("dp", "tp+sp", "pp", "cp", "ep", "hsdp"),
        {
            "tp": "write a parallelize function without SequenceParallel",
            "pp": "give the model's TrainSpec a pipelining_fn, or a later torchtitan its configuration in Python",
            "cp": "give the model an attention that context parallelism splits, in place of FlexAttention, yourself",
        },
        {"pp": TITAN_PIPELINED, "cp": TITAN_RINGED},
    ),
    uneven=Support(SPLITS),
    compile=support_of(("none", "blocks", "blocks+loss", "model", "loss"), EVERY_COMPILE, needs.COMPILE),
    fsdp_schedule=Support(("default", "simple")),
    reduce_dtype=Support(("fp32",), {"bf16": needs.REDUCE}),
    tp_comm_overlap=EITHER,
    clashes=(
        Clash(
            ("tp_comm_overlap", ("true",)),
            ("compile", ("none", "loss")),
            why="torchtitan's async TP is a pass of the compiled model: --compile blocks or model",
        ),
        Clash(("compile", ("model",)), ("fsdp_schedule", ("default",)), needs.COMPILE),
        Clash(
            ("compile", ("blocks", "blocks+loss", "loss")),
            ("fsdp_schedule", ("simple",)),
            "compile parts of SimpleFSDP's model yourself (it compiles the whole model)",
        ),
        Clash(
            ("zero", ("0",)),
            ("parallel", ("dp", "cp")),
            why="torchtitan shards over data-parallel and context ranks wherever there are two: --zero 3 or 2",
        ),
    ),
)
"""torchtitan, whose losses and schedules its eras have; stages are cut where the config names their modules."""
TITAN_2024 = TITAN._replace(
    parallel=Support(
        TITAN.parallel.direct[:-1], {**TITAN.parallel.code, "hsdp": needs.REPLICAS}, TITAN.parallel.classes
    )
)
"""Before ``data_parallel_replicate_degree`` (db6b39acd of September 2024)."""
TITAN_AMP = TITAN._replace(
    precision=support_of((*_TITAN_PRECISIONS, "bf16-autocast"), ("fp16-mixed", "fp16-autocast"), needs.FP16),
    clashes=(
        *TITAN.clashes,
        *(
            Clash(("precision", ("bf16-autocast",)), side, needs.AUTOCAST)
            for side in (("zero", ("3", "2")), ("parallel", ("tp+sp", "tp", "pp")))
        ),
    ),
)
"""With autocast on a single GPU (``maybe_enable_amp``)."""
TITAN_DEEPEP = TITAN_AMP._replace(moe_dispatcher=Support(("alltoall", "deepep")))
"""With ``expert_parallel_comm_backend`` (distributed/deepep of December 2025)."""
_CODE = {name: text for name, text in needs.LOSS.items() if name not in ("chunked", "parallel")}
_CHUNKED = "write the configuration of a torchtitan after 0.2.2 in Python (loss=ChunkedCELoss.Config()) yourself"
TITAN_CHUNKED = TITAN._replace(
    zero=Support(("3", "2")),
    clashes=TITAN.clashes[:-1],
    moe_dispatcher=TITAN_DEEPEP.moe_dispatcher,
    loss=Support(("standard", "parallel"), {**_CODE, "chunked": _CHUNKED}),
)
"""With the chunked loss of components/loss.py at 786e26f8e, whose configurations are no TOML."""
_AUTOCAST = support_of(
    ("fp32", "bf16-autocast", "fp16-autocast", "bf16"), (), **{"bf16-mixed": needs.MASTER, "fp16-mixed": needs.MASTER}
)
TRAINER = Capabilities(
    zero=Support(("0",)),
    precision=_AUTOCAST,
    recompute=recompute("every"),
    offload=offloads(("none", "activations"), {"optimizer": needs.OPTIMIZER_OFFLOAD}),
    offload_to=Support(("cpu",), needs.TIER),
    optimizer=_OPTIMIZERS,
    optimizer_impl=Support(FORMS),
    loss=LAUNCHED.loss,
    compile=LAUNCHED.compile,
    clashes=(_CHECKPOINTED_ALONE, *_FORMS),
)
"""DistributedDataParallel, and one GPU without shards, under the Trainer."""
PLAIN = TRAINER._replace(parallel=Support(), recompute=recompute())
"""One GPU, on which the Trainer's every-K begins with another block."""
_SHARDED = ("zero", ("2", "3"))
_PARAMS = ("params", "params,activations")
HF = TRAINER._replace(
    reduce_dtype=Support(("fp32", "bf16")),
    zero=Support(("0", "3"), {"2": "say SHARD_GRAD_OP in Accelerate's YAML, and leave the Trainer's fsdp out"}),
    precision=Support((*_AUTOCAST.direct, "bf16-mixed", "fp16-mixed"), {"fp8-mixed": needs.FP8}),
    offload=offloads(("none", "params", "activations", "params,activations"), {"optimizer": needs.OPTIMIZER_OFFLOAD}),
    parallel=Support(("dp",), {"hsdp": "say HYBRID_SHARD in Accelerate's YAML, and leave the Trainer's fsdp out"}),
    clashes=(
        *TRAINER.clashes,
        Clash(_SHARDED, ("precision", ("bf16-autocast", "fp16-autocast")), needs.AUTOCAST),
        Clash(("zero", ("0",)), ("offload", _PARAMS), why="only FSDP takes weights off the GPU: use --zero 3"),
    ),
)
"""The Trainer on one GPU, or on FSDP 1: its table passes no sharding strategy on (training_args.py)."""
DEEPSPEED_OPTIMIZERS = ("adamw", "lion", "sgd", "sgd-momentum", "muon")
_INITIALIZE = "pass it to deepspeed.initialize yourself"
_SCALING = "write the configuration of Aleph Alpha's Scaling yourself"
_PIPELINED = {"pp": "write the model as a deepspeed.pipe.PipelineModule"}
DEEPSPEED_17 = Capabilities(
    zero=Support(("3", "2", "1", "0")),
    precision=Support(("bf16-mixed", "fp16-mixed", "fp32", "bf16-autocast", "fp16-autocast", "bf16")),
    recompute=recompute("every"),
    offload=offloads(
        ("none", "optimizer", "params", "optimizer,params"),
        {"activations": "checkpoint blocks with deepspeed.checkpointing.checkpoint in the model's own code"},
    ),
    offload_to=Support(("cpu", "nvme"), {"cxl": needs.TIER["cxl"]}),
    optimizer=support_of(DEEPSPEED_OPTIMIZERS, OPTIMIZERS, _INITIALIZE),
    optimizer_impl=Support(("fused", "foreach"), {"loop": _INITIALIZE}),
    loss=Support(("standard", "fused-kernel", "fused-linear", "chunked"), {"parallel": needs.LOSS["parallel"]}),
    parallel=Support(("dp", "tp"), _PIPELINED),
    uneven=support_of((), SPLITS, "give the PipelineModule a partition_method of its own"),
    compile=LAUNCHED.compile,
    grad_accum_dtype=Support(("", "fp32", "bf16", "fp16")),
    zero_gather=Support(("allgather",), {"broadcast": needs.BROADCAST}),  # no program reads allgather_partitions
    clashes=(
        Clash(("optimizer", ("sgd", "sgd-momentum")), ("optimizer_impl", ("fused",)), _INITIALIZE),
        Clash(("optimizer", ("lion", "muon")), ("optimizer_impl", ("foreach",)), _INITIALIZE),
    ),
)
DEEPSPEED = DEEPSPEED_17._replace(
    parallel=Support(
        ("dp", "tp"), {**_PIPELINED, "cp": "launch it with Accelerate, whose parallelism_config has sp_size"}
    )
)
"""DeepSpeed's JSON beside the Trainer's arguments: edaa722 runtime/config.py, runtime/zero/config.py; AutoTP."""
MEGATRON_DEEPSPEED = DEEPSPEED._replace(
    recompute=Support(("none", "full", "uniform"), {k: v for k, v in needs.RECOMPUTE.items() if k != "uniform"}),
    offload=offloads(("none", "optimizer"), {"params": "train without the pipeline engine", **DEEPSPEED.offload.code}),
    parallel=Support(("dp", "tp", "pp")),
    loss=Support(("standard", "parallel"), {"fused-linear": needs.LOSS["fused-linear"]}),
)
"""Megatron-DeepSpeed 541b967: ``--checkpoint-activations --checkpoint-num-layers``."""
SCALING = MEGATRON_DEEPSPEED._replace(
    zero=support_of((), ("1", "0"), _SCALING),
    recompute=Support(("none", "full"), needs.RECOMPUTE),
    offload=offloads(("none",), {}),
    optimizer=Support(("adamw",)),
    optimizer_impl=Support(("foreach", "fused")),
    loss=Support(("standard",)),
    parallel=Support(("dp", "tp", "tp+sp", "pp")),
    uneven=Support(("first_stage_layers", "last_stage_layers")),
)
"""Scaling 737f855: no file of it is written."""
LITGPT = Capabilities(
    zero=Support(("0", "3"), {"2": "change FSDPStrategy in the script"}),
    precision=support_of(
        ("fp32", "bf16-mixed", "fp16-mixed", "bf16-autocast", "fp16-autocast", "bf16"), (), **{"fp8-mixed": needs.FP8}
    ),
    recompute=recompute(),
    offload=offloads(
        ("none",),
        {
            "params": "set cpu_offload of FSDPStrategy in the script",
            "optimizer": needs.OPTIMIZER_OFFLOAD,
            "activations": needs.ACTIVATION_OFFLOAD,
        },
    ),
    offload_to=Support(("cpu",), needs.TIER),
    optimizer=Support(OPTIMIZERS),
    optimizer_impl=Support(FORMS),
    loss=Support(("standard", "chunked"), {"fused-linear": needs.LOSS["fused-linear"]}),
    compile=support_of(("none", "model"), EVERY_COMPILE, needs.COMPILE),
    reduce_dtype=Support(("fp32", "bf16")),
    parallel=Support(("dp", "hsdp")),  # pretrain.py: HYBRID_SHARD
    clashes=(
        Clash(("zero", ("0",)), ("recompute", ("full",)), "call torch.utils.checkpoint for each block in the script"),
    ),
)
"""litgpt's YAML: the scripts' own FSDPStrategy checkpoints every block, and one GPU has none (finetune/full.py)."""
TORCHTUNE = Capabilities(
    zero=Support(("3", "2", "0")),
    precision=support_of(
        ("bf16", "fp32"),
        ("bf16-mixed", "fp16-mixed", "bf16-autocast", "fp16-autocast"),
        "give fully_shard a mixed-precision policy in the recipe",
    ),
    recompute=recompute("every", "selective-ops"),
    offload=offloads(("none", "params", "activations", "params,activations"), {"optimizer": needs.OPTIMIZER_OFFLOAD}),
    offload_to=Support(("cpu",), needs.TIER),
    optimizer=Support(OPTIMIZERS),
    optimizer_impl=Support(FORMS),
    loss=Support(("standard", "chunked"), {"fused-linear": needs.LOSS["fused-linear"]}),
    compile=support_of(("none", "blocks", "blocks+loss"), EVERY_COMPILE, needs.COMPILE),
    parallel=Support(("dp", "hsdp")),
    reduce_dtype=Support(("fp32", "bf16")),  # of 16-bit shards, which have no policy
    clashes=(Clash(("recompute", ("none",)), _CHECKPOINTED_ALONE.second, needs.ACTIVATION_OFFLOAD),),
)
"""torchtune's YAML: recipes/full_finetune_distributed.py of bd2a0fc7c."""
TORCHTUNE_2024 = TORCHTUNE._replace(parallel=Support(("dp",), {"hsdp": needs.REPLICAS}))
"""Before ``data_parallel_replicate_dim`` (d3ab3b7c9 of April 2025)."""
