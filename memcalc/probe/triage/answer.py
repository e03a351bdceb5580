"""The answer of triage: what was read becomes facts, causes and changes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from memcalc import __version__
from memcalc.errors import MemcalcError, MissingError
from memcalc.probe.triage.causes import cause, ranked, said
from memcalc.probe.triage.frames import read_stack, site_of
from memcalc.probe.triage.job import Job, changes_of, comparison_of, job_of, verdict_of
from memcalc.probe.triage.logs import Incident, read_log
from memcalc.probe.triage.message_causes import causes_of, other_processes, outside_of
from memcalc.probe.triage.messages import Figures
from memcalc.probe.triage.snapshot import read_snapshot
from memcalc.probe.triage.snapshot_causes import Explained, explained
from memcalc.probe.triage.source import content_of, is_snapshot, log_text
from memcalc.results.triage import GpuProcess, Triage, TriageCause, TriageFailure

__all__ = ["triage"]

_RECORD = (
    "torch.cuda.memory._record_memory_history(max_entries=200_000)  # before the model is built",
    "try:",
    "    train()",
    "except torch.cuda.OutOfMemoryError:",
    '    torch.cuda.memory._dump_snapshot("oom.pickle")',
    "    raise",
)
_RECORD_HOST = ("/usr/bin/time -v python train.py", "sacct -j JOB --format=JobID,State,MaxRSS,ReqMem")
_MORE = 1.15
"""Times the estimate's allocated peak above which the job as told does not explain what is held."""
_UNTOLD = frozenset({"too-large", "longer-batch", "unexplained"})


def triage(
    source: str | bytes | Path,
    *,
    config: Iterable[str] = (),
    plan: str | None = None,
    settings: Mapping[str, Any] | None = None,
    preset_dirs: Iterable[str] = (),
    **words: Any,
) -> Triage:
    """Explain an out-of-memory message, a log that holds one, or a memory snapshot.

    With a job, told by ``words``, by its ``config`` files or by a saved ``plan``, what was measured stands beside the
    estimate, and each change that is proposed is proved by it. Snapshots are read as plain data: nothing in them runs.

    Parameters
    ----------
    source
        A file's name, a message, or the bytes of either.
    config
        Paths of the job's own config files.
    plan
        The path of a saved plan.
    settings, preset_dirs
        As for :func:`memcalc.estimate`.
    **words
        The job, as for :func:`memcalc.estimate`.

    Returns
    -------
    Triage
        Causes with their evidence, the most likely first, and the changes that help [bytes].

    Raises
    ------
    memcalc.errors.InputError
        For what cannot be read.
    memcalc.errors.MissingError
        Where there is no failure to explain.
    """
    content, name = content_of(source)
    job = job_of(tuple(config), plan, words, dict(settings or {}), tuple(preset_dirs))
    if is_snapshot(content):
        return _of_snapshot(explained(read_snapshot(content, name)), name, job)
    return _of_log(log_text(content, name), name, job)


def _of_log(text: str, name: str, job: Job | None) -> Triage:
    log = read_log(text)
    if not log.incidents:
        raise MissingError(
            f"{name} has no out-of-memory message: give the log of the rank that failed, with its traceback, or a "
            "snapshot of torch.cuda.memory._dump_snapshot."
        )
    first = _worst(log.incidents)
    reading, figures = read_stack(first.stack), first.figures
    causes = causes_of(first)
    if log.expandable:
        causes = [_already(one) if one.code == "fragmentation" else one for one in causes]
    measured = {
        "allocated": None if figures.allocated is None else figures.allocated + (figures.tried or 0),
        "reserved": figures.reserved,
        "device": other_processes(figures)[1],
        "outside PyTorch": outside_of(figures),
        "capacity": figures.capacity,
    }
    unknown = ["which tensors hold the memory: a message has totals alone"] if figures.backend != "host" else []
    if reading.evidence is None:
        unknown.append("what ran: no traceback stands above the message")
    if figures.backend != "host" and figures.this_process is None and not figures.processes:
        unknown.append("what other processes held: this message does not list them")
    return _answer(
        kind="message", name=name, job=job, causes=causes, figures=figures, phase=reading.phase, measured=measured,
        failures=tuple(_failure(one) for one in log.incidents), unknown=unknown, explained=None,
    )  # fmt: skip


def _worst(incidents: tuple[Incident, ...]) -> Incident:
    """The failure that is explained: of those with figures the first."""
    return next((one for one in incidents if one.figures.tried is not None), incidents[0])


def _already(one: TriageCause) -> TriageCause:
    says = "expandable segments were on already, as the log shows"
    return one.model_copy(update={"confidence": "possible", "evidence": (*one.evidence, says)})


def _of_snapshot(found: Explained, name: str, job: Job | None) -> Triage:
    memory = found.memory
    unknown = []
    unread = sum(one.bytes for one in found.shares if one.category in {"before the recording", "unknown"})
    if unread > 0.05 * max(memory.allocated, 1):
        unknown.append(f"what {said(unread)} are: they have no stack, or were made before the recording began")
    if not memory.entries:
        unknown.append("what was freed, and when: the snapshot has no trace (record with enabled='all')")
    elif not memory.steps:
        unknown.append("what grows from step to step: no steps were found in the trace")
    failed = found.figures.tried is not None
    measured = {"allocated": memory.allocated, "reserved": memory.end_reserved}
    return _answer(
        kind="snapshot", name=name, job=job, causes=found.causes, figures=found.figures, phase=found.reading.phase,
        measured=measured, failures=(_snapshot_failure(found),) if failed else (), unknown=unknown, explained=found,
    )  # fmt: skip


def _answer(
    *,
    kind: Any,
    name: str,
    job: Job | None,
    causes: list[TriageCause],
    figures: Figures,
    phase: str,
    measured: Mapping[str, int | None],
    failures: tuple[TriageFailure, ...],
    unknown: list[str],
    explained: Explained | None,
) -> Triage:
    lacking = None if figures.tried is None else max(figures.tried - (figures.free or 0), 1)
    if job is not None:
        causes = [*_of_job(job, figures, measured, explained), *causes]
        unknown += _mismatch(job, figures)
    listed = ranked(causes)
    sure = any(one.confidence != "possible" for one in listed)
    told = explained is not None and not failures and not unknown
    changes = changes_of(job, listed, lacking) if job is not None and figures.backend != "host" else ()
    return Triage(
        version=__version__,
        kind=kind,
        source=name,
        answered=sure or told,
        summary=_summary(listed, failures, explained),
        failures=failures,
        memory=explained.memory if explained else None,
        shares=explained.shares if explained else (),
        sites=explained.sites if explained else (),
        growth=explained.growth if explained else (),
        comparison=comparison_of(job.estimate, explained.shares if explained else (), phase, measured) if job else (),
        estimate=verdict_of(job.estimate) if job else "",
        causes=listed,
        changes=changes,
        unknown=tuple(unknown),
        record=_lines(listed, sure or told, kind, figures, job),
        command=job.estimate.command if job else "",
    )


def _lines(
    causes: tuple[TriageCause, ...], answered: bool, kind: str, figures: Figures, job: Job | None
) -> tuple[str, ...]:
    """What to record: where nothing is likely, or where a message alone cannot say what fills the card."""
    if figures.backend == "host":
        return () if answered else _RECORD_HOST
    vague = kind == "message" and job is None and bool(causes) and causes[0].code in _UNTOLD
    return () if answered and not vague else _RECORD


def _of_job(
    job: Job, figures: Figures, measured: Mapping[str, int | None], explained: Explained | None
) -> Iterable[TriageCause]:
    """What the estimate says of the failure."""
    estimate, held = job.estimate, measured.get("allocated")
    failed = figures.tried is not None
    if failed and estimate.verdict == "does-not-fit":
        yield cause("too-large", "likely", verdict_of(estimate), size=estimate.peak.device)
    peak = estimate.peak.allocated
    if held is not None and held > _MORE * peak:
        evidence = f"{said(held)} are held or asked for, {said(peak)} is the estimate's peak: {said(held - peak)} more"
        yield cause("unexplained", "likely" if failed else "possible", evidence, size=held - peak)
    if figures.tried is not None and explained is None:
        yield from _like_logits(job, figures.tried)


def _like_logits(job: Job, tried: int) -> Iterable[TriageCause]:
    """Whether the request is as large as the job's logits, to the digits that the message prints."""
    from memcalc.api import load_model

    model, work = job.words.get("model"), job.estimate.workload
    try:
        vocab = load_model(model, job.dirs).vocab if isinstance(model, str) else getattr(model, "vocab", 0)
    except MemcalcError:
        return
    tokens = work.seq_len * work.micro_batch
    digits = 0.006 * (1 << 30 if tried >= 1 << 30 else 1 << 20)
    for width, name in ((4, "fp32"), (2, "16-bit")):
        size = tokens * vocab * width
        if size >= 1 << 26 and abs(-(-size // (1 << 21)) * (1 << 21) - tried) <= digits:
            evidence = (
                f"{said(tried)} were asked for: {tokens:,} tokens times {vocab:,} words in {name}, the logits' size"
            )
            yield cause("logits", "likely", evidence, size=tried)


def _mismatch(job: Job, figures: Figures) -> list[str]:
    capacity, told = figures.capacity, job.estimate.budget.capacity
    if capacity is None or abs(capacity - told) <= 0.03 * told:
        return []
    return [f"whether this is the job: its GPU has {said(told)}, the one that failed {said(capacity)}"]


def _summary(causes: tuple[TriageCause, ...], failures: tuple[TriageFailure, ...], explained: Explained | None) -> str:
    ranks = len({one.rank for one in failures})
    several = f"{ranks} ranks failed; " if ranks > 1 else ""
    likely = [one for one in causes if one.confidence != "possible"]
    if likely:
        nothing = "nothing failed in this snapshot, but " if explained is not None and not failures else ""
        return f"{several}{nothing}{likely[0].confidence}: {likely[0].title}"
    if explained is not None and not failures:
        largest = explained.shares[0] if explained.shares else None
        most = f": most of {said(explained.memory.allocated)} are {largest.category}" if largest else ""
        return f"nothing failed in this snapshot{most}"
    if causes:
        return f"{several}cannot tell; possible: {causes[0].title}"
    return f"{several}cannot tell from this message"


def _failure(one: Incident) -> TriageFailure:
    figures, reading = one.figures, read_stack(one.stack)
    others, own = other_processes(figures)
    evidence = reading.evidence
    return TriageFailure(
        form=figures.form, backend=figures.backend, rank=one.rank, device=figures.device, line=one.line,
        tried=figures.tried, capacity=figures.capacity, free=figures.free, allocated=figures.allocated,
        unallocated=figures.unallocated, reserved=figures.reserved, private_pools=figures.private_pools,
        limit=figures.limit, this_process=own, outside=outside_of(figures),
        others=tuple(GpuProcess(pid=pid, bytes=size) for pid, size in others),
        phase=reading.phase, site=site_of(one.stack) if one.stack else "",
        evidence="" if evidence is None else f"{evidence.short}{': ' if evidence.code else ''}{evidence.code}",
    )  # fmt: skip


def _snapshot_failure(found: Explained) -> TriageFailure:
    figures, evidence = found.figures, found.reading.evidence
    return TriageFailure(
        form="snapshot", backend=figures.backend, rank="", device=figures.device, line=0, tried=figures.tried,
        capacity=None, free=figures.free, allocated=figures.allocated, unallocated=figures.unallocated,
        reserved=figures.reserved, private_pools=None, limit=None, this_process=None, outside=None, others=(),
        phase=found.reading.phase, evidence=evidence.short if evidence else "", site=found.site,
    )  # fmt: skip
