"""The file of a model that was recorded with torch: what it begins with, and how it is read and written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from memcalc.errors import FileError, InputError

if TYPE_CHECKING:
    from memcalc.specs.model import Model

SCHEMA = "memcalc.module/1"
LARGEST = 64 << 20
"""Bytes; a model of a hundred different blocks has a tenth of it."""
BEGINNING = 64
"""Characters within which the schema stands."""


def is_recorded(path: Path) -> bool:
    """Whether a file begins as a recorded model does."""
    try:
        if not path.is_file():
            return False
        with path.open("rb") as stream:
            return SCHEMA.encode() in stream.read(BEGINNING)
    except (OSError, ValueError):
        return False


def read_recorded(path: Path) -> Model:
    """Return the model in a file, checked."""
    from pydantic import ValidationError

    from memcalc.specs.model import Model

    with path.open("rb") as stream:
        content = stream.read(LARGEST + 1)
    if len(content) > LARGEST:
        raise FileError("file", str(path), f"a recorded model has at most {LARGEST >> 20} MiB")
    try:
        data = json.loads(content)
        model = Model.model_validate(data["model"])
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise InputError(f"{path.name}: {where}", first.get("input"), str(first["msg"])) from None
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        raise FileError("file", str(path), f"it is no recorded model: {type(error).__name__}") from None
    if model.recording is None or any(group.block.recorded is None for group in model.groups):
        raise FileError("file", str(path), "it is no recorded model: a part has no recording")
    return model


def recorded_text(model: Model) -> str:
    """The text of the file."""
    data = model.model_dump(mode="json", exclude_defaults=True)
    return json.dumps({"schema": SCHEMA, "model": data}, separators=(",", ":")) + "\n"
