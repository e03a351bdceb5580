"""Published layouts beside what `plan` says first for the same job: the table of docs/planning.md.

Run as a script, this file writes the table anew.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import memcalc
from memcalc.results.plans import Plan

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "docs" / "planning.md"
BLOCK = re.compile(r"(<!-- experts -->\n).*?(<!-- end -->)", re.DOTALL)
NEAR = 0.05
"""Part of the fastest plan's throughput within which a layout counts as as good."""


@dataclass(frozen=True)
class Compared:
    """A published layout and the fastest plan, by the model."""

    name: str
    source: str
    layout: dict[str, Any]
    first: Plan
    expert: Plan | None
    """The fastest plan with the layout; None where nothing with it fits."""
    why: str
    """What `--why` says of it."""
    published: float | None
    """What its source says that it reached [tokens/s a GPU]."""

    @property
    def off(self) -> float | None:
        """What is said of its speed over what was published, less one."""
        if self.published is None or self.expert is None:
            return None
        return self.expert.time.tokens_per_second_per_gpu / self.published - 1

    @property
    def behind(self) -> float:
        """The part of the fastest plan's throughput that the layout lacks; all of it where it does not fit."""
        if self.expert is None:
            return 1.0
        return 1 - self.expert.time.tokens_per_second_per_gpu / self.first.time.tokens_per_second_per_gpu


def experts() -> list[dict[str, Any]]:
    """The published layouts."""
    listed: list[dict[str, Any]] = tomllib.loads((HERE / "planner" / "expert_layouts.toml").read_text())["expert"]
    return listed


def compared(expert: dict[str, Any]) -> Compared:
    """One layout beside the fastest plan."""
    job, layout = expert["job"], expert["layout"]
    question = ",".join(f"{name}={_word(value)}" for name, value in layout.items())
    software, stages = expert.get("software", {}), expert.get("settings", {})
    answer = memcalc.plan(**job, settings=software, objective="throughput", top=1, why="" if stages else question)
    fields = {**software, **stages}
    pinned = memcalc.plan(**job, **layout, settings=fields, objective="throughput", top=1, advice=False)
    fastest = pinned.plans[0] if pinned.plans else None
    why = memcalc.plan(**job, settings=fields, objective="throughput", top=1, why=question) if stages else answer
    first, speed = answer.plans[0], expert.get("speed")
    return Compared(expert["name"], expert["source"], layout, first, fastest, why.asked, speed)


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def table(rows: list[Compared]) -> str:
    """The table in Markdown."""
    head = "| layout | published | reached | said of it | off | fastest | behind | why |\n"
    head += "|---|---|--:|--:|--:|--:|--:|---|\n"
    return head + "".join(map(_row, rows))


def _row(row: Compared) -> str:
    layout = " ".join(f"{name.replace('_', '-')} {_word(value)}" for name, value in row.layout.items())
    speed = f"{row.expert.time.tokens_per_second_per_gpu:.0f}" if row.expert else "does not fit"
    behind = f"{row.behind:.1%}" if row.expert else ""
    why = "" if row.behind <= NEAR else row.why.partition(" fits and ")[2] or row.why
    first = f"{row.first.time.tokens_per_second_per_gpu:.0f}"
    reached = "" if row.published is None else f"{row.published:.0f}"
    off = "" if row.off is None else f"{row.off:+.1%}"
    return f"| {row.name}: {layout} | {row.source} | {reached} | {speed} | {off} | {first} | {behind} | {why} |\n"


def main() -> None:
    """Write the table into the page."""
    text = BLOCK.sub(lambda match: match[1] + "\n" + table([compared(e) for e in experts()]) + "\n" + match[2], _page())
    PAGE.write_text(text, encoding="utf-8")


def _page() -> str:
    return PAGE.read_text(encoding="utf-8")


if __name__ == "__main__":
    main()
