"""What the tests of the formats of config files share: reading one, and the way from a strategy to a file and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import memcalc
from memcalc.convert.config import Config
from memcalc.convert.document import parsed
from memcalc.convert.formats import format_named, written
from memcalc.convert.job import Job
from memcalc.preflight.answer import estimated
from memcalc.preflight.gather import gathered
from memcalc.preflight.join import joined
from memcalc.results import Estimate

FOLDER = Path(__file__).parent / "configs"
JOB = {"model": "llama-2-7b", "gpu": "h100", "seq_len": 2048}


def words(config: Config) -> dict[str, Any]:
    """Return what a config says, without what it leaves to a default."""
    return {said.word: said.value for said in config.said if not said.default}


def defaults(config: Config) -> dict[str, Any]:
    """Return what a config leaves to its framework's defaults."""
    return {said.word: said.value for said in config.said if said.default}


def codes(config: Config) -> set[tuple[str, str]]:
    """Return the findings, each as its code and the key."""
    return {(finding.code, finding.field) for finding in config.findings}


def config_of(path: Path, text: str, name: str, kind: str = "") -> Config:
    """Return the config of a text."""
    form = format_named(name)
    return form.read(parsed(path, text, kind or form.kind))  # type: ignore[arg-type]


def read(*paths: str) -> tuple[Config, ...]:
    """Return the configs of some files of the tests, and of those that they name."""
    return gathered([str(FOLDER / path) for path in paths])


def check(*paths: str, **given: Any) -> Estimate:
    """Return the estimate that some files come to."""
    return estimated(joined(read(*paths), {**JOB, **given}), ())


def there_and_back(tmp: Path, names: tuple[str, ...], plan: dict[str, Any], beside: dict[str, Any]) -> None:
    """Write the files of a strategy, read them, and compare; `beside` is what no file of these says."""
    before = memcalc.estimate(**JOB, **plan)
    configs = []
    for name in names:
        form = format_named(name)
        configs.append(config_of(tmp / form.filename, written(form, Job.of(before)), name))
    unknown = [finding for config in configs for finding in config.findings if finding.code == "MC001"]
    assert not unknown
    after = estimated(joined(configs, {**JOB, **beside}), ())
    assert after.strategy == before.strategy
    assert after.peak == before.peak
    assert after.workload == before.workload
