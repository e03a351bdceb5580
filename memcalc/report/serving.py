"""An engine as a document: whether it starts, what a GPU holds, the pool, what can be set; and its start-up log."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from memcalc.report.estimate import MOODS, warned
from memcalc.report.plan_words import assumed
from memcalc.report.tables import Bar, Block, Code, Line, Report, Table, facts, gib, header, made, percent, said
from memcalc.results.serving import WAITING, EngineLimits, EngineLog, EngineStage, LoggedTerm, Served
from memcalc.units import format_count

_DATA = header("stage > | part | size [bytes] > | in the budget | formula | source")
_CACHE = "KV cache"
_NONE, _LIMIT = "none", 2
"""What stands for no limit, and in which column of the table of limits."""


def report(result: Served, remedies: Sequence[tuple[str, Served]] = ()) -> Report:
    """Return the answer of ``memcalc serve``, with options that would make an engine start and what they bring."""
    head, ways = tuple(_head(result)), tuple(_remedies(remedies))
    screen = (*head, *_bar(result), *_brief(result, ways))
    return made(result, _data(result), *head, *_body(result), *ways, *_foot(result), screen=screen)


def _remedies(remedies: Sequence[tuple[str, Served]]) -> Iterator[Block]:
    """Yield a table of what would start, and the first of it as a line to paste."""
    if not remedies:
        return
    rows = tuple((options, f"{way.tokens:,}", f"{way.concurrency:.1f}", way.verdict) for options, way in remedies)
    columns = header("what would start | tokens cached > | sequences at once > | verdict")
    yield Table("What would start", columns, rows, titled=False)
    yield Code("Next, the first of these", remedies[0][1].command)


def _brief(result: Served, ways: tuple[Block, ...]) -> Iterator[Block]:
    """Yield what a terminal shows below the bar: the pool in a line, what can be set, what was assumed."""
    if result.verdict == "does-not-fit":
        yield from (_needs(result, stage) for stage in result.stages)
    elif len(result.stages) > 1:
        yield said("Stages", *(f"{stage.stage}: {gib(stage.cache)} GiB of cache" for stage in result.stages))
    if ways:
        yield from ways
    elif result.limits is not None:
        limits = _limits(result, result.limits)
        rows = tuple(row for row in limits.rows if row[_LIMIT] != _NONE)
        if rows:
            yield limits._replace(rows=rows, titled=False)
        else:
            yield Line("No utilization, max-len or max-seqs makes it start: take more GPUs, or larger ones.", "warning")
    yield from warned(warning for warning in result.warnings if WAITING not in warning)  # the limit of max-seqs says so
    yield from assumed(result.assumptions)
    yield Line("-v: parts of a GPU and of the cache", "faint")


def _needs(result: Served, stage: EngineStage) -> Line:
    """Return what a GPU of an engine holds that does not start, in one paragraph."""
    inside = [f"{term.name} {gib(term.bytes)}" for term in stage.terms if term.within]
    outside = [f"outside the budget: {term.name} {gib(term.bytes)}" for term in stage.terms if not term.within]
    left = f"over by {gib(-stage.cache)} GiB" if stage.cache < 0 else f"left for the cache {gib(stage.cache)} GiB"
    label = "Per GPU" if len(result.stages) == 1 else f"Stage {stage.stage}"
    return said(label, *inside, left, *outside)


def _head(result: Served) -> Iterator[Line]:
    pool = f"{result.tokens:,} tokens cached, {result.concurrency:.1f} sequences of {result.max_len:,} tokens at once"
    text = pool if result.verdict != "does-not-fit" else result.reason
    yield Line(f"{result.verdict.replace('-', ' ')} · {text}", "verdict", MOODS[result.verdict])
    hardware = result.hardware
    layout = f"tp {result.tp}" + (f", pp {result.pp}" if result.pp > 1 else "")
    engines = f"{result.replicas} engines, each {layout}" if result.replicas > 1 else layout
    subject = f"{result.model.name} ({format_count(result.model.parameters)} parameters)"
    index = f"{hardware.gpus} × {hardware.gpu}: {result.engine}"
    items = (f"{subject} on {index}", f"utilization {result.utilization:g}", engines)
    yield Line(", ".join(items), "title", items=items)
    if result.verdict == "tight":
        yield Line(f"Tight: {result.reason}.", "warning")


def _body(result: Served) -> Iterator[Block]:
    yield from _bar(result)
    for stage in result.stages:
        yield _memory(result, stage)
    yield _cache(result)
    if result.limits is not None:
        yield _limits(result, result.limits)


def _bar(result: Served) -> Iterator[Bar]:
    """Yield a GPU of the stage with the least cache as a bar, where an engine starts."""
    pool = min(result.stages, key=lambda stage: stage.blocks)
    parts = [(term.name, term.bytes) for term in pool.terms]
    if result.verdict != "does-not-fit":
        yield Bar((*parts, (_CACHE, max(0, pool.cache))), result.capacity)


def _memory(result: Served, stage: EngineStage) -> Table:
    rows = [
        (term.name, gib(term.bytes), percent(term.bytes, result.capacity), "yes" if term.within else "no")
        for term in stage.terms
    ]
    share = percent(stage.cache, result.capacity) if stage.cache > 0 else ""
    rows.append((_CACHE, gib(stage.cache).replace("-", "−"), share, "yes"))
    title = "Per GPU" if len(result.stages) == 1 else f"Per GPU of stage {stage.stage}, {stage.layers} layers"
    return Table(title, header("part | size [GiB] > | of the GPU [%] > | in the budget"), tuple(rows))


def _cache(result: Served) -> Table:
    columns = header("layers of a group > | kind | window > | per token and layer [bytes] > | blocks per sequence >")
    pool = min(result.stages, key=lambda stage: stage.blocks)
    rows = tuple(
        (str(g.layers), g.kind, str(g.window or ""), str(g.token_bytes), str(g.request_blocks)) for g in pool.groups
    )
    return Table(f"Cache: {result.blocks:,} blocks of {result.block_tokens} tokens a layer", columns, rows)


def _limits(result: Served, limits: EngineLimits) -> Table:
    def row(name: str, now: str, value: float | None, says: str) -> tuple[str, ...]:
        return name, now, _NONE if value is None else f"{value:,}", says

    share = f"{result.utilization:g}"
    rows = (
        row("utilization", share, limits.largest_utilization, "largest that leaves enough for what is outside"),
        row("utilization", share, limits.smallest_utilization, "smallest that holds one sequence"),
        row("max-len", f"{result.max_len:,}", limits.largest_max_len, "longest with which the engine starts"),
        row("max-seqs", f"{result.max_seqs:,}", limits.largest_max_seqs, "most at once, all at max-len; more wait"),
    )
    return Table("What can be set", header("setting | now > | limit > | meaning"), rows)


def _foot(result: Served) -> Iterator[Block]:
    yield from warned(result.warnings)
    yield from facts("Assumed", result.assumptions)
    yield Code("Reproduce with", result.command)


def _data(result: Served) -> Table:
    rows = [
        (str(s.stage), term.name, str(term.bytes), str(term.within).lower(), term.formula, term.source)
        for s in result.stages
        for term in s.terms
    ]
    rows += [(str(s.stage), _CACHE, str(s.cache), "true", "budget - parts in it", "") for s in result.stages]
    return Table("Engine", _DATA, tuple(rows))


# ------------------------------------------------------------------------------------------------------- a start-up log


def log_report(result: EngineLog) -> Report:
    """Return the answer of ``memcalc triage`` about a start-up log."""
    return made(result, _log_table(result), *_log_head(result), _log_table(result), *_log_foot(result))


def _log_head(result: EngineLog) -> Iterator[Block]:
    served = result.served
    differs = f"{result.differs} differ from the prediction" if result.differs else "as predicted"
    agreed = differs if result.terms else "it has no figure to compare"
    yield Line(f"{result.failure or 'started'} · {agreed}", "verdict", "bad" if result.failure else "good")
    yield Line(
        f"{result.source}: {served.model.name} on {served.hardware.gpu}, {served.engine}, tp {served.tp}, utilization "
        f"{served.utilization:g}, {served.max_seqs} sequences of {served.max_len:,} tokens",
        "title",
    )
    yield from (Line(f"{text}.", label="Cause") for text in result.causes)
    yield from (Line(f"{text}.", label="Change") for text in result.changes)


def _log_table(result: EngineLog) -> Table:
    columns = header("figure | logged > | predicted > | logged less predicted > | as usual")
    return Table("A GPU of the first stage", columns, tuple(_log_row(term) for term in result.terms))


def _log_row(term: LoggedTerm) -> tuple[str, ...]:
    def shown(size: int) -> str:
        return f"{size:,}" if term.unit == "tokens" else f"{gib(size)} GiB"

    return (
        term.name,
        shown(term.logged),
        shown(term.predicted),
        shown(term.logged - term.predicted),
        ("yes" if term.agrees else "no"),
    )


def _log_foot(result: EngineLog) -> Iterator[Block]:
    yield from (Line(f"The log does not say {text}.", "warning") for text in result.unknown)
