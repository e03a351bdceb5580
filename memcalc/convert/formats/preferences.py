"""What trainers that stand upon TRL's say of preferences and rewards: axolotl, LLaMA-Factory, ms-swift.

Their classes hold whole logits, as TRL's own did until 1.14.
"""

from __future__ import annotations

from memcalc.convert.config import ConfigReader
from memcalc.convert.objectives import ALGORITHMS, refuse_method
from memcalc.errors import ObjectiveError


def set_algorithm(reader: ConfigReader, method: str, key: str, stated: str, framework: str = "trl") -> str:
    """Set what a method optimizes, by roles that are counted, or refuse it; empty for the next token."""
    if method not in ALGORITHMS:
        refuse_method(reader.document.path.name, method, f"{key}: {stated}")
        return ""
    reader.set("rl.algorithm", ALGORITHMS[method], key)
    reader.set("rl.framework", framework, key)
    reader.set("rl.logits", "plain", key)  # kernels of blocks alone do not fuse this loss
    return ALGORITHMS[method]


def refuse_reference(reader: ConfigReader, model: str, keys: tuple[str, ...], *, adapters: bool) -> None:
    """Refuse a reference that is another model than the policy, or that stands beside adapters: neither is counted."""
    for key in keys:
        stated = reader.text(key)
        if stated.lower() not in ("", "false") and (adapters or stated not in (model, "true")):
            raise ObjectiveError(
                f"{reader.document.path.name} has a reference model of its own ({key} {stated}): memcalc rl counts the "
                f"policy's {'weights with its adapters off' if adapters else 'first weights'} alone."
            )
