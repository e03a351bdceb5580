"""Names of models and GPUs as files give them, and the presets that they are."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from memcalc import catalog
from memcalc.errors import MissingError, UnknownNameError, nearest
from memcalc.specs.model import Model

__all__ = ["bare", "gpu_named", "model_named", "preset_like"]

_TUNED = re.compile(
    r"[-_](hf|chat|instruct|base|it|pt|sft|dpo|128k|4k|8k|\d+k|2507|unsloth|bnb-4bit|gptq|awq|v[01]\.\d)$"
)
"""What is appended to a model's name by its form or its training, and changes no size."""


def model_named(name: str, folder: str = ".", dirs: tuple[str, ...] = ()) -> str:
    """The model of a name: a path beside the file that names it, a preset, or a preset's name on the Hub.

    >>> model_named("meta-llama/Llama-2-7b-hf")
    'llama-2-7b'
    """
    for path in (Path(folder) / name, Path(name)):
        if _is_model(path):
            return str(path)
    plain = name.rstrip("/").rpartition("/")[2].lower()
    for candidate in _shortened(plain):
        try:
            return catalog.model(candidate, dirs).name
        except UnknownNameError:
            continue
    like = nearest(plain, catalog.names("model", dirs))
    hint = f" (the nearest preset is {like})" if like else ""
    raise MissingError(f"the files name the model {name[:80]!r}, which is no preset: give --model{hint}.")


def preset_like(model: Model, dirs: tuple[str, ...] = ()) -> str | Model:
    """The preset that is a model in all that counts, or the model itself."""
    for name in catalog.models_of(model.num_layers, model.hidden, dirs):
        if bare(catalog.model(name, dirs)) == bare(model):
            return name
    return model


def bare(model: Model) -> Model:
    """A model without what it is called and where it was read; positions of rotary embeddings have no rows."""
    own: dict[str, Any] = {"name": "", "family": "", "aliases": (), "hf_class": None, "hf_config": {}, "notes": ""}
    own |= {"published_parameters": None, "source": "-"}
    return model.model_copy(update={**own, **({"max_positions": 1} if model.positions == "rope" else {})})


def _is_model(path: Path) -> bool:
    try:
        return (path.is_dir() and (path / "config.json").is_file()) or (
            path.is_file() and path.suffix in {".json", ".toml"}
        )
    except (OSError, ValueError):
        return False


def _shortened(name: str) -> list[str]:
    """A name, and what is left of it as endings are taken off."""
    found = [name]
    while match := _TUNED.search(found[-1]):
        found.append(found[-1][: match.start()])
    return [*found, *(one.removeprefix("meta-") for one in found)]


def _folded(name: str) -> str:
    return re.sub(r"[\s_]+", "-", name.lower())


def gpu_named(name: str, dirs: tuple[str, ...] = ()) -> str:
    """The GPU preset that a queue's word for a GPU is.

    Raises :class:`memcalc.errors.MissingError` where it may be several, as `a100` may.
    """
    try:
        return catalog.gpu(name, dirs).name
    except UnknownNameError:
        like = [one for one in catalog.names("gpu", dirs) if _folded(one).startswith(_folded(name))]
        if not like:
            raise
        raise MissingError(f"GPU {name!r} may be {', '.join(like)}: give --gpu.") from None
