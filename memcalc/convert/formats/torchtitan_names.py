"""Names of torchtitan's TOML: keys with the day until which it took them, and models with the presets of their sizes.

Keys: every commit that changed ``config_manager.py`` or ``config/job_config.py``, from the first of February 2024 to
73a0e6979 of February 2026, which is 0.2.2, the last release that reads TOML: 9810191bb replaced it by functions.
Models: 0.2.2 models/*/__init__.py. The flavors of Llama 3 have the sizes of 3 and 3.1 alike; 3.1 stands for both, as
their assets are those of 3.1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memcalc.convert.formats.base import key_table

if TYPE_CHECKING:
    from memcalc.convert.document import Document


LAST = "2026-02-23"
"""The day on which TOML went."""
KEYS = key_table("torchtitan")
CURRENT = frozenset(KEYS.lists["newest"])
"""What 0.2.2 takes."""
REMOVED = {key: day for day, keys in KEYS.tables["removed"].items() for key in keys.split()}
"""By key: the day on which a commit removed or renamed it."""
SPELLED: dict[str, tuple[tuple[str, str], ...]] = {
    name: tuple((since, key) for since, key in spelled) for name, spelled in KEYS.tables["spelled"].items()
}
"""By the name of 0.2.2: the days since which a setting has had its names, the newest first."""
FLAVORS: dict[str, dict[str, str]] = {
    "llama3": {"8B": "llama-3.1-8b", "70B": "llama-3.1-70b", "405B": "llama-3.1-405b"},
    "deepseek_v3": {"16B": "deepseek-v2-lite", "236B": "deepseek-v2", "671B": "deepseek-v3"},
    "qwen3": {
        **{f"{size}B": f"qwen3-{size}b" for size in ("0.6", "1.7", "4", "8", "14", "32")},
        "30B-A3B": "qwen3-30b-a3b",
        "235B-A22B": "qwen3-235b-a22b",
    },
    "gpt_oss": {"20b": "gpt-oss-20b", "120b": "gpt-oss-120b"},
    "llama2": {"7B": "llama-2-7b", "13B": "llama-2-13b", "70B": "llama-2-70b"},
}
"""Presets by name and flavor; ``llama2`` (first called ``llama``) was there until February 2025."""
PRESETS = frozenset(preset for flavors in FLAVORS.values() for preset in flavors.values())
FLEXIBLE = frozenset({"deepseek_v3"})
"""Models whose flavors run FlexAttention; flavors of others say so in their name."""
_DEBUG = {"name": "llama3-debugmodel", "n_layers": 6, "hidden": 256, "heads": 16, "ffn": 768, "vocab": 2048,
          "max_positions": 131072}  # fmt: skip
"""dim 256; 8/3 of it rounded up to a multiple of 256."""


def until(document: Document) -> tuple[str, str]:
    """The day until which torchtitan took all keys of a document, and the key that decides; unknown ones aside."""
    removed = [(day, key) for key, day in REMOVED.items() if _has(document.data, key)]
    return min(removed, default=(LAST, ""))


def _has(data: Any, key: str) -> bool:
    for part in key.split("."):
        if not isinstance(data, dict) or part not in data:
            return False
        data = data[part]
    return True


def spelling(document: Document, key: str) -> str:
    """How a document's torchtitan calls a setting; empty where it does not have it."""
    day, _ = until(document)
    return next((name for since, name in SPELLED.get(key, (("", key),)) if since < day), "")


def model_of(name: str, flavor: str) -> str | dict[str, Any]:
    """Return the preset or the sizes of a flavor; a name that is no preset where neither is known.

    >>> model_of("llama3", "8B_flex")
    'llama-3.1-8b'
    """
    family = {"llama": "llama2"}.get(name, name)
    plain = flavor.removesuffix("_attn").removesuffix("_flex").removesuffix("_varlen")
    if family == "llama3" and plain == "debugmodel":
        return dict(_DEBUG)
    return FLAVORS.get(family, {}).get(plain, f"{name} {flavor}")


def flavor_of(preset: str) -> tuple[str, str] | None:
    """Return name and flavor of a preset, or None where torchtitan has none.

    >>> flavor_of("llama-3-8b")
    ('llama3', '8B')
    """
    alike = preset.replace("llama-3-", "llama-3.1-")
    for name, flavors in FLAVORS.items():
        for flavor, known in flavors.items():
            if known == alike and name != "llama2":
                return name, flavor
    return None
