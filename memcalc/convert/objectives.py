"""What a file or a command trains, where that is not the next token of a decoder; and those that train nothing.

Their memory is another than what the arguments alone come to: pairs of answers, models beside the one that is trained,
generation. So they are refused by name, with the exit code of a question, and have no verdict.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from importlib.resources import files
from typing import Any, NoReturn

from memcalc.catalog import read_toml
from memcalc.convert.document import Document
from memcalc.errors import FragmentError, IdleError, ObjectiveError, UnknownFormatError, cut

_TABLES = read_toml(files("memcalc.convert") / "objectives.toml")
METHODS: dict[str, str] = _TABLES["methods"]
"""What training by each method does, by its name."""
_CALLED: dict[str, str] = {**{name.replace("-", "_"): name for name in METHODS}, **_TABLES["called"]}
_KEYS = {method: frozenset(text.split()) for method, text in _TABLES["keys"].items()}
_LOSSES = {name: method for method, text in _TABLES["losses"].items() for name in text.split()}
_WORDS = re.compile(r"[a-z]+")
ALGORITHMS = {
    "grpo": "grpo", "dapo": "dapo", "rloo": "rloo", "dpo": "dpo", "ipo": "dpo", "kto": "kto", "orpo": "orpo",
    "simpo": "simpo", "cpo": "simpo", "reward": "reward", "gdpo": "grpo",
}  # fmt: skip
"""By method the algorithm of ``memcalc rl`` that has its roles; CPO's are those of SimPO."""
ROLES = ("verl", "verl_tuning", "openrlhf", "nemo_rl")
"""Formats of post-training, whose arguments say what is trained."""
SUPERVISED = "has no figures for this"
_TRAINERS = _TABLES["trainers"]
_SWITCHES = re.compile(_TABLES["switches"]["choose"])
_IDLE_SWITCHES = re.compile(_TABLES["switches"]["idle"])
_FORKS = re.compile(_TABLES["switches"]["forks"])
_OFF = frozenset(_TABLES["switches"]["off"].split())


def method_called(name: str) -> str:
    """The method that a word of a config or command names; empty for supervised training, or a name not known.

    >>> method_called("DPO"), method_called("rm"), method_called("sft")
    ('dpo', 'reward', '')
    """
    return _CALLED.get(name.lower().replace("-", "_"), "")


def method_of_script(script: str) -> str:
    """The method that a script, a module or a recipe is named after.

    >>> method_of_script("trl/scripts/dpo.py"), method_of_script("lora_dpo_distributed"), method_of_script("train.py")
    ('dpo', 'dpo', '')
    """
    stem = script.rpartition("/")[2].lower().removesuffix(".py").rpartition(".")[2].replace("-", "_")
    if stem in _CALLED:
        return _CALLED[stem]
    for longer in (name for name in _CALLED if "_" in name):
        if longer in stem:
            return _CALLED[longer]
    ambiguous = ("reward", "reinforce", "distillation", "embedding")
    short = {name for name in _CALLED if "_" not in name and name not in ambiguous}
    return next((_CALLED[word] for word in _WORDS.findall(stem) if word in short), "")


def method_of_keys(data: Mapping[str, Any]) -> tuple[str, str]:
    """The method whose arguments a config of TRL has, and those; both empty for supervised training.

    >>> method_of_keys({"beta": 0.1, "max_prompt_length": 512})
    ('dpo', 'beta, max_prompt_length')
    """
    kind = data.get("loss_type")
    named = _LOSSES.get(str(kind).lower(), "") if isinstance(kind, str) else ""
    for method, keys in _KEYS.items():
        present = sorted(key for key in keys if data.get(key) is not None)
        if present:
            return named or method, ", ".join(present)
    return named, f"loss_type {kind}" if named else ""


def refuse_method(where: str, method: str, evidence: str) -> None:
    """Refuse training by a method; ``evidence`` says what tells it. Nothing for an empty one."""
    if method:
        says = "does not read its arguments: give memcalc rl what it trains" if method in ALGORITHMS else SUPERVISED
        raise ObjectiveError(
            f"{where} trains by {method.upper()} ({evidence}), which {METHODS[method]}: memcalc {says}."
        )


def refuse_task(where: str, task: str, evidence: str = "task_type") -> None:
    """Refuse a task whose head is no language model's, of which ``evidence`` tells; nothing for `causal_lm`."""
    if task in _TABLES["tasks"]:
        raise ObjectiveError(
            f"{where} trains {task} ({evidence}), which {_TABLES['tasks'][task]}: memcalc {SUPERVISED}."
        )


def refuse_library(where: str, script: str, flags: Iterable[str] = (), form: str = "") -> None:
    """Refuse a command of a library whose own arguments are not read; its ``flags`` tell some of them.

    Of a ``form`` whose arguments are read it refuses what by its name places the roles otherwise than they say.
    """
    if form in ROLES:
        stem = {*re.split(r"[_.]+", script.rpartition("/")[2].removesuffix(".py").rpartition(".")[2])}
        if form == "verl" and stem & {*_TABLES["placements"]["words"].split()}:
            raise ObjectiveError(
                f"{where} starts {cut(script)}, which by its name gives its roles GPUs of their own: memcalc rl "
                "answers for roles that share them, and for engines apart."
            )
        return
    parts = [*script.removesuffix(".py").replace("/", ".").split("."), *sorted(flags)]
    library = next((part for part in parts if part in _TABLES["libraries"]), "")
    if library and _TABLES["read"].get(library) not in parts:
        name = _TABLES["libraries"][library]
        raise ObjectiveError(
            f"{where} starts {name} ({cut(script)}), whose arguments are not read: {_answering(name, script)}."
        )


def _answering(library: str, script: str) -> str:
    """Which command answers for what a script of a library trains, or that none does."""
    method = method_of_script(script)
    if method not in ("", "ppo", "reinforce", *ALGORITHMS):
        return f"it {METHODS[method]}, for which memcalc has no figures"
    optimizes = method or (library in _TABLES["optimizing"]["libraries"] and "sft" not in script.lower())
    return f"give memcalc {'rl' if optimizes else 'estimate'} what it trains"


def refuse_pictures(where: str, script: str, flags: Iterable[str] = ()) -> None:
    """Refuse a script that is named after a model of pictures made by diffusion, or has such a trainer's ``flags``."""
    names, needed, sizes = ({*_TABLES["pictures"][part].split()} for part in ("words", "flags", "sizes"))
    parts = dict.fromkeys(re.split(r"[_.-]+", script.rpartition("/")[2].lower()))
    evidence = [part for part in parts if part in names]
    sized = sorted(sizes & {*flags})
    if not evidence and (needed <= {*flags} or ("train_batch_size" in {*flags} and len(sized) > 1)):
        evidence = sized
    if evidence:
        raise ObjectiveError(
            f"{where} trains a model of pictures ({cut(script)}: {', '.join(evidence)}): memcalc {SUPERVISED}."
        )


_OF_TRL = re.compile(r"(^|[/.])(trl|examples[/.]scripts)[/.]")


def trainers_script(launcher: str, script: str) -> str:
    """What takes arguments of the Trainer: ``trl`` for TRL's own commands and scripts, else the script.

    >>> trainers_script("trl", "sft"), trainers_script("", "trl/scripts/sft.py"), trainers_script("", "sft.py")
    ('trl', 'trl', 'sft.py')
    """
    return "trl" if launcher == "trl" or _OF_TRL.search(script) else script


def refuse_heads(where: str, script: str) -> None:
    """Refuse a script that is named after a task whose head is no language model's."""
    stem = script.rpartition("/")[2].lower().removesuffix(".py")
    heads = _TABLES["heads"]
    if stem in heads["scripts"].split() or {*re.split(r"[_.-]+", stem)} & {*heads["words"].split()}:
        raise ObjectiveError(
            f"{where} starts {cut(script)}, whose task by its name has another head than a language model's: memcalc "
            f"{SUPERVISED}."
        )


def refuse_switches(where: str, data: Mapping[str, Any], *, engine: bool = False) -> None:
    """Refuse arguments of a script's own that choose what is trained or how weights are stored.

    ``engine``: DeepSpeed is on without a config, which its script then makes, as those of DeepSpeed-Chat do.
    """
    if engine and (key := next((name for name in data if name.endswith("zero_stage")), "")):
        raise ObjectiveError(
            f"{where} has {key} {cut(str(data[key]))} and no DeepSpeed config, which its script makes itself: give "
            "memcalc estimate --framework deepspeed what it trains."
        )
    for name, value in _turned_on(data, _SWITCHES):
        raise ObjectiveError(
            f"{where} has {name} {value}, a switch of its own script that may choose what is trained or how weights "
            "are stored: give memcalc estimate what it does (--lora, --quantize, --trainable, …)."
        )


def refuse_forks(where: str, data: Mapping[str, Any]) -> None:
    """Refuse arguments of a fork of Megatron-LM that change the model, its states or what is kept of it."""
    for name, value in _turned_on(data, _FORKS):
        raise ObjectiveError(
            f"{where} has {name} {value}, an argument of a fork of Megatron-LM that may change the model or its "
            "states: give memcalc estimate what it trains."
        )


def _turned_on(data: Mapping[str, Any], pattern: re.Pattern[str]) -> Iterator[tuple[str, str]]:
    """Arguments whose names are of a pattern, with values that turn something on."""
    for name, value in data.items():
        key = str(name).lower()
        if isinstance(value, dict) or _IDLE_SWITCHES.fullmatch(key) or not pattern.fullmatch(key):
            continue
        if str(value).strip("\"' ").lower() not in _OFF:
            yield cut(str(name)), cut(str(value))


def refuse_megatron(where: str, script: str, flags: Iterable[str] = ()) -> None:
    """Refuse a script of Megatron-LM for another kind of model than its arguments are read as."""
    stem = script.rpartition("/")[2].removesuffix(".py")
    if other := sorted({*_TABLES["megatron_flags"]} & {*flags}):
        raise ObjectiveError(
            f"{where} starts {cut(script)} with --{other[0].replace('_', '-')}, which is for "
            f"{_TABLES['megatron_flags'][other[0]]}: memcalc {SUPERVISED}."
        )
    if kind := _TABLES["megatron"].get(stem, ""):
        raise ObjectiveError(
            f"{where} starts {stem}.py, which trains {kind}: memcalc reads a decoder's arguments only, and gives no "
            "figures for this."
        )


_LISTED = 4
"""What a sentence names of a file's other work."""


def refuse_idle(where: str, evidence: Iterable[str]) -> None:
    """Refuse a file of which ``evidence`` tells that it trains nothing."""
    names = [*dict.fromkeys(cut(" ".join(text.split())) for text in evidence)]
    listed = ", ".join(names[:_LISTED] + ["…"] * (len(names) > _LISTED))
    raise IdleError("file", where, f"starts no training ({listed})")


def refuse_unknown(where: str, *, fragment: bool) -> NoReturn:
    """Refuse a script with no command of a training; a ``fragment`` sets variables, and no more."""
    if fragment:
        raise FragmentError("file", where, "it sets variables for a script beside it: give the one that starts")
    allowed = "must start a training: it has no command that memcalc knows"
    if where.endswith(".py"):
        allowed = (
            "is Python, of which no setting is read: give them as options, as in memcalc estimate --model qwen3-8b "
            "--gpu 3090 --framework hf --lora 16 --quantize nf4 --recompute full, or the config files that it reads"
        )
    raise UnknownFormatError("file", where, allowed)


def refuse_trainer(document: Document) -> None:
    """Refuse a config of a trainer that is known by its keys and not read, so that none is taken for another's."""
    data = document.data if isinstance(document.data, dict) else {}
    keys = {str(key).replace("-", "_") for key in data}
    keys |= {f"{key}.{inner}" for key, table in data.items() if isinstance(table, dict) for inner in table}
    for row in _TRAINERS["table"]:
        if keys.issuperset(signs := row["keys"].split()):
            says = _TRAINERS[row.get("says", "says")]
            raise ObjectiveError(f"{document.path.name} is a config of {row['name']} ({', '.join(signs)}), {says}.")
    if {"apiVersion", "kind"} <= keys:
        raise ObjectiveError(
            f"{document.path.name} is a Kubernetes manifest ({cut(str(data['kind']))}), of which no command is read: "
            "give the script that its container starts, or its command as one."
        )
