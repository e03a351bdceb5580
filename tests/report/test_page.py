"""The page of HTML: all of it there without a script, nothing from outside, and what a reader does with it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from colours import contrast
from typer.testing import CliRunner

import memcalc
from memcalc import report
from memcalc.cli.app import app
from memcalc.errors import InputError, MissingError
from memcalc.evidence import errors_by_kind, evidence_for, kind_of
from memcalc.handoff.review import review_of
from memcalc.report.page import markup, page_of
from memcalc.report.palette import INK, MOODS, SERIES
from memcalc.results.names import component_name
from memcalc.runs import read_runs
from memcalc.specs.step_time import KindErrors
from memcalc.specs.strict import FIGURES
from memcalc.validation import Presets, predict

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memcalc.results.estimates import Estimate
    from memcalc.results.plans import Plans

JOB = {"model": "gpt2", "gpu": "rtx-4090", "gpus": 4, "global_batch": 512}
PINNED = {"precision": "bf16-mixed", "recompute": "none/full", "tp": 1, "cp": 1, "pp": 1}
WORDS = [part for name, value in JOB.items() for part in (f"--{name.replace('_', '-')}", str(value))]
HOSTILE = '</script><script>alert("x")</script><img src=x onerror=alert(1)>\'&'
VOID = {"meta", "wbr", "path", "use", "rect", "circle"}
FORMS = ("markdown", "latex", "csv")


@pytest.fixture(scope="module")
def plans() -> Plans:
    return memcalc.plan(**JOB, **PINNED, offload="none/optimizer", top=4)


@pytest.fixture(scope="module")
def found() -> Estimate:
    return memcalc.estimate(**JOB, zero=3, timeline=True)


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave Matplotlib out: it takes most of the time of a page, and nothing but the charts is its work."""
    monkeypatch.setattr(markup, "draws", lambda: False)


class Read(HTMLParser):
    """A page taken apart: elements with their attributes, text by id, and whether every element is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[tuple[str, str | None]] = []
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.texts: Counter[str] = Counter()
        self.by_id: dict[str, str] = {}
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Take in an element."""
        found = {name: value or "" for name, value in attrs}
        assert len(found) == len(attrs), f"<{tag}> has an attribute twice"
        self.elements.append((tag, found))
        if tag not in VOID:
            self.open.append((tag, found.get("id")))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Take in an element without content."""
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        """Check that the innermost element is closed."""
        if tag not in VOID:
            assert self.open, f"</{tag}> closes nothing"
            assert self.open[-1][0] == tag, f"</{tag}> closes <{self.open[-1][0]}>"
            self.open.pop()

    def handle_data(self, data: str) -> None:
        """Take in text, for each element with an id around it."""
        for _, name in self.open:
            if name:
                self.by_id[name] = self.by_id.get(name, "") + data
        if not self.open or self.open[-1][0] not in {"script", "style"}:
            self.texts[data] += 1

    @property
    def text(self) -> str:
        """All that can be read."""
        return " ".join(self.texts)

    def all(self, name: str) -> Iterator[str]:
        """Yield the values of an attribute."""
        yield from (attributes[name] for _, attributes in self.elements if name in attributes)


def sound(text: str) -> Read:
    """Check a page's form, and that nothing in it leads outside; return it taken apart."""
    page = Read(text)
    ids = list(page.all("id"))
    assert len(ids) == len(set(ids)), [name for name, count in Counter(ids).items() if count > 1]
    for attribute in ("aria-labelledby", "aria-describedby", "data-copies"):
        assert {name for value in page.all(attribute) for name in value.split()} <= set(ids)
    targets = [*page.all("href"), *page.all("xlink:href"), *page.all("src"), *page.all("action")]
    assert all(target.startswith("#") and target[1:] in ids for target in targets)
    styles = [*page.all("style"), *re.findall(r"<style>(.*?)</style>", text, re.DOTALL)]
    assert all(place.startswith("#") for one in styles for place in re.findall(r"url\(([^)]*)\)", one))
    assert not any("@import" in one for one in styles)
    assert not [name for _, attributes in page.elements for name in attributes if name.startswith("on")]
    tags = [tag for tag, _ in page.elements]
    assert [tags.count(tag) for tag in ("script", "h1", "main", "header", "footer")] == [1] * 5
    assert not {"link", "img", "iframe", "object", "embed", "base"} & set(tags)
    assert len(text.encode()) < 1 << 20
    return page


# -------------------------------------------------------------------------------------------------------------- content


@pytest.mark.usefixtures("undrawn")
def test_a_page_has_the_whole_answer(plans: Plans) -> None:
    review = review_of(plans)
    page = sound(page_of(review, title="The plan", note="First.\n\nSecond."))
    estimate = review.estimate
    assert estimate is not None
    assert {"The plan", "First.", "Second."} <= set(page.texts)
    for term in (*estimate.terms, *estimate.off_gpu):
        for said in (term.name, term.formula, term.source, f"{term.bytes:,}"):
            assert said in page.texts, said
        assert all(f"{name} = " in page.text for name in term.inputs)
    for plan in plans.plans:
        assert {plan.why[:1].upper() + plan.why[1:], plan.time.basis} <= set(page.texts)
        assert page.by_id[f"plan-{plan.rank}-command"] == plan.command
    assert all(warning[:1].upper() + warning[1:] in page.texts for warning in review.warnings)
    assert page.by_id["command-0"] == review.command
    assert page.by_id["command-1"] == plans.command


@pytest.mark.usefixtures("undrawn")
def test_who_chose_what_is_told_apart(plans: Plans) -> None:
    """Every default that was taken is on the page, apart from what was typed and from what was searched."""
    review = review_of(plans)
    groups = re.findall(r'<div class="(given|searched|default)">(.*?)</dl></div>', page_of(review), re.DOTALL)
    told = {kind: dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", body)) for kind, body in groups}
    assert told["given"]["model"] == "gpt2"
    assert told["given"]["recompute"] == "none/full"
    assert told["searched"].keys() >= {"zero", "recompute", "micro batch"}
    assert told["default"].keys() >= {"framework", "optimizer", "attention", "loss", "node"}
    taken = {name.replace("_", " ") for name, value in plans.assumptions.items() if not value.startswith("searched")}
    assert taken == set(told["default"])
    assert not set(told["default"]) & (set(told["given"]) | set(told["searched"]))


@pytest.mark.usefixtures("undrawn")
def test_what_is_copied_is_what_the_formats_print(plans: Plans) -> None:
    review = review_of(plans)
    page = sound(page_of(review))
    assert review.estimate is not None
    for form in FORMS:
        assert page.by_id[f"plan-{form}"] == report.render(report.of_plans(plans), form)
        assert page.by_id[f"estimate-{form}"] == report.render(report.of_estimate(review.estimate), form)


@pytest.mark.slow
def test_a_page_with_charts_is_sound(found: Estimate) -> None:
    text = page_of(review_of(found))
    page = sound(text)
    assert {"timeline-alt", "timeline-narrow-alt"} <= page.by_id.keys()
    assert "prefers-color-scheme: dark" in text


@pytest.mark.usefixtures("undrawn")
def test_without_something_to_draw_with_the_page_says_so(found: Estimate) -> None:
    page = sound(page_of(review_of(found)))
    assert markup.UNDRAWN in page.texts
    assert "svg" not in {tag for tag, _ in page.elements}
    assert "phases" in page.by_id


@pytest.mark.usefixtures("undrawn")
def test_names_cannot_become_markup(tmp_path: Path) -> None:
    """A model, a path, a title and a note may say anything."""
    source = (Path(memcalc.__file__).parents[1] / "presets" / "models" / "gpt2.toml").read_text(encoding="utf-8")
    named = re.sub(r"^name = .*$", f"name = {json.dumps(HOSTILE)}", source, count=1, flags=re.MULTILINE)
    path = tmp_path / "<script>alert(2)<&>.toml"
    path.write_text(named, encoding="utf-8")
    found = memcalc.plan(**{**JOB, "model": str(path)}, **PINNED, top=2)
    page = sound(memcalc.page(found, title=HOSTILE, note=f"{HOSTILE}\x00\x1b"))
    assert page.texts[HOSTILE] >= 2
    assert f"{HOSTILE}��" in page.texts
    assert page.by_id["plan-1-command"] == found.plans[0].command


def test_the_policy_lets_nothing_in_but_the_pages_own_script() -> None:
    digest = base64.b64encode(hashlib.sha256(markup.script().encode()).digest()).decode()
    rules = dict(rule.strip().split(" ", 1) for rule in markup.policy().split(";"))
    assert rules["default-src"] == "'none'"
    assert rules["script-src"] == f"'sha256-{digest}'"
    assert "</" not in markup.script()


@pytest.mark.parametrize("side", ["light", "dark"])
def test_words_can_be_read(side: str) -> None:
    """WCAG 2.2 AA: 4.5 to 1 for words on the page, and for those on the ground of tables and commands."""
    page, ground = (getattr(INK[name], side) for name in ("page", "free"))
    for ink in (INK["text"], INK["muted"]):
        assert min(contrast(getattr(ink, side), paper) for paper in (page, ground)) >= 4.5
    assert min(contrast(getattr(ink, side), page) for ink in (*MOODS.values(), SERIES[0])) >= 4.5


def test_colours_come_from_the_palette() -> None:
    """The style sheet names no colour but shadows; the palette puts them in."""
    source = (Path(markup.__file__).parent / "page.css").read_text(encoding="utf-8")
    assert not re.findall(r"#[0-9a-fA-F]{3,8}\b", source)
    assert set(re.findall(r"rgb\([^)]*\)", source)) <= {"rgb(0 0 0/.18)"}


# ----------------------------------------------------------------------------------------------------------- what fits


@pytest.mark.usefixtures("undrawn")
def test_a_page_is_the_same_each_time(plans: Plans) -> None:
    assert memcalc.page(plans) == memcalc.page(plans)


@pytest.mark.usefixtures("undrawn")
def test_where_nothing_fits_it_says_what_would() -> None:
    found = memcalc.plan(
        model="llama-2-13b", gpu="rtx-4090", gpus=1, recompute="none", offload="none", optimizer="adamw"
    )
    review = review_of(found)
    assert review.subject == "closest"
    assert review.estimate is not None
    assert f"{review.estimate.peak.device / 2**30:.1f} of " in found.too_large
    page = sound(page_of(review))
    assert {"Does not fit", "What would fit", "Closest strategy"} <= set(page.texts)
    assert all(one.change in page.texts for one in found.nearest if one.group != "not enough")
    assert found.nearest
    with pytest.raises(MissingError, match="Nothing fits"):
        review_of(found, rank=1)


def test_another_plan_can_be_shown(plans: Plans) -> None:
    review = review_of(plans, rank="2")
    assert review.chosen == plans.plans[1]
    assert review.command == f"{plans.command.replace('memcalc plan', 'memcalc report')} --rank 2"
    with pytest.raises(InputError, match=r"rank 9: .*from 1 to 4"):
        review_of(plans, rank=9)
    with pytest.raises(InputError, match="this is one strategy"):
        review_of(memcalc.estimate(**JOB), rank=1)


# ---------------------------------------------------------------------------------------------------------- the command


def run(*words: str) -> Any:
    return CliRunner().invoke(app, ["report", *words], prog_name="memcalc")


@pytest.mark.usefixtures("undrawn")
def test_the_command_writes_a_file_and_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first = run(*WORDS, "--zero", "3", "--recompute", "full", "--top", "2")
    assert first.exit_code == 0
    assert re.search(rf"^fits · .*\nWrote report\.html, \d+ KiB\. {re.escape(markup.UNDRAWN)}$", first.output.strip())
    assert run(*WORDS).exit_code == 2
    again = run(*WORDS, "--estimate", "--zero", "3", "--output", "report.html", "--force", "--title", "Mine")
    assert again.exit_code == 0
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert sound(text).by_id["command-0"] == f"memcalc report --estimate {' '.join(WORDS)} --zero 3"
    assert "<title>Mine</title>" in text
    half = run(*WORDS, "--estimate", "--output", "half.html", "--note", "half a pair: \udcff")
    assert (half.exit_code, "Wrote half.html" in half.output) == (0, True)
    tight = run("--model", "llama-2-7b", "--gpu", "rtx-4090", "--estimate", "--output", "not.html")
    assert tight.exit_code == 1
    assert "does not fit" in tight.output


@pytest.mark.usefixtures("undrawn")
def test_a_saved_plan_is_shown_with_its_fallback(tmp_path: Path, plans: Plans) -> None:
    saved = memcalc.save(plans, str(tmp_path / "plan.json"), 2)
    done = run(str(tmp_path / "plan.json"), "--output", str(tmp_path / "saved.html"))
    assert done.exit_code == 0, done.output
    page = sound((tmp_path / "saved.html").read_text(encoding="utf-8"))
    assert page.by_id["plan-2-command"] == saved.plan.command
    for one in saved.fallback:
        assert page.by_id[f"fallback-{one.rank}-command"] == one.command
    listed = tmp_path / "plans.json"
    listed.write_text(report.render(report.of_plans(plans), "json"), encoding="utf-8")
    assert run(str(listed), "--rank", "3", "--output", str(tmp_path / "third.html")).exit_code == 0
    third = sound((tmp_path / "third.html").read_text(encoding="utf-8"))
    assert {f"plan-{plan.rank}-command" for plan in plans.plans} <= third.by_id.keys()
    assert plans.plans[2].command in third.by_id["command-2"].replace("memcalc explain", "memcalc estimate")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["plan.json", "--zero", "3"], "plan.json tells the job"),
        (["plan.json", "--objective", "memory"], "plan.json tells the job"),
        ([*WORDS, "--estimate", "--top", "3"], "ranks plans"),
        (["--model", "gpt2"], "give --gpu"),
        (["absent.json"], "absent.json"),
        ([*WORDS, "--output", "absent/report.html"], "must exist"),
    ],
)
def test_wrong_words_are_refused(words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = run(*words)
    assert done.exit_code == 2
    assert said in done.output
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------------------------------- evidence


def kind(framework: str, *traits: str, **values: Any) -> KindErrors:
    counts = dict.fromkeys(("runs", "ran", "false_rejects", "ran_out", "false_fits"), 0) | {"runs": 1}
    return KindErrors(framework=framework, **dict.fromkeys(traits, True), **{**counts, "errors": {}, **values})


def test_shipped_errors_are_those_of_the_page_of_accuracy() -> None:
    """`python tests/accuracy.py` writes both; the slow test of the page compares the file itself."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "accuracy.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (allocated|reserved|total) +\| +(\d+) \|", page.split("## Aims")[0], re.MULTILINE)
    counts = {name: sum(len(entry.errors.get(name, ())) for entry in errors_by_kind()) for name in FIGURES}
    assert {name: int(count) for name, count in rows} == {component_name(n): count for n, count in counts.items()}
    out, false_fits = re.search(r"Of (\d+) runs that ran out of memory, (\d+) were predicted to fit", page).groups()  # type: ignore[union-attr]
    assert sum(entry.ran_out for entry in errors_by_kind()) == int(out)
    assert sum(entry.false_fits for entry in errors_by_kind()) == int(false_fits)


def test_errors_are_those_of_the_kind(found: Estimate) -> None:
    """The median of 1%, -2% and 4% is 2%, and its 90th percentile lies 0.8 of the way from 2% to 4%."""
    own = kind("fsdp2", errors={"reserved": (0.01, -0.02, 0.04)}, runs=3, ran=3, false_rejects=1)
    told = evidence_for(found, (kind("fsdp2", "adapters"), own, kind("hf")))
    assert not told.differs
    assert (told.runs, told.ran, told.false_rejects) == (3, 3, 1)
    (figure,) = told.figures
    assert (figure.figure, figure.count, figure.worst) == ("reserved", 3, 0.04)
    assert figure.median_abs_error == pytest.approx(0.02)
    assert figure.p90_abs_error == pytest.approx(0.036)


def test_the_nearest_kind_says_in_what_it_differs(found: Estimate) -> None:
    """The framework counts before the traits, and adapters before the rest."""
    others = (kind("torchtitan"), kind("fsdp2", "offload"), kind("fsdp2", "adapters"), kind("fsdp2", runs=0))
    assert evidence_for(found, others).differs == ("offloaded",)
    assert evidence_for(found, (kind("hf"), kind("torchtitan", "experts"))).differs == (
        "torchtitan",
        "mixture of experts",
    )
    assert evidence_for(found, (kind("hf"),)).nearest is None


@pytest.mark.usefixtures("undrawn")
def test_a_page_says_plainly_when_nothing_was_measured() -> None:
    alone = memcalc.estimate(model="gpt2", gpu="rtx-4090", framework="plain", gpus=1)
    assert "No measured runs of this kind or framework." in sound(memcalc.page(alone)).texts
    adapters = memcalc.estimate(model="gpt2", gpu="rtx-4090", framework="ddp", gpus=2, lora="16")
    near = sound(memcalc.page(adapters))
    assert "No measured runs of this kind." in near.texts
    same = sound(memcalc.page(memcalc.estimate(model="llama-2-7b", gpu="a100-80g", gpus=8, framework="torchtitan")))
    assert "No measured runs of this kind." not in same.texts
    assert "errors" in same.by_id


@pytest.mark.slow
def test_kinds_of_runs_are_those_of_their_estimates() -> None:
    """The script tells a run's kind by its own words, an answer by its estimate: one run of each set of words."""
    import accuracy

    presets, seen = Presets(), set()
    for one in read_runs().run:
        own = accuracy.kind_of_run(one, presets)
        if own not in seen and not one.id.startswith("none"):
            seen.add(own)
            assert kind_of(predict(one, presets)) == own, one.id
    assert len(seen) >= len(errors_by_kind())
