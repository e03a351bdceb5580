"""What the page asks for: each kind of request is one call of the library, and its answer as parts of the page.

A job of post-training becomes one of another kind too.
"""

from __future__ import annotations

import contextlib
import io
import json
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from urllib.parse import parse_qs

from memcalc import api
from memcalc.errors import CombinationError, InputError, MemcalcError, MissingError
from memcalc.posttraining import rl
from memcalc.posttraining.frameworks import RECIPES, TOOLKITS
from memcalc.posttraining.plans import plan_rl
from memcalc.posttraining.steps import PLACES
from memcalc.posttraining.words import OFFLINE_ALONE
from memcalc.report.page import live
from memcalc.report.page.roles import role_difference, role_notes, role_parts, role_plans, role_terms
from memcalc.results.estimates import Estimate
from memcalc.results.plans import Plans
from memcalc.results.posttraining import Rl, RlDiff, RlPlans
from memcalc.specs.job import JobRecord
from memcalc.specs.options import COMMAND_LINE, SEARCHED
from memcalc.specs.posttraining import RL_WORDS, TRAINING
from memcalc.ui.link import LinkedJob, link_of, parse_link
from memcalc.units import parse_tokens

ROLES_OPEN = (
    "micro_batch", "micro_tokens", "logprob_batch", "logprob_tokens", "engine_tp", "engine_gpus", "utilization",
    "max_seqs", "sleep", "park", "zero", "recompute", "offload",
)  # fmt: skip
"""What a plan of post-training decides."""
START = {"framework": "verl", "prompt": "1k", "response": "3k", "micro_tokens": "16k", "prompts": "128", "samples": "8"}
"""What a job that generates begins with."""
PAIRS = {"framework": "trl", "prompt": "1k", "response": "1k", "micro_batch": "1"}
"""What a job without generation begins with."""


def words_of(job: LinkedJob) -> dict[str, Any]:
    """The keywords of :func:`memcalc.rl` for a link."""
    typed = job.keywords()
    if typed.pop("settings"):
        raise CombinationError("set", next(iter(job.settings)), "post-training takes the options of memcalc rl alone")
    return typed


def asked(job: LinkedJob, *, advice: bool = True) -> Rl:
    """The job as it stands."""
    return rl(**words_of(job), advice=advice)


def searched(job: LinkedJob) -> RlPlans:
    """Its plans."""
    return plan_rl(**words_of(job.without(*ROLES_OPEN)))


def fitted(job: LinkedJob) -> dict[str, Any]:
    """The first change, of those that cost least, that makes the job fit, as a link."""
    edit = asked(job).edit
    if edit is None:
        return {"changes": [], "link": ""}
    options = {name.strip().replace("-", "_"): value for name, _, value in map(_parted, edit.change.split("--")[1:])}
    changed = job.without("micro_batch") if "micro_tokens" in options else job
    return {"changes": [edit.change], "link": changed.having(options).text()}


def _parted(text: str) -> tuple[str, str, str]:
    return text.strip().partition(" ")


def script_of(job: LinkedJob) -> str:
    """The script that starts the job."""
    from memcalc.handoff.role_scripts import role_script

    return role_script(**words_of(job))


def turned(job: LinkedJob) -> LinkedJob:
    """The job of a link with the options that its algorithm has, the others left out; what is missing gets a start."""
    options = {name: value for name, value in job.options.items() if value}
    algorithm = options.get("algorithm", "")
    if not algorithm:
        return _trained(job, options)
    recipe = RECIPES.get(algorithm)
    online = recipe is None or recipe.online
    allowed = {*PLACES, *RL_WORDS, *TRAINING} - ({*OFFLINE_ALONE} if not online else set())
    staying = {name: value for name, value in options.items() if name in allowed}
    start = START if online else PAIRS
    if options.get("framework", "").partition("@")[0] not in TOOLKITS or "prompt" not in staying:
        batch = {"micro_batch", "micro_tokens"}
        staying = {name: value for name, value in staying.items() if name not in {"framework", *batch}} | start
    missing = {} if {"micro_batch", "micro_tokens"} & set(staying) else {"micro_batch": "1"}
    rest = {name: value for name, value in start.items() if name in ("prompts", "samples") and name not in staying}
    return LinkedJob({**staying, **missing, **rest, "gpus": staying.get("gpus", "8")}, {}, job.config)


def _trained(job: LinkedJob, options: dict[str, str]) -> LinkedJob:
    """The same model on the same GPUs without post-training."""
    known = {row.name for row in COMMAND_LINE} - {"framework"}
    staying = {name: value for name, value in options.items() if name in known}
    lengths = [int(parse_tokens(options[name], name)) for name in ("prompt", "response") if name in options]
    length = {"seq_len": str(sum(lengths))} if lengths else {}
    return LinkedJob({**staying, **length}, job.settings, job.config)


JSON, HTML, ZIP = "application/json", "text/html; charset=utf-8", "application/zip"
PASTED_NAME = "your-model"
"""What a pasted model is called in an answer."""
_STATED = ("gpus", "global_batch", "precision", "optimizer")
"""Options of a search that stay as they are where plans are looked for: they are the user's part of the job."""
_FILLED = ("gpu", "model", "gpus", "node", "seq_len")
"""What the controls say where dropped files do not, in the order in which it is taken."""
MOST_FILES = 16
LONGEST_NAME = 60
"""Letters of a dropped file's name that are kept, its ending among them: at four bytes each, as any system takes."""
LEFT_OPEN = tuple(name for name in SEARCHED if name not in _STATED)
"""What a plan decides."""


class Reply(NamedTuple):
    """What goes back over HTTP."""

    status: int
    kind: str
    """Its media type."""
    body: bytes


def reply(request: str, text: str) -> Reply:
    """Answer a request about the job of a link; what cannot be answered is a sentence and its field.

    Everything happens in an empty folder, so that no name in a link leads to a file; a pasted model is called by it.
    """
    with TemporaryDirectory(prefix="memcalc-ui-") as scratch:
        folder = Path(scratch, PASTED_NAME)
        folder.mkdir()
        with contextlib.chdir(folder):
            return _answered(request, text)


def _answered(request: str, text: str) -> Reply:
    try:
        return REQUESTS[request](text)
    except MemcalcError as error:
        field = error.field if isinstance(error, InputError) else ""
        return _json({"field": field, "message": str(error)}, 422)


def _json(value: Mapping[str, Any], status: int = 200) -> Reply:
    return Reply(status, JSON, json.dumps(value).encode())


def _estimated(job: LinkedJob, **more: Any) -> Estimate:
    return api.estimate(**job.keywords(), **more)


def _estimate(text: str) -> Reply:
    """The strategy as it stands: verdict, bar, figures; nothing that takes a second look."""
    job = parse_link(text)
    if job.has_roles:
        return _json(role_parts(asked(job, advice=False)))
    return _json(live.estimate_parts(api.single(**job.keywords()).figures()))


def _remarks(text: str) -> Reply:
    """All that is to be said of the strategy, which the bar does not wait for."""
    return _json({"warnings": live.estimate_parts(_estimated(parse_link(text), advice=False))["warnings"]})


def _terms(text: str) -> Reply:
    """Every term, and what expandable segments would leave of a large cache."""
    job = parse_link(text)
    return _json(role_terms(asked(job, advice=False)) if job.has_roles else live.term_parts(_estimated(job)))


def _plans(job: LinkedJob) -> Plans:
    keywords = job.without(*LEFT_OPEN).having({"gpus": job.options.get("gpus", "1")}).keywords()
    return api.plan(**keywords)


def _plan(text: str) -> Reply:
    """The plans of the job, each with its link; where none fits, what would."""
    job = parse_link(text)

    def link(record: JobRecord) -> str:
        return link_of(record, job.config)

    if job.has_roles:
        return _json(role_plans(searched(job), link))
    return _json(live.plan_parts(_plans(job), link))


def _fit(text: str) -> Reply:
    """The smallest edit that makes the strategy fit, as a link."""
    from memcalc.ui.fit import smallest_edit

    job = parse_link(text)
    if job.has_roles:
        return _json(fitted(job))
    edit = smallest_edit(job, _estimated(job, advice=False))
    return _json({"changes": list(edit.changes), "link": edit.job.text()} if edit else {"changes": [], "link": ""})


def _compare(text: str) -> Reply:
    """What is different between two jobs, and what it costs."""
    from memcalc.differences import diff
    from memcalc.planner.job import flat_options

    sides = parse_qs(text, keep_blank_values=True)
    first, second = (parse_link(sides.get(side, [""])[0]) for side in "ab")
    if first.config != second.config:
        raise InputError("compare", "two pasted models", "compare jobs of the same pasted model")
    if first.has_roles != second.has_roles:
        raise InputError("compare", "post-training and training", "compare jobs of one kind")
    result = diff(flat_options(first.keywords()), flat_options(second.keywords()))
    return _json(role_difference(result) if isinstance(result, RlDiff) else live.diff_parts(result))


def _check(text: str) -> Reply:
    """The job of dropped files: what was noticed in them, and the link to what they say."""
    from memcalc.preflight import check

    given = _dropped(text)
    paths = []
    for name, content in given["files"].items():
        path = Path(_file_name(name))
        path.write_text(content, encoding="utf-8")
        paths.append(str(path))
    job = parse_link(given["job"])
    for count in range(len(_FILLED) + 1):
        options: dict[str, Any] = {name: job.options[name] for name in _FILLED[:count] if name in job.options}
        try:
            result = check(paths, **options)
        except MissingError:
            if count == len(_FILLED):
                raise
        else:
            break
    if isinstance(result, Rl):
        return _json({**role_notes(result), "link": link_of(result.job)})
    return _json({**live.check_parts(result), "link": link_of(result.estimate.job)})


def _file_name(name: str) -> str:
    """The last part of a name, as a file of any system can be called.

    >>> [_file_name(name) for name in ("a/job.yaml", "..", "b" * 300 + ".sh")]
    ['job.yaml', 'file', 'bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb.sh']
    """
    last = "".join(letter if letter.isprintable() else "_" for letter in Path(name).name)[-LONGEST_NAME:]
    return last if last.strip(".") else "file"


def _dropped(text: str) -> dict[str, Any]:
    """Return what came with dropped files, checked."""
    try:
        given = json.loads(text)
        files, job = given["files"], given["job"]
    except (ValueError, KeyError, TypeError):
        raise InputError("files", text, "must be JSON with files and job") from None
    fits = isinstance(job, str) and isinstance(files, dict) and all(isinstance(text, str) for text in files.values())
    if not fits or not 0 < len(files) <= MOST_FILES:
        raise InputError("files", text, f"must be 1 to {MOST_FILES} files by name, and a job as text")
    return {"files": files, "job": job}


def _report(text: str) -> Reply:
    """The page of the strategy, to keep or to send."""
    from memcalc.report.page import page

    job = parse_link(text)
    result = asked(job) if job.has_roles else _estimated(job, timeline=True)
    return Reply(200, HTML, page(result).encode())


def _export(text: str) -> Reply:
    """The files that run the strategy under its framework, with the line that starts them."""
    from memcalc.frameworks.capabilities import formats_of
    from memcalc.handoff import write_job
    from memcalc.handoff.written import write_plan

    job = parse_link(text)
    if job.has_roles:
        return Reply(200, ZIP, _zipped({"train.sh": script_of(job).encode()}))
    result = _estimated(job, advice=False)
    exported = write_plan(result, formats_of(result.strategy.framework)[0], None, ())
    folder = Path("job")
    write_job(exported, folder, force=True)
    return Reply(200, ZIP, _zipped({path.name: path.read_bytes() for path in sorted(folder.iterdir())}))


def _zipped(files: Mapping[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return stream.getvalue()


def _turn(text: str) -> Reply:
    """The job of a link as another kind, or another algorithm, has it."""
    return _json({"link": turned(parse_link(text)).text()})


REQUESTS: dict[str, Callable[[str], Reply]] = {
    "estimate": _estimate,
    "remarks": _remarks,
    "terms": _terms,
    "plan": _plan,
    "fit": _fit,
    "compare": _compare,
    "check": _check,
    "turn": _turn,
    "report": _report,
    "export": _export,
}
"""By the last part of their address."""
QUICK = ("estimate", "turn")
"""Those that follow a control: they never wait for a search."""
