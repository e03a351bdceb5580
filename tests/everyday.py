"""Everyday jobs, planned, exported and read back: `python tests/everyday.py` writes their table into docs/export.md."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from command_lines import keywords  # noqa: E402

import memcalc  # noqa: E402
from memcalc import api  # noqa: E402
from memcalc.errors import MemcalcError  # noqa: E402
from memcalc.handoff import exported  # noqa: E402
from memcalc.handoff import saved as saving  # noqa: E402
from memcalc.handoff.saved import saved_plan  # noqa: E402
from memcalc.handoff.written import Exported  # noqa: E402
from memcalc.results.estimates import Estimate  # noqa: E402
from memcalc.results.plans import Plan, Plans  # noqa: E402

LIST = ROOT / "tests" / "handoff" / "everyday.toml"
PAGE = ROOT / "docs" / "export.md"
FIRST = 3
"""Plans of each job that are exported."""
BLOCK = re.compile(r"<!-- everyday -->\n.*?<!-- /everyday -->", re.DOTALL)
JOB_ALONE = {"files", "model", "gpu", "gpus", "node", "seq_len", "settings", "preset_dirs"}


@dataclass
class Outcome:
    """What became of the plans of one framework."""

    jobs: int = 0
    plans: int = 0
    same: int = 0
    """Written, and read back to the plan's own bytes."""
    noted: int = 0
    """Written, with a note of the bytes that the framework's own habits make of it."""
    lost: list[str] = field(default_factory=list)
    """Written, and read back to other bytes without a word."""
    refused: list[str] = field(default_factory=list)


def jobs() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the framework of each job, and the job's words."""
    for framework, lines in tomllib.loads(LIST.read_text(encoding="utf-8")).items():
        for line in lines:
            model, gpu, gpus, *options = line.split()
            stated = dict(option.split("=", 1) for option in options)
            yield framework, {"model": model, "gpu": gpu, "gpus": int(gpus), "framework": framework, **stated}


def read_back(done: Exported) -> Estimate:
    """Write the files, and check them by what the printed line says of the job."""
    with TemporaryDirectory() as folder:
        for path, text in done.files.items():
            (Path(folder) / path).write_text(text, encoding="utf-8")
        words = keywords(done.check)
        assert {name for name, value in words.items() if value} <= JOB_ALONE, done.check
        return memcalc.check(**{**words, "files": [str(Path(folder) / name) for name in words["files"]]}).estimate


def tried(outcome: Outcome, plans: Plans, plan: Plan) -> None:
    """Export a plan with no word on the format, read it back, and count what became of it."""
    name = f"{plan.job.model} on {plan.gpus} x {plan.job.gpu}, plan {plan.rank}"
    try:
        with mock.patch.object(saving, "fallbacks", return_value=()):  # no export needs them
            done = exported(saved_plan(plans, plan.rank))
    except MemcalcError as error:
        outcome.refused.append(f"{name}: {error}")
        return
    again = read_back(done)
    if (again.peak.device, again.strategy.recompute) == (plan.peak.device, plan.strategy.recompute):
        outcome.same += 1
    elif any(f"{again.peak.device / 2**30:.2f} GiB" in note for note in done.notes):
        outcome.noted += 1
    else:
        outcome.lost.append(name)


def once(estimate: Callable[..., Estimate]) -> Callable[..., Estimate]:
    """The same function, which answers equal words only once: saving, writing and checking a plan ask for it again.

    `advice` says whether the answer names settings that would save more, and moves no byte.
    """
    answers: dict[str, Estimate] = {}

    def answered(**words: Any) -> Estimate:
        question = repr(sorted((name, value) for name, value in words.items() if name != "advice"))
        if question not in answers:
            answers[question] = estimate(**words)
        return answers[question]

    return answered


def outcomes() -> dict[str, Outcome]:
    """What became of the first plans of each job, by framework."""
    table: dict[str, Outcome] = {}
    for framework, words in jobs():
        outcome = table.setdefault(framework, Outcome())
        outcome.jobs += 1
        plans = memcalc.plan(**words, top=FIRST, advice=False)
        with mock.patch.object(api, "estimate", once(api.estimate)):
            for plan in plans.plans:
                outcome.plans += 1
                tried(outcome, plans, plan)
    return table


def block(table: dict[str, Outcome]) -> str:
    """The table for the page."""
    lines = ["| framework | jobs | plans | the same bytes | with a note | refused | lost |"]
    lines.append("| --- | --: | --: | --: | --: | --: | --: |")
    total = Outcome()
    for name, row in table.items():
        lines.append(_row(f"`{name}`", row))
        total = Outcome(
            total.jobs + row.jobs, total.plans + row.plans, total.same + row.same, total.noted + row.noted,
            total.lost + row.lost, total.refused + row.refused,
        )  # fmt: skip
    lines.append(_row("all", total))
    return "\n".join(["<!-- everyday -->", *lines, "<!-- /everyday -->"])


def _row(name: str, row: Outcome) -> str:
    cells = row.jobs, row.plans, row.same, row.noted, len(row.refused), len(row.lost)
    return f"| {name} | {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    found = outcomes()
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(BLOCK.sub(lambda _: block(found), text), encoding="utf-8")
    for row in found.values():
        sys.stdout.writelines(f"{name}\n" for name in (*row.refused, *(f"LOST {name}" for name in row.lost)))
