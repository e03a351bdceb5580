"""DeepSpeed's configs that axolotl and LLaMA-Factory have in their own folders, by the path that jobs name them by."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from memcalc.catalog import read_toml
from memcalc.convert.document import Document, parse_document

COMMITS = {"axolotl": "axolotl 067b021c8", "llamafactory": "LLaMA-Factory ff6d4d12e"}
"""By format: whose folder it is, and the commit at which it was read."""


@cache
def _tables() -> dict[str, Any]:
    return read_toml(files("memcalc.convert") / "shipped.toml")


def shipped(form: str, path: str) -> Document | None:
    """The config that a framework ships under a path, or one that ends in it; None where it ships none.

    >>> shipped("llamafactory", "/app/examples/deepspeed/ds_z3_config.json").data["zero_optimization"]["stage"]
    3
    >>> shipped("trainer", "examples/deepspeed/ds_z3_config.json") is None
    True
    """
    if form not in COMMITS:
        return None
    for name, data in _tables()[form].items():
        if f"/{path}".endswith(f"/{name}"):
            return parse_document(Path(path), json.dumps(data), "json")
    return None
