"""The table of inference engines and their eras: what each takes of a GPU, and how it logs its pool.

Sources: vLLM 0012cf69 (2025, the first releases of its engine V1) and 001cabc1, ``vllm/v1/worker/gpu_worker.py``,
``vllm/v1/core/kv_cache_utils.py`` and ``vllm/engine/arg_utils.py`` (``get_batch_defaults``); SGLang 001ccef0,
``sglang/srt/model_executor/model_runner_kv_cache_mixin.py`` and ``sglang/srt/server_args.py``. Constants that no source
states are fitted on published start-up logs (``presets/serving``) by ``tests/engines.py``.

What an engine is told, read and checked word by word; then what depends on the model and the GPU.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from memcalc.errors import CombinationError, InputError, MissingError, UnknownNameError, UnmodelledError
from memcalc.planner.request import boolean, flag, one_of
from memcalc.specs.posttraining import ENGINE_OPTIONS, ENGINE_WORDS, EngineInputs
from memcalc.terms.parameters import refuse_counted
from memcalc.units import GIB, MIB, parse_bytes, parse_count, parse_tokens

if TYPE_CHECKING:
    from collections.abc import Mapping

    from memcalc.specs.hardware import GPU
    from memcalc.specs.model import Model
    from memcalc.specs.strict import Option

LOGS = "start-up logs of llm-d-incubation/llm-d-planner accuracy/results@d3121e05"


@dataclass(frozen=True, slots=True)
class Engine:
    """What a release of an engine does with a GPU's memory."""

    name: str
    """Name and release."""
    budget: Literal["whole", "static"] = "whole"
    """What the share bounds: all that the engine takes; or weights and cache alone, activations lying outside."""
    block_tokens: int = 16
    """Tokens of one block of the cache."""
    logit_bytes: float = 12.0
    """What the sampler holds for each logit beside itself [bytes]."""
    counts_logit: bool = True
    """Whether the logit itself, in the width that is computed in, comes on top."""
    sampler_rest: int = 110 * MIB
    """What the profiled step holds beside logits and hidden states [bytes]."""
    non_torch: tuple[tuple[int, int], ...] = ((1, 256 * MIB), (2, 2130 * MIB), (4, 2222 * MIB))
    """Taken outside PyTorch since the engine's first snapshot [bytes], from so many tensor-parallel ranks on."""
    non_torch_staged: int = 72 * MIB
    """The same with pipeline stages and no tensor parallelism [bytes]."""
    graphs_within: bool = False
    """Whether an estimate of the CUDA graphs is taken off the budget; else they come on top of it."""
    counts_others: bool = False
    """Whether what other processes hold counts as the engine's own; else the budget only has to be free."""
    logs: Literal["blocks", "concurrency"] = "blocks"
    """What the logged tokens are made of: blocks shared out to the groups of layers, or concurrency times length."""
    large: tuple[int, int] = (1024, 8192)
    """Default sequences and tokens of a step on GPUs of 70 GiB or more, A100 left out."""
    small: tuple[int, int] = (256, 2048)
    """The same on others."""


_V1 = Engine(
    "vllm@0.8",
    logit_bytes=38.5,
    counts_logit=False,
    sampler_rest=0,
    non_torch=((1, 133 * MIB), (2, 2130 * MIB), (4, 2222 * MIB)),
    counts_others=True,
    small=(256, 2048),
)
_SNAPSHOT = replace(_V1, name="vllm@0.10", counts_others=False)
_LEAN = replace(_SNAPSHOT, name="vllm@0.17", logit_bytes=12.0, counts_logit=True, sampler_rest=110 * MIB)
_MEASURED = replace(_LEAN, name="vllm@0.18", non_torch=Engine("").non_torch)
_BY_LENGTH = replace(_MEASURED, name="vllm@0.20", logs="concurrency")
_GRAPHS = replace(_BY_LENGTH, name="vllm@0.21", graphs_within=True)
_SGLANG = Engine(
    "sglang@0.5", budget="static", block_tokens=1, counts_others=True, large=(256, 8192), small=(256, 2048)
)

ENGINES: dict[str, tuple[Engine, ...]] = {
    "vllm": (_V1, _SNAPSHOT, _LEAN, _MEASURED, _BY_LENGTH, _GRAPHS),
    "sglang": (_SGLANG,),
}
"""By name: the eras, oldest first, each named for the release in which its habits began."""
NEWEST = {"vllm": (0, 27), "sglang": (0, 5)}
"""The newest releases that a log or source was read of."""
_RELEASE = re.compile(r"v?(\d+)\.(\d+)(?:\.\w+)?")


def with_release(name: str) -> str:
    """An engine's name with its release; the newest that was read where none is stated.

    >>> with_release("vllm@0.19"), with_release("vllm")
    ('vllm@0.19', 'vllm@0.27')
    """
    return name if "@" in name else f"{name}@{'.'.join(map(str, NEWEST[name]))}"


def engine_of(name: str) -> Engine:
    """The habits of ``name`` or ``name@release``: the newest that had begun by then.

    >>> engine_of("vllm@0.19").name, engine_of("vllm@0.16").logit_bytes
    ('vllm@0.18', 38.5)
    """
    bare, at, release = str(name).partition("@")
    if bare not in ENGINES:
        raise UnknownNameError("engine", bare, f"must be one of {', '.join(ENGINES)}", ENGINES)
    eras = ENGINES[bare]
    if not at:
        return eras[-1]
    wanted = _order(name, release)
    begun = [era for era in eras if _order(era.name, era.name.partition("@")[2]) <= wanted]
    if not begun:
        raise InputError("engine", name, f"the oldest release modelled is {eras[0].name}")
    if wanted > NEWEST[bare]:
        newest = ".".join(map(str, NEWEST[bare]))
        raise InputError("engine", name, f"the newest release that was read is {bare}@{newest}")
    return begun[-1]


def _order(name: str, release: str) -> tuple[int, int]:
    match = _RELEASE.fullmatch(release)
    if match is None:
        raise InputError("engine", name, "a release has the form of vllm@0.19 or sglang@0.5")
    return int(match[1]), int(match[2])


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
    return {option.name: value_of(option, raw[option.name]) for option in rows}


def value_of(option: Option, value: Any) -> Any:
    """A word as its kind is read, of an engine or of post-training; InputError for any other."""
    if option.kind == "fraction":
        return share(value, option.name)
    if option.kind == "name":
        return one_of(str(value), option.name, option.values)
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
