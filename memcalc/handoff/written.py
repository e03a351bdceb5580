"""A plan as a framework's own config: its files, and the lines that start and check them."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from memcalc._version import __version__
from memcalc.api import load_model
from memcalc.convert.document import parse_document
from memcalc.convert.formats import Format, get_format, render_config
from memcalc.convert.formats.base import WRITABLE, ConfigJob, hub_name
from memcalc.errors import CombinationError, UnknownNameError
from memcalc.files import asks
from memcalc.frameworks.capabilities import FORMATS_OF
from memcalc.handoff.round_trip import check_command, resolved
from memcalc.handoff.saved import estimated_again
from memcalc.planner.images import parse_size, seen_by, sides_of
from memcalc.results.estimates import Estimate
from memcalc.results.plans import Plan
from memcalc.specs.job import command_line
from memcalc.specs.model import Model
from memcalc.specs.options import meant
from memcalc.units import GIB, parse_bytes

# The line that starts a job from the files that were written for it.

PROGRAMS = {"megatron": "pretrain_gpt.py"}
"""Programs that are started with flags."""
PASSED = {
    "megatron": (
        "# Give it the rest: data, tokenizer, --lr and --train-iters; with --load also --rotary-base and "
        "--norm-epsilon of the weights.\n"
        "# On random tokens: --mock-data --tokenizer-type NullTokenizer --lr 1e-5 --train-iters 10"
    )
}
"""What a plan says nothing of and a program does not start without, as comments of a script that passes it on."""
BLACKWELL = 10.0
"""Its compute capability."""
SCRIPT = "train.py"
"""The training script beside arguments of the Trainer."""
LOADING = {"trainer", "axolotl"}
"""Formats whose files say which weights are loaded."""
_LINES = {
    "deepspeed": f"deepspeed {{hosts}}--num_gpus {{gpus}} {SCRIPT} {{arguments}}",
    "accelerate": f"accelerate launch --config_file {{file}} {{machines}}{SCRIPT} {{arguments}}",
    "trainer": f"{{torchrun}} {SCRIPT} {{file}}",
    "torchtitan": "{torchrun} -m torchtitan.train --job.config_file {file}",
    "megatron": "bash {file}",
    "swift_megatron": "{variables}NPROC_PER_NODE={gpus} megatron sft {file}",
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
    rest = PASSED.get(form, "")
    comments = [*(line for line in lines if line.startswith("#")), *rest.splitlines()]
    tail = "\n".join(f"  {line}" for line in lines if not line.startswith("#")) + (' "$@"' if rest else "")
    program = f"{filled('{torchrun}', job, Path())} {PROGRAMS.get(form, SCRIPT)} \\"
    return "\n".join(["#!/bin/bash", *comments, *_exports(form, job), program, tail, ""])


def _exports(form: str, job: ConfigJob) -> Iterator[str]:
    """What a program refuses to start without.

    Megatron-LM splits tensors or sequences over GPUs older than Blackwell in one queue alone, which lets messages
    overtake kernels (d98e8a64 training/arguments.py, ``validate_args``); tokens that overlap need more.
    """
    plan = job.strategy
    if form == "megatron" and max(plan.tp, plan.cp) > 1 and not (plan.ep_overlap or job.capability >= BLACKWELL):
        yield "export CUDA_DEVICE_MAX_CONNECTIONS=1"


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
        variables=f"NNODES={job.nodes} NODE_RANK=RANK MASTER_ADDR=HOST " if several else "",
    )


@dataclass(frozen=True)
class Exported:
    """The files of a plan under a framework, and the lines to start and check them."""

    files: dict[Path, str]
    """The text of each file."""
    launch: str
    """The line that starts the job."""
    check: str
    """The line that checks the file before every start."""
    notes: tuple[str, ...]
    """What the files no longer hold, or hold for another release."""
    format: str = ""
    """The name of the format."""


def anchored(plan: Plan) -> Plan:
    """A plan whose model, where that is a path, is found from whatever folder its files lie in or are started from."""
    path = Path(plan.job.model or "")
    if path.is_absolute() or not path.exists():
        return plan
    job = plan.job.model_copy(update={"model": str(path.resolve())})
    return plan.model_copy(update={"job": job, "command": command_line(job)})


def first_written(plan: Plan, names: Sequence[str], path: Path | None, dirs: tuple[str, ...]) -> Exported:
    """Write a plan in the first of some formats that says it, or refuse it as the first of them does."""
    refusals = []
    for name in names:
        try:
            return write_plan(plan, name, path, dirs)
        except CombinationError as error:
            refusals.append(error)
    raise refusals[0]


def write_plan(plan: Plan | Estimate, to: str, path: Path | None, dirs: tuple[str, ...]) -> Exported:
    """Write one plan in a format, and prove that what is written is the plan."""
    form = get_format(to)
    target = Path(usual_name(form)) if path is None else path / usual_name(form) if asks(path.is_dir) else path
    estimate = estimated_again(plan, dirs, advice=False)
    job = _job(plan, estimate, form, target, dirs)
    check, runs = check_command(form, _files(form, job, target), plan.job, estimate, dirs)
    files = _files(form, replace(job, check=check), target)
    line = launch(to, job, target, several=len(files) > 1)
    notes = (*_moved(plan, estimate, runs, form), *_unnamed(form, job), *_deprecated(form, job))
    return Exported(files, line, check, notes, to)


def known_format(to: str) -> str:
    """A format that can be written, or the error that names those of a framework that was named instead."""
    if to in WRITABLE:
        return to
    if to in FORMATS_OF:
        allowed = f"{to} is a framework; its formats are {', '.join(FORMATS_OF[to])}"
        raise UnknownNameError("format of --to", to, allowed)
    allowed = f"must be one of {', '.join(WRITABLE)}"
    raise UnknownNameError("format of --to", to, allowed, WRITABLE, suggestion=meant("to", to))


def _job(plan: Plan | Estimate, estimate: Estimate, form: Format, target: Path, dirs: tuple[str, ...]) -> ConfigJob:
    model = str(plan.job.model)
    workspace = plan.job.settings.get("strategy.blas_workspace")
    evaluated = plan.job.settings.get("workload.eval_micro_batch")
    spec = load_model(model, dirs)
    return replace(
        ConfigJob.of(estimate, spec),
        **_pictured(plan, spec),
        model=model,
        blas_workspace=None if workspace is None else parse_bytes(workspace),
        eval_micro_batch=None if evaluated is None else int(evaluated),
        beside={form.name: target.name, **{name: usual_name(get_format(name)) for name in form.beside}},
    )


def _pictured(plan: Plan | Estimate, spec: Model) -> dict[str, Any]:
    """How many images a job has, and what the model makes of one of them."""
    count, size = int(plan.job.options.get("images", 1)), plan.job.options.get("image_size")
    if spec.images is None or not count:
        return {}
    limit = plan.job.settings.get("workload.image_pixels")
    most = None if limit is None else int(limit)
    sides = parse_size(size) if size else (spec.images.side, spec.images.side)
    return {"images": count, "image": seen_by(spec, *sides, most), "image_sides": sides_of(spec.images, *sides, most)}


def usual_name(form: Format) -> str:
    """The name that a format's file has; flags stand in a script that starts the job."""
    return f"{Path(form.filename).stem}.sh" if form.kind == "flags" else form.filename


def _files(form: Format, job: ConfigJob, target: Path) -> dict[Path, str]:
    """The file of a format, those beside it and those that they name, and the script that reads them."""
    text = render_config(form, job)
    if form.kind == "flags":
        return {target: start(form.name, job, text)}
    files = {target: text}
    if form.kind != "shell":
        for other in (*form.beside, *_named(form, target, text)):
            path = target.parent / job.beside.get(other, usual_name(get_format(other)))
            files.setdefault(path, render_config(get_format(other), job))
    script = next((get_format(name).script for name in (form.name, *form.beside) if get_format(name).script), None)
    if script is not None:
        files[target.parent / SCRIPT] = script(job)
    return files


def _named(form: Format, target: Path, text: str) -> Iterator[str]:
    """Yield the formats of the files that a config names."""
    for other in form.read(parse_document(target, text, form.kind)).references:
        if other.format in WRITABLE and other.path and Path(other.path).name == other.path:
            yield other.format


def _unnamed(form: Format, job: ConfigJob) -> Iterator[str]:
    """Yield a sentence where the files name a model that the Hub has under a name which is not known."""
    name = hub_name(job)
    if {form.name, *form.beside} & LOADING and "/" not in name and not name.endswith((".json", ".toml")):
        yield f"the Hub's name of {name} is not known: write it in its place, or plan with --model OWNER/NAME."


def _deprecated(form: Format, job: ConfigJob) -> Iterator[str]:
    """Yield a sentence where the files start FSDP 1 (Transformers 5.24, training_args.py, _process_fsdp_args)."""
    if job.framework == "hf" and job.strategy.zero and {form.name, *form.beside} & LOADING:
        other = f"--framework fsdp2 --to {form.name}"
        yield f"Transformers deprecates FSDP 1, which --framework hf runs; for FSDP 2 plan with {other}."


def _moved(plan: Plan | Estimate, estimate: Estimate, runs: Estimate, form: Format) -> Iterator[str]:
    """Yield a sentence where the figures are no longer those that were saved, or what runs has others by itself."""
    was, now = plan.peak.device, estimate.peak.device
    if was != now:
        text = f"{was / GIB:.2f} GiB per GPU when saved; {now / GIB:.2f} GiB now ({estimate.verdict})"
        yield f"{text} by memcalc {__version__}."
    if runs is estimate:
        return
    before, after = resolved(estimate), resolved(runs)
    other = ", ".join(f"{name.replace('_', '-')} {after[name]}" for name in after if after[name] != before[name])
    text = f"{form.title}: what runs has {other}, and takes {runs.peak.device / GIB:.2f} GiB per GPU, not the planned "
    text += f"{now / GIB:.2f}"
    again = "" if plan.job.query.get("to") == form.name else f"; --to {form.name} plans what runs"
    if after["kbit_experts"] and not before["kbit_experts"]:
        again = "; --set strategy.kbit_experts=true plans what runs"
    if runs.verdict == "does-not-fit":
        raise CombinationError("to", form.title, f"{text}, which does not fit{again}")
    yield f"{text} ({runs.verdict}){again}."
