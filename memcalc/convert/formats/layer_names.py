"""What the classes of Transformers call the layers that adapters and GaLore are asked for."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

from memcalc.catalog import read_toml

if TYPE_CHECKING:
    from collections.abc import Iterable

    from memcalc.convert.job import ConfigJob


def layer_names(job: ConfigJob, word: str, targets: Iterable[str]) -> list[str]:
    """The names of layers by memcalc's words for them, as the option ``word`` has them.

    Refuses one whose name is not known: a list of names would go without it, and nobody would be told.
    """
    tables = _tables()
    names = {**tables["usual"], **tables.get(job.spec.architecture if job.spec else "", {})}
    listed = list(targets)
    for target in listed:
        job.require(target in names, word, f"names of layers are known of {', '.join(names)}")
    return list(dict.fromkeys(names.get(target, target) for target in listed))


@cache
def _tables() -> dict[str, dict[str, str]]:
    tables: dict[str, dict[str, str]] = read_toml(files("memcalc.convert.formats") / "layers.toml")
    return tables
