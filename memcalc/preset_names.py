"""Names of presets as people type them: forms that mean the same, and the sentence for what none is."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from memcalc.errors import UnknownNameError, nearest

_FORM = r"hf|chat|instruct|base|it|pt|sft|dpo"
_TUNED = re.compile(rf"[-_]({_FORM}|128k|4k|8k|\d+k|2507|unsloth|bnb-4bit|gptq|awq|v[01]\.\d)$")
"""What is appended to a model's name by its form or its training, and changes no size."""
_FORM_WITHIN = re.compile(rf"[-_]({_FORM})(?=[-_]|$)")
_MOST_LISTED = 8


def key(name: str) -> str:
    """A name as presets and aliases are looked up."""
    return name.strip().casefold().replace(" ", "-").replace("_", "-")


def shortened(name: str) -> list[str]:
    """A model's name without its owner on the Hub, and what is left of it as its forms and endings are taken off.

    >>> shortened("mistralai/Mistral-7B-Instruct-v0.3")
    ['mistral-7b-instruct-v0.3', 'mistral-7b-v0.3', 'mistral-7b']
    """
    plain = name.rstrip("/").rpartition("/")[2].lower()
    names = [plain, _FORM_WITHIN.sub("", plain)]
    while match := _TUNED.search(names[-1]):
        names.append(names[-1][: match.start()])
    return list(dict.fromkeys([*names, *(short.removeprefix("meta-") for short in names)]))


def is_hub_id(name: str) -> bool:
    """Whether a name may be that of a repository on the Hub: OWNER/NAME.

    >>> is_hub_id("Qwen/Qwen2.5-7B"), is_hub_id("./config"), is_hub_id("a/b/c")
    (True, False, False)
    """
    return re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name) is not None and not name.endswith((".json", ".toml"))


def unknown(kind: str, name: str, names: Iterable[str], aliases: Mapping[str, str]) -> UnknownNameError:
    """The error for a name that no preset of a kind has: all that begin with it, or the nearest.

    >>> print(unknown("gpu", "a100", ["a100-40g", "a100-80g", "a10"], {}))
    gpu 'a100' is not known: it may be a100-40g or a100-80g.
    """
    known = sorted(names)
    begun = [other for other in known if other.startswith(f"{key(name)}-")]
    if 1 < len(begun) <= _MOST_LISTED:
        return UnknownNameError(kind, name, f"it may be {', '.join(begun[:-1])} or {begun[-1]}")
    like = nearest(name, {*known, *aliases})
    allowed = f"must be one that `memcalc {kind}s` lists, or a .toml file"
    if kind == "model" and is_hub_id(name):
        allowed = "no preset has that name and nothing is downloaded here: give the path of its config.json"
        like = nearest(name.partition("/")[2], {*known, *aliases})
    return UnknownNameError(kind, name, allowed, suggestion=aliases.get(like or "", like))
