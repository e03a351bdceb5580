"""Charts: what is drawn is what the result says, in every format, for light and dark, wide and narrow."""

from __future__ import annotations

import re
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import matplotlib as mpl
import pytest
from charts_of_docs import PICTURES, words_of
from colours import contrast, luminance
from matplotlib.figure import Figure
from typer.testing import CliRunner

import memcalc
from memcalc import api
from memcalc.cli.app import app
from memcalc.ledger import COMPONENTS as NAMES
from memcalc.ledger import PHASES
from memcalc.planner.timelines import Recorder
from memcalc.report import charts as pictures
from memcalc.report.charts import Chart, estimate, inverse, plan
from memcalc.report.palette import COMPONENTS, INK, MOODS, SERIES
from memcalc.results.plans import Miss
from memcalc.terms.activations import groups_of
from memcalc.terms.head import head_templates
from memcalc.terms.model_on_grid import ModelOnGrid
from memcalc.units import GIB

SMALL: dict[str, Any] = {"model": "gpt2", "gpu": "rtx-4090", "gpus": 1, "framework": "plain", "seq_len": 512}
PIPELINE: dict[str, Any] = {
    "model": "gpt2", "gpu": "a100-40g", "gpus": 4, "framework": "megatron", "pp": 4, "micro_batch": 1,
    "global_batch": 8, "seq_len": 512,
}  # fmt: skip
ROOT = Path(__file__).resolve().parents[2]
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def fits() -> Any:
    return memcalc.estimate(timeline=True, **SMALL)


@pytest.fixture(scope="module")
def staged() -> Any:
    return memcalc.estimate(timeline=True, **PIPELINE)


@pytest.fixture(scope="module")
def too_large() -> Any:
    return memcalc.estimate(timeline=True, **{**SMALL, "micro_batch": 64, "seq_len": 1024})


@pytest.fixture(scope="module")
def plans() -> Any:
    return memcalc.plan(model="gpt2", gpu="rtx-4090", gpus=2, seq_len=512, global_batch=64, top=10)


@pytest.fixture(scope="module")
def widest() -> Any:
    pinned = {"recompute": "none", "precision": "bf16", "zero": 0, "offload": "none"}
    return memcalc.largest("micro-batch", curve=True, **SMALL, **pinned)


@pytest.fixture(scope="module")
def charts(fits: Any, plans: Any, widest: Any) -> list[Chart]:
    return [estimate.chart(fits), estimate.timeline_chart(fits), plan.chart(plans), inverse.chart(widest)]


@pytest.fixture(scope="module")
def others(staged: Any, too_large: Any) -> list[Chart]:
    fewest = memcalc.smallest("gpus", model="gpt2", gpu="rtx-4090", up_to=1)
    nothing = memcalc.plan(
        model="llama-2-7b", gpu="rtx-4090", gpus=1, offload="none", framework="fsdp2", precision="bf16-mixed", zero=3
    )
    several = memcalc.plan(model="llama-2-7b", gpu="a100-80g", global_batch=64, top=20)
    return [
        estimate.chart(too_large), estimate.timeline_chart(too_large), estimate.timeline_chart(staged),
        inverse.chart(fewest), plan.chart(nothing), plan.chart(several),
    ]  # fmt: skip


EACH = pytest.mark.parametrize("some", ["charts", pytest.param("others", marks=pytest.mark.slow)])


DRAWN: dict[tuple[str, bool], Figure] = {}


def drawn(chart: Chart, *, narrow: bool = False) -> Figure:
    """Draw a chart once, told from others by its words."""
    known = chart.alt, narrow
    if known not in DRAWN:
        DRAWN[known] = _drawn(chart, narrow=narrow)
    return DRAWN[known]


def _drawn(chart: Chart, *, narrow: bool) -> Figure:
    with mpl.rc_context(pictures._LOOK):
        figure = Figure(figsize=chart.narrow if narrow else chart.size)
        chart.draw(figure)
        figure.draw_without_rendering()
    return figure


INLINE: dict[str, str] = {}


def inline(chart: Chart) -> str:
    """Return a chart's SVG, drawn once."""
    if chart.alt not in INLINE:
        INLINE[chart.alt] = pictures.inline(chart)
    return INLINE[chart.alt]


def parts(figure: Figure) -> dict[str, Any]:
    return {str(part.get_gid()): part for part in figure.findobj(lambda part: bool(part.get_gid()))}


# ------------------------------------------------------------------------------------------------ the numbers drawn


@pytest.mark.parametrize("job", ["fits", "too_large"])
def test_the_bar_of_a_gpu_has_the_components_of_the_estimate(job: str, request: pytest.FixtureRequest) -> None:
    result = request.getfixturevalue(job)
    found = parts(drawn(estimate.chart(result)))
    sizes = {**result.components.model_dump(), "context": result.peak.device - result.peak.reserved}
    for name, size in sizes.items():
        assert found[f"part-{name}"].get_width() * GIB == pytest.approx(size, abs=1), name
    end = found["part-context"]
    assert (end.get_x() + end.get_width()) * GIB == pytest.approx(result.peak.device, abs=4)
    low, high = found["range"].get_xdata()
    assert [low * GIB, high * GIB] == pytest.approx([result.interval.low, result.interval.high])


def test_phases_are_drawn_by_component_and_add_up(staged: Any) -> None:
    """Each stage's phases: the sums are the published figures of the peak's stage, and each stage's own peak."""
    assert {p: sum(s.values()) for p, s in staged.stages[staged.peak.stage].phases.items()} == staged.phases
    found = parts(drawn(estimate.timeline_chart(staged)))
    for stage in staged.stages:
        assert list(stage.phases) == list(PHASES)
        assert (
            stage.allocated
            == sum(stage.phases[stage.phase].values())
            == max(map(sum, (s.values() for s in stage.phases.values())))
        )
        for phase, sizes in stage.phases.items():
            assert list(sizes) == [name for name in NAMES if name != "reserve"]
            for name, size in sizes.items():
                assert found[f"stage-{stage.stage}-{phase}-{name}"].get_height() * GIB == pytest.approx(size, abs=1)


def test_micro_batches_in_flight_are_those_of_1f1b(staged: Any) -> None:
    """Stage i of p holds p - i micro-batches (Narayanan et al., 2021)."""
    assert [stage.in_flight for stage in staged.stages] == [4, 3, 2, 1]


@pytest.mark.parametrize("job", ["fits", pytest.param("staged", marks=pytest.mark.slow)])
def test_the_replays_curve_reaches_what_the_estimate_says(job: str, request: pytest.FixtureRequest) -> None:
    """Reserved is the very figure of the estimate, before the share that no mechanism predicts; allocated within 3%."""
    result = request.getfixturevalue(job)
    for line in result.timeline:
        stage = result.stages[line.stage]
        share = stage.reserved / line.peak_reserved
        assert 1 <= share < 1.06
        assert share == pytest.approx(result.stages[0].reserved / result.timeline[0].peak_reserved, rel=1e-6)
        assert max(line.reserved) <= line.peak_reserved
        assert max(line.allocated) == line.peak_allocated == pytest.approx(stage.allocated, rel=0.03)


@pytest.mark.parametrize(
    "job", ["fits", *(pytest.param(job, marks=pytest.mark.slow) for job in ("staged", "too_large"))]
)
def test_a_curve_is_what_the_allocator_holds(job: str, request: pytest.FixtureRequest) -> None:
    """Components never exceed what is allocated, which never exceeds what is reserved; parts are in order."""
    result = request.getfixturevalue(job)
    for line in result.timeline:
        held = [sum(sizes) for sizes in zip(*line.components.values(), strict=True)]
        assert all(0 <= h <= a <= r for h, a, r in zip(held, line.allocated, line.reserved, strict=True))
        assert all(here < there for here, there in pairwise(line.position))
        assert line.position[-1] == line.events - 1
        assert [part.position for part in line.parts] == sorted(part.position for part in line.parts)
        forwards = [part.micro_batch for part in line.parts if part.phase == "forward-last"]
        assert forwards == list(range(line.micro_batches))
        assert line.parts[-1].phase == "step"
        curve = parts(drawn(estimate.timeline_chart(result)))[f"curve-{line.stage}-allocated"]
        assert [size * GIB for size in curve.get_ydata()] == pytest.approx(line.allocated)


@pytest.mark.parametrize("model", ["gpt2", "llama-3-8b", "mixtral-8x7b", "deepseek-v3"])
def test_gradients_of_weights_are_told_from_those_that_flow(model: str) -> None:
    """The curve goes by names, the events by the kind of a record: both agree on all tensors of a block and head."""
    single = api.single(model=model, gpu="h100", framework="megatron", gpus=64, pp=1)
    census = ModelOnGrid(single.job.model, single.grid)
    templates = [a.template(census.grid.policies[0], a.settings[0]) for a in groups_of(census)]
    recorder = Recorder({})
    for template in (*templates, *head_templates(census)):
        for record in template.records:
            wanted = "gradients" if record.kind == "gradient" else "activations"
            assert recorder.component(record.name) == wanted, record.name


def test_parameters_stay_and_activations_ramp(fits: Any) -> None:
    """Over a step: weights constant, activations up to the loss and down again, gradients up in backward."""
    (line,) = fits.timeline
    assert len(set(line.components["parameters"])) == 1
    by_part = {part.phase: line.position.index(part.position) for part in reversed(line.parts)}
    activations, gradients = line.components["activations"], line.components["gradients"]
    assert activations[by_part["forward-last"]] < 0.1 * activations[by_part["loss"]]
    assert activations[by_part["step"]] < 0.1 * activations[by_part["loss"]]
    assert gradients[by_part["loss"]] < gradients[by_part["backward-end"]]


def test_what_does_not_fit_is_drawn_without_a_limit_and_says_so(too_large: Any) -> None:
    assert too_large.verdict == "does-not-fit"
    (line,) = too_large.timeline
    assert not line.limited
    assert line.peak_reserved > too_large.budget.usable
    assert "does not fit" in estimate.timeline_chart(too_large).alt
    said = [text.get_text() for text in drawn(estimate.chart(too_large)).findobj(mpl.text.Text)]
    missing = (too_large.peak.device - too_large.budget.capacity) / GIB
    assert f"over by {missing:.2f} GiB" in said


def test_where_no_allocator_is_replayed_the_phases_are_drawn_alone() -> None:
    words = {**SMALL, "framework": "deepspeed@2021-01", "precision": "fp16-mixed", "zero": 2, "gpus": 2}
    result = memcalc.estimate(timeline=True, **words)
    assert [line.events for line in result.timeline] == [0]
    figure = drawn(estimate.timeline_chart(result))
    assert any("no curve" in text.get_text() for text in figure.axes[1].texts)
    assert "stage-0-loss-activations" in parts(figure)


def test_plans_are_drawn_where_their_figures_are(plans: Any) -> None:
    found = parts(drawn(plan.chart(plans)))
    for one in plans.plans:
        (x,), (y,) = found[f"plan-{one.rank}"].get_data()
        assert x == pytest.approx(one.time.tokens_per_second_per_gpu)
        assert y * GIB == pytest.approx(one.peak.device)
        assert [*found[f"plan-range-{one.rank}"].get_xdata()] == pytest.approx(
            [plans.seq_len * one.global_batch / end / one.gpus for end in (one.time.high, one.time.low)]
        )


def test_what_was_searched_is_drawn_as_a_cloud_with_its_frontier(plans: Any) -> None:
    """Both axes begin at zero and hold all of it; nothing in the cloud is both smaller and faster than the frontier."""
    axes = drawn(plan.chart(plans)).axes[0]
    found = parts(drawn(plan.chart(plans)))
    assert len(plans.cloud) > 10 * len(plans.plans)
    points = [(item.tokens_per_second_per_gpu, item.device / GIB) for item in plans.cloud]
    assert sorted(zip(*found["plan-cloud-2"].get_data(), strict=True)) == sorted(points)
    corners = {*zip(*found["plan-front-2"].get_data(), strict=True)}
    front = [(item.tokens_per_second_per_gpu, item.device / GIB) for item in plans.cloud if item.frontier]
    assert set(front) <= corners
    assert not [(x, y) for x, y in points for speed, size in front if x > speed and y < size]
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    assert (left, low) == (0, 0)
    assert all(x < right and y < high for x, y in points)
    assert "cloud" not in plans.model_dump(mode="json")


def test_what_is_said_to_fit_is_not_drawn_above_the_gpu() -> None:
    """Two of these strategies come to more than the GPU has by the sums that a search begins with."""
    words = {"framework": "megatron", "tp": "1/2", "pp": 1, "cp": 1, "offload": "none", "recompute": "none"}
    plans = memcalc.plan(model="llama-3.1-8b", gpu="h100", gpus=8, **words, advice=False)
    assert len(plans.cloud) > 5
    assert all(item.device <= plans.capacity for item in plans.cloud)


def test_a_limit_that_is_tight_is_no_bar_of_what_does_not_fit() -> None:
    """Each bar has the look of its verdict, which the legend names, and its number says what it counts."""
    fewest = memcalc.smallest("gpus", model="gpt2", gpu="rtx-4090", up_to=1)
    miss = Miss(value=7, verdict="tight", device=20 * GIB, missing=GIB, parameters=0)
    misses = (miss, miss.model_copy(update={"value": 3, "verdict": "does-not-fit"}))
    figure = drawn(inverse.chart(fewest.model_copy(update={"beyond": misses})))
    bars = [parts(figure)[f"value-{index}"] for index in range(3)]
    assert [bool(bar.get_hatch()) for bar in bars] == [False, False, True]
    assert bars[0].get_facecolor() != bars[1].get_facecolor()
    assert {"fits", "tight", "does not fit"} <= {text.get_text() for text in figure.legends[0].get_texts()}
    labels = [label.get_text().partition(":")[0] for label in figure.axes[0].get_yticklabels()]
    assert labels == ["1 GPU", "7 GPUs", "3 GPUs"]


def test_each_point_of_a_curve_is_what_estimate_says(widest: Any) -> None:
    best, values = widest.best, [point.value for point in widest.curve]
    assert best.value in values
    assert widest.beyond[0].value in values
    for point in widest.curve[:: len(values) // 3]:
        words = {name: getattr(best.strategy, name) for name in ("precision", "recompute")}
        alone = memcalc.estimate(**SMALL, **words, micro_batch=point.value, global_batch=point.global_batch)
        assert (point.device, point.components, point.verdict) == (alone.peak.device, alone.components, alone.verdict)
    found = parts(drawn(inverse.chart(widest)))
    assert [*found["device"].get_xdata()] == values
    assert [y * GIB for y in found["device"].get_ydata()] == pytest.approx([point.device for point in widest.curve])
    assert found["answer"].get_xdata()[0] == best.value


def test_no_curve_and_no_timeline_unless_asked_for() -> None:
    assert memcalc.estimate(**SMALL).timeline == ()
    asked = {**SMALL, "recompute": "none", "precision": "bf16", "zero": 0, "offload": "none"}
    assert memcalc.largest("micro-batch", **asked).curve == ()


# ------------------------------------------------------------------------------------------------------- the looks


@EACH
def test_axes_of_sizes_begin_at_zero_and_have_units(some: str, request: pytest.FixtureRequest) -> None:
    """But for the panel that says that it does not."""
    for chart in request.getfixturevalue(some):
        labels = ""
        for axes in drawn(chart).axes:
            labels += axes.get_xlabel() + axes.get_ylabel()
            if "do not begin at 0" in axes.get_title(loc="left"):
                continue
            assert axes.get_xlim()[0] == 0 or not axes.get_xlabel()
            assert axes.get_ylim()[0] == 0 or "[" not in axes.get_ylabel()
        assert "[GiB]" in labels, chart.name


@EACH
@pytest.mark.parametrize("narrow", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_words_lie_on_the_page_and_not_on_each_other(some: str, narrow: bool, request: pytest.FixtureRequest) -> None:
    for chart in request.getfixturevalue(some):
        figure = drawn(chart, narrow=narrow)
        texts = [text for text in figure.findobj(mpl.text.Text) if text.get_visible() and text.get_text().strip()]
        texts = [text for text in texts if id(text) not in unseen(figure)]
        boxes = [(text.get_text(), mpl.text.Text.get_window_extent(text)) for text in texts]
        page = figure.bbox.padded(3)
        off = [words for words, box in boxes if not page.containsx(box.x0) or not page.containsx(box.x1)]
        assert off == [], chart.name
        level = [box for box, text in zip(boxes, texts, strict=True) if level_words(text)]
        over = [
            (one, other)
            for place, (one, box) in enumerate(level)
            for other, rival in level[place + 1 :]
            if box.padded(-1).overlaps(rival.padded(-1))
        ]
        assert over == [], chart.name


def level_words(text: Any) -> bool:
    """Return whether a text is its box: the heading's has blank lines, in which the subject stands."""
    return not text.get_rotation() % 90 and not text.get_text().endswith("\n")


def unseen(figure: Figure) -> set[int]:
    """Return the words that are never drawn: of axes that are off, and of ticks outside their axes' limits."""
    found: set[int] = set()
    for axes in figure.axes:
        if not axes.axison:
            found |= {id(text) for text in axes.findobj(mpl.text.Text)}
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            for tick in axis.majorTicks:
                outside = not low <= tick.get_loc() <= high
                found |= {id(tick.label2), *([id(tick.label1)] if outside else [])}
    return found


@EACH
def test_colours_are_the_palettes_and_each_has_a_dark_one(some: str, request: pytest.FixtureRequest) -> None:
    """Each colour in a picture has a rule for its kind of use, whose dark shade is the palette's."""
    shades = [*COMPONENTS.values(), *SERIES, *INK.values(), *MOODS.values()]
    rules = pictures.dark_rules()
    for chart in request.getfixturevalue(some):
        assert set(re.findall(r"#[0-9a-fA-F]{6}\b", inline(chart))) <= {shade.light for shade in shades}, chart.name
        for kind, colour in set(re.findall(r"(fill|stroke)(?:: |=\")(#[0-9a-f]{6})", inline(chart))):
            assert f'[style*="{kind}: {colour}"], [{kind}="{colour}"] {{ {kind}: #' in rules, (chart.name, colour)
    assert len({shade.light for shade in shades}) == len(set(shades)), "one light colour, one dark one"


def test_words_on_a_part_can_be_read() -> None:
    """Contrast of at least 4 to 1 in light and dark (WCAG 2.1 asks 3 of large and 4.5 of small words)."""
    from memcalc.report.palette import words_on

    for name, shade in COMPONENTS.items():
        words = words_on(shade)
        assert contrast(shade.light, words.light) > 4, name
        assert contrast(shade.dark, words.dark) > 4.5, name


def test_neighbours_in_a_stack_differ_in_grey() -> None:
    """So that a stack can be read in print without colour."""
    greys = [luminance(shade.light) for shade in COMPONENTS.values()]
    assert all(max(pair) / min(pair) > 1.2 for pair in pairwise(greys))


# -------------------------------------------------------------------------------------------------------- the files


@EACH
def test_svg_is_well_formed_and_has_real_text_and_tips(some: str, request: pytest.FixtureRequest) -> None:
    for chart in request.getfixturevalue(some):
        root = ET.fromstring(inline(chart))  # noqa: S314 just written
        assert root.findtext(f"{SVG}title") == chart.alt
        assert len(list(root.iter(f"{SVG}text"))) > 10
        tips = {part.get("data-part") for part in root.iter() if part.get("class") == "memcalc-part"}
        assert tips == set(chart.tips) & set(parts(drawn(chart)))
        assert tips, chart.name


def test_a_file_is_the_same_each_time(plans: Any, tmp_path: Path) -> None:
    for name in ("one.svg", "two.svg"):
        pictures.save(plan.chart(plans), tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()


def test_alternatives_say_the_figures(fits: Any, plans: Any, widest: Any) -> None:
    assert f"{fits.peak.device / GIB:.1f} of" in estimate.chart(fits).alt
    assert f"activations {fits.components.activations / GIB:.2f}" in estimate.chart(fits).alt
    first = plans.plans[0]
    assert f"{first.time.tokens_per_second_per_gpu:.0f} tok/s/GPU, {first.peak.device / GIB:.2f} GiB" in re.sub(
        r" \(\d+–\d+\)(?= tok)", "", plan.chart(plans).alt
    )
    assert (
        f"{widest.answer}: {widest.best.peak.device / GIB:.2f} GiB, {widest.best.verdict}" in inverse.chart(widest).alt
    )


def test_a_page_has_a_drawing_for_wide_and_one_for_narrow_screens(fits: Any) -> None:
    page = pictures.page(estimate.chart(fits))
    assert page.count("<svg ") == 2
    assert "http" not in re.sub(r'xmlns(:\w+)?="[^"]*"', "", page), "no network"
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:url\(#|href="#)([^")]+)', page)) <= set(ids)


@pytest.mark.parametrize("ending", ["svg", "html", "pdf"])
def test_a_name_with_what_is_no_text_is_drawn_without_it(fits: Any, ending: str, tmp_path: Path) -> None:
    """Names come from files and paths: control characters, what XML lacks, half a pair, and no mathematics."""
    model = fits.model.model_copy(update={"name": "a\x1b[31m\uffff\udcff 日 $\\frac{$ <b>"})
    drawing = estimate.chart(fits.model_copy(update={"model": model}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pictures.save(drawing, tmp_path / f"a.{ending}")
    if ending == "svg":
        words = " ".join(ET.parse(tmp_path / "a.svg").getroot().itertext())  # noqa: S314 just written
        assert words.count("a�[31m�� 日 $\\frac{$ <b>") >= 2


@pytest.mark.slow
def test_every_format_is_written_and_says_what_it_is(tmp_path: Path) -> None:
    fewest = memcalc.smallest("gpus", model="gpt2", gpu="rtx-4090", up_to=1)
    begins = {"svg": b"<?xml", "png": b"\x89PNG", "pdf": b"%PDF", "html": b"<!doctype html>"}
    for ending, first in begins.items():
        pictures.save(inverse.chart(fewest), tmp_path / f"a.{ending}")
        assert (tmp_path / f"a.{ending}").read_bytes().startswith(first)


JOB = ["estimate", "--model", "gpt2", "--gpu", "rtx-4090", "--framework", "plain", "--seq-len", "512"]


def call(*words: str) -> Any:
    return CliRunner().invoke(app, words, prog_name="memcalc")


def test_commands_draw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert call(*JOB, "--chart", "a.svg", "--timeline", "b.svg").exit_code == 0
    assert 'id="estimate-alt"' in Path("a.svg").read_text()
    assert 'id="timeline-alt"' in Path("b.svg").read_text()
    again = call(*JOB, "--chart", "a.svg")
    assert (again.exit_code, "--force" in again.stderr) == (2, True)
    assert call(*JOB, "--chart", "a.svg", "--force").exit_code == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--chart", "a.jpg"], "--chart 'a.jpg': must end in .svg, .png, .pdf or .html"),
        (["--timeline", "a"], "--timeline 'a': must end in .svg"),
        (["--chart", "a.svg", "--timeline", "./a.svg"], "--timeline './a.svg': --chart is written to that file"),
        (["--chart", "a.html", "--output", "a.html"], "--chart 'a.html': --output is written to that file"),
        (["--chart", "nowhere/a.svg"], "nowhere"),
    ],
)
def test_a_wrong_file_is_refused_before_anything_is_computed(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(memcalc, "estimate", lambda **_: pytest.fail("computed"))
    result = call(*JOB, *words)
    assert result.exit_code == 2
    assert said in " ".join(result.stderr.split())
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib_the_command_that_installs_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pictures, "find_spec", lambda _: None)
    result = call(*JOB, "--chart", str(tmp_path / "a.svg"))
    assert result.exit_code == 2
    assert "pip install 'memcalc[charts]'" in " ".join(result.stderr.split())


@pytest.mark.slow
@pytest.mark.parametrize("name", PICTURES)
def test_pictures_of_the_documents_are_current(name: str, tmp_path: Path) -> None:
    """`python tests/charts_of_docs.py` draws them; words are compared, for shapes differ by Matplotlib's release."""
    fresh = tmp_path / name
    PICTURES[name](fresh)
    assert words_of(fresh) == words_of(ROOT / "docs" / "images" / name)
