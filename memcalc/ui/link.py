"""A job as the text that a link holds: options as they are typed on the command line, joined as in a query.

And the smallest edit of it that makes it fit: the fewest options, and none that changes what is learned.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlencode

from memcalc import api
from memcalc.errors import InputError, MemcalcError, MissingError, UnknownNameError
from memcalc.records import dataclass, field, replace
from memcalc.results.estimates import Estimate
from memcalc.results.plans import Plan
from memcalc.specs.job import JobRecord
from memcalc.specs.options import COMMAND_LINE, DEGREES
from memcalc.specs.posttraining import RL_OPTIONS

CONFIG = "config.json"
"""What a pasted model is called: its command line runs where the text was saved under this name."""
PASTED = "config"
"""The key of a pasted model; its value is the text of its ``config.json``."""
MOST_PAIRS = 120
"""Of one link; the table has fewer options."""
OPTIONS = {row.name.replace("_", "-"): row for row in (*RL_OPTIONS, *COMMAND_LINE)}
"""By the name in a link; those of post-training stand beside an algorithm alone."""
_FILED = ("model", "gpu", "node", "critic-model", "reward-model")
"""Options whose value may be a file's name on the command line."""


@dataclass(frozen=True)
class LinkedJob:
    """What a link says."""

    options: dict[str, str] = field(default_factory=dict)
    """By the library's keyword."""
    settings: dict[str, str] = field(default_factory=dict)
    """By dotted name."""
    config: str = ""
    """The text of a pasted model."""

    def keywords(self) -> dict[str, Any]:
        """The keywords of :func:`memcalc.estimate`; a pasted model lies under its usual name in the folder."""
        if self.config:
            Path(CONFIG).write_text(self.config, encoding="utf-8")
        options = {**self.options, **({"model": CONFIG} if self.config else {})}
        for name in ("model", "gpu"):
            if not options.get(name):
                raise MissingError(f"which {name}? give {name}.")
        return {**options, "settings": self.settings}

    @property
    def has_roles(self) -> bool:
        """Whether it is post-training."""
        return bool(self.options.get("algorithm"))

    def without(self, *names: str) -> LinkedJob:
        """The same job with some options left out."""
        return replace(self, options={name: value for name, value in self.options.items() if name not in names})

    def having(self, options: Mapping[str, Any]) -> LinkedJob:
        """The same job with some options set."""
        return replace(self, options={**self.options, **{name: _text(value) for name, value in options.items()}})

    def text(self) -> str:
        """What the link holds."""
        options = {name: value for name, value in self.options.items() if not (self.config and name == "model")}
        return urlencode([*_pairs(options, self.settings), *([(PASTED, self.config)] if self.config else [])])


def parse_link(text: str) -> LinkedJob:
    """Read what a link holds; an unknown name, and whatever would have a file of this machine read, is refused.

    >>> parse_link("model=7b&gpu=h100&seq-len=4k&set=strategy.reduce_dtype%3Dbf16").options["seq_len"]
    '4k'
    """
    try:
        pairs = parse_qsl(text, keep_blank_values=True, max_num_fields=MOST_PAIRS)
    except ValueError:
        raise InputError("link", text, f"must hold at most {MOST_PAIRS} options") from None
    options: dict[str, str] = {}
    settings: dict[str, str] = {}
    config = ""
    for name, value in pairs:
        if name == PASTED:
            config = value
        elif name == "set":
            key, _, stated = value.partition("=")
            settings[key.strip()] = stated.strip()
        elif name not in OPTIONS:
            raise UnknownNameError("option", name, "must be one that memcalc estimate --help lists", OPTIONS)
        elif value:
            options[OPTIONS[name].name] = _no_file(name, value)
    return LinkedJob(options, settings, config)


def _no_file(name: str, value: str) -> str:
    """A value that names no file; a page is served to whoever reaches its port."""
    path = Path(value)
    reads = name in _FILED and path.suffix in {".json", ".toml"} and value != CONFIG
    reads = reads or (name == "calibration" and value != "none")
    if reads or path.is_absolute() or value.startswith("~") or ".." in path.parts:
        raise InputError(name, value, "the page reads no files of this machine; paste or drop what the file holds")
    return value


def link_of(job: JobRecord, config: str = "") -> str:
    """Return what a link to a job holds; ``config`` is the text of its pasted model.

    >>> link_of(JobRecord(command="estimate", model="gpt2", gpu="h100", options={"seq_len": 4096, "sp": False}))
    'model=gpt2&gpu=h100&seq-len=4096&sp=false'
    """
    places = {"model": job.model, "gpu": job.gpu, "node": job.node}
    options = {name: _text(value) for name, value in {**places, **job.options}.items() if value is not None}
    return LinkedJob(options, {name: _text(value) for name, value in job.settings.items()}, config).text()


def _pairs(options: Mapping[str, str], settings: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for name, value in options.items():
        yield name.replace("_", "-"), value
    for name, value in settings.items():
        yield "set", f"{name}={value}"


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


# ------------------------------------------------------------------------------------------------- what makes it fit


EDITED = ("recompute", "micro_batch", "zero", "offload")
"""What an edit may change; equal edits are preferred in this order."""
_STAY = ("framework", "precision", "optimizer", "recompute", "zero", *DEGREES, "micro_batch")


class Edit(NamedTuple):
    """A change that makes a job fit."""

    changes: tuple[str, ...]
    """Each as option, old value and new value."""
    job: LinkedJob
    """The job as edited."""


def smallest_edit(job: LinkedJob, estimate: Estimate) -> Edit | None:
    """Return the edit of the fewest options with which the job fits, of those the fastest; None where none does.

    The global batch and the number of GPUs stay. An edit is proved by an estimate of the job as edited; one that is
    tight is taken where none fits.
    """
    tight: Edit | None = None
    for count in range(1, len(EDITED) + 1):
        plans = [plan for names in combinations(EDITED, count) for plan in _plans(names, job, estimate)]
        for plan in sorted(plans, key=lambda plan: (not plan.time.validated, plan.time.step)):
            edit = _edit(job, estimate, plan)
            verdict = _verdict(edit.job)
            if verdict == "fits":
                return edit
            tight = tight or (edit if verdict == "tight" else None)
    return tight


def _plans(names: tuple[str, ...], job: LinkedJob, estimate: Estimate) -> Iterator[Plan]:
    """Yield the fastest strategy that fits where some options are free and all else stays."""
    strategy, work = estimate.strategy, estimate.workload
    stays: dict[str, Any] = {name: getattr(strategy, name) for name in _STAY}
    stays |= {"offload": ",".join(strategy.offload) or "none", "global_batch": work.global_batch}
    free: dict[str, str | None] = dict.fromkeys(names)
    share = work.micro_batch * work.accumulation_steps
    smaller = [str(size) for size in range(1, work.micro_batch) if share % size == 0]
    if "micro_batch" in names:
        if not smaller:
            return
        free["micro_batch"] = "/".join(smaller)
    keywords = {**job.keywords(), "gpus": estimate.hardware.gpus, **stays, **free}
    try:
        yield from api.plan(**keywords, top=1, advice=False).plans
    except MemcalcError:  # the framework does not have that combination
        return


def _edit(job: LinkedJob, estimate: Estimate, plan: Plan) -> Edit:
    before, after = _values(estimate.strategy), _values(plan.strategy)
    changed = {name: value for name, value in after.items() if value != before[name]}
    changes = tuple(f"{name.replace('_', '-')} {before[name]} → {value}" for name, value in changed.items())
    if "micro_batch" in changed:  # the batch would follow from it
        changed["global_batch"] = str(estimate.workload.global_batch)
    return Edit(changes, job.having(changed))


def _values(strategy: Any) -> dict[str, str]:
    values = {name: getattr(strategy, name) for name in EDITED}
    return {name: ",".join(value) or "none" if name == "offload" else str(value) for name, value in values.items()}


def _verdict(job: LinkedJob) -> str:
    try:
        return api.estimate(**job.keywords(), advice=False).verdict
    except MemcalcError:
        return ""
