"""Results of jobs as records of a runs file, and compared with their predictions."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from memcalc._version import __version__
from memcalc.errors import InputError
from memcalc.probe.measure.planning import Planned, Target, run_without_figures
from memcalc.results.probe import ProbedJob, ProbeFigure
from memcalc.specs.runs import Communicator, LeftOut, Probe, Rate, Run, RunsFile
from memcalc.specs.strict import FIGURES
from memcalc.units import GIB

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from memcalc.results.estimates import Estimate

Result = dict[str, Any]
PHASES = {
    "forward": ("forward-last",),
    "loss": ("forward",),
    "backward": ("loss", "backward-last", "backward-first", "backward-end"),
    "step": ("step",),
}
"""Phases that are read at the borders of a step, each with those of the ledger whose largest it is."""
_COPIED = ("context", "bare_context", "blas_workspace", "allocator", "comment")


def runs_file(results: Iterable[tuple[Planned, Result]], target: Target, date: str) -> RunsFile:
    """Return the runs file of a probe.

    A CPU's has no `[[probe]]`: what it read says nothing of a GPU, its driver or its libraries.
    """
    entries = list(results)
    probe = probe_id(target, date)
    on_gpu = target.device == "cuda"
    done = [(planned, result) for planned, result in entries if result["ok"] or result["outcome"] == "oom"]
    runs = [_run(planned, result, target, probe, date) for planned, result in done if planned.run is not None]
    failed = [(planned, result["message"]) for planned, result in entries if (planned, result) not in done]
    answers = [result for _, result in entries if result["ok"]] if on_gpu else []
    return RunsFile(
        run=tuple(runs),
        left_out=tuple(LeftOut(id=f"{probe}/{planned.job.id}", reason=message) for planned, message in failed),
        probe=(_probe(target, probe, date, answers),) if on_gpu else (),
        rate=tuple(Rate(**{**rate, "probe": probe}) for result in answers for rate in result.get("rates", ())),
        communicator=tuple(
            Communicator(**{**fields, "probe": probe})
            for result in answers
            for fields in result.get("communicators", ())
        ),
    )


def probe_id(target: Target, date: str) -> str:
    """Return a name that another machine, or another day, does not have."""
    environment = json.dumps(target.environment.machine(target.device), sort_keys=True)
    kind = target.gpu.name if target.device == "cuda" else "cpu"
    return f"{kind}-{date}-{hashlib.sha256(environment.encode()).hexdigest()[:4]}"


def probed_job(planned: Planned, result: Result | None, status: str, reason: str = "") -> ProbedJob:
    """Return a job for the report: as it is planned, or with what was read."""
    job, figures, seconds, summary = planned.job, [], None, ""
    if result is not None and result["ok"]:
        run = result.get("run", {})
        seconds, summary = run.get("seconds"), _summary(result)
        if planned.estimate is not None:
            figures = list(_figures(run, planned.estimate))
    return ProbedJob.model_validate(
        {
            "id": job.id, "kind": job.kind, "status": status, "reason": reason, "memory": job.memory,
            "need": job.seconds, "ranks": job.ranks, "meant_to_fail": planned.meant_to_fail, "figures": figures,
            "seconds": seconds, "found": summary,
        }
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ records


def _run(planned: Planned, result: Result, target: Target, probe: str, date: str) -> Run:
    """Return a run with its figures; one that ran out of memory has none."""
    stated = run_without_figures(planned.job, target).model_dump(exclude_unset=True)
    identity = {
        "id": f"{probe}/{planned.job.id}",
        "source": f"memcalc probe {__version__}, {date}",
        "probe": probe if target.device == "cuda" else None,
    }
    if not result["ok"]:
        environment = target.environment
        software = f"torch {environment.torch}, transformers {environment.transformers}"
        return Run.model_validate(
            {**stated, **identity, "outcome": "oom", "software": software, "comment": result["message"].splitlines()[0]}
        )
    read = dict(result["run"])
    read["comment"] = "; ".join(part for part in (stated.get("comment", ""), read.get("comment", "")) if part)
    return Run.model_validate({**stated, **read, **identity})


def _probe(target: Target, probe: str, date: str, answers: Iterable[Result]) -> Probe:
    """Return the record of the machine, with the overheads that were measured."""
    environment = target.environment
    machine: dict[str, Any] = {}
    for answer in answers:
        machine |= {name: answer["machine"][name] for name in _COPIED if name in answer.get("machine", {})}
    peft = f", peft {environment.peft}" if environment.peft else ""
    return Probe(
        id=probe,
        gpu=target.gpu.name,
        name=environment.name,
        date=date,
        driver=environment.driver,
        cuda=environment.cuda,
        torch=environment.torch,
        software=f"transformers {environment.transformers}{peft}",
        memcalc=__version__,
        gpus=environment.gpus,
        memory=environment.memory,
        settings=environment.settings,
        **machine,
    )


# --------------------------------------------------------------------------------------------------------- comparison


def _figures(run: Mapping[str, Any], estimate: Estimate) -> Iterator[ProbeFigure]:
    """Yield measured and predicted bytes: the figures, then the phases of the second step."""
    for name in FIGURES:
        if name in run.get("measured", {}):
            yield _figure(name, run["measured"][name], getattr(estimate.peak, name))
    for name, measured in run.get("phases", {}).items():
        yield _figure(name, measured, max(estimate.phases[phase] for phase in PHASES[name]))


def _figure(name: str, measured: int, predicted: int) -> ProbeFigure:
    return ProbeFigure(name=name, measured=measured, predicted=predicted, error=predicted / measured - 1)


def _summary(result: Result) -> str:
    """Describe the result of a measurement of the machine."""
    machine = result.get("machine", {})
    parts = [f"{name.replace('_', ' ')} {machine[name] / GIB:.2f} GiB" for name in _COPIED[:3] if machine.get(name)]
    parts += [f"{len(result[name])} {name}" for name in ("rates", "communicators") if result.get(name)]
    return ", ".join(parts)


def record_error(planned: Planned, result: Result, target: Target) -> str:
    """Return why a result is no record, or nothing: a wrong field would invalidate the runs file at the end."""
    try:
        runs_file([(planned, result)], target, "2000-01-01")
    except (ValidationError, InputError, KeyError, TypeError) as error:
        return f"its result is no record of a runs file: {' '.join(str(error).split())[:200]}"
    return ""
