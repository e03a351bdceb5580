"""The page in a real browser: drag, type, paste, drop, link, back, compare, keyboard, dark, narrow, at random."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from colours import contrast

import memcalc
from memcalc.errors import MemcalcError
from memcalc.report.palette import INK
from memcalc.ui.answers import words_of
from memcalc.ui.link import parse_link

pytestmark = pytest.mark.slow

JOB = "model=llama-2-7b&gpu=a100-40g&gpus=8&seq-len=4096&zero=3&recompute=full"
WALKS, STEPS = 5, 20
SCRIPTED, SCRIPTED_STEPS, LOOKED_AT = 200, 6, 10
KINDS = ("slider", "select", "radio", "box", "text", "back")
WALK = """async steps => {
    const kinds = ["slider", "select", "radio", "box", "text", "back"];
    const queries = {slider: "[data-slides]", select: "select[data-option]", radio: "[data-option][type=radio]",
        box: "[data-option][type=checkbox]", text: "#o-recompute, #o-seq-len, #o-micro-batch"};
    const texts = ["", "none", "full", "ful", "every-4", "1", "2", "4k", "0", "-1", "many"];
    const pick = (list, at) => list[Math.floor(at * list.length)];
    for (const [kind, at] of steps) {
        const before = location.hash;
        if (kinds[kind] === "back") {
            if (window.walked) { window.walked -= 1; history.back(); }
        } else {
            const field = pick([...document.querySelectorAll(queries[kinds[kind]])], at), rest = (at * 7919) % 1;
            if (kinds[kind] === "slider") field.value = Math.floor(rest * (Number(field.max) + 1));
            else if (kinds[kind] === "select") field.selectedIndex = Math.floor(rest * field.options.length);
            else if (kinds[kind] === "text") field.value = pick(texts, rest);
            else field.checked = kinds[kind] === "radio" || !field.checked;
            for (const name of ["input", "change"]) field.dispatchEvent(new Event(name, {bubbles: true}));
            window.walked = (window.walked ?? 0) + (location.hash !== before);
        }
        await new Promise(done => setTimeout(done, 10));
    }
}"""
"""Changes controls as a hand would, one after the other."""
WIDTHS = (360, 800, 1920)
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 1000,
    "max_position_embeddings": 512,
}


PATIENT = """
import runpy
from memcalc.ui import workers

workers.QUICK_SECONDS = workers.SECONDS
runpy.run_module("memcalc", run_name="__main__")
"""
"""The command on a machine that may be busy: a request is given up later."""


BUSY = 180_000
"""How long such a machine may take [ms]; no test says how fast the page is."""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """The page as the command serves it."""
    command = [sys.executable, "-c", PATIENT, "ui", "--no-open", "--port", "18865"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            yield re.findall(r"http://127\.0\.0\.1:\d+/", server.stdout.readline())[0]
            server.terminate()
            server.wait(60)
        finally:
            server.kill()


@pytest.fixture
def tab(browser: Any, address: str, request: pytest.FixtureRequest) -> Iterator[Any]:
    """The page with a job; what it asks of others, and errors of its script, fail the test."""
    options = {"viewport": {"width": 1280, "height": 900}, **getattr(request, "param", {})}
    context = browser.new_context(**options)
    context.set_default_timeout(BUSY)
    page, addresses, complaints = context.new_page(), [], []
    page.on("request", lambda made: addresses.append(made.url))
    page.on("console", lambda line: complaints.append(line.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(f"{address}#{JOB}")
    shows(page, JOB)
    yield page
    context.close()
    assert all(url.startswith((address, "data:", "blob:")) for url in addresses)
    refused = "the server responded with a status of 422"  # how a browser notes an answer that is a sentence
    assert [text for text in complaints if refused not in text] == []


def shows(page: Any, job: str) -> None:
    """Wait until the answer to a job is on the screen."""
    page.locator(f'body[data-shows="{job}"]').wait_for(timeout=BUSY)


def job_of(page: Any) -> Any:
    return parse_link(page.url.partition("#")[2].partition("&pin=")[0])


def said(page: Any) -> str:
    return str(page.inner_text("#verdict"))


def expected(page: Any) -> str:
    """What the library says of the job in the address, of post-training too: its figures, or why there are none."""
    job = job_of(page)
    try:
        if job.has_roles:
            roles = memcalc.rl(**words_of(job), advice=False)
            return f"{(roles.capacity - roles.headroom) / 2**30:.1f} of {roles.capacity / 2**30:.1f} GiB"
        result = memcalc.estimate(**job.keywords())
    except MemcalcError as error:
        return str(error)
    return f"{result.peak.device / 2**30:.1f} of {result.budget.capacity / 2**30:.1f} GiB"


def test_the_bar_moves_while_a_slider_is_dragged(tab: Any) -> None:
    slider = tab.locator("[data-slides=seq-len]")
    box, most, at = slider.bounding_box(), int(slider.get_attribute("max")), int(slider.input_value())
    middle = box["y"] + box["height"] / 2
    places = [box["x"] + 8 + (box["width"] - 16) * index / most for index in range(most + 1)]
    before = tab.get_attribute("#bar .stack .c-activations", "style")
    tab.mouse.move(places[at], middle)
    tab.mouse.down()
    for index in range(at, at + 5):
        tab.mouse.move(places[index], middle)
        tab.wait_for_timeout(50)
    shows(tab, JOB.replace("seq-len=4096", "seq-len=16384"))
    assert tab.get_attribute("#bar .stack .c-activations", "style") != before
    assert tab.evaluate("performance.getEntriesByName('memcalc-bar').length") > 0
    tab.mouse.up()
    tab.wait_for_url(re.compile("seq-len=16384"), wait_until="commit")
    assert expected(tab) in said(tab)


def test_what_is_typed_counts_and_what_is_wrong_is_said_beside_it(tab: Any) -> None:
    tab.fill("#o-recompute", "none")
    tab.locator("#o-recompute").blur()
    shows(tab, JOB.replace("recompute=full", "recompute=none"))
    assert expected(tab) in said(tab)
    tab.fill("#o-recompute", "ful")
    tab.locator("#message", has_text="did you mean 'full'").wait_for()
    assert tab.get_attribute("#o-recompute", "aria-invalid") == "true"
    assert "recompute" in tab.inner_text("#e-recompute")
    assert tab.locator("#copy-command").is_disabled()
    assert tab.locator("footer .code.stale, .now.stale").count() == 2
    tab.fill("#o-recompute", "full")
    shows(tab, JOB)
    assert tab.locator("#copy-command").is_enabled()
    assert tab.locator("footer .code.stale, .now.stale").count() == 0
    assert tab.get_attribute("#o-recompute", "aria-invalid") is None
    assert tab.inner_text("#message") == ""


def test_what_is_wrong_is_said_once_beside_the_control_and_once_above_the_plans(tab: Any) -> None:
    """A search of the same job is refused for the same reason, which is not said again."""
    tab.goto(tab.url.partition("#")[0] + "#model=llama-2-7b&gpu=a100")
    tab.locator("#message", has_text="a100-80g").wait_for()
    tab.locator("body[data-rests]").wait_for(timeout=BUSY)
    tab.wait_for_function("document.getElementById('plans').textContent === ''", timeout=BUSY)


def test_a_pressed_button_is_read_under_the_pointer(tab: Any) -> None:
    """Where the pointer still is after a click."""
    tab.click("#compare")
    tab.locator("#compare[aria-pressed=true]").hover()
    tab.wait_for_timeout(300)
    shades = tab.eval_on_selector(
        "#compare", "(button) => [getComputedStyle(button).color, getComputedStyle(button).backgroundColor]"
    )
    text, ground = ("#" + "".join(f"{int(part):02x}" for part in re.findall(r"\d+", shade)[:3]) for shade in shades)
    assert contrast(text, ground) >= 4.5


def test_a_command_breaks_between_options_alone(tab: Any) -> None:
    """On a narrow screen too: each option stands in one row with its value, and what is copied is the command."""
    tab.set_viewport_size({"width": 390, "height": 800})
    parts = tab.locator("#command .word").all_inner_texts()
    assert " ".join(parts) == tab.inner_text("#command").replace("\n", " ")
    assert all(part.startswith("--") for part in parts[1:])
    heights = tab.eval_on_selector_all("#command .word", "(parts) => parts.map(part => part.getClientRects().length)")
    assert set(heights) == {1}


def test_the_link_holds_the_job_and_back_goes_back(tab: Any, browser: Any) -> None:
    tab.select_option("#o-gpu", "h100")
    tab.locator("[data-option=zero][value='2']").check()
    tab.locator("[data-option=offload][value=activations]").check()
    job = JOB.replace("a100-40g", "h100").replace("zero=3", "zero=2") + "&offload=activations"
    shows(tab, job)
    assert tab.url.endswith(job)
    other = browser.new_context().new_page()
    other.goto(tab.url)
    shows(other, job)
    assert said(other) == said(tab)
    assert other.input_value("#o-gpu") == "h100"
    assert other.locator("[data-option=zero][value='2']").is_checked()
    other.context.close()
    tab.go_back()
    shows(tab, job.replace("&offload=activations", ""))
    assert not tab.locator("[data-option=offload][value=activations]").is_checked()
    tab.go_back()
    tab.go_back()
    shows(tab, JOB)
    assert tab.input_value("#o-gpu") == "a100-40g"
    tab.go_forward()
    shows(tab, JOB.replace("a100-40g", "h100"))


def test_an_unknown_option_of_a_link_is_said_not_dropped(tab: Any) -> None:
    tab.goto(tab.url.partition("#")[0] + f"#{JOB}&seqlen=1")
    tab.locator("#message", has_text="did you mean 'seq-len'").wait_for()
    tab.wait_for_url(re.compile("seqlen=1"), wait_until="commit")


def test_a_model_is_pasted_and_a_config_is_dropped(tab: Any) -> None:
    tab.locator("#own summary").click()
    tab.fill("#paste", json.dumps(CONFIG))
    tab.locator("#paste").blur()
    tab.locator("#command", has_text="--model config.json").wait_for()
    assert json.loads(job_of(tab).config) == CONFIG
    tab.fill("#o-model", "llama-2-7b")
    tab.locator("#command", has_text="--model llama-2-7b").wait_for()
    content = json.dumps({"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 2})
    tab.set_input_files("#files", {"name": "ds.json", "mimeType": "text/plain", "buffer": content.encode()})
    tab.locator("#command", has_text="--framework deepspeed").wait_for()
    assert job_of(tab).options["zero"] == "2"
    assert "ds.json" in tab.inner_text("#notice")


def test_a_plan_is_put_into_the_controls(tab: Any) -> None:
    tab.locator("#plan-table tbody tr").nth(1).wait_for(timeout=BUSY)
    tab.locator("#plan-table .load").nth(1).focus()
    tab.keyboard.press("Enter")
    best = memcalc.plan(model="llama-2-7b", gpu="a100-40g", gpus=8, seq_len=4096, advice=False).plans[1]
    tab.locator("#command", has_text=best.command).wait_for()
    assert tab.input_value("#o-micro-batch") == str(best.strategy.micro_batch)


def test_make_it_fit_and_compare(tab: Any) -> None:
    tab.fill("#o-micro-batch", "64")
    tab.locator("#verdict", has_text="Does not fit").wait_for()
    tab.click("#compare")
    tab.click("#fit")
    tab.locator("#fitted", has_text="micro-batch 64 →").wait_for(timeout=BUSY)
    tab.locator("#verdict", has_text="Fits").wait_for()
    tab.locator("#difference", has_text="micro-batch").wait_for(timeout=BUSY)
    tab.wait_for_url(re.compile("pin="), wait_until="commit")
    tab.click("#compare")
    assert not tab.locator("#difference").is_visible()


def test_the_files_are_one_click(tab: Any) -> None:
    with tab.expect_download() as download:
        tab.click("#export")
    assert download.value.suggested_filename == "memcalc-job.zip"
    with tab.context.expect_page() as report:
        tab.click("#report")
    report.value.locator("#answer-title").wait_for(timeout=BUSY)
    report.value.close()


def test_an_algorithm_brings_its_roles_and_the_link_holds_them(tab: Any, browser: Any) -> None:
    tab.select_option("#o-algorithm", "grpo")
    tab.locator("#bar .phases").wait_for(timeout=BUSY)
    assert not tab.locator("#o-seq-len").is_visible()
    job = job_of(tab).options
    assert job["algorithm"] == "grpo"
    tab.select_option("#o-sleep", "0")
    tab.locator("#command", has_text="--sleep 0").wait_for(timeout=BUSY)
    result = memcalc.rl(**words_of(job_of(tab)), advice=False)
    names = [text.partition(" (")[0] for text in tab.locator("#bar .phases .phase").all_inner_texts()]
    assert names == [phase.name for phase in result.phases]
    assert f"{(result.capacity - result.headroom) / 2**30:.1f} of" in said(tab)
    other = browser.new_context().new_page()
    other.goto(tab.url)
    other.locator("#command", has_text="--sleep 0").wait_for(timeout=BUSY)
    assert (other.input_value("#o-algorithm"), other.input_value("#o-sleep")) == ("grpo", "0")
    assert said(other) == said(tab)
    other.context.close()
    tab.locator("#plan-table .load").first.wait_for(timeout=BUSY)
    tab.select_option("#o-algorithm", "")
    tab.locator("#bar .stack").wait_for(timeout=BUSY)
    assert tab.locator("#o-seq-len").is_visible()
    tab.go_back()
    tab.locator("#bar .phases").wait_for(timeout=BUSY)


def test_roles_are_made_to_fit_compared_and_wrong_ones_are_marked(tab: Any) -> None:
    tab.select_option("#o-algorithm", "grpo")
    tab.locator("#bar .phases").wait_for(timeout=BUSY)
    tab.fill("#o-utilization", "0.95")
    tab.locator("#verdict", has_text="Does not fit").wait_for(timeout=BUSY)
    tab.click("#compare")
    tab.click("#fit")
    tab.locator("#fitted", has_text="--").wait_for(timeout=BUSY)
    assert memcalc.rl(**words_of(job_of(tab))).verdict != "does-not-fit"
    tab.locator("#difference", has_text="Step by step").wait_for(timeout=BUSY)
    tab.fill("#o-engine-tp", "3")
    tab.locator("#e-engine-tp", has_text="divide").wait_for(timeout=BUSY)
    assert tab.get_attribute("#o-engine-tp", "aria-invalid") == "true"


@pytest.mark.parametrize("tab", [{"viewport": {"width": width, "height": 900}} for width in WIDTHS], indirect=True)
def test_no_phase_is_wider_than_the_screen(tab: Any) -> None:
    tab.select_option("#o-algorithm", "ppo")
    tab.locator("#bar .phases").wait_for(timeout=BUSY)
    tab.evaluate("for (const box of document.querySelectorAll('details')) box.open = true")
    tab.locator("#terms section").wait_for(timeout=BUSY)
    assert tab.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth") <= 0
    nameless = tab.evaluate(
        """() => [...document.querySelectorAll('button, input, select, textarea, a[href]')].filter(field =>
            !(field.textContent.trim() || field.labels?.length || field.ariaLabel)).map(field => field.outerHTML)"""
    )
    assert nameless == []


def test_the_keyboard_is_enough_and_a_change_is_spoken(tab: Any) -> None:
    tab.keyboard.press("/")
    assert tab.evaluate("document.activeElement.id") == "o-model"
    tab.locator("[data-slides=micro-batch]").focus()
    tab.keyboard.press("ArrowRight")
    shows(tab, f"{JOB}&micro-batch=2")
    tab.wait_for_timeout(1200)
    assert tab.inner_text("#live").endswith("GiB per GPU")
    nameless = tab.evaluate(
        """() => [...document.querySelectorAll('button, input, select, textarea, a[href]')].filter(field =>
            !(field.textContent.trim() || field.labels?.length || field.ariaLabel)).map(field => field.outerHTML)"""
    )
    assert nameless == []


@pytest.mark.parametrize("tab", [{"viewport": {"width": width, "height": 900}} for width in WIDTHS], indirect=True)
def test_nothing_is_wider_than_the_screen(tab: Any) -> None:
    tab.locator("#plan-table").wait_for(timeout=BUSY)
    tab.evaluate("for (const box of document.querySelectorAll('details')) box.open = true")
    tab.locator("#terms section").wait_for(timeout=BUSY)
    assert tab.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth") <= 0


def test_dark_is_dark_by_the_system_and_by_choice(tab: Any) -> None:
    def ground() -> str:
        colour = tab.eval_on_selector("body", "element => getComputedStyle(element).backgroundColor")
        return "#" + "".join(f"{int(part):02x}" for part in re.findall(r"\d+", colour)[:3])

    assert ground() == INK["page"].light
    tab.emulate_media(color_scheme="dark")
    assert ground() == INK["page"].dark
    tab.select_option("#theme", "light")
    assert ground() == INK["page"].light
    tab.emulate_media(color_scheme="light")
    tab.select_option("#theme", "dark")
    assert ground() == INK["page"].dark
    tab.reload()
    assert ground() == INK["page"].dark


def test_random_walks_leave_no_error_and_the_answer_of_the_library(tab: Any) -> None:
    """After each walk the screen has what the library says of the job in the address, or its sentence."""
    chance = random.Random(21)  # noqa: S311 - a walk, no secret
    for _ in range(WALKS):
        for _ in range(STEPS):
            step(tab, chance)
        arrived(tab, pause=400)


def test_two_hundred_walks_of_a_script_leave_no_error(tab: Any) -> None:
    """Controls change faster than a hand moves them, so that answers overtake one another."""
    chance = random.Random(200)  # noqa: S311 - a walk, no secret
    for index in range(SCRIPTED):
        tab.evaluate(WALK, [[chance.randrange(len(KINDS)), chance.random()] for _ in range(SCRIPTED_STEPS)])
        if index % LOOKED_AT == 0:
            arrived(tab, pause=300)


def arrived(page: Any, pause: int) -> None:
    """Wait until the screen has come to rest, and compare it with the library."""
    page.wait_for_timeout(pause)  # the address is written a while after the last movement
    link = page.url.partition("#")[2]
    page.locator(f'body[data-shows="{link}"]').wait_for(timeout=BUSY)
    assert expected(page) in page.inner_text("#message") + said(page)


def step(page: Any, chance: random.Random) -> None:
    """Change one control at random."""
    kind = chance.choice(("slider", "select", "radio", "box", "text", "back"))
    if kind == "slider":
        slider = page.locator("[data-slides]").nth(chance.randrange(3))
        slider.focus()
        page.keyboard.press(chance.choice(("ArrowRight", "ArrowLeft", "ArrowRight", "PageDown")))
    elif kind == "select":
        field = page.locator("#o-gpu, #o-framework, #o-precision").nth(chance.randrange(3))
        field.select_option(index=chance.randrange(field.locator("option").count()))
    elif kind == "radio":
        page.locator("[data-option=zero]").nth(chance.randrange(5)).check()
    elif kind == "box":
        page.locator("[data-option=offload]").nth(chance.randrange(3)).click()
    elif kind == "text":
        page.fill("#o-recompute", chance.choice(("", "none", "full", "mlp", "ful", "every-4")))
        page.locator("#o-recompute").blur()
    elif page.evaluate("history.length") > 3:
        page.go_back()
