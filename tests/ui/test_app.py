"""The page over HTTP: who may ask, how much, how long, and that answers are those of the library."""

from __future__ import annotations

import asyncio
import io
import json
import re
import shlex
import signal
import subprocess
import sys
import zipfile
from html.parser import HTMLParser
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlencode, urlsplit

import pytest

import memcalc
from memcalc.cli.registry import EXAMPLES
from memcalc.report.page import live
from memcalc.specs.options import COMMAND_LINE
from memcalc.specs.posttraining import RL_OPTIONS
from memcalc.ui import app as module
from memcalc.ui.answers import Reply, reply
from memcalc.ui.app import ADDRESS, App, listener
from memcalc.ui.link import parse_link
from memcalc.ui.page import page, policy
from memcalc.ui.workers import MOST_WAITING, Worker, Workers

JOB = "model=llama-2-7b&gpu=a100-40g&gpus=8&zero=3"
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


async def direct(request: str, text: str) -> Reply:
    return reply(request, text)


def ask(
    path: str, body: bytes = b"", *, method: str = "POST", query: str = "", answering: Any = direct, **headers: str
) -> tuple[int, dict[str, str], bytes]:
    """Return status, headers and body of one request, as an ASGI server passes it on."""
    named = {"host": "127.0.0.1:8765", **{name.replace("_", "-"): value for name, value in headers.items()}}
    scope = {
        "type": "http", "method": method, "path": path, "query_string": query.encode(),
        "headers": [(name.encode(), value.encode()) for name, value in named.items()],
    }  # fmt: skip
    parts = [body[start : start + 65536] for start in range(0, len(body), 65536)] or [b""]
    events = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    events[-1]["more_body"] = False
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        if events:
            return events.pop(0)
        await asyncio.sleep(3600)
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    asyncio.run(App(page(), policy(), answering)(scope, receive, send))
    return sent[0]["status"], {name.decode(): value.decode() for name, value in sent[0]["headers"]}, sent[1]["body"]


def answered(request: str, text: str) -> dict[str, Any]:
    status, headers, body = ask(f"/api/{request}", text.encode())
    assert status == 200, body
    assert headers["content-type"] == "application/json"
    answer: dict[str, Any] = json.loads(body)
    return answer


# ---------------------------------------------------------------------------------------------------------- who may ask


@pytest.mark.parametrize("host", ["127.0.0.1:8765", "localhost:8765", "localhost", "[::1]:9000"])
def test_this_machine_may_ask(host: str) -> None:
    assert ask("/", method="GET", host=host)[0] == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "evil.example:8765", "", "a b", "localhost:8765,x"]
)
def test_a_name_from_elsewhere_that_leads_here_is_refused(host: str) -> None:
    """DNS rebinding: the address is this machine's, the name is another's."""
    assert ask("/", method="GET", host=host)[0] == 421
    assert ask("/api/estimate", JOB.encode(), host=host)[0] == 421


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://localhost:3000", "https://127.0.0.1:8765"])
def test_a_page_of_another_origin_cannot_ask(origin: str) -> None:
    assert ask("/api/estimate", JOB.encode(), origin=origin)[0] == 403


def test_the_page_itself_can_ask_and_be_linked_to() -> None:
    assert ask("/api/estimate", JOB.encode(), origin="http://127.0.0.1:8765", sec_fetch_site="same-origin")[0] == 200
    assert ask("/", method="GET", sec_fetch_site="cross-site")[0] == 200
    assert ask("/api/report", method="GET", query=JOB, sec_fetch_site="cross-site")[0] == 403


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/x"), ("DELETE", "/api/estimate"), ("POST", "/"), ("GET", "/api/x")]
)
def test_anything_else_is_not_there(method: str, path: str) -> None:
    assert ask(path, method=method)[0] == 404


def test_the_page_lets_no_other_script_run_and_asks_nobody_else() -> None:
    _, headers, body = ask("/", method="GET")
    rules = dict(rule.strip().split(" ", 1) for rule in headers["content-security-policy"].split(";"))
    assert rules["default-src"] == "'none'"
    assert rules["connect-src"] == "'self'"
    assert rules["script-src"].startswith("'sha256-")
    assert rules["frame-ancestors"] == "'none'"
    assert headers["x-frame-options"] == "DENY"
    assert not re.findall(r"(?:src|href)=\"(?:https?:)?//", body.decode())
    written = re.sub(
        rb"<datalist.*?</datalist>", b"", body, flags=re.DOTALL
    )  # names of presets, of which there may be more
    assert len(written) < 78_000


# ------------------------------------------------------------------------------------------------------------- how much


def test_a_request_has_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask("/api/estimate", b"x" * (module.MOST_BYTES + 1))[0] == 413
    assert ask("/api/estimate", b"\xff\xfe")[0] == 413
    assert ask("/api/estimate", method="GET", query="x" * (module.MOST_QUERY + 1))[0] == 414
    monkeypatch.setattr(module, "BODY_SECONDS", 0.01)

    async def silent() -> dict[str, Any]:
        await asyncio.sleep(3600)
        return {}

    assert asyncio.run(module._body(silent)) is None


def test_a_request_that_takes_too_long_ends_and_the_next_is_answered() -> None:
    async def both() -> tuple[Reply, Reply]:
        worker = Worker()
        late = await worker.answer("plan", JOB, 0.01)
        process = worker._process
        following = await worker.answer("estimate", JOB, 120)
        assert process is None
        await worker.stop()
        return late, following

    late, following = asyncio.run(both())
    assert late.status == 503
    assert "too long" in json.loads(late.body)["message"]
    assert json.loads(following.body)["verdict"] == memcalc.estimate(**parse_link(JOB).keywords()).verdict


def test_the_first_answer_of_a_process_waits_for_what_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as a search may take; from then on as long as a control may."""
    allowed: list[float] = []

    async def answer(worker: Worker, *asked: Any) -> Reply:
        allowed.append(asked[-1])
        worker.has_answered = True
        return Reply(200, "", b"")

    async def twice() -> None:
        workers = Workers(quick=1, others=1)
        await workers.answer("estimate", JOB)
        await workers.answer("estimate", JOB)

    monkeypatch.setattr(Worker, "answer", answer)
    asyncio.run(twice())
    assert allowed[0] > allowed[1]


def test_more_requests_than_can_wait_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two users and more ask at once; each gets the answer to what they asked."""

    async def slow(_: Worker, request: str, text: str, __: float) -> Reply:
        await asyncio.sleep(0.01)
        return Reply(200, request, text.encode())

    monkeypatch.setattr(Worker, "answer", slow)

    async def many() -> list[Reply]:
        workers = Workers(quick=2, others=1)
        return await asyncio.gather(*(workers.answer("estimate", str(index)) for index in range(MOST_WAITING + 20)))

    replies = asyncio.run(many())
    done = [(index, answer) for index, answer in enumerate(replies) if answer.status == 200]
    assert all(answer.body == str(index).encode() for index, answer in done)
    assert {answer.status for answer in replies} == {200, 503}
    assert len(done) >= MOST_WAITING


def test_a_search_that_nobody_waits_for_does_not_begin() -> None:
    begun = []

    async def leaving() -> int:
        async def waits() -> Reply:
            await asyncio.sleep(3600)
            begun.append(JOB)
            return Reply(200, "", b"")

        async def gone() -> dict[str, Any]:
            return {"type": "http.disconnect"}

        return (await module._while_read(waits(), gone)).status

    assert asyncio.run(leaving()) == 499
    assert not begun


def test_it_is_reached_from_this_machine_alone_and_a_taken_port_is_no_end() -> None:
    with listener(18765) as first, listener(first.getsockname()[1]) as second:
        assert {first.getsockname()[0], second.getsockname()[0]} == {ADDRESS} == {"127.0.0.1"}
        assert second.getsockname()[1] > first.getsockname()[1]


# -------------------------------------------------------------------------------------------------------- what is said


def test_the_bar_is_that_of_the_library() -> None:
    answer, result = answered("estimate", JOB), memcalc.estimate(**parse_link(JOB).keywords())
    assert answer["verdict"] == result.verdict
    assert answer["device"] == result.peak.device
    assert answer["command"] == result.command
    widths = [float(width) for width in re.findall(r'<span class="c-\w+" style="width:([\d.]+)%"', answer["bar"])]
    total = max(result.budget.capacity, result.peak.device, result.interval.high)
    assert sum(widths) == pytest.approx(100 * result.peak.device / total, abs=0.01)


@pytest.mark.parametrize(
    "options",
    [
        "&seq-len=4096&recompute=full",
        "&seq-len=512&recompute=full",
        "&micro-batch=64",
        "&offload=optimizer&set=workload.eval_micro_batch%3D64",
        "&set=workload.eval_micro_batch%3D512",
    ],
)
def test_what_the_bar_does_not_wait_for_changes_no_figure(options: str) -> None:
    """The first answer is the whole one but for its warnings, which are all there once the controls rest."""
    link = JOB + options
    first, rest = (json.loads(reply(request, link).body) for request in ("estimate", "remarks"))
    whole = json.loads(json.dumps(live.estimate_parts(memcalc.estimate(**parse_link(link).keywords(), advice=False))))
    assert {**first, **rest} == whole


def test_plans_lead_to_their_jobs() -> None:
    answer = answered("plan", f"{JOB}&recompute=full")
    links = dict.fromkeys(re.findall(r'data-link="([^"]*)"', answer["plans"]))
    jobs = [parse_link(link.replace("&amp;", "&")) for link in links]
    expected = memcalc.plan(model="llama-2-7b", gpu="a100-40g", gpus=8, advice=False)
    assert [memcalc.estimate(**job.keywords()).peak.device for job in jobs] == [
        plan.peak.device for plan in expected.plans
    ]


def test_plans_say_why_they_are_tight() -> None:
    """And that memory which nobody stated has to suffice, once for all of them."""
    told = re.findall(r"<li>(.*?)</li>", answered("plan", "model=llama-3.1-70b&gpu=4090&gpus=4")["plans"])
    assert any(re.match(r"#1.*: tight, ", text) for text in told)
    assert sum("host memory" in text for text in told) == 1


def test_where_nothing_fits_each_remedy_leads_to_a_job_that_does() -> None:
    answer = answered("plan", "model=llama-2-7b&gpu=rtx-4090&gpus=1&offload=none")
    links = re.findall(r'data-link="([^"]*)"', answer["plans"])
    assert links
    first = parse_link(links[0].replace("&amp;", "&"))
    assert memcalc.estimate(**first.keywords()).verdict != "does-not-fit"


@pytest.mark.parametrize(
    ("options", "count"), [("recompute=full&micro-batch=32", 1), ("micro-batch=8&global-batch=64", 2)]
)
def test_make_it_fit_changes_as_little_as_can_be(options: str, count: int) -> None:
    """Of the second job each option alone is not enough, offloaded activations for want of host memory."""
    job = f"{JOB}&{options}"
    before = memcalc.estimate(**parse_link(job).keywords())
    assert before.verdict == "does-not-fit"
    answer = answered("fit", job)
    assert len(answer["changes"]) == count
    after = memcalc.estimate(**parse_link(answer["link"]).keywords())
    assert after.verdict == "fits"
    assert after.workload.global_batch == before.workload.global_batch
    singles = ("recompute=full", "micro-batch=1", "offload=params")
    verdicts = [memcalc.estimate(**parse_link(f"{job}&{single}").keywords()).verdict for single in singles]
    assert ("fits" in verdicts) == (count == 1)


def test_where_no_edit_is_enough_it_says_so() -> None:
    assert answered("fit", "model=llama-2-7b&gpu=rtx-4090&gpus=1&framework=plain&offload=none") == {
        "changes": [],
        "link": "",
    }


def test_a_pasted_model_is_counted_and_stays_in_every_link() -> None:
    text = urlencode({"config": json.dumps(CONFIG), "gpu": "h100"})
    answer = answered("estimate", text)
    assert "--model config.json" in answer["command"]
    plans = answered("plan", text)["plans"]
    link = re.findall(r'data-link="([^"]*)"', plans)[0].replace("&amp;", "&")
    assert json.loads(parse_link(link).config) == CONFIG


def test_a_dropped_config_becomes_a_job() -> None:
    content = json.dumps(
        {
            "zero_optimization": {"stage": 3},
            "bf16": {"enabled": True},
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 4,
        }
    )
    answer = answered("check", json.dumps({"files": {"../ds.json": content}, "job": f"{JOB}&seq-len=2048"}))
    job = parse_link(answer["link"])
    assert job.options["framework"] == "deepspeed"
    assert job.options["micro_batch"] == "2"
    assert job.options["zero"] == "3"
    assert memcalc.estimate(**job.keywords()).workload.global_batch == 2 * 4 * 8
    for name in ("..", "a" * 300, "a\0\ud800.json"):
        dropped = json.dumps({"files": {name: content}, "job": f"{JOB}&seq-len=2048"})
        assert answered("check", dropped)["link"] == answer["link"]
    for wrong in ("", "{}", '{"files": {}, "job": ""}', '{"files": {"a": 1}, "job": ""}', "[1]"):
        assert ask("/api/check", wrong.encode())[0] == 422


def test_two_jobs_are_compared() -> None:
    answer = answered("compare", urlencode({"a": JOB, "b": f"{JOB}&recompute=full"}))
    assert "recompute" in answer["difference"]
    assert "none" in answer["difference"]


def test_report_and_export_are_one_request() -> None:
    status, headers, body = ask("/api/export", method="GET", query=f"{JOB}&recompute=full")
    assert status == 200
    assert "attachment" in headers["content-disposition"]
    names = zipfile.ZipFile(io.BytesIO(body)).namelist()
    assert "launch.sh" in names
    assert len(names) > 1
    status, headers, body = ask("/api/report", method="GET", query=f"{JOB}&recompute=full")
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert body.startswith(b"<!doctype html>")


@pytest.mark.parametrize(
    ("text", "field"),
    [("model=lama-2-7b&gpu=h100", "model"), (f"{JOB}&tp=3", "tp"), (f"{JOB}&set=a%3Db", "set"), ("x=1", "option")],
)
def test_what_cannot_be_answered_is_a_sentence_and_its_field(text: str, field: str) -> None:
    status, _, body = ask("/api/estimate", text.encode())
    answer = json.loads(body)
    assert status == 422
    assert answer["field"] == field
    assert answer["message"].endswith((".", "?"))


# ------------------------------------------------------------------------------------------------------------ the page


class Fields(HTMLParser):
    """The options that have a control, the labels, and what is open and closed."""

    def __init__(self) -> None:
        super().__init__()
        self.options: set[str] = set()
        self.ids: list[str] = []
        self.labels: set[str] = set()
        self.named: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what an element is for."""
        given = {name: value or "" for name, value in attrs}
        if "data-option" in given:
            self.options.add(given["data-option"])
        if "id" in given:
            self.ids.append(given["id"])
        if tag == "label" and "for" in given:
            self.labels.add(given["for"])
        if tag in {"input", "select"} and "id" in given:
            self.named.add(given["id"])


def test_every_control_is_an_option_and_has_its_label() -> None:
    fields = Fields()
    fields.feed(page())
    known = {row.name.replace("_", "-") for row in (*COMMAND_LINE, *RL_OPTIONS)}
    assert fields.options == known - {"calibration", "lengths"}
    assert len(fields.ids) == len(set(fields.ids))
    assert fields.named - {"theme", "files"} == fields.labels


def test_the_example_of_the_command_serves_until_it_is_interrupted() -> None:
    line = [sys.executable, "-m", "memcalc", *shlex.split(EXAMPLES["ui"])[1:], "--no-open"]
    # a shell's background jobs ignore the signal, and their children with them
    told = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.default_int_handler)}
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True, **told) as server:
        try:
            assert server.stdout is not None
            address = re.findall(r"http://127\.0\.0\.1:\d+/", server.stdout.readline())[0]
            connection = HTTPConnection(urlsplit(address).netloc, timeout=60)
            connection.request("GET", "/")
            assert connection.getresponse().status == 200
            connection.close()
            server.send_signal(signal.SIGINT)
            assert server.wait(60) == 0
        finally:
            server.kill()
