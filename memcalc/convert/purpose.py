"""What a command is for, by the name of its script and its flags: training, other work, or neither is said.

The names are those of public scripts. A folder says least, so that it counts only where the script's own name and its
flags say nothing; a verb that comes first says what is done, and a training's own flags have the last word.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from memcalc.convert.launchers import TABLES, Launch
from memcalc.convert.shell_values import Token

_OTHER, _HARD, _TRAINS = (re.compile(TABLES["purpose"][name]) for name in ("other", "hard", "trains"))
_TRAINING_FLAGS = frozenset(TABLES["purpose"]["flags"].split())
_SUBCOMMANDS = frozenset(TABLES["trains"]) - {"tune"}


def flags_of(tokens: Sequence[Token]) -> set[str]:
    """The names of the flags among some words, with underscores."""
    return {
        token.text.partition("=")[0].lstrip("-").replace("-", "_") for token in tokens if token.text.startswith("--")
    }


def recipe_of(launch: Launch) -> str:
    """What is started: the script, the module, the subcommand, or the recipe of `tune run`."""
    return launch.arguments[0].text if launch.launcher == "tune" and launch.arguments else launch.script


def is_other_work(launch: Launch) -> bool:
    """Whether a command's name says that it does not train: it evaluates, converts, prepares data."""
    if launch.launcher in TABLES["trains"] and not re.fullmatch(TABLES["trains"][launch.launcher], launch.script):
        return True
    if launch.launcher in _SUBCOMMANDS or _TRAINING_FLAGS & flags_of(launch.arguments):
        return False
    return names_other_work(recipe_of(launch))


def names_other_work(script: str) -> bool:
    """Whether the path of a script, a module or a recipe names other work than training.

    >>> [names_other_work(f"{name}.py") for name in ("chat/finetune", "finetune_and_eval", "train_generator")]
    [False, False, False]
    >>> [names_other_work(f"{name}.py") for name in ("eval/run", "convert_pretrained", "generate_train_data")]
    [True, True, True]
    >>> names_other_work("verl.trainer.main_generation"), names_other_work("verl.trainer.main_ppo")  # modules
    (True, False)
    """
    path = script.lower()
    is_module = "/" not in path and not path.endswith(".py")
    folder, _, name = (path.replace(".", "/") if is_module else path).rpartition("/")
    parts = [part for part in re.split(r"[_.-]+", name.removesuffix(".py")) if part]
    if not any(map(_TRAINS.fullmatch, parts)):
        return any(map(_OTHER.fullmatch, [*parts, *re.split(r"[/_.-]+", folder)]))
    return bool(_HARD.fullmatch(parts[0]) or (_OTHER.fullmatch(parts[0]) and not _TRAINS.fullmatch(parts[-1])))
