"""``memcalc triage``: a message, log or snapshot read within bounds, and the answer of facts, causes and changes."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from memcalc._version import __version__
from memcalc.errors import FileError, MemcalcError, MissingError
from memcalc.files import regular, there
from memcalc.probe.triage.engine_lines import engine_failed, is_engine_log
from memcalc.probe.triage.frames import read_stack, site_of
from memcalc.probe.triage.job import TriageJob, changes_of, comparison_of, job_of, verdict_of
from memcalc.probe.triage.logs import Figures, OomEvent, read_log
from memcalc.probe.triage.message_causes import cause, causes_of, other_processes, outside_of, ranked, shown
from memcalc.probe.triage.plain_pickle import looks_like_pickle
from memcalc.probe.triage.snapshot import LARGEST_SNAPSHOT, read_snapshot
from memcalc.probe.triage.snapshot_causes import SnapshotEvidence, evidence_of
from memcalc.results.serving import EngineLog
from memcalc.results.triage import DOUBT, GpuProcess, Triage, TriageCause, TriageFailure

LARGEST_LOG = 256 << 20
"""Bytes of a log."""
_LONGEST_NAME = 4096


def content_of(source: str | bytes | Path) -> tuple[bytes, str]:
    """Return the bytes of a source, and what it is called; a str that is no file's name but a message is itself.

    Raises :class:`memcalc.errors.FileError` for a file that cannot be read.
    """
    if isinstance(source, bytes):
        return source, "data"
    if isinstance(source, str) and ("\n" in source or len(source) > _LONGEST_NAME or _is_message(source)):
        return source.encode("utf-8", "replace"), "text"
    return _read(Path(source)), Path(source).name


def _is_message(text: str) -> bool:
    """Whether a line is a message rather than a name: names of files that exist are names."""
    return " " in text and not there(Path(text)) and bool(read_log(text).events)


def _read(path: Path) -> bytes:
    """Read a regular file; its size is looked at first."""
    with regular(path) as stream:
        head = stream.read(2)
        most = LARGEST_SNAPSHOT if head[:1] in {b"\x80", b"{", b"["} else LARGEST_LOG
        size = os.fstat(stream.fileno()).st_size
        if size > most:
            raise FileError("file", str(path), f"must be at most {most >> 20} MiB; of a log, give its end")
        # reading makes room for all that is asked for; a log that grows meanwhile is read as it was
        return head + stream.read(size)


def is_snapshot(content: bytes) -> bool:
    """Return whether content is a memory snapshot: a pickle, or JSON with segments.

    >>> is_snapshot(b'{"segments": []}'), is_snapshot(b"{} CUDA out of memory")
    (True, False)
    """
    return looks_like_pickle(content) or ((content[:1] in {b"{", b"["} and b'"segments"' in content) or _bare(content))


def _bare(content: bytes) -> bool:
    """Whether it is a list of segments in JSON, without a table around it."""
    return content[:1] == b"[" and b'"total_size"' in content[:4096]


def log_text(content: bytes, name: str) -> str:
    """Return a log as text; what is no UTF-8 in it is replaced, since logs hold all kinds of bytes."""
    if b"\0" in content[:65536]:
        raise FileError("file", name, "must be a log or a memory snapshot, not another binary file")
    return content.decode("utf-8", "replace")


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
"""Times the estimate's allocated peak above which the given job does not explain the memory in use."""
_BY_THEN = {"loss": ("forward-last", ("parameters", "activations")), "optimizer": ("step", ("parameters", "gradients"))}
"""Of a phase that failed, an earlier moment or its own, and what no run reaches it without."""
_UNTOLD = frozenset({"too-large", "longer-batch", "unexplained"})


def triage(
    source: str | bytes | Path,
    *,
    config: Iterable[str] = (),
    plan: str | None = None,
    settings: Mapping[str, Any] | None = None,
    preset_dirs: Iterable[str] = (),
    **options: Any,
) -> Triage | EngineLog:
    """Explain an out-of-memory message, a log that holds one, a memory snapshot, or an inference engine's start-up log.

    With a job, told by ``options``, by its ``config`` files or by a saved ``plan``, what was measured stands beside the
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
    **options
        The job, as for :func:`memcalc.estimate`.

    Returns
    -------
    Triage or EngineLog
        Causes with their evidence, the most likely first, and the changes that help [bytes]; of an engine's log its
        figures beside their predictions.

    Raises
    ------
    memcalc.errors.InputError
        For what cannot be read.
    memcalc.errors.MissingError
        Where there is no failure to explain.
    """
    content, name = content_of(source)
    if not is_snapshot(content) and _of_engine(text := log_text(content, name)):
        from memcalc.probe.triage.engine import engine_log

        typed = {option: value for option, value in options.items() if value is not None}
        return engine_log(text, name, typed, tuple(preset_dirs))
    job = job_of(tuple(config), plan, options, dict(settings or {}), tuple(preset_dirs))
    if is_snapshot(content):
        return _of_snapshot(evidence_of(read_snapshot(content, name)), name, job)
    return _of_log(log_text(content, name), name, job)


def _of_engine(text: str) -> bool:
    """Whether a log is of an engine's start; a trainer that ran out beside an engine that runs is none."""
    return is_engine_log(text) and (engine_failed(text) or not read_log(text).events)


def _of_log(text: str, name: str, job: TriageJob | None) -> Triage:
    log = read_log(text)
    if not log.events:
        raise MissingError(
            f"no out-of-memory message in {name}. Pass the failed rank's log, with its traceback, or a snapshot of "
            "torch.cuda.memory._dump_snapshot."
        )
    first = _worst(log.events)
    context, figures = read_stack(first.stack), first.figures
    causes = causes_of(first)
    if log.expandable:
        causes = [_already(item) if item.code == "fragmentation" else item for item in causes]
    measured = {
        "allocated": None if figures.allocated is None else figures.allocated + (figures.tried or 0),
        "reserved": figures.reserved,
        "device": other_processes(figures)[1],
        "outside PyTorch": outside_of(figures),
        "capacity": figures.capacity,
    }
    unknown = ["which tensors use the memory (the message has totals only)"] if figures.backend != "host" else []
    if context.evidence is None:
        unknown.append("what ran: no traceback stands above the message")
    if figures.backend != "host" and figures.this_process is None and not figures.processes:
        unknown.append("what other processes held: this message does not list them")
    return _answer(
        kind="message", name=name, job=job, causes=causes, figures=figures, phase=context.phase, measured=measured,
        failures=tuple(_failure(incident) for incident in log.events), unknown=unknown, snapshot=None,
    )  # fmt: skip


def _worst(events: tuple[OomEvent, ...]) -> OomEvent:
    """The failure that is explained: the first with figures."""
    return next((incident for incident in events if incident.figures.tried is not None), events[0])


def _already(fragmentation: TriageCause) -> TriageCause:
    says = "expandable segments were on already, as the log shows"
    return fragmentation.model_copy(update={"confidence": "possible", "evidence": (*fragmentation.evidence, says)})


def _of_snapshot(snapshot: SnapshotEvidence, name: str, job: TriageJob | None) -> Triage:
    memory = snapshot.memory
    unknown = []
    without_stack = {"before the recording", "unknown"}
    unidentified = sum(share.bytes for share in snapshot.shares if share.category in without_stack)
    if unidentified > 0.05 * max(memory.allocated, 1):
        unknown.append(f"what {shown(unidentified)} are: they have no stack, or were made before the recording began")
    if not memory.entries:
        unknown.append("what was freed, and when: the snapshot has no trace (record with enabled='all')")
    elif not memory.steps:
        unknown.append("what grows from step to step: no steps were found in the trace")
    failed = snapshot.figures.tried is not None
    measured = {"allocated": memory.allocated, "reserved": memory.end_reserved}
    return _answer(
        kind="snapshot", name=name, job=job, causes=snapshot.causes, figures=snapshot.figures,
        phase=snapshot.context.phase, measured=measured, unknown=unknown, snapshot=snapshot,
        failures=(_snapshot_failure(snapshot),) if failed else (),
    )  # fmt: skip


def _answer(
    *,
    kind: Any,
    name: str,
    job: TriageJob | None,
    causes: list[TriageCause],
    figures: Figures,
    phase: str,
    measured: Mapping[str, int | None],
    failures: tuple[TriageFailure, ...],
    unknown: list[str],
    snapshot: SnapshotEvidence | None,
) -> Triage:
    lacking = None if figures.tried is None else max(figures.tried - (figures.free or 0), 1)
    if job is not None:
        beside = _of_evaluation(job, measured.get("allocated")) if phase == "evaluation" else ()
        causes = [*_of_job(job, figures, measured, snapshot), *beside, *causes]
        unknown += [*_mismatch(job, figures), *_larger_job(job, measured.get("allocated"), phase)]
    ordered = ranked(causes)
    is_sure = any(item.confidence != "possible" for item in ordered)
    nothing_failed = snapshot is not None and not failures and not unknown
    changes = changes_of(job, ordered, lacking) if job is not None and figures.backend != "host" else ()
    return Triage(
        version=__version__,
        kind=kind,
        source=name,
        answered=is_sure or nothing_failed,
        summary=_summary(ordered, failures, snapshot),
        failures=failures,
        memory=snapshot.memory if snapshot else None,
        shares=snapshot.shares if snapshot else (),
        sites=snapshot.sites if snapshot else (),
        growth=snapshot.growth if snapshot else (),
        comparison=comparison_of(job.estimate, snapshot.shares if snapshot else (), phase, measured) if job else (),
        estimate=verdict_of(job.estimate) if job else "",
        causes=ordered,
        changes=changes,
        unknown=tuple(unknown),
        record=_lines(ordered, is_sure or nothing_failed, kind, figures, job),
        command=job.estimate.command if job else "",
    )


def _lines(
    causes: tuple[TriageCause, ...], answered: bool, kind: str, figures: Figures, job: TriageJob | None
) -> tuple[str, ...]:
    """Lines that record more: where no cause is likely, or where a message cannot show what fills the GPU."""
    if figures.backend == "host":
        return () if answered else _RECORD_HOST
    vague = kind == "message" and job is None and bool(causes) and causes[0].code in _UNTOLD
    return () if answered and not vague else _RECORD


def _of_job(
    job: TriageJob, figures: Figures, measured: Mapping[str, int | None], snapshot: SnapshotEvidence | None
) -> Iterable[TriageCause]:
    """Causes that the estimate of the job suggests."""
    estimate, allocated = job.estimate, measured.get("allocated")
    failed = figures.tried is not None
    if failed and estimate.verdict == "does-not-fit":
        yield cause("too-large", "likely", verdict_of(estimate), size=estimate.peak.device)
    peak = estimate.peak.allocated
    if allocated is not None and allocated > _MORE * peak:
        more = allocated - peak
        evidence = f"{shown(allocated)} held or requested, {shown(peak)} is the estimate's peak: {shown(more)} more"
        yield cause("unexplained", "likely" if failed else "possible", evidence, size=more)
    if figures.tried is not None and snapshot is None:
        yield from _like_logits(job, figures.tried)


def _of_evaluation(job: TriageJob, allocated: int | None) -> Iterable[TriageCause]:
    """What more than one evaluation's forward is held, beside the logits of a batch that a loop with metrics keeps."""
    evaluation = next((occasion for occasion in job.estimate.occasions if occasion.name == "evaluation"), None)
    if evaluation is None or allocated is None or allocated <= _MORE * evaluation.allocated:
        return
    more = allocated - evaluation.allocated
    forward = (
        f"{shown(evaluation.allocated)} is the estimate of {evaluation.when} without gradients: {shown(more)} more"
    )
    outputs = evaluation.batch_outputs
    batches = f"; the logits of one batch of all ranks are {shown(outputs)}" if outputs else ""
    evidence = f"{shown(allocated)} held or requested, {forward}{batches}"
    yield cause("evaluation-outputs", "likely", evidence, size=more)


def _like_logits(job: TriageJob, tried: int) -> Iterable[TriageCause]:
    """Whether the request is as large as the job's logits, to the digits that the message prints."""
    from memcalc.api import load_model

    model, work = job.options.get("model"), job.estimate.workload
    try:
        vocab = load_model(model, job.preset_dirs).vocab if isinstance(model, str) else getattr(model, "vocab", 0)
    except MemcalcError:
        return
    tokens = work.seq_len * work.micro_batch
    digits = 0.006 * (1 << 30 if tried >= 1 << 30 else 1 << 20)
    for width, name in ((4, "fp32"), (2, "16-bit")):
        size = tokens * vocab * width
        if size >= 1 << 26 and abs(-(-size // (1 << 21)) * (1 << 21) - tried) <= digits:
            evidence = f"the request of {shown(tried)} equals {tokens:,} tokens × {vocab:,} vocabulary in {name}"
            yield cause("logits", "likely", evidence, size=tried)


def _mismatch(job: TriageJob, figures: Figures) -> list[str]:
    capacity, planned = figures.capacity, job.estimate.budget.capacity
    if capacity is None or abs(capacity - planned) <= 0.03 * planned:
        return []
    return [f"{DOUBT}: its GPU has {shown(planned)}, the one that failed {shown(capacity)}"]


def _larger_job(job: TriageJob, allocated: int | None, phase: str) -> Iterable[str]:
    """Say where the job as told would have run out earlier: what is alive by then in any step, the first one too."""
    moment, components = _BY_THEN.get(phase if job.estimate.strategy.pp == 1 else "", ("", ()))
    terms = [term for term in job.estimate.terms if term.component in components and moment in term.phases]
    alive = sum(term.bytes for term in terms)
    if allocated is not None and alive > _MORE * allocated:
        yield (
            f"{DOUBT}: its {' and '.join(components)} alone are {shown(alive)} by the {phase}, and {shown(allocated)} "
            "were held or requested; give what shards, recomputes or freezes, or the config files (--config)"
        )


def _summary(
    causes: tuple[TriageCause, ...], failures: tuple[TriageFailure, ...], snapshot: SnapshotEvidence | None
) -> str:
    ranks = len({failure.rank for failure in failures})
    several = f"{ranks} ranks failed; " if ranks > 1 else ""
    likely = [item for item in causes if item.confidence != "possible"]
    if likely:
        nothing = "nothing failed in this snapshot, but " if snapshot is not None and not failures else ""
        return f"{several}{nothing}{likely[0].confidence}: {likely[0].title}"
    if snapshot is not None and not failures:
        largest = snapshot.shares[0] if snapshot.shares else None
        most = f": most of {shown(snapshot.memory.allocated)} are {largest.category}" if largest else ""
        return f"nothing failed in this snapshot{most}"
    if causes:
        return f"{several}cannot tell; possible: {causes[0].title}"
    return f"{several}cannot tell from this message"


def _failure(incident: OomEvent) -> TriageFailure:
    figures, context = incident.figures, read_stack(incident.stack)
    others, this_process = other_processes(figures)
    frame = context.evidence
    return TriageFailure(
        form=figures.form, backend=figures.backend, rank=incident.rank, device=figures.device, line=incident.line,
        tried=figures.tried, capacity=figures.capacity, free=figures.free, allocated=figures.allocated,
        unallocated=figures.unallocated, reserved=figures.reserved, private_pools=figures.private_pools,
        limit=figures.limit, this_process=this_process, outside=outside_of(figures),
        others=tuple(GpuProcess(pid=pid, bytes=size) for pid, size in others),
        phase=context.phase, site=site_of(incident.stack) if incident.stack else "",
        evidence="" if frame is None else f"{frame.short}{': ' if frame.code else ''}{frame.code}",
    )  # fmt: skip


def _snapshot_failure(snapshot: SnapshotEvidence) -> TriageFailure:
    figures, evidence = snapshot.figures, snapshot.context.evidence
    return TriageFailure(
        form="snapshot", backend=figures.backend, rank="", device=figures.device, line=0, tried=figures.tried,
        capacity=None, free=figures.free, allocated=figures.allocated, unallocated=figures.unallocated,
        reserved=figures.reserved, private_pools=None, limit=None, this_process=None, outside=None, others=(),
        phase=snapshot.context.phase, evidence=evidence.short if evidence else "", site=snapshot.site,
    )  # fmt: skip
