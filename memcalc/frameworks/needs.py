"""What has to be written for what a framework is not told: one command for each, where several frameworks need it."""

from __future__ import annotations

RECOMPUTE = {
    "every": "put checkpoint_wrapper round every K-th block yourself",
    "block": "put checkpoint_wrapper round the first N blocks yourself",
    "attention": "call the attention of each block through torch.utils.checkpoint yourself",
    "mlp": "call the MLP of each block through torch.utils.checkpoint yourself",
    "submodules": "put checkpoint_wrapper round each module of a block yourself (Accelerate 1.8 to 1.14 does)",
    "selective-ops": "give torch.utils.checkpoint a policy of operators (create_selective_checkpoint_contexts)",
    "selective-core-attn": "call the core of attention through torch.utils.checkpoint inside the model's own code",
    "modules": "call these parts of each block through torch.utils.checkpoint inside the model's own code",
    "uniform": "wrap runs of blocks in torch.utils.checkpoint yourself",
    "segments": "wrap runs of blocks in torch.utils.checkpoint yourself (checkpoint_sequential)",
    "sqrt": "wrap runs of blocks in torch.utils.checkpoint yourself",
}
"""By the kind of a policy that is neither none nor full."""
OPTIMIZER_OFFLOAD = "write an optimizer that keeps its states in host memory (PyTorch has none: pytorch#120256)"
TENSOR_OFFLOAD = "move the local tensors of DTensors in the hooks that offload activations yourself"
ACTIVATION_OFFLOAD = "run the forward under torch.autograd.graph.save_on_cpu yourself"
PARALLEL = {
    "tp": "apply a plan of tensor parallelism (parallelize_module) to the model yourself",
    "tp+sp": "apply a plan of tensor parallelism whose norms are SequenceParallel to the model yourself",
    "pp": "cut the model into stages for torch.distributed.pipelining yourself",
    "cp": "run the step under torch.distributed.tensor.experimental.context_parallel yourself",
    "ep": "shard the experts and exchange their tokens (all-to-all) in the model's own code",
}
"""By the kind of parallelism, on PyTorch's own building blocks."""
REPLICAS = "give fully_shard a mesh of two dimensions, replicas and shards, yourself"
SPLIT = "name the blocks of each pipeline stage yourself"
MASTER = "write an optimizer that keeps fp32 copies of 16-bit weights"
AUTOCAST = "run the forward under torch.autocast yourself, and leave the launcher's mixed precision off"
FP16 = "scale the loss (torch.amp.GradScaler) yourself"
FP8 = "convert the linear layers with torchao.float8 before they are sharded"
OPTIMIZER = "build the optimizer from its own package in the training loop"
LOSS = {
    "chunked": "compute the loss on parts of the logits yourself",
    "fused-kernel": "replace the loss by Liger's or another fused kernel yourself",
    "fused-linear": "replace head and loss by Liger's fused linear cross entropy yourself",
    "parallel": "compute the loss under torch.distributed.tensor.parallel.loss_parallel yourself",
}
FORM = "hand an optimizer of this form to the trainer yourself (optimizer_cls_and_kwargs)"
CHUNKED = "train under axolotl (chunked_cross_entropy), or compute the loss on parts of the logits yourself"
MUON = "train under axolotl, or hand it to the trainer yourself (optimizer_cls_and_kwargs)"
COMPILE = "call torch.compile on that part of the model yourself"
PACKING = (
    "run the blocks under torch.autograd.graph.saved_tensors_hooks whose pack and unpack quantise all but weights, or "
    "under GACT (fp16 and fp32 alone)"
)
REDUCE = "set the reduction's dtype in the framework's mixed-precision policy yourself"
BROADCAST = "write a ZeRO optimizer whose ranks broadcast their updated weights (as InternEvo's do)"
TIER = {
    "nvme": "write a swapper between host memory and NVMe",
    "cxl": "start the ranks under numactl, with host allocations in CXL memory",
}
