"""A request: the options of a job, each read and checked by itself."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, get_args

from memcalc import calibrations
from memcalc.errors import InputError, UnknownNameError
from memcalc.formulas.recompute import NAMES, PATTERNS, parse_policy
from memcalc.frameworks import habits_of
from memcalc.specs import adapters
from memcalc.specs.options import BY_NAME, COMMAND_LINE, FIELDS, OPTIONS, SEARCHED, SETTINGS, WORDS, meant
from memcalc.specs.strategy import FRAMEWORKS, Offload
from memcalc.units import parse_bytes, parse_count, parse_token_batch, parse_tokens

LARGEST_NUMBER = {"critical_batch": 10**12, "tokens": 10**15} | {row.word: row.most for row in OPTIONS}
"""By keyword, also of a search's own."""
SMALLEST_NUMBER = {row.word: row.least for row in OPTIONS}
"""By keyword; 1 where it is none of these."""
TOKENS = frozenset(row.name for row in COMMAND_LINE if row.unit == "tokens")
"""Options that count tokens, of which 4k are 4096."""


@dataclass
class Request:
    """Checked words: None where the user said nothing."""

    given: dict[str, Any]
    assumptions: dict[str, str] = field(default_factory=dict)
    choices: dict[str, Choice] = field(default_factory=dict)
    """Words of which several values were given."""
    calibration: str = ""
    """What names the calibration again: a file, or none where it is switched off; empty where there is none."""
    warnings: tuple[str, ...] = ()
    """What an answer has to say of the model as it was named."""
    beyond: bool = False
    """Whether a search also tries what the framework cannot be told, which needs code of one's own."""
    several: bool = False
    """Whether a search decides what is left out, and not the defaults of one strategy alone."""
    launched: bool = False
    """Whether FSDP 2, which nobody named, is that of Accelerate and the Trainer: memcalc's script does not run it."""

    def get(self, name: str, default: Any, note: str = "") -> Any:
        """The user's value, or the default, which is then noted as an assumption."""
        if self.given.get(name) is not None:
            return self.given[name]
        self.assumptions[name] = note or str(default)
        return default


def check_words(raw: Mapping[str, Any], settings: Mapping[str, Any] | None, *, several: bool = False) -> Request:
    """Check each word by itself; unknown names and impossible numbers are refused here.

    With ``several`` a word that a search can leave open may have several values.
    """
    unknown = next((name for name in raw if name not in WORDS), None)
    if unknown is not None:
        raise UnknownNameError("word", unknown, f"must be one of {', '.join(WORDS)}", WORDS)
    merged = {**raw, **_settings(settings or {})}
    given: dict[str, Any] = {name: value for name, value in merged.items() if value is not None}
    given["fields"] = _fields(settings or {})
    choices: dict[str, Choice] = {}
    for name in [name for name in given if name != "fields"]:
        value = _read(name, given[name])
        if isinstance(value, Choice):
            if not several:
                raise InputError(flag(name), given[name], "takes one value; memcalc plan accepts several")
            choices[name] = value
            del given[name]
        else:
            given[name] = value
    if given.get("quantize", "none") != "none":  # a base that is not trained: adapters of the usual rank are
        given.setdefault("lora", adapters.parse_lora(adapters.USUAL))
    return Request(given, choices=choices, several=several)


def _read(name: str, value: Any) -> Any:
    if name not in SEARCHED or (name == "offload" and not isinstance(value, str)):
        return _value(name, value)
    number = BY_NAME[name].kind in ("count", "stage")
    return parse_choice(flag(name), value, lambda text: _value(name, text), number=number)


def _value(name: str, value: Any) -> Any:
    option = BY_NAME[name]
    if option.kind == "count":
        return positive(value, name)
    if option.kind == "name":
        return one_of(value, name, option.values)
    if option.kind == "flag":
        return boolean(value, name)
    if option.kind == "factor":
        return factor(value, name)
    return PARSERS[option.kind](value) if option.kind in PARSERS else value


def _fields(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The values of the options that ``--set`` alone takes, by the name after the dot."""
    stated = {FIELDS[key]: value for key, value in settings.items() if key in FIELDS}
    return {option.name: FIELD_PARSERS[option.kind](option.key, value) for option, value in stated.items()}


def _settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    known = (*SETTINGS, *FIELDS)
    unknown = next((key for key in settings if key not in known), None)
    if unknown is not None:
        raise InputError("set", unknown, f"a field is one of {', '.join(known)}", known)
    return {SETTINGS[key]: value for key, value in settings.items() if key in SETTINGS}


def flag(name: str) -> str:
    """The name of an option, or of a dotted field, as typed."""
    return name if "." in name else name.replace("_", "-")


def positive(value: object, name: str) -> int:
    """A whole number within the bounds of an option, by its name or dotted name; by default from 1 to a million."""
    least, most = SMALLEST_NUMBER.get(name, 1), LARGEST_NUMBER.get(name, 1_000_000)
    parse = parse_tokens if name in TOKENS else parse_count
    with suppress(InputError):
        number = parse(value, flag(name))
        if least <= number <= most:
            return number
    raise InputError(flag(name), value, f"must be a whole number from {least} to {most:,}")


def factor(value: object, name: str) -> float:
    """A number from 1."""
    most = BY_NAME[name.rpartition(".")[2]].most
    with suppress(TypeError, ValueError):
        number = float(str(value))
        if 1.0 <= number <= most:
            return number
    raise InputError(flag(name), value, f"must be a number from 1 to {most:,}")


def one_of(value: object, name: str, allowed: tuple[str, ...]) -> str:
    """One of the allowed names."""
    if not isinstance(value, str) or value not in allowed:
        sentence = f"must be one of {', '.join(allowed)}"
        raise InputError(flag(name), value, sentence, allowed, suggestion=meant(name, value))
    return value


def boolean(value: object, name: str) -> bool:
    """True or false, also as text."""
    if isinstance(value, str) and value.lower() in {"true", "false"}:
        return value.lower() == "true"
    if not isinstance(value, bool):
        raise InputError(flag(name), value, "must be true or false")
    return value


def framework(value: object) -> str:
    """A framework's name, with an era where one is given."""
    if value == ANY:
        raise InputError("framework", value, f"it is not searched: name one of {', '.join(FRAMEWORKS)}")
    if instead := meant("framework", value):
        allowed = f"must be one of {', '.join(FRAMEWORKS)}"
        raise UnknownNameError("framework", value, allowed, suggestion=instead)
    habits_of(str(value))
    return str(value)


def zero(value: object) -> int:
    """A ZeRO stage."""
    if str(value) not in {"0", "1", "2", "3"}:
        raise InputError("zero", value, "must be 0, 1, 2 or 3", suggestion=meant("zero", value))
    return int(str(value))


def recompute(value: object) -> str:
    """A recompute policy's name."""
    if instead := meant("recompute", value):
        raise InputError("recompute", value, f"must be one of {', '.join((*NAMES, *PATTERNS))}", suggestion=instead)
    return parse_policy(str(value)).name


def offload(value: object) -> tuple[str, ...]:
    """A comma-separated list of what leaves the GPU, in a fixed order."""
    listed = [part.strip() for part in value.split(",")] if isinstance(value, str) else list(value)  # type: ignore[call-overload]
    for part in listed:
        if part == "cpu":
            allowed = f"says what leaves the GPU: {', '.join(get_args(Offload))}; where to is --offload-to cpu"
            raise InputError("offload", part, allowed, suggestion=meant("offload", part))
        one_of(part, "offload", ("none", *get_args(Offload)))
    if "none" in listed and len(listed) > 1:
        raise InputError("offload", ",".join(listed), "use none without other names")
    return tuple(name for name in get_args(Offload) if name in listed)


PARSERS: dict[str, Callable[[object], Any]] = {
    "calibration": calibrations.word,
    "framework": framework,
    "stage": zero,
    "policy": recompute,
    "offload": offload,
    "lora": adapters.parse_lora,
    "parts": adapters.parse_also_train,
}
"""How a kind of option is read that is neither a number nor a name; the global batch is, once the length is known."""


def _version(key: str, value: Any) -> str:
    if not re.fullmatch(r"\d+(\.\d+)*", str(value)):
        raise InputError(key, str(value), "must be a version, such as 0.43")
    return str(value)


def _fraction(key: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = -1.0
    if not 0.0 <= number < 1.0:
        raise InputError(key, value, "must be a number from 0 to below 1")
    return number


FIELD_PARSERS: dict[str, Callable[[str, Any], Any]] = {
    "name": lambda key, value: one_of(str(value), key, FIELDS[key].values),
    "flag": lambda key, value: boolean(value, key),
    "count": lambda key, value: positive(value, key),
    "bytes": lambda key, value: parse_bytes(value, key),
    "fraction": _fraction,
    "factor": lambda key, value: factor(value, key),
    "version": _version,
    "targets": adapters.parse_layers,
}
"""How a kind of option is read that ``--set`` alone takes."""


ANY, NOT, BETWEEN, OR = "any", "not:", "..", "/"


@dataclass(frozen=True)
class Choice:
    """Several values of one axis."""

    text: str
    listed: tuple[Any, ...] = ()
    """These and no others; empty where a range, an exclusion or ``any`` was given."""
    without: tuple[Any, ...] = ()
    least: int | None = None
    most: int | None = None
    unbounded: bool = False
    """All values there are, beyond those that a search tries by itself."""

    def of(self, usual: Iterable[Any], allowed: Iterable[Any] | None = None) -> list[Any]:
        """Those of the usual values that are wanted; ``every`` is all there are, in the order of preference."""
        if self.listed:
            return list(self.listed)
        if self.unbounded:
            return list(usual if allowed is None else allowed)
        bounded = self.least is not None or self.most is not None
        known = list(allowed) if bounded and allowed is not None else list(usual)
        return [value for value in known if self.takes(value)]

    def takes(self, value: Any) -> bool:
        """Whether a value is wanted."""
        if self.listed:
            return value in self.listed
        low = self.least is None or value >= self.least
        return low and (self.most is None or value <= self.most) and value not in self.without


def parse_choice(name: str, value: Any, parse: Callable[[Any], Any], *, number: bool = False) -> Any:
    """One value, read by ``one``, or a :class:`Choice`.

    Raises the error of ``one`` for a wrong value, and :class:`InputError` for a range that is none.

    >>> parse_choice("tp", "2/4", int).listed
    (2, 4)
    >>> parse_choice("tp", "..4", int, number=True).most
    4
    """
    if isinstance(value, list | set | frozenset):
        return Choice(OR.join(map(str, value)), listed=_unique(map(parse, value))) if len(value) != 1 else parse(*value)
    if not isinstance(value, str):
        return parse(value)
    text = value.strip()
    if text == ANY:
        return Choice(text, unbounded=True)
    if text.startswith(NOT):
        return Choice(text, without=_unique(map(parse, text.removeprefix(NOT).split(OR))))
    if number and BETWEEN in text:
        return _range(name, text, parse)
    if OR in text:
        return Choice(text, listed=_unique(map(parse, text.split(OR))))
    return parse(value)


def _unique(values: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(dict.fromkeys(values))


def _range(name: str, text: str, parse: Callable[[Any], Any]) -> Choice:
    low, _, high = text.partition(BETWEEN)
    least, most = (parse(end) if end.strip() else None for end in (low, high))
    if (least is None and most is None) or (least is not None and most is not None and least > most):
        raise InputError(name, text, "a range is low..high, low.. or ..high, such as 2..8")
    return Choice(text, least=least, most=most)


# ----------------------------------------------------------------------------------------------------- the global batch


DEFAULT_TOKENS = 524_288
"""Tokens of the default global batch: half a million, a common size for pretraining and continued training."""
MOST_TOKENS = 2**29
"""Tokens of a step above which a bare number of sequences is taken for a slip; published jobs stay below 2^28."""
ROUNDING = 0.05
"""How far a number of sequences may lie from tokens that are no multiple of the length; 4 x 1024^2 is 4.9% above 4M."""
MICRO_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Sequences a pass that are tried where the global batch is open."""
_BINARY_FROM = 512


def micro_batches_of(batch: int) -> list[int]:
    """Sequences a pass that a search tries for a global batch: each of its divisors, up to 128.

    A rank's share of 1,280 sequences over 128 ranks goes in one pass of 10 (NousResearch/torchtitan pull request 19).

    >>> micro_batches_of(20)
    [1, 2, 4, 5, 10, 20]
    """
    return [size for size in range(1, MICRO_BATCHES[-1] + 1) if batch % size == 0]


def batch_of(request: Request, seq_len: int, micro_steps: int = 1) -> int:
    """Global batch [sequences] of sequences of `seq_len` [tokens].

    ``micro_steps`` are the sequences that all ranks take at once; the default, and tokens that are no multiple of the
    length, come to a multiple of them.
    """
    raw = request.given.get("global_batch")
    if raw is None:
        sequences = max(DEFAULT_TOKENS // seq_len, 1)
        sequences = max(1 << (sequences.bit_length() - 1), micro_steps)
        sequences = -(-sequences // micro_steps) * micro_steps
        return int(request.get("global_batch", sequences, f"{sequences} sequences ({sequences * seq_len:,} tokens)"))
    if in_tokens(raw):
        number = sequences_of(tokens_of(raw, seq_len), seq_len, micro_steps)
        request.assumptions["global_batch"] = f"{number} sequences ({number * seq_len:,} tokens)"
    else:
        number = parse_count(raw, "global-batch")
        _refuse_slip(raw, number, seq_len)
    if not 0 < number <= LARGEST_NUMBER["global_batch"]:
        most = LARGEST_NUMBER["global_batch"]
        allowed = f"must be from one sequence of {seq_len:,} tokens to {most:,} sequences"
        raise InputError("global-batch", raw, allowed)
    return number


def in_tokens(raw: object) -> bool:
    """Whether a global batch was typed in tokens."""
    return isinstance(raw, str) and raw.strip().lower().endswith(("token", "tokens"))


def tokens_of(raw: object, seq_len: int) -> int:
    """Tokens as typed; k and M are powers of 1024 where the length is counted so (a multiple of 512), else of 1000.

    >>> tokens_of("4M tokens", 4096), tokens_of("4M tokens", 4000)
    (4194304, 4000000)
    """
    return parse_token_batch(raw, "global-batch", binary=seq_len % _BINARY_FROM == 0)


def sequences_of(tokens: int, seq_len: int, micro_steps: int = 1) -> int:
    """Sequences of a batch of `tokens`: exact where that is whole steps, else a number that many layouts divide.

    Of the numbers within 5% that is a multiple of ``micro_steps`` where there is one, and of the largest power of two.

    >>> sequences_of(4_194_304, 4096), sequences_of(4_000_000, 4000), sequences_of(4_000_000, 4096)
    (1024, 1000, 1024)
    """
    if tokens < seq_len or tokens % (seq_len * micro_steps) == 0:
        return tokens // seq_len
    exact = tokens / seq_len
    low, high = exact * (1 - ROUNDING), exact * (1 + ROUNDING)
    steps = micro_steps if high // micro_steps * micro_steps >= low else 1
    least, most = max(-int(-low // steps), 1), int(high // steps)
    if least > most:
        return round(exact)
    power = next(1 << k for k in reversed(range(most.bit_length())) if most >> k << k >= least)
    return min(range(-(-least // power) * power, most + 1, power), key=lambda n: abs(n * steps - exact)) * steps


def _refuse_slip(raw: object, number: int, seq_len: int) -> None:
    """Refuse a bare number of sequences that no one trains with, which is then most likely one of tokens."""
    typed = isinstance(raw, str) and "seq" in raw.lower()
    if number * seq_len > MOST_TOKENS and not typed:
        allowed = f"means {number * seq_len:,} tokens per step; write '{raw} tokens' or '{raw} sequences'"
        raise InputError("global-batch", raw, allowed)
