"""Read a model from the config.json of Transformers."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from memcalc.convert.counted import COUNTED, COUNTED_PARTS
from memcalc.convert.huggingface_keys import Flat, Keys
from memcalc.convert.huggingface_stacks import BRANCHES, TOWERS
from memcalc.convert.huggingface_table import ENCODERS
from memcalc.convert.vision_language import DECODERS, VISION_LANGUAGE, read
from memcalc.errors import FileError, InputError, MissingError, UnknownNameError
from memcalc.specs.flat import flat_of, from_flat
from memcalc.specs.model import Model

_LARGEST_FILE = 5 << 20
_WHOLE = {**COUNTED, **COUNTED_PARTS}
_BUILT = {**TOWERS, **ENCODERS, **_WHOLE, **BRANCHES}
_WITH_HEAD = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
_NO_TOWERS = frozenset({"text_config", "quantization_config", "generation_config", "compression_config"})
_FULL_PRECISION = (None, "fp8", "mxfp4")

MODEL_TYPES = tuple(sorted({*DECODERS, *_BUILT, *VISION_LANGUAGE}))
"""Every `model_type` that is understood."""


def from_huggingface(mapping: Mapping[str, Any], name: str = "", source: str = "") -> Model:
    """Return the model that a config.json describes.

    Parameters
    ----------
    mapping : the content of the config.json [-]
    name : what to call the model; the config's own `_name_or_path`, or its model_type, where empty [-]
    source : where the config was found [-]

    Examples
    --------
    >>> from_huggingface({"model_type": "gpt2", "n_layer": 24, "n_embd": 1024, "n_head": 16}).groups[0].count
    24

    """
    of_parts = _table(mapping).get("model_type")
    if isinstance(of_parts, str) and of_parts in VISION_LANGUAGE:
        keys = Keys(mapping)
        _refuse_quantized(keys)
        about, headed = _headed(_about(mapping, of_parts, name, source))
        return read(keys, mapping, of_parts, {**headed, **about})
    kind, data = (of_parts, mapping) if isinstance(of_parts, str) and of_parts in _WHOLE else _text_part(mapping)
    keys = Keys(data)
    _refuse_quantized(keys)
    about = _about(mapping, kind, name, source)
    if kind in _BUILT:
        model = _BUILT[kind](keys, about)
    else:
        about, headed = _headed(about)
        model = from_flat({**DECODERS[kind](keys), **headed, **about})
    keys.refuse_rest()
    return model


def flat_table(mapping: Mapping[str, Any]) -> Flat:
    """Return a decoder's config as the inline table of a runs file, without what is left at its default.

    >>> flat_table({"model_type": "gpt2", "n_layer": 24, "n_embd": 1024, "n_head": 16})["ffn"]
    4096
    """
    kind, data = _text_part(_table(mapping))
    if kind not in DECODERS:
        raise InputError("config key model_type", kind, "must be that of a decoder, which has a flat form")
    keys = Keys(data)
    flat = flat_of({**DECODERS[kind](keys), "family": kind})
    keys.refuse_rest()
    return flat.model_dump(mode="json", exclude_defaults=True, exclude_none=True)


def read_model(path: str | os.PathLike[str]) -> Model:
    """Return the model of a config.json, or of a directory that holds one."""
    file = Path(path)
    if stat.S_ISDIR(_mode(file)):
        file = file / "config.json"
    config = read_config(file)
    name = file.resolve().parent.name if file.name == "config.json" else file.stem
    return from_huggingface(config, name=name, source=str(file))


def _table(mapping: object) -> Mapping[str, Any]:
    if not isinstance(mapping, Mapping) or not all(isinstance(key, str) for key in mapping):
        raise InputError("config", mapping, "must be a table of keys, as in a config.json")
    return mapping


def _text_part(mapping: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Return the model type and the table it is read from: a text model may stand within a config of several."""
    kind, text = mapping.get("model_type"), mapping.get("text_config")
    if kind != "clip" and isinstance(text, Mapping):
        tower = next((key for key, value in mapping.items() if _is_tower(key, value)), "")
        if tower:
            raise InputError("config key model_type", kind, _not_understood(tower, kind, text))
        mapping = _table(text)
        kind = mapping.get("model_type", f"{kind}_text")
    if kind is None:
        raise MissingError("The config.json has no model_type, which says what its other keys mean.")
    if not isinstance(kind, str) or kind not in MODEL_TYPES:
        known = f"is none of the {len(MODEL_TYPES)} that are read"
        allowed = f"{known}: write that of a class with the same blocks, or give the model by --module"
        raise UnknownNameError("config key model_type", kind, allowed, MODEL_TYPES)
    return kind, mapping


def _not_understood(tower: str, kind: object, text: Mapping[str, Any]) -> str:
    """What of a model of several parts is not understood, and what can be asked all the same."""
    inner = text.get("model_type", f"{kind}_text")
    if not isinstance(inner, str) or inner not in MODEL_TYPES:
        return f"neither its {tower} nor its text model {inner!r} is understood"
    alone = "to train that only, give its text_config as a config.json of its own"
    return f"only its text model is understood, not its {tower}; {alone}"


def _is_tower(key: str, value: object) -> bool:
    """Whether a key holds the config of a part that stands beside the text model: an encoder, a tower, a tokenizer."""
    return key.endswith("_config") and key not in _NO_TOWERS and isinstance(value, Mapping)


def _refuse_quantized(keys: Keys) -> None:
    """Refuse weights that stay quantised in training; fp8 and mxfp4 checkpoints are expanded when they are loaded."""
    table = keys.table("quantization_config")
    if table is not None and table.get("quant_method") not in _FULL_PRECISION:
        allowed = "quantization is set by --quantize, not by a config"
        raise InputError("config key quantization_config", table.get("quant_method"), allowed)


def _about(mapping: Mapping[str, Any], kind: str, name: str, source: str) -> Flat:
    """Return what the config says about itself, its class among it where it is told."""
    stated_name = mapping.get("_name_or_path")
    architectures = mapping.get("architectures")
    about = {
        "name": name or (stated_name if isinstance(stated_name, str) and stated_name else kind),
        "family": kind,
        "source": source or "a config.json",
    }
    if architectures is None or architectures == []:
        return about
    if not isinstance(architectures, list) or not isinstance(architectures[0], str):
        raise InputError("config key architectures", architectures, "must be a list of class names")
    return {**about, "architecture": architectures[0]}


def _headed(about: Flat) -> tuple[Flat, Flat]:
    """Split off whether the class has the head of a language model."""
    architecture = about.pop("architecture", None)
    if architecture is None or architecture.endswith(_WITH_HEAD):
        return about, {}
    if architecture.endswith("Model"):
        return about, {"head": False}
    raise InputError("config key architectures", architecture, f"must end with {', '.join(_WITH_HEAD)} or Model")


def _mode(path: Path) -> int:
    """Return the kind of file, 0 where there is none."""
    try:
        return path.stat().st_mode
    except (OSError, ValueError):
        return 0


def read_config(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file of at most 5 MiB; whatever else is in there becomes one sentence."""
    try:
        config = json.loads(_text(path), parse_constant=_refuse_constant)
    except RecursionError:
        raise FileError("file", str(path), "its JSON must not be nested so deeply") from None
    except json.JSONDecodeError as error:
        raise FileError("file", str(path), f"must be JSON: {error.msg} at line {error.lineno}") from None
    except ValueError as error:
        raise FileError("file", str(path), f"must hold numbers of a usual size: {error}".split(";")[0]) from None
    if not isinstance(config, dict):
        raise FileError("file", str(path), f"must hold a JSON object, not {type(config).__name__}")
    return config


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number that a config can have")


def _text(path: Path) -> str:
    mode = _mode(path)
    if not mode:
        raise FileError("file", str(path), "must be an existing config.json, or a directory that holds one")
    if not stat.S_ISREG(mode):
        raise FileError("file", str(path), "must be a regular file")
    try:
        if path.stat().st_size > _LARGEST_FILE:
            raise FileError("file", str(path), "must be at most 5 MiB")
        return path.read_bytes().decode()
    except UnicodeDecodeError:
        raise FileError("file", str(path), "must be UTF-8 text") from None
    except OSError as error:
        raise FileError("file", str(path), error.strerror or "must be readable") from None
