"""Commands that start a training job: the launcher, its options, the script, its arguments, the number of ranks.

Launchers' options are those of torchrun (torch 2.13, distributed/run.py), `accelerate launch` (Accelerate 1.15,
commands/launch.py) and `deepspeed` (DeepSpeed 0.19, launcher/runner.py).

What a command is for is told by the name of its script and its flags: training, other work, or neither is said. The
names are those of public scripts. A folder says least, so that it counts only where the script's own name and its
flags say nothing; a verb that comes first says what is done, and a training's own flags have the last word.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files

from memcalc.catalog import read_toml
from memcalc.convert.config import ConfigReader
from memcalc.convert.directives import Option, options_of
from memcalc.convert.shell import Script
from memcalc.convert.shell_commands import Command
from memcalc.convert.shell_values import Token, assigned
from memcalc.errors import ObjectiveError
from memcalc.frameworks.environment import visible_gpus

TABLES = read_toml(files("memcalc.convert") / "launchers.toml")
"""Commands, their options, and how arguments tell their framework."""
_THROUGH, _TOOLS = (frozenset(TABLES["commands"][part].split()) for part in ("through", "tools"))
_NAMED = ("-J", "--job-name", "--name", "-o", "--output", "-n", "--comment", "-p", "--label", "-t", "--tag")
"""Options whose value may read as a starter does."""
_INSTALLING = ("pip", "pip3", "apt", "apt-get", "build", "pull", "push", "git", "wget", "curl")
"""Words behind which such names are packages, images or addresses."""
_STARTERS = re.compile(
    r"python(\d(\.\d+)?)?|torchrun|accelerate|accelerate-launch|deepspeed|[\w.-]*\.(py|sh|slurm|sbatch)"
)
_BARE = {name: frozenset(text.split()) for name, text in TABLES["bare"].items()}


@dataclass(frozen=True)
class LauncherOption:
    """One option of a launcher; its value is None where it has none."""

    flag: Token
    value: Token | None = None


@dataclass(frozen=True)
class Launch:
    """One command that starts a script."""

    launcher: str
    """torchrun, accelerate, deepspeed, python, shell, or the name of a tool such as axolotl."""
    script: str
    """A file, a module, or a tool's subcommand."""
    arguments: tuple[Token, ...]
    command: Command
    options: Mapping[str, LauncherOption] = field(default_factory=dict)
    """The launcher's own options, with underscores."""
    step: Mapping[str, Option] = field(default_factory=dict)
    """Options of the srun that runs it."""
    through: tuple[Token, ...] = ()
    """The words of a program that starts it, with options of its own."""

    @property
    def name(self) -> str:
        """The last part of the script's path, without its ending."""
        return self.script.rpartition("/")[2].removesuffix(".py")


def launch_of(command: Command) -> Launch | None:
    """Return what a command starts, or None where it starts no script."""
    tokens = command.tokens
    at = _begin(tokens)
    if at is None:
        return None
    command = replace(command, variables={**command.variables, **assigned(tokens[:at])})
    for cut in range(len(tokens) - 1, at, -1):
        # Another program takes the command behind a lone `--`, or a line of several, and starts it
        if (behind := _behind(tokens[cut:])) and _is_launcher(behind):
            inner = launch_of(replace(command, tokens=behind))
            return None if inner is None else replace(inner, command=command, through=tuple(tokens[at:cut]))
    step: dict[str, Option] = {}
    named = [token.text.rpartition("/")[2] for token in tokens[:at]]
    if "srun" in named:
        first = named.index("srun") + 1
        step, _ = options_of((token.text, token.positions[0] if token.positions else -1) for token in tokens[first:at])
    launcher, rest = _base(tokens[at]), tokens[at + 1 :]
    if launcher.startswith(("python", "-")):  # `uv run -m MODULE` starts Python itself
        launcher, rest = "python", tokens[at:] if launcher.startswith("-") else rest
    return _started(launcher, rest, command, step, tokens[at])


def _behind(tokens: Sequence[Token]) -> tuple[Token, ...]:
    """The words behind a lone `--` or a `&&` that is quoted, which may lead the next word; none where there is none."""
    first = tokens[0]
    if first.text.startswith("&&") and first.text != "&&":
        return (replace(first, text=first.text[2:], positions=first.positions[2:]), *tokens[1:])
    return tuple(tokens[1:]) if first.text in ("--", "&&") else ()


def _is_launcher(tokens: Sequence[Token]) -> bool:
    """Whether words begin with what starts a script, and are no script themselves."""
    if not tokens or re.search(r"[.](py|sh|slurm|sbatch)$", tokens[0].text):
        return False
    return _starts(tokens, 0) or (_base(tokens[0]) in _THROUGH and _begin(tokens) is not None)


def _base(token: Token) -> str:
    return token.text.rpartition("/")[2] if "=" not in token.text else token.text  # no path that is a value starts one


def _begin(tokens: Sequence[Token]) -> int | None:
    """Where the starter stands: at first, or behind commands that run another one."""
    if tokens and _starts(tokens, 0):
        return 0
    if not tokens or _base(tokens[0]) not in _THROUGH:
        return None
    for at in range(len(tokens)):
        if _base(tokens[at]) in _INSTALLING:
            return None
        if at and _starts(tokens, at) and tokens[at - 1].text not in _NAMED:
            return at
    return None


def _starts(tokens: Sequence[Token], at: int) -> bool:
    """Whether a word starts something: of a tool with the name of a package, one with a subcommand behind it."""
    name = _base(tokens[at])
    if name in ("-m", "--module"):
        return "uv" in map(_base, tokens[:at])
    if name in TABLES["ambiguous"]:
        return at + 1 < len(tokens) and tokens[at + 1].text in TABLES["ambiguous"][name].split()
    return bool(_STARTERS.fullmatch(name)) or name in _TOOLS


def _started(
    launcher: str, tokens: Sequence[Token], command: Command, step: Mapping[str, Option], starter: Token
) -> Launch | None:
    if launcher == "accelerate-launch":
        launcher = "accelerate"
    elif launcher == "accelerate":
        if not tokens or tokens[0].text != "launch":
            return None
        tokens = tokens[1:]
    if launcher in _TOOLS:
        return _tool(launcher, tokens, command, step) if tokens else None
    if launcher not in _BARE:
        kind = "python" if launcher.endswith(".py") else "shell"
        return Launch(kind, starter.text, tuple(tokens), command, {}, step)
    settings, rest = _settings(launcher, tokens)
    if launcher == "python" and ("c" in settings or "-" in settings):
        return None
    module = settings.get("module") if launcher == "python" else None
    if module is not None:
        name = module.value.text if module.value else ""
        if name in TABLES["installing"]["modules"].split():
            return None
        if name in TABLES["modules"]:
            started, _, lead = TABLES["modules"][name].partition(" ")
            return _started(started, [Token(lead), *rest] if lead else rest, command, step, starter)
        return Launch("python", name, tuple(rest), command, {}, step)
    if not rest:
        return None
    return Launch(launcher, rest[0].text, tuple(rest[1:]), command, settings, step)


def _tool(launcher: str, tokens: Sequence[Token], command: Command, step: Mapping[str, Option]) -> Launch:
    """A tool's subcommand: `tune run` takes torchrun's options before its recipe, `axolotl train` behind `--`."""
    settings, rest = dict[str, LauncherOption](), list(tokens[1:])
    if launcher == "nemo":  # `nemo llm pretrain --factory RECIPE`
        return Launch("python", ".".join(["nemo", *(token.text for token in tokens[:2])]), (), command, {}, step)
    if launcher == "tune":
        settings, rest = _settings("torchrun", rest)
    elif launcher == "axolotl":
        cut = next((at for at, token in enumerate(rest) if token.text == "--"), len(rest))
        settings, rest = _settings("torchrun", rest[cut + 1 :])[0], _without_launcher(rest[:cut])
    return Launch(launcher, tokens[0].text, tuple(rest), command, settings, step)


def _without_launcher(tokens: Sequence[Token]) -> list[Token]:
    """Arguments of axolotl without `--launcher`, which starts its ranks and is no key of its YAML (cli/main.py)."""
    at = next((at for at, token in enumerate(tokens) if token.text.split("=")[0] == "--launcher"), len(tokens))
    width = 1 if "".join(token.text for token in tokens[at : at + 1]).count("=") else 2
    return [*tokens[:at], *tokens[at + width :]]


def _settings(launcher: str, tokens: Sequence[Token]) -> tuple[dict[str, LauncherOption], list[Token]]:
    """The launcher's own options, and the words from its script on; python's -m ends its options."""
    bare = _BARE[launcher]
    options: dict[str, LauncherOption] = {}
    at = 0
    while at < len(tokens) and tokens[at].text.startswith("-"):
        token = tokens[at]
        at += 1
        text, equals, _ = token.text.partition("=")
        name = text.lstrip("-").replace("-", "_")
        name = TABLES["letters"].get(name, name) if not text.startswith("--") else name
        flag = Token(text, token.positions[: len(text)], "" if equals else token.unknown)
        if equals:
            begin = len(text) + 1
            options[name] = LauncherOption(flag, Token(token.text[begin:], token.positions[begin:], token.unknown))
        elif (name in bare and launcher != "python") or (launcher == "python" and set(name) <= bare):
            options[name] = LauncherOption(flag)
        elif at < len(tokens):
            options[name] = LauncherOption(flag, tokens[at])
            at += 1
        if launcher == "python" and name in ("module", "c"):
            break
    return options, list(tokens[at:])


def read_ranks(reader: ConfigReader, launch: Launch, script: Script) -> None:
    """Set the number of ranks that the launcher starts."""
    if launch.through:
        program = next((token.text for token in launch.through if token.text.endswith(".py")), launch.through[0].text)
        reader.ask("gpus", launch.script, "-", f"is started by {program}, whose own options say on how many GPUs")
        reader.harmless(*(key for key in reader.document.data if key.startswith(f"{launch.launcher} --")))
        return
    settings = {**script.variables, **launch.command.variables}
    seen = visible_gpus({name: token.text for name, token in settings.items() if not token.unknown})
    if launch.launcher == "torchrun" or "nproc_per_node" in launch.options:
        _torchrun(reader, launch, seen)
    elif launch.launcher == "deepspeed":
        _deepspeed(reader, launch, seen)
    elif launch.launcher == "accelerate":
        _accelerate(reader, launch, seen)
    elif launch.launcher == "shell":
        _set_from(reader, "gpus_per_node", "NGPU")
    elif launch.launcher == "tune" and any(token.text.endswith("_single_device") for token in launch.arguments[:1]):
        reader.set("gpus", 1, "tune run")  # torchtune's own recipes for one GPU, whatever it sees
    elif launch.launcher in ("swift", "megatron"):
        _swift(reader, None if launch.script == "rlhf" else seen)
    elif launch.launcher in ("llamafactory-cli", "axolotl", "lmf", "tune", "composer"):
        _set_from(reader, "gpus", f"{launch.launcher} --num_processes")
        _set_from(reader, "nodes", "NNODES")
        _set_from(reader, "gpus_per_node", "NPROC_PER_NODE")
        if seen is not None and not reader.has("NPROC_PER_NODE"):
            reader.set("gpus_per_node", seen, "CUDA_VISIBLE_DEVICES")
    elif launch.launcher == "python" and launch.step:
        keys = ("#SBATCH --ntasks-per-node", "srun --ntasks-per-node")
        key = next((key for key in keys if reader.raw(key)), None)
        if key is not None:
            reader.set("gpus_per_node", reader.integer(key, low=1), key)
        reader.harmless(*(key for key in reader.document.data if key.startswith("python --")))
    elif launch.launcher == "python" and not any(setting.name == "gpus_per_node" for setting in reader.settings):
        reader.set("gpus", 1, "python")


def _swift(reader: ConfigReader, seen: int | None) -> None:
    """`swift` and `megatron` of ms-swift start torchrun where NPROC_PER_NODE or NNODES says so, else one process.

    Each process takes its equal share of the GPUs that it sees, and the layers are laid over them (swift/utils/env.py,
    is_mp; swift/model/utils.py, get_default_device_map).
    """
    each, nodes = reader.integer("NPROC_PER_NODE", low=1), reader.integer("NNODES", low=1)
    several = [key for key in ("NPROC_PER_NODE", "NNODES") if (key,) in reader.document.unknown]
    _set_from(reader, "nodes", "NNODES")
    if each is None and nodes is None and not several:
        reader.set("gpus", 1, "swift" if seen is None else "CUDA_VISIBLE_DEVICES")
    else:
        _set_from(reader, "gpus_per_node", "NPROC_PER_NODE")
    ranks = each or 1
    if not several and seen is not None and seen > ranks and reader.text("SWIFT_SINGLE_DEVICE_MODE") != "1":
        raise ObjectiveError(
            f"{reader.document.path.name} shows {seen} GPUs to {ranks} process{'es' if ranks > 1 else ''}, over which "
            "ms-swift lays out the layers (device_map): memcalc has no figures for this, but has for "
            f"NPROC_PER_NODE={seen}."
        )


def _set_from(reader: ConfigReader, option: str, key: str) -> None:
    value = reader.integer(key, low=1)
    if value is not None:
        reader.set(option, value, key)
    elif (key,) in reader.document.unknown and not _is_stated(reader, option):
        _ask(reader, option, key)


def _is_stated(reader: ConfigReader, option: str) -> bool:
    return any(setting.name == option and setting.value is not None for setting in reader.settings)


def _torchrun(reader: ConfigReader, launch: Launch, seen: int | None) -> None:
    """`--nproc-per-node` is a number, gpu or auto; with `--nnodes 1:4` the fewest nodes count: each then keeps most."""
    lead = f"{launch.launcher} --"
    each, nodes = f"{lead}nproc_per_node", f"{lead}nnodes"
    all_seen = str(reader.raw(each, "")).lower() in ("gpu", "auto")
    if all_seen and seen is not None:
        reader.set("gpus_per_node", seen, "CUDA_VISIBLE_DEVICES")
    elif not all_seen and (each,) not in reader.document.unknown:
        reader.set("gpus_per_node", reader.integer(each, 1, low=1), each)
    elif not _is_stated(reader, "gpus_per_node"):
        _ask(reader, "gpus_per_node", each)
    text = str(reader.raw(nodes, ""))
    if re.fullmatch(r"\d{1,7}:\d{1,7}", text):
        least = int(text.partition(":")[0])
        reader.set("nodes", max(least, 1), nodes)
        reader.note("note", "MC004", nodes, f"{nodes} {text}: counted with {least}, where each GPU keeps the most")
    elif (nodes,) not in reader.document.unknown:
        reader.set("nodes", reader.integer(nodes, 1, low=1), nodes)
    elif not _is_stated(reader, "nodes"):
        _ask(reader, "nodes", nodes)
    reader.harmless(*(key for key in reader.document.data if key.startswith(lead)))


def _accelerate(reader: ConfigReader, launch: Launch, seen: int | None) -> None:
    """Its own format reads the options; the GPUs that it sees count where no number of processes is said."""
    if "num_processes" not in launch.options and "config_file" not in launch.options:
        says = "accelerate reads default_config.yaml of the user's cache, which counts for nothing"
        reader.note("note", "MC004", "accelerate", f"without --config_file {says}")
        if seen is not None:
            reader.set("gpus_per_node", seen, "CUDA_VISIBLE_DEVICES")
    reader.harmless(*(key for key in reader.document.data if key.startswith("accelerate --")))


def _deepspeed(reader: ConfigReader, launch: Launch, seen: int | None) -> None:
    """`--num_gpus` and `--num_nodes`, or `--include host:0,1@other:0`; else a hostfile, or the GPUs that there are."""
    lead = "deepspeed --"
    if reader.raw(f"{lead}autotuning"):
        message = f"{lead}autotuning tries batches and stages of its own: the config is counted as it stands"
        reader.note("warning", "MC002", f"{lead}autotuning", message)
    included = str(reader.raw(f"{lead}include", ""))
    number = f"{lead}num_gpus" if "num_gpus" in launch.options else f"{lead}num_accelerators"
    if included:
        hosts = [host.partition(":") for host in included.split("@")]
        slots = {len(filter_) for _, _, slot in hosts if (filter_ := [number for number in slot.split(",") if number])}
        if len(slots) == 1 and all(slot for _, _, slot in hosts):
            reader.set("gpus_per_node", slots.pop(), f"{lead}include")
        else:
            _ask(reader, "gpus_per_node", f"{lead}include")
        reader.set("nodes", len(hosts), f"{lead}include")
        reader.harmless(*(key for key in reader.document.data if key.startswith(lead)))
        return
    _set_from(reader, "gpus_per_node", number)
    _set_from(reader, "nodes", f"{lead}num_nodes")
    if not _is_stated(reader, "gpus_per_node"):
        if reader.raw(f"{lead}exclude"):  # of all that there are, which no file says
            _ask(reader, "gpus_per_node", f"{lead}exclude")
        elif seen is not None:
            reader.set("gpus_per_node", seen, "CUDA_VISIBLE_DEVICES")
        elif "hostfile" in launch.options:
            _ask(reader, "gpus_per_node", f"{lead}hostfile")
    if not any(setting.name == "nodes" for setting in reader.settings):
        if "hostfile" in launch.options:
            _ask(reader, "nodes", f"{lead}hostfile")
        else:
            reader.set("nodes", 1, f"{lead}num_nodes")
    reader.harmless(*(key for key in reader.document.data if key.startswith(lead)))


def _ask(reader: ConfigReader, option: str, key: str) -> None:
    """Leave a word to be asked for: what stands under the key does not tell it."""
    reader.ask(option, key, reader.document.unknown.get((key,)) or str(reader.raw(key, key)))


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
