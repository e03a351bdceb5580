"""What the tests of the formats of config files share: reading one, and the way from a strategy to a file and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import memcalc
from memcalc.convert.config import Config
from memcalc.convert.document import parse_document
from memcalc.convert.formats import get_format, render_config
from memcalc.convert.formats.base import ConfigJob
from memcalc.preflight.job import estimate_merged, read_files
from memcalc.preflight.merge import merge
from memcalc.results.estimates import Estimate

FOLDER = Path(__file__).parent / "configs"
JOB = {"model": "llama-2-7b", "gpu": "h100", "seq_len": 2048}


def words(config: Config) -> dict[str, Any]:
    """Return what a config says, without what it leaves to a default."""
    return {said.name: said.value for said in config.settings if not said.default}


def defaults(config: Config) -> dict[str, Any]:
    """Return what a config leaves to its framework's defaults."""
    return {said.name: said.value for said in config.settings if said.default}


def codes(config: Config) -> set[tuple[str, str]]:
    """Return the findings, each as its code and the key."""
    return {(finding.code, finding.field) for finding in config.findings}


def config_of(path: Path, text: str, name: str, kind: str = "") -> Config:
    """Return the config of a text."""
    form = get_format(name)
    return form.read(parse_document(path, text, kind or form.kind))  # type: ignore[arg-type]


def read(*paths: str) -> tuple[Config, ...]:
    """Return the configs of some files of the tests, and of those that they name."""
    return read_files([str(FOLDER / path) for path in paths])


def check(*paths: str, **given: Any) -> Estimate:
    """Return the estimate that some files come to."""
    return estimate_merged(merge(read(*paths), {**JOB, **given}), ())


def there_and_back(tmp: Path, names: tuple[str, ...], plan: dict[str, Any], beside: dict[str, Any]) -> None:
    """Write the files of a strategy, read them, and compare; `beside` is what no file of these says."""
    before = memcalc.estimate(**JOB, **plan)
    configs = []
    for name in names:
        form = get_format(name)
        configs.append(config_of(tmp / form.filename, render_config(form, ConfigJob.of(before)), name))
    unknown = [finding for config in configs for finding in config.findings if finding.code == "MC001"]
    assert not unknown
    after = estimate_merged(merge(configs, {**JOB, **beside}), ())
    assert after.strategy == before.strategy
    assert after.peak == before.peak
    assert after.workload == before.workload
