"""Names of models and GPUs as files give them, the presets that they are, and the files of a folder that is named."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from itertools import islice, product
from pathlib import Path
from typing import Any

from memcalc import catalog
from memcalc.convert.document import read_document
from memcalc.convert.formats import recognise
from memcalc.convert.formats.trainer_writer import layer_tables
from memcalc.convert.formats.tuning import BLOCKS, LAYERS
from memcalc.convert.named_model import named_model
from memcalc.errors import MemcalcError, MissingError, UnknownNameError
from memcalc.frameworks import Habits
from memcalc.planner.adapted_layers import adaptable
from memcalc.preset_names import is_hub_id
from memcalc.specs.adapters import in_class
from memcalc.specs.model import Model

MOST_LOOKED_AT = 256
"""Entries of a folder that is given in place of a file."""
MOST_NAMED = 4
"""Files of a folder that a sentence names."""
ENDINGS = frozenset({".json", ".yaml", ".yml", ".toml", ".sh", ".bash", ".sbatch", ".slurm"})
"""What configs and launch scripts end with."""
_SIZE = re.compile(r"v?[\d.]+x?[\d.]*[bm]?", re.IGNORECASE)


def model_named(name: str, folder: str = ".", dirs: tuple[str, ...] = (), option: str = "--model") -> str:
    """The model of a name: a path beside the file that names it, a preset, or a repository of the Hub.

    A preset's name stands for a repository that has nothing to be said of beside its sizes.

    >>> model_named("meta-llama/Llama-2-7b-hf"), model_named("/data/Qwen2.5-7B-Instruct/")
    ('llama-2-7b', 'qwen2.5-7b')
    """
    if not name.strip():
        raise MissingError(f"the files name the model by a variable or a field that is empty; give {option}.")
    for path in (Path(folder) / name, Path(name)):
        if _is_model(path):
            return str(path)
    hub_id = _hub_id(name)
    if hub_id != name and _SIZE.fullmatch(hub_id):
        raise MissingError(f"the files name the model {name[:80]!r}, by its size alone; give {option}.")
    try:
        named = named_model(hub_id, dirs)
    except UnknownNameError as error:
        if error.field != "model":
            raise
        reason = error.allowed.partition(":")[0]
        hint = f" (the nearest preset is {error.suggestion})" if error.suggestion else ""
        raise MissingError(f"the files name the model {name[:80]!r}: {reason}; give {option}{hint}.") from None
    return hub_id if named.missing or named.stored or named.model.name == hub_id else named.model.name


def _hub_id(name: str) -> str:
    """The repository that a path leads to by its last parts, or within a cache of the Hub."""
    if is_hub_id(name):
        return name
    cached = re.search(r"models--([\w.-]+?)--([\w.-]+)", name)
    return "/".join(cached.groups()) if cached else name.rstrip("/").rpartition("/")[2] or name


def preset_like(model: Model, dirs: tuple[str, ...] = ()) -> str | Model:
    """The preset that is a model in all that counts, or the model itself."""
    for name in catalog.models_of(model.num_layers, model.hidden, dirs):
        if bare(catalog.model(name, dirs)) == bare(model):
            return name
    return model


def bare(model: Model) -> Model:
    """A model without what it is called and where it was read; positions of rotary embeddings have no rows."""
    unnamed: dict[str, Any] = {"name": "", "family": "", "aliases": (), "hf_class": None, "hf_config": {}, "notes": ""}
    unnamed |= {"published_parameters": None, "source": "-"}
    return model.model_copy(update={**unnamed, **({"max_positions": 1} if model.positions == "rope" else {})})


def _is_model(path: Path) -> bool:
    try:
        return (path.is_dir() and (path / "config.json").is_file()) or (
            path.is_file() and path.suffix in {".json", ".toml"}
        )
    except (OSError, ValueError):
        return False


def _folded(name: str) -> str:
    return re.sub(r"[\s_]+", "-", name.lower())


def gpu_named(name: str, dirs: tuple[str, ...] = ()) -> str:
    """The GPU preset that a queue's word for a GPU is.

    Raises :class:`memcalc.errors.MissingError` where it may be several, as `a100` may.
    """
    try:
        return catalog.gpu(name, dirs).name
    except UnknownNameError:
        like = [gpu for gpu in catalog.names("gpu", dirs) if _folded(gpu).startswith(_folded(name))]
        if not like:
            raise
        raise MissingError(f"GPU {name!r} is ambiguous: {', '.join(like)}. Pass --gpu.") from None


def of_folder(folder: Path) -> str:
    """What to give instead of a folder: the line of a job that was exported into it, or the files that are known.

    A config that another file names is read with that one.
    """
    try:
        inside_it = sorted(islice(folder.iterdir(), MOST_LOOKED_AT))
    except OSError:
        return "is a folder; give a file of the job"
    known = {path: text for path in inside_it if (text := known_text(path)) is not None}
    for text in known.values():
        if line := re.search(r"^# (memcalc check .+)$", text, re.MULTILINE):
            return f"is a folder; check its job with: cd {shlex.quote(str(folder))} && {line[1]}"
    first = [
        str(path)
        for path in known
        if path.suffix == ".py" or not any(path.name in text for other, text in known.items() if other != path)
    ]
    each = f"--survey {shlex.quote(str(folder))}"
    if not first:
        return f"is a folder without a config or launch script that is known; {each} says why, file by file"
    if len(first) == 1:
        return f"is a folder; give the file that starts its job: {first[0]}"
    more = f" and {len(first) - MOST_NAMED} more" if len(first) > MOST_NAMED else ""
    return (
        f"is a folder; give the files of one job: of {', '.join(first[:MOST_NAMED])}{more}; {each} reads each of them"
    )


def known_text(path: Path) -> str | None:
    """The text of a file that is some job's; None of another."""
    if path.suffix.lower() not in {*ENDINGS, ".py"} or path.name.startswith(".") or not path.is_file():
        return None
    try:
        document = read_document(path)
        form = recognise(document).name
    except MemcalcError:
        return None
    return None if form == "launch" and path.suffix.lower() == ".py" else document.text


_INSIDE = ("self_attn", "attn", "attention", "mlp", "feed_forward", "conv", "mixer", "mamba", "linear_attn")
"""What classes call the parts of a block."""


def found_layers(
    listed: Sequence[str], names: Sequence[str] | None, model: Model, habits: Habits, peft: str
) -> tuple[list[str], list[str]]:
    """Which of the layers that a file lists PEFT finds in a model, and which it passes over.

    It finds no part of a packed layer, and none that the class does not call by one of ``names``.
    """
    layers, known = in_class(tuple(listed), model.architecture), adaptable(model, habits, peft)
    present = [layer for layer in _spelled(names, layers, known, model.architecture) if layer in known]
    return present, [layer for layer in layers if layer not in present]


def _spelled(names: Sequence[str] | None, layers: Sequence[str], known: Sequence[str], kind: str) -> Sequence[str]:
    """The words for layers that a class calls by one of the names of a file, or that its pattern matches.

    Only a class whose names are not the usual ones is asked: LFM2 has an ``out_proj`` and no ``o_proj``. A name of a
    list is the end of a path, a text matches all of it (PEFT 005fdd53 tuners_utils.py, check_target_module_exists).
    """
    tables = layer_tables()
    if not names or kind not in tables:
        return layers
    rows = (tables["usual"] | tables[kind]).items()
    spelled = {layer: [path] if isinstance(path, str) else path for layer, path in rows}
    if all(name in LAYERS for name in names):
        return [each for each in layers if any(_ends(path, name) for path in spelled.get(each, ()) for name in names)]
    matches = re.compile(names[0]).fullmatch
    for start in BLOCKS:
        inside = [f"{start}.{number}.{part}" for number, part in product((0, 3, 10, 27), _INSIDE)]
        matched = [
            each for each in known if any(matches(f"{at}.{path}") for at in inside for path in spelled.get(each, ()))
        ]
        if matched:
            return matched
    return ()


def _ends(path: str, name: str) -> bool:
    """Whether a path ends as a name does, or the name as the path.

    >>> _ends("attn.c_proj", "c_proj"), _ends("q_proj", "self_attn.q_proj"), _ends("out_proj", "proj")
    (True, True, False)
    """
    return f".{path}".endswith(f".{name}") or f".{name}".endswith(f".{path}")
