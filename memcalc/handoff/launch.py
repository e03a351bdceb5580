"""How what is written is started: a line for each format, with the processes of each node."""

from __future__ import annotations

import shlex
from pathlib import Path

from memcalc.convert.job import Job

__all__ = ["launch"]

_TORCHRUN = "torchrun {nodes}--nproc-per-node {gpus} {tail}"
_LINES = {
    "deepspeed": "deepspeed {hosts}--num_gpus {gpus} train.py --deepspeed --deepspeed_config {file}",
    "accelerate": "accelerate launch --config_file {file} {machines}train.py",
    "trainer": _TORCHRUN.replace("{tail}", "train.py --config {file}"),
    "torchtitan": _TORCHRUN.replace("{tail}", "-m torchtitan.train --job.config_file {file}"),
    "megatron": _TORCHRUN.replace("{tail}", "pretrain_gpt.py $(sed -e '/^#/d' -e 's/\\\\$//' {file})"),
    "axolotl": "axolotl train {file} --launcher torchrun -- {nodes}--nproc_per_node={gpus}",
    "fsdp2": _TORCHRUN.replace("{tail}", "{file}"),
}
"""By format. `train.py` stands for the user's own script."""


def launch(form: str, job: Job, path: Path) -> str:
    """Return the line that starts a job from the file that was written; of several nodes, the line of each.

    A format without a line of its own is started by torchrun, with the file as an argument of the user's script.
    """
    line = _LINES.get(form, _TORCHRUN.replace("{tail}", "train.py {file}"))
    several = job.nodes > 1
    return line.format(
        file=shlex.quote(str(path)),
        gpus=job.gpus_per_node,
        nodes=f"--nnodes {job.nodes} --rdzv-backend c10d --rdzv-endpoint HOST:29500 " if several else "",
        hosts=f"--hostfile hostfile --num_nodes {job.nodes} " if several else "",
        machines="--machine_rank RANK --main_process_ip HOST " if several else "",
    )
