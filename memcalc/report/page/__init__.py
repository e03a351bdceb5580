"""One answer as a page of HTML that stands alone: no network, no script but its own, all of it readable without one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc._version import __version__
from memcalc.report.page import head, markup, sections
from memcalc.report.page.markup import Html, el
from memcalc.report.page.plans import plans
from memcalc.report.page.sections import breakdown, step

if TYPE_CHECKING:
    from collections.abc import Iterable

    from memcalc.results.estimates import Estimate
    from memcalc.results.plans import Plans, Review, SavedPlan
    from memcalc.results.posttraining import Rl, RlPlans
    from memcalc.specs.model import Model


def page(
    answer: Estimate | Plans | SavedPlan | Rl | RlPlans,
    *,
    rank: int | str | None = None,
    title: str = "",
    note: str = "",
    model: Model | None = None,
    preset_dirs: Iterable[str] = (),
) -> str:
    """Return an estimate, plans, a saved plan or post-training as a page of HTML for a design document or a review.

    Of plans the one of `rank` is shown byte by byte, the first when left out. `title` and `note` head the page; blank
    lines part the note. `model` is the recorded one, where the plans are of one.
    """
    from memcalc.handoff.review import review_of, roles_of
    from memcalc.report.page.roles import role_page
    from memcalc.results.posttraining import Rl, RlPlans

    if isinstance(answer, Rl | RlPlans):
        return role_page(*roles_of(answer, rank), title=title, note=note)
    return page_of(review_of(answer, rank=rank, model=model, preset_dirs=preset_dirs), title=title, note=note)


def page_of(review: Review, *, title: str = "", note: str = "") -> str:
    """Return a review as a page."""
    text = title or head.title_of(review)
    sections = _sections(review)
    links = head.contents([(name, label) for name, label, _ in sections])
    main = el("main", head.answer(review), links, *(part for _, _, part in sections), id="main")
    skip = el("a", "Skip to the answer", href="#main", class_="skip")
    undrawn = "" if markup.draws() else el("p", markup.UNDRAWN)
    closing = el("footer", el("p", f"Made by memcalc {__version__}. Figures are predictions."), undrawn)
    status = el("p", id="status", role="status", class_="status")
    body = el(
        "body", skip, head.heading(review, text, note), main, closing, status, el("script", Html(markup.script()))
    )
    return f"<!doctype html>\n{el('html', markup.head(text), body, lang='en')}\n"


def said_of(review: Review) -> tuple[bool, str]:
    """Return whether it fits, and the verdict in one line."""
    fits = head.verdict_of(review) != "does-not-fit"
    if review.subject == "closest" and review.plans is not None:
        return fits, f"does not fit · {review.plans.too_large}"
    return fits, "" if review.estimate is None else head.spoken(review.estimate)


def _front(review: Review) -> Html:
    result = review.plans
    return markup.chart("plan", result) if result is not None and len(result.plans) > 1 else Html("")


def _sections(review: Review) -> list[tuple[str, str, Html]]:
    """Return the parts below the answer: id, name in the contents, element."""
    result, parts = review.estimate, []
    if review.chosen is not None:
        parts.append(("plans", "Plans", plans(review, _front(review))))
    if result is not None:
        parts.append(("bytes", "Bytes", breakdown(result)))
        parts.append(
            ("step", "One step", step(result, markup.chart("timeline", result) if result.timeline else Html("")))
        )
    parts.append(("assumed", "Assumptions", sections.settings(review)))
    if review.evidence is not None:
        parts.append(("accuracy", "Accuracy", sections.accuracy(review.evidence)))
    parts.append(("reproduce", "Reproduce", sections.reproduce(review)))
    parts.append(("copy", "Copy", sections.copies(review)))
    return parts
