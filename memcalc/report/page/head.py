"""The top of a page: what it is about, the verdict with its figures, the GPU as a bar, what would fit."""

from __future__ import annotations

from collections.abc import Iterator

from memcalc.report.estimate import MOODS, bar_of, ends_above, head_of
from memcalc.report.page.markup import Html, begun, cell, el, join, swatch, table
from memcalc.report.tables import gib, header, percent
from memcalc.results.estimates import Estimate
from memcalc.results.names import component_name, phase_name
from memcalc.results.plans import Plans, Review
from memcalc.units import format_count, format_seconds

_SAID = {"fits": "Fits", "tight": "Tight", "does-not-fit": "Does not fit"}
_SIGNS = {"fits": "✓", "tight": "!", "does-not-fit": "✕"}
_MEANS = {"fits": "Fits with the 95% margin.", "tight": "Fits as predicted, but not with the 95% margin."}
_READ = {
    "device": "nvidia-smi (this process)",
    "reserved": join("max_memory_", el("wbr"), "reserved()"),
    "allocated": join("max_memory_", el("wbr"), "allocated()"),
}


def title_of(review: Review) -> str:
    """Return the heading where none is given."""
    result = review.estimate or review.plans
    if result is None:  # a review holds one of them
        return "Memory"
    gpus = review.estimate.hardware.gpus if review.estimate else result.hardware.gpus
    return f"{result.model.name} on {gpus} × {result.hardware.gpu}"


def verdict_of(review: Review) -> str:
    """Return the verdict: a closest strategy may fit the GPU and still not run, for want of memory off it."""
    if review.subject == "closest" or review.estimate is None:
        return "does-not-fit"
    return review.estimate.verdict


def heading(review: Review, title: str, note: str) -> Html:
    """Return the heading, the job in one sentence and a note of the user's own."""
    return el(
        "header",
        el("h1", title),
        el("p", *_sentence(review), class_="job"),
        *(el("p", part, class_="note") for part in note.split("\n\n") if part.strip()),
    )


def spoken(estimate: Estimate) -> str:
    """Return the verdict in one line, as a terminal has it."""
    return next(line.text for line in head_of(estimate) if line.role == "verdict")


def _sentence(review: Review) -> Iterator[str]:
    result = review.estimate
    if result is None:
        plans = review.plans
        if plans is not None:
            parameters = format_count(plans.model.parameters)
            yield f"{plans.model.name} ({parameters} parameters), sequence length {plans.seq_len}."
        return
    job = next(line.text for line in head_of(result) if line.role == "title")
    yield f"{job}; {result.workload.tokens_per_step:,} tokens per step."


def answer(review: Review) -> Html:
    """Return the verdict, the figures, the bar, and what to know before anything else."""
    verdict, result, plans = verdict_of(review), review.estimate, review.plans
    failed = review.subject == "closest"
    parts: list[str] = [_said(review, verdict)]
    if plans is not None and failed:
        parts += [el("p", begun(plans.too_large), class_="lead"), *_nearest(plans)]
    if result is not None:
        closest = el("h3", "Closest strategy") if failed else ""
        parts += [closest, _figures(result), gpu_bar(result)]
    if review.chosen is not None:
        parts.append(el("p", el("strong", "Why this plan: "), review.chosen.why, class_="why-plan"))
    if plans is not None and plans.asked:
        parts.append(el("p", el("strong", "Why not? "), begun(plans.asked)))
    if review.warnings:
        rows = (el("li", begun(warning)) for warning in review.warnings)
        parts.append(el("div", el("h3", "Notes"), el("ul", *rows), class_="warnings"))
    return el("section", *parts, id="answer", class_=f"answer {MOODS[verdict]}", aria_labelledby="answer-title")


def verdict_title(verdict: str) -> tuple[Html, str]:
    """Return the verdict's sign and its name."""
    return el("span", _SIGNS[verdict], class_="mark", aria_hidden="true"), _SAID[verdict]


def _said(review: Review, verdict: str) -> Html:
    result = review.estimate
    head = el("h2", *verdict_title(verdict), id="answer-title")
    if result is None or review.subject == "closest":
        return head
    device, capacity = result.peak.device, result.budget.capacity
    used = el("strong", f"{gib(device)} of {gib(capacity)} GiB")
    index = "each GPU" if len(result.stages) < 2 else f"the fullest GPU, in pipeline stage {result.peak.stage}"
    above = ends_above(result)
    means = f"With the 95% margin {above}." if above else _MEANS.get(verdict) or _missing(result)
    text = f" on {index} ({percent(device, capacity)}%). {means}"
    return join(head, el("p", used, text, class_="lead"))


def _missing(estimate: Estimate) -> str:
    over = estimate.peak.device - estimate.budget.capacity
    return f"Over by {gib(over)} GiB." if over > 0 else "The allocator runs out of memory (simulated)."


def _figures(estimate: Estimate) -> Html:
    peak, interval = estimate.peak, estimate.interval
    tiles = [(component_name(name), gib(getattr(peak, name)), "GiB", read) for name, read in _READ.items()]
    live = "" if interval.coverage is None else f"of the total; holds {100 * interval.coverage:.0f}% of measured runs"
    tiles.append(("range", f"{gib(interval.low)} – {gib(interval.high)}", "GiB", live))
    time = estimate.time
    if time is not None:
        unmet = "if it fit; " if estimate.verdict == "does-not-fit" else ""
        rate, busy = f"{time.tokens_per_second_per_gpu:.0f}", f"{unmet}MFU {100 * time.mfu:.1f}%"
        tiles += [
            ("throughput", rate, "tokens/s per GPU", busy),
            (
                "step",
                format_seconds(time.step),
                "",
                f"between {format_seconds(time.low)} and {format_seconds(time.high)}; {time.basis}",
            ),
        ]
    return el("dl", *(_tile(*tile) for tile in tiles), class_=f"tiles of-{len(tiles)}")


def _tile(name: str, value: str, unit: str, note: str) -> Html:
    figure = el("dd", el("span", value, class_="value"), f" {unit}" if unit else "", class_="figure")
    return el("div", el("dt", name), figure, el("dd", note, class_="small"))


def gpu_bar(estimate: Estimate) -> Html:
    """Return the GPU as a stacked bar, its range below, its limit marked, and the parts named with their figures."""
    bar, interval = bar_of(estimate), estimate.interval
    used = sum(size for _, size in bar.parts)
    total = max(bar.capacity, used, interval.high)
    width = [(name, f"width:{100 * size / total:.3f}%") for name, size in bar.parts]
    pieces = [
        el("span", class_=f"c-{name}", style=style, title=_part(name, dict(bar.parts)[name])) for name, style in width
    ]
    limit = f"left:{100 * bar.capacity / total:.3f}%"
    span = f"left:{100 * interval.low / total:.3f}%;width:{100 * (interval.high - interval.low) / total:.3f}%"
    side = " flip" if bar.capacity > 0.6 * total else ""
    drawn = el(
        "div",
        el("div", *pieces, class_="stack", style=f"--end:{100 * bar.capacity / total:.3f}%"),
        el("div", el("span", f"GPU {gib(bar.capacity)}"), class_=f"limit{side}", style=limit),
        el("div", class_="range", style=span),
        class_="bar",
        aria_hidden="true",
    )
    keys = [el("li", swatch(name), component_name(name), " ", el("b", gib(size))) for name, size in bar.parts]
    free = bar.capacity - used
    if free >= 0:
        keys.append(el("li", el("span", class_="swatch free", aria_hidden="true"), "headroom ", el("b", gib(free))))
    else:  # which is no part of the bar, and has no colour in it
        keys.append(el("li", "over by ", el("b", gib(-free))))
    text = el("figcaption", f"One GPU at the peak ({phase_name(estimate.peak.phase)}), GiB. Bracket: 95% range.")
    return el("figure", text, drawn, el("ul", *keys, class_="legend"), class_="gpu")


def _part(name: str, size: int) -> str:
    return f"{component_name(name)} {gib(size)} GiB"


def _nearest(plans: Plans) -> Iterator[Html]:
    if not plans.nearest:
        return
    rows = [
        el(
            "tr",
            cell(item.change, head=True),
            cell(gib(item.device), right=True),
            cell(f"{item.tokens_per_second_per_gpu:.0f}", right=True),
            cell("unknown" if item.throughput is None else f"{100 * item.throughput:.0f}%", right=True),
        )
        for item in plans.nearest
        if item.verdict != "does-not-fit"
    ]
    columns = header("change | total [GiB] > | throughput [tokens/s per GPU] > | speed >")
    yield el("h3", "What would fit")
    yield table("Smallest changes. Speed: relative to your job.", columns, rows, name="nearest")


def contents(parts: list[tuple[str, str]]) -> Html:
    """Return links to the parts of the page."""
    links = (el("li", el("a", text, href=f"#{name}")) for name, text in parts)
    return el("nav", el("ul", *links), aria_label="Contents")
