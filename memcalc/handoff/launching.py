"""The line that starts a job from the files that were written for it."""

from __future__ import annotations

import shlex
from pathlib import Path

from memcalc.convert.job import ConfigJob

PROGRAMS = {"megatron": "pretrain_gpt.py"}
"""Programs that are started with flags."""
SCRIPT = "train.py"
"""The training script beside arguments of the Trainer."""
_LINES = {
    "deepspeed": f"deepspeed {{hosts}}--num_gpus {{gpus}} {SCRIPT} {{arguments}}",
    "accelerate": f"accelerate launch --config_file {{file}} {{machines}}{SCRIPT} {{arguments}}",
    "trainer": f"{{torchrun}} {SCRIPT} {{file}}",
    "torchtitan": "{torchrun} -m torchtitan.train --job.config_file {file}",
    "megatron": "bash {file}",
    "axolotl": "axolotl train {file} --launcher torchrun -- {nodes}--nproc_per_node={gpus}",
    "fsdp2": "{torchrun} {file}",
}
"""The line that starts a job by its format, where its main file lies."""


def launch(form: str, job: ConfigJob, path: Path, *, several: bool = False) -> str:
    """Return the line that starts a job from the file that was written; of several nodes, the line of each.

    A format without a line of its own is started by torchrun, with the file as an argument of a script. ``several``
    files name one another, so that the job is started from their folder.
    """
    line = _LINES.get(form, f"{{torchrun}} {SCRIPT} {{file}}")
    before = "" if form == "fsdp2" else _environment(job)
    if several and path.parent != Path():
        return f"cd {shlex.quote(str(path.parent))} && {before}{filled(line, job, Path(path.name))}"
    return before + filled(line, job, path)


def _environment(job: ConfigJob) -> str:
    """What the allocator and cuBLAS read before a program starts; the FSDP2 script sets the first one itself."""
    settings = {}
    if job.strategy.expandable_segments:
        settings["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    if job.blas_workspace is not None:
        settings["CUBLAS_WORKSPACE_CONFIG"] = f":{job.blas_workspace // 1024}:1"
    return "".join(f"{name}={value} " for name, value in settings.items())


def start(form: str, job: ConfigJob, flags: str) -> str:
    """Return a script that starts a program with flags, one a line; comments stand before them."""
    lines = flags.splitlines()
    comments = [line for line in lines if line.startswith("#")]
    tail = "\n".join(f"  {line}" for line in lines if not line.startswith("#"))
    program = f"{filled('{torchrun}', job, Path())} {PROGRAMS.get(form, SCRIPT)} \\"
    return "\n".join(["#!/bin/bash", *comments, program, tail, ""])


def filled(line: str, job: ConfigJob, path: Path) -> str:
    """Return a line with the file, those beside it, and the ranks of a job put in."""
    several = job.nodes > 1
    nodes = f"--nnodes {job.nodes} --rdzv-backend c10d --rdzv-endpoint HOST:29500 " if several else ""
    return line.format(
        file=shlex.quote(str(path)),
        arguments=job.beside.get("trainer", ""),
        gpus=job.gpus_per_node,
        nodes=nodes,
        torchrun=f"torchrun {nodes}--nproc-per-node {job.gpus_per_node}",
        hosts=f"--hostfile hostfile --num_nodes {job.nodes} " if several else "",
        machines="--machine_rank RANK --main_process_ip HOST " if several else "",
    )
