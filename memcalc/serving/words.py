"""What an engine is told, read and checked word by word; then what depends on the model and the GPU."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from memcalc.errors import CombinationError, InputError, MissingError, UnknownNameError, UnmodelledError
from memcalc.planner.request import boolean, flag, one_of
from memcalc.serving.engines import Engine, engine_of, with_release
from memcalc.specs.hardware import GPU
from memcalc.specs.model import Model
from memcalc.specs.option import Option
from memcalc.specs.serving import ENGINE_OPTIONS, ENGINE_WORDS, EngineInputs
from memcalc.terms.parameters import refuse_counted
from memcalc.units import GIB, parse_bytes, parse_count, parse_tokens

LARGE_CARD = 70 * GIB
"""From which memory on vLLM takes larger defaults (``get_batch_defaults``)."""
_MOST, _LONGEST, _PARAMETERS = 1_000_000, 100_000_000, 10**12
"""The largest count, the most tokens, as of a training job, and the most parameters."""


def read_words(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Each word by itself; a name that no option has is refused."""
    unknown = next((name for name in raw if name not in ENGINE_WORDS), None)
    if unknown is not None:
        raise UnknownNameError("word", unknown, f"must be one of {', '.join(ENGINE_WORDS)}", ENGINE_WORDS)
    rows = [option for option in ENGINE_OPTIONS if raw.get(option.name) is not None]
    return {option.name: _value(option, raw[option.name]) for option in rows}


def _value(option: Option, value: Any) -> Any:
    if option.kind == "fraction":
        return share(value, option.name)
    if option.kind == "name":
        return one_of(value, option.name, option.values)
    if option.kind == "flag":
        return boolean(value, option.name)
    if option.kind == "bytes":
        return parse_bytes(value, flag(option.name))
    if option.kind == "count":
        return number(value, option.name, option.unit)
    return str(value)


def share(value: object, name: str) -> float:
    """A number above 0, up to 1."""
    with suppress(TypeError, ValueError):
        read = float(str(value))
        if 0 < read <= 1:
            return read
    raise InputError(flag(name), value, "must be a share of the GPU, above 0 and at most 1")


def number(value: object, name: str, unit: str = "") -> int:
    """A whole number above 0."""
    tokens = unit == "tokens"
    most = {"tokens": _LONGEST, "parameters": _PARAMETERS}.get(unit, _MOST)
    with suppress(InputError):
        read = (parse_tokens if tokens else parse_count)(value, flag(name))
        if 0 < read <= most:
            return read
    raise InputError(flag(name), value, f"must be a whole number from 1 to {most:,}")


def completed(
    given: Mapping[str, Any], model: Model, gpu: GPU, assumptions: dict[str, str]
) -> tuple[Engine, EngineInputs]:
    """The engine, and its inputs with nothing left to a default; what was not told is noted."""
    name = given.get("engine", "vllm")
    engine = engine_of(name)
    if "engine" not in given:
        assumptions["engine"] = with_release(name)
    if engine.budget == "static" and "utilization" not in given:
        raise MissingError(
            "sglang sets mem_fraction_static itself, by rules that change with its releases: give --utilization."
        )
    if given.get("dtype", "bf16") == "bf16" and not gpu.supports("bf16"):
        raise CombinationError("dtype", "bf16", f"{gpu.name} has no bf16 arithmetic: give --dtype fp16")
    large = gpu.memory_bytes >= LARGE_CARD and not gpu.name.startswith("a100")
    seqs, tokens = engine.large if large else engine.small
    longest = model.max_positions
    batched = given.get("max_batched_tokens", max(tokens, given.get("max_seqs", 0)))
    usual = {"max_len": longest, "max_batched_tokens": batched, "max_seqs": min(seqs, batched), "utilization": 0.9}
    for name, value in usual.items():
        if name not in given:
            assumptions[name] = str(value)
    inputs = EngineInputs(**{**usual, **given})
    if inputs.max_seqs > inputs.max_batched_tokens:
        allowed = f"a step of {inputs.max_batched_tokens} tokens must have at least one for each sequence"
        raise CombinationError("max-seqs", inputs.max_seqs, allowed)
    return engine, inputs


def check_model(model: Model, tp: int, pp: int) -> None:
    """Refuse what an engine cannot hold or what is not modelled."""
    refuse_counted(model)
    if model.mixers:
        kinds = " and ".join(model.mixer_kinds)
        raise UnmodelledError("model", model.name, f"what an engine keeps of its {kinds} is not modelled")
    if model.recording is not None:
        raise InputError("model", model.name, "a recorded module is no model that an engine serves")
    towers = {group.tower for group in model.groups} - {"decoder"}
    crossed = any(group.block.cross_attention for group in model.groups)
    if towers or crossed or not model.head or not model.vocab or model.tail.classes:
        raise InputError("model", model.name, "an engine that generates text serves decoder-only language models")
    for attention in model.attentions:
        if attention.heads % tp:
            raise InputError("tp", tp, f"must divide the {attention.heads} attention heads of {model.name}")
        if attention.latent is None and attention.kv_heads % tp and tp % attention.kv_heads:
            raise InputError("tp", tp, f"must divide the {attention.kv_heads} key-value heads, or be a multiple")
    if pp > model.num_layers:
        raise InputError("pp", pp, f"must be at most the {model.num_layers} layers of {model.name}")
