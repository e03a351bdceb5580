"""How what is written is started: a line for each format, with the processes of each node."""

from __future__ import annotations

import shlex
from pathlib import Path

from memcalc.convert.job import Job

__all__ = ["launch", "script"]

_TORCHRUN = "torchrun {nodes}--nproc-per-node {gpus} {tail}"
_LINES = {
    "deepspeed": "deepspeed {hosts}--num_gpus {gpus} train.py --deepspeed --deepspeed_config {file}",
    "accelerate": "accelerate launch --config_file {file} {machines}train.py",
    "trainer": _TORCHRUN.replace("{tail}", "train.py --config {file}"),
    "torchtitan": _TORCHRUN.replace("{tail}", "-m torchtitan.train --job.config_file {file}"),
    "megatron": "bash {file}",
    "axolotl": "axolotl train {file} --launcher torchrun -- {nodes}--nproc_per_node={gpus}",
    "fsdp2": _TORCHRUN.replace("{tail}", "{file}"),
}
"""By format. `train.py` stands for the user's own script."""
_PROGRAMS = {"megatron": "pretrain_gpt.py"}
"""What takes flags."""


def launch(form: str, job: Job, path: Path) -> str:
    """Return the line that starts a job from the file that was written; of several nodes, the line of each.

    A format without a line of its own is started by torchrun, with the file as an argument of the user's script.
    """
    return _filled(_LINES.get(form, _TORCHRUN.replace("{tail}", "train.py {file}")), job, path)


def script(form: str, job: Job, flags: str) -> str:
    """Return a script that starts a program with flags, one a line; a comment may stand before them."""
    head = [line for line in flags.splitlines() if line.startswith("#")]
    tail = "\n".join(f"  {line}" for line in flags.splitlines() if not line.startswith("#"))
    start = _filled(_TORCHRUN.replace("{tail}", f"{_PROGRAMS.get(form, 'train.py')} \\"), job, Path())
    return "\n".join(["#!/bin/bash", *head, start, tail, ""])


def _filled(line: str, job: Job, path: Path) -> str:
    several = job.nodes > 1
    return line.format(
        file=shlex.quote(str(path)),
        gpus=job.gpus_per_node,
        nodes=f"--nnodes {job.nodes} --rdzv-backend c10d --rdzv-endpoint HOST:29500 " if several else "",
        hosts=f"--hostfile hostfile --num_nodes {job.nodes} " if several else "",
        machines="--machine_rank RANK --main_process_ip HOST " if several else "",
    )
