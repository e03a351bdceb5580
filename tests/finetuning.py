"""What the tests of the fine-tuning frameworks' configs have in common."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import memcalc
from memcalc import validation
from memcalc.convert.config import Config
from memcalc.convert.document import parse_document, read_document
from memcalc.convert.formats.base import recognise
from memcalc.frameworks import habits_of
from memcalc.preflight.job import estimate_merged, read_files
from memcalc.preflight.merge import merge
from memcalc.results.estimates import Estimate
from memcalc.runs import read_runs
from memcalc.specs.runs import Run
from memcalc.specs.strategy import Strategy

CONFIGS = Path(__file__).parent / "configs"


def read(path: Path) -> Config:
    """Return what the format that a file is of says of it."""
    text = read_document(path)
    return recognise(text).read(text)


def read_text(text: str, name: str = "config.yaml") -> Config:
    """Return what is said in the text of a config."""
    written = parse_document(Path(name), text, "yaml")
    return recognise(written).read(written)


def said(config: Config) -> dict[str, Any]:
    """Return the words that a config says, but the engines, which may be several."""
    return {one.name: one.value for one in config.settings if one.name != "engine"}


def engines(config: Config) -> set[str]:
    """Return what runs the ranks."""
    return {one.value for one in config.settings if one.name == "engine"}


def defaults(config: Config) -> set[str]:
    """Return the words that the file leaves to its framework's default."""
    return {one.name for one in config.settings if one.default}


def codes(config: Config) -> list[tuple[str, str]]:
    """Return the findings, each by its code and key."""
    return sorted((one.code, one.field) for one in config.findings)


def checked(paths: Iterable[Path | str], **words: Any) -> Estimate:
    """Return the estimate of a job's files beside some typed words."""
    given = {**words, "settings": words.pop("settings", {})}
    return estimate_merged(merge(read_files(map(str, paths)), given), ())


@cache
def runs() -> Mapping[str, Run]:
    """Return the public runs by id."""
    return {run.id: run for run in read_runs().run}


def as_usual(strategy: Strategy) -> Strategy:
    """Return a strategy that says nothing of checkpoints which its framework does anyhow."""
    usual = "reentrant" if habits_of(strategy.framework).reentrant else "non-reentrant"
    return strategy.model_copy(update={"checkpoint": ""}) if strategy.checkpoint == usual else strategy


def same_as_run(run_id: str, path: Path, **words: Any) -> None:
    """Assert that a config and the public run that it is of come to the same strategy and the same bytes.

    ``words`` are what no config of the framework can say, such as the release whose code ran.
    """
    run = runs()[run_id]
    theirs = validation.predict(run)
    chip = {"gpu": run.gpu, "gpus": run.gpus}
    ours = checked([path], **{**chip, **words})
    assert as_usual(ours.strategy) == as_usual(theirs.strategy)
    assert ours.peak.allocated == theirs.peak.allocated
    assert ours.components == theirs.components or run.context is not None


def resolved(**words: Any) -> Estimate:
    """Return an estimate of a small model, for a writer."""
    return memcalc.estimate(model="llama-3.2-1b", gpu="h100", **words)
