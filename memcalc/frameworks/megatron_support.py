"""What Megatron-LM can be told, by its version: flags of training/arguments.py, and what validate_args refuses."""

from __future__ import annotations

from dataclasses import replace

from memcalc.formulas.optimizer_states import STATE_BYTES
from memcalc.frameworks import needs
from memcalc.frameworks.capability import EITHER, NEVER, SPLITS, Capabilities, Clash, Support, offloads, support_of
from memcalc.frameworks.support import FORMS
from memcalc.specs.strategy import OPTIMIZERS

WHOLE_BLOCKS = ("full", "uniform", "block")
_MEGATRON_POLICIES = ("none", "full", "uniform", "block", "selective-core-attn", "modules")
_MEGATRON_CODE = "change the blocks' forward (core/transformer/transformer_block.py) yourself"
_UNDER_IT = "Megatron-LM supports it only with its precision-aware optimizer: strategy.precision_aware=true"
_NARROW = tuple(name for name in STATE_BYTES if name != "fp32")
_NARROW_STATES = (
    Clash(
        ("precision_aware", ("true",)),
        ("zero", ("0",)),
        why="Megatron-LM's precision-aware optimizer needs the distributed optimizer: zero 1",
    ),
    Clash(
        ("precision_aware", ("true",)),
        ("optimizer", ("sgd-momentum", "lion", "muon", "soap")),
        why="Megatron-LM's precision-aware optimizer is Adam: --optimizer adamw",
    ),
    Clash(
        ("precision_aware", ("true",)),
        ("precision", ("fp32",)),
        why="it is modelled over 16-bit weights: precision bf16-mixed, fp16-mixed or fp8-mixed",
    ),
    Clash(
        ("precision_aware", ("true",)),
        ("offload", ("optimizer", "optimizer,activations")),
        why="Megatron-LM's optimizer on the host keeps fp32 states, whatever their flags say",
    ),
    Clash(("main_params_dtype", ("fp16",)), ("precision_aware", ("false",)), why=_UNDER_IT),
    *(
        Clash((option, _NARROW), ("precision_aware", ("false",)), why=_UNDER_IT)
        for option in ("exp_avg_dtype", "exp_avg_sq_dtype")
    ),
)
"""core/optimizer/optimizer_config.py, ``__post_init__``; core/optimizer/cpu_offloading/hybrid_optimizer.py."""
MEGATRON = Capabilities(
    zero=Support(("1", "0")),
    precision=Support(("bf16-mixed", "fp16-mixed", "fp32", "fp8-mixed")),
    recompute=support_of(_MEGATRON_POLICIES, needs.RECOMPUTE, _MEGATRON_CODE),
    offload=offloads(
        ("none", "optimizer"),
        {"activations": "run the blocks under torch.autograd.graph.save_on_cpu yourself (its own flags move parts)"},
    ),
    offload_to=Support(("cpu",), needs.TIER),
    optimizer=support_of(
        ("adamw", "sgd-momentum", "lion", "muon", "soap"), OPTIMIZERS, "add it to core/optimizer yourself"
    ),
    optimizer_impl=support_of(("fused",), FORMS, "change the optimizer's class in core/optimizer yourself"),
    loss=Support(("standard", "parallel", "fused-kernel", "triton"), {"fused-linear": needs.LOSS["fused-linear"]}),
    parallel=Support(("dp", "tp", "tp+sp", "pp", "cp", "ep", "hsdp")),
    uneven=Support(SPLITS),
    compress_activations=Support(("none",)),
    moe_dispatcher=Support(("alltoall", "deepep", "allgather")),
    ep_overlap=EITHER,
    tp_comm_overlap=EITHER,
    cuda_graphs=Support(("none", "partial", "full")),
    precision_aware=EITHER,
    main_params_dtype=Support(("fp32", "fp16")),
    exp_avg_dtype=Support(tuple(STATE_BYTES)),
    exp_avg_sq_dtype=Support(tuple(STATE_BYTES)),
    clashes=(
        *_NARROW_STATES,
        Clash(
            ("tp_comm_overlap", ("true",)),
            ("parallel", ("tp",)),
            why="Megatron-LM overlaps tensor-parallel messages only with sequence parallelism: --sp",
        ),
        Clash(
            ("ep_overlap", ("true",)),
            ("moe_dispatcher", ("allgather",)),
            why="Megatron-LM overlaps the exchange of tokens only with alltoall and deepep",
        ),
        Clash(
            ("ep_overlap", ("true",)),
            ("recompute", WHOLE_BLOCKS),
            why="Megatron-LM overlaps the exchange of tokens only without full recomputation",
        ),
        Clash(
            ("ep_overlap", ("true",)),
            ("precision", ("fp32",)),
            why="Megatron-LM overlaps the exchange of tokens only in 16 bits",
        ),
        Clash(
            ("cuda_graphs", ("partial",)),
            ("recompute", WHOLE_BLOCKS),
            why="Megatron-LM recomputes whole blocks only in a CUDA graph of the whole pass: --cuda-graphs full",
        ),
        Clash(
            ("zero", ("0",)),
            ("offload", ("optimizer", "optimizer,activations")),
            why="--optimizer-cpu-offload needs the distributed optimizer: zero 1",
        ),
        Clash(
            ("parallel", ("tp",)),
            ("parallel", ("ep",)),
            why="Megatron-LM trains experts with tensor parallelism only with sequence parallelism: --sp",
        ),
        Clash(
            ("parallel", ("hsdp",)),
            ("optimizer", ("muon", "soap")),
            why="Megatron-LM's layer-wise optimizers have one instance (core/optimizer/layer_wise_optimizer.py)",
        ),
    ),
)
"""Megatron-LM's flags at d98e8a64 (core 0.20): training/arguments.py, validate_args; core/optimizer/__init__.py."""
_MOMENTS_CORE_11 = Support(("fp32", "fp16", "fp8"))
MEGATRON_CORE_11 = replace(MEGATRON, exp_avg_dtype=_MOMENTS_CORE_11, exp_avg_sq_dtype=_MOMENTS_CORE_11)
"""Before moments in bf16 (9d509a03b4, core 0.13)."""
MEGATRON_CORE_10 = replace(
    MEGATRON,
    precision_aware=NEVER,
    main_params_dtype=Support(("fp32",)),
    exp_avg_dtype=Support(("fp32",)),
    exp_avg_sq_dtype=Support(("fp32",)),
    clashes=tuple(clash for clash in MEGATRON.clashes if clash not in _NARROW_STATES),
)
"""Before ``--use-precision-aware-optimizer`` and the dtypes of its states (47a175b4c4, core 0.11)."""
MEGATRON_CORE_05 = replace(
    MEGATRON_CORE_10,
    parallel=Support(MEGATRON.parallel.direct[:-1]),
    moe_dispatcher=Support(("alltoall", "allgather")),
    ep_overlap=NEVER,
    cuda_graphs=Support(("none",)),
    clashes=tuple(
        clash for clash in MEGATRON_CORE_10.clashes[:-1] if clash.first[0] not in ("ep_overlap", "cuda_graphs")
    ),
)
"""Before ``--num-distributed-optimizer-instances`` (bb84eb93fa, core 0.10).

Core 0.11 has CUDA graphs, core 0.12 DeepEP, core 0.14 ``--overlap-moe-expert-parallel-comm``.
"""
MEGATRON_2021 = replace(
    MEGATRON_CORE_10,
    zero=Support(("0",)),
    precision=Support(("bf16-mixed", "fp16-mixed", "fp32")),
    reduce_dtype=Support(("fp32",)),
    offload=offloads(("none",), {"optimizer": needs.OPTIMIZER_OFFLOAD, **MEGATRON.offload.code}),
    parallel=MEGATRON_CORE_05.parallel,
    moe_dispatcher=Support(("alltoall",)),
    ep_overlap=NEVER,
    tp_comm_overlap=NEVER,
    cuda_graphs=Support(("none",)),
    loss=Support(("standard", "parallel"), {"fused-linear": needs.LOSS["fused-linear"]}),
    optimizer=support_of(("adamw", "sgd-momentum"), OPTIMIZERS, "add it to megatron/optimizer yourself"),
    uneven=Support(),
    clashes=(),
)
"""Megatron-LM of 2021 and 2022, whose stages are alike."""
