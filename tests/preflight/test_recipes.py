"""Public jobs, each from its own config files: what `memcalc check` says beside what is known of their memory.

Run as a script, this file writes the table of docs/preflight.md anew.
"""

from __future__ import annotations

import functools
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from memcalc import check
from memcalc.results.check import Check
from memcalc.specs.runs import Run
from memcalc.units import GIB, parse_bytes
from memcalc.validation import predict

pytestmark = pytest.mark.usefixtures("answers_once")

ROOT = Path(__file__).resolve().parents[2]
HOME = ROOT / "docs" / "examples" / "preflight"
PAGE = ROOT / "docs" / "preflight.md"
RECIPES: list[dict[str, Any]] = tomllib.loads((HOME / "recipes.toml").read_text(encoding="utf-8"))["recipe"]
NAMES = [recipe["name"] for recipe in RECIPES]
TABLE = re.compile(
    r"(<!-- recipes: written by tests/preflight/test_recipes.py -->\n).*?(<!-- end of recipes -->)", re.DOTALL
)
KINDS = {"allocated": "allocated", "reserved": "reserved", "device": "device", "unknown": "device"}
"""What was measured, and our figure that it is compared with."""
FAR = 0.2
"""A difference of more than this needs a remark."""
HEAD = (
    "| job | framework | GPUs | memcalc, GiB | known, GiB | difference | verdict | it | source |\n"
    "| --- | --- | --- | --- | --- | --- | --- | --- | --- |\n"
)


def of(name: str) -> dict[str, Any]:
    """One entry of the index."""
    return next(recipe for recipe in RECIPES if recipe["name"] == name)


def folder(recipe: dict[str, Any]) -> Path:
    return HOME / str(recipe.get("folder", recipe["name"]))


@functools.cache
def checked(name: str) -> Check:
    """What the program says of a job."""
    recipe = of(name)
    words = dict(recipe["words"])
    if str(words.get("model", "")).endswith(".toml"):
        words["model"] = str(folder(recipe) / words["model"])
    files = [str(folder(recipe) / file) for file in recipe["files"]]
    return check(files, settings=recipe.get("settings"), **words)


def figure(recipe: dict[str, Any]) -> float:
    """Our figure of the kind that was measured [GiB]."""
    peak = checked(recipe["name"]).estimate.peak
    return float(getattr(peak, KINDS[recipe.get("kind", "device")])) / GIB


def known(recipe: dict[str, Any]) -> float | None:
    """The published figure [GiB]."""
    return parse_bytes(recipe["known"], "known") / GIB if "known" in recipe else None


def difference(recipe: dict[str, Any]) -> float | None:
    """Ours over the published one, less one."""
    measured = known(recipe)
    return None if measured is None else figure(recipe) / measured - 1


def agrees(recipe: dict[str, Any]) -> bool:
    """Whether a job that ran is said to fit, if tightly, and one that did not, not to."""
    return (checked(recipe["name"]).verdict != "does-not-fit") == bool(recipe["outcome"] == "ran")


def row(recipe: dict[str, Any]) -> str:
    """A job's line of the table."""
    result, measured, apart = checked(recipe["name"]), known(recipe), difference(recipe)
    kind = recipe.get("kind", "device")
    link = f"[{recipe['title']}](examples/preflight/{folder(recipe).name}/{recipe['files'][0]})"
    cells = (
        link,
        recipe["framework"],
        str(result.estimate.hardware.gpus),
        f"{figure(recipe):.1f} {KINDS[kind]}",
        "" if measured is None else f"{measured:.1f} {'(tool not said)' if kind == 'unknown' else kind}",
        "" if apart is None else f"{round(apart * 100) or 0:+d}%".replace("-", "−").replace("+0", "0"),
        result.verdict.replace("-", " "),
        recipe["outcome"] if recipe["outcome"] == "ran" else "ran out of memory",
        f"[{recipe['date']}]({recipe['source']})",
    )
    return "| " + " | ".join(cells) + " |"


def remarks() -> str:
    """What is known of the large differences and of the wrong verdicts."""
    found = [(one["title"], one.get("apart") or one.get("remark")) for one in RECIPES]
    return "".join(f"- {title}: {text}.\n" for title, text in found if text)


def filled(page: str) -> str:
    """The page with its table made anew."""
    rows = "\n".join(row(recipe) for recipe in RECIPES)
    return TABLE.sub(lambda match: f"{match[1]}\n{HEAD}{rows}\n\n{remarks()}\n{match[2]}", page)


def test_there_are_enough() -> None:
    assert len(RECIPES) >= 10
    assert len(set(NAMES)) == len(NAMES)
    assert len({recipe["framework"] for recipe in RECIPES}) >= 6


@pytest.mark.parametrize("name", NAMES)
def test_each_says_where_it_is_from(name: str) -> None:
    recipe = of(name)
    assert recipe["source"].startswith("https://")
    assert re.fullmatch(r"20\d\d-\d\d", recipe["date"])
    assert recipe["why"]
    assert recipe["outcome"] in {"ran", "out of memory"}
    assert recipe["outcome"] == "out of memory" or recipe["kind"] in KINDS
    heads = [(folder(recipe) / file).read_text(encoding="utf-8")[:400] for file in recipe["files"]]
    assert all("In the shape of" in head for head in heads), "each file names its origin"


@pytest.mark.parametrize("name", NAMES)
def test_verdicts_are_outcomes(name: str) -> None:
    recipe = of(name)
    assert agrees(recipe) == ("apart" not in recipe), f"{checked(name).verdict} and {recipe['outcome']}"


@pytest.mark.parametrize("name", [name for name in NAMES if "known" in of(name)])
def test_large_differences_are_remarked(name: str) -> None:
    recipe = of(name)
    apart = difference(recipe)
    assert apart is not None
    assert (abs(apart) > FAR) == ("remark" in recipe), f"{apart:+.1%}"


@pytest.mark.parametrize("name", [name for name in NAMES if "run" in of(name)])
def test_a_row_of_the_measured_runs_is_the_same_job(name: str) -> None:
    """What is measured, and the job's own numbers, as they stand in presets/runs."""
    recipe, run, estimate = of(name), published(of(name)["run"]), checked(name).estimate
    measured = run.measured.model_dump(exclude_none=True)
    figures = [value for value in measured.values() if isinstance(value, int)]
    assert any(abs(value / GIB - (known(recipe) or 0)) < 1e-3 for value in figures)
    assert estimate.hardware.gpus == run.gpus
    assert estimate.workload.seq_len == run.workload["seq_len"]
    assert estimate.workload.micro_batch == run.workload["micro_batch"]
    same = estimate.peak.allocated == predict(run).peak.allocated
    assert same == ("unlike_run" not in recipe), "the files come to the words of the row, byte by byte"


def published(name: str) -> Run:
    """A row of presets/runs."""
    for path in sorted((ROOT / "presets" / "runs").glob("*.toml")):
        for one in tomllib.loads(path.read_text(encoding="utf-8")).get("run", ()):
            if one["id"] == name:
                return Run.model_validate(one)
    raise AssertionError(name)


def test_the_table_is_current() -> None:
    """`python tests/preflight/test_recipes.py` writes it."""
    page = PAGE.read_text(encoding="utf-8")
    assert TABLE.search(page)
    assert filled(page) == page


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
