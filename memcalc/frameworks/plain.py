"""Plain PyTorch on one GPU, and DistributedDataParallel."""

from __future__ import annotations

from memcalc.frameworks import losses, support
from memcalc.frameworks.fsdp import SHARDED
from memcalc.frameworks.habits import Habits, Widths, like

MASTER = {**SHARDED, "bf16-mixed": Widths(2, 2, 4, 4, 2, 0), "fp16-mixed": Widths(2, 2, 4, 4, 2, 0)}

PLAIN = Habits(
    name="plain",
    zero=(0,),
    capabilities=support.PLAIN,
    widths=MASTER,
    losses=losses.HUGGING_FACE,
    source="torch.optim and torch.autograd, torch 2.13",
)
DDP = like(
    PLAIN,
    "ddp",
    capabilities=support.TRAINER,
    checkpoints_first=True,  # the Trainer's own
    gradient_copy=True,
    source="torch/nn/parallel/distributed.py, torch 2.13",
)

ERAS = {"plain": (("2.4", PLAIN),), "ddp": (("2.4", DDP),)}
