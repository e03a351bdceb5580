"""Results of jobs as records of a runs file, and beside their predictions."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from memcalc import __version__
from memcalc.errors import InputError
from memcalc.probe.measure.planning import Planned, Target, unmeasured
from memcalc.results import ProbedJob, ProbeFigure
from memcalc.specs.probes import Communicator, Probe, Rate
from memcalc.specs.runs import FIGURES, LeftOut, Run, RunsFile
from memcalc.units import GIB

if TYPE_CHECKING:
    from memcalc.results import Estimate

__all__ = ["PHASES", "probed_job", "runs_file"]

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
    listed = list(results)
    mark = probe_id(target, date)
    on_gpu = target.device == "cuda"
    done = [(planned, result) for planned, result in listed if result["ok"] or result["outcome"] == "oom"]
    runs = [_run(planned, result, target, mark, date) for planned, result in done if planned.run is not None]
    failed = [(planned, result["message"]) for planned, result in listed if (planned, result) not in done]
    answers = [result for _, result in listed if result["ok"]] if on_gpu else []
    return RunsFile(
        run=tuple(runs),
        left_out=tuple(LeftOut(id=f"{mark}/{planned.job.id}", reason=message) for planned, message in failed),
        probe=(_probe(target, mark, date, answers),) if on_gpu else (),
        rate=tuple(Rate(**{**rate, "probe": mark}) for result in answers for rate in result.get("rates", ())),
        communicator=tuple(
            Communicator(**{**one, "probe": mark}) for result in answers for one in result.get("communicators", ())
        ),
    )


def probe_id(target: Target, date: str) -> str:
    """Return a name that another machine, or another day, does not have."""
    told = json.dumps(target.facts.machine(target.device), sort_keys=True)
    kind = target.gpu.name if target.device == "cuda" else "cpu"
    return f"{kind}-{date}-{hashlib.sha256(told.encode()).hexdigest()[:4]}"


def probed_job(planned: Planned, result: Result | None, status: str, reason: str = "") -> ProbedJob:
    """Return a job for the report: as it is planned, or with what was read."""
    job, figures, seconds, found = planned.job, [], None, ""
    if result is not None and result["ok"]:
        run = result.get("run", {})
        seconds, found = run.get("seconds"), _found(result)
        if planned.estimate is not None:
            figures = list(_figures(run, planned.estimate))
    return ProbedJob.model_validate(
        {
            "id": job.id, "kind": job.kind, "status": status, "reason": reason, "memory": job.memory,
            "need": job.seconds, "ranks": job.ranks, "meant_to_fail": planned.meant_to_fail, "figures": figures,
            "seconds": seconds, "found": found,
        }
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ records


def _run(planned: Planned, result: Result, target: Target, mark: str, date: str) -> Run:
    """Return a run with its figures; one that ran out of memory has none."""
    stated = unmeasured(planned.job, target).model_dump(exclude_unset=True)
    own = {
        "id": f"{mark}/{planned.job.id}",
        "source": f"memcalc probe {__version__}, {date}",
        "probe": mark if target.device == "cuda" else None,
    }
    if not result["ok"]:
        facts = target.facts
        software = f"torch {facts.torch}, transformers {facts.transformers}"
        return Run.model_validate(
            {**stated, **own, "outcome": "oom", "software": software, "comment": result["message"].splitlines()[0]}
        )
    read = dict(result["run"])
    read["comment"] = "; ".join(part for part in (stated.get("comment", ""), read.get("comment", "")) if part)
    return Run.model_validate({**stated, **read, **own})


def _probe(target: Target, mark: str, date: str, answers: Iterable[Result]) -> Probe:
    """Return the record of the machine, with the overheads that were measured."""
    facts = target.facts
    machine: dict[str, Any] = {}
    for answer in answers:
        machine |= {name: answer["machine"][name] for name in _COPIED if name in answer.get("machine", {})}
    peft = f", peft {facts.peft}" if facts.peft else ""
    return Probe(
        id=mark,
        gpu=target.gpu.name,
        name=facts.name,
        date=date,
        driver=facts.driver,
        cuda=facts.cuda,
        torch=facts.torch,
        software=f"transformers {facts.transformers}{peft}",
        memcalc=__version__,
        gpus=facts.gpus,
        memory=facts.memory,
        settings=facts.settings,
        **machine,
    )


# --------------------------------------------------------------------------------------------------------- comparison


def _figures(run: Mapping[str, Any], estimate: Estimate) -> Iterator[ProbeFigure]:
    """Yield what was read beside what was predicted: the figures, then the phases of the second step."""
    for name in FIGURES:
        if name in run.get("measured", {}):
            yield _figure(name, run["measured"][name], getattr(estimate.peak, name))
    for name, measured in run.get("phases", {}).items():
        yield _figure(name, measured, max(estimate.phases[phase] for phase in PHASES[name]))


def _figure(name: str, measured: int, predicted: int) -> ProbeFigure:
    return ProbeFigure(name=name, measured=measured, predicted=predicted, error=predicted / measured - 1)


def _found(result: Result) -> str:
    """Say what a measurement of the machine gave."""
    machine = result.get("machine", {})
    said = [f"{name.replace('_', ' ')} {machine[name] / GIB:.2f} GiB" for name in _COPIED[:3] if machine.get(name)]
    said += [f"{len(result[name])} {name}" for name in ("rates", "communicators") if result.get(name)]
    return ", ".join(said)


def is_record(planned: Planned, result: Result, target: Target) -> str:
    """Return why a result is no record, or nothing: a wrong field would cost the whole file at its end."""
    try:
        runs_file([(planned, result)], target, "2000-01-01")
    except (ValidationError, InputError, KeyError, TypeError) as error:
        return f"its result is no record of a runs file: {' '.join(str(error).split())[:200]}"
    return ""
