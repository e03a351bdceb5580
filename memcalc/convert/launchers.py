"""Commands that start a training job, taken apart: what starts it, with which options, which script, its arguments.

Launchers' options are those of torchrun (torch 2.13, distributed/run.py), `accelerate launch` (Accelerate 1.15,
commands/launch.py) and `deepspeed` (DeepSpeed 0.19, launcher/runner.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from memcalc.convert.shell import Command, Word
from memcalc.convert.slurm import Option, options_of

__all__ = ["Launch", "Setting", "launch_of"]

_THROUGH = frozenset(
    ("bash", "sh", "zsh",
     "srun", "mpirun", "mpiexec", "prun", "jsrun", "ibrun", "env", "nohup", "time", "exec", "command", "nice", "ionice",
     "timeout", "numactl", "taskset", "stdbuf", "setsid", "sudo", "nsys", "ncu", "apptainer", "singularity", "docker",
     "podman", "enroot", "conda", "micromamba", "mamba", "uv", "poetry", "pixi", "pipenv", "sbatch", "salloc",
     "unbuffer", "script", "with-contenv", "xargs", "catchsegv", "dcgmi", "ray")
)  # fmt: skip
"""Commands that run another command, which is what counts."""
_TOOLS = frozenset({"axolotl", "llamafactory-cli", "lmf", "tune", "litgpt", "trl"})
_STARTERS = re.compile(
    r"python(\d(\.\d+)?)?|torchrun|accelerate|accelerate-launch|deepspeed|[\w.-]*\.(py|sh|slurm|sbatch)"
)
_MODULES = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "torch.distributed.launcher": "torchrun",
    "accelerate.commands.launch": "accelerate",
    "accelerate.commands.accelerate_cli": "accelerate launch",
    "deepspeed.launcher.runner": "deepspeed",
}
_BARE = {
    "torchrun": "standalone m module no_python run_path use_env virtual_local_rank h help",
    "accelerate": """m module no_python q quiet cpu multi_gpu tpu use_deepspeed use_fsdp use_megatron_lm use_xpu ipex
        use_parallelism_config use_mps_device fp16 enable_cpu_affinity same_network tpu_cluster no_tpu_cluster
        tpu_use_sudo downcast_bf16 debug dynamo_use_fullgraph dynamo_use_dynamic dynamo_use_regional_compilation
        h help""",
    "deepspeed": """module no_python no_local_rank no_ssh no_ssh_check force_multi save_pid elastic_training
        bind_cores_to_rank q quiet h help""",
    "python": "u O OO B I s S E v q d P b i x",
}
_BARE_FLAGS = {name: frozenset(text.split()) for name, text in _BARE.items()}
_LETTERS = {"m": "module", "i": "include", "e": "exclude", "H": "hostfile", "t": "tee", "r": "redirects", "q": "quiet"}


@dataclass(frozen=True)
class Setting:
    """One option of a launcher; its value is None where it has none."""

    flag: Word
    value: Word | None = None


@dataclass(frozen=True)
class Launch:
    """One command that starts a script."""

    launcher: str
    """torchrun, accelerate, deepspeed, python, shell, or the name of a tool such as axolotl."""
    script: str
    """A file, a module, or a tool's subcommand."""
    arguments: tuple[Word, ...]
    command: Command
    settings: Mapping[str, Setting] = field(default_factory=dict)
    """The launcher's own options, with underscores."""
    step: Mapping[str, Option] = field(default_factory=dict)
    """Options of the srun that runs it."""

    @property
    def name(self) -> str:
        """The last part of the script's path, without its ending."""
        return self.script.rpartition("/")[2].removesuffix(".py")


def launch_of(command: Command) -> Launch | None:
    """Return what a command starts, or None where it starts no script."""
    words = command.words
    at = _begin(words)
    if at is None:
        return None
    step: dict[str, Option] = {}
    named = [word.text.rpartition("/")[2] for word in words[:at]]
    if "srun" in named:
        first = named.index("srun") + 1
        step, _ = options_of((word.text, word.places[0] if word.places else -1) for word in words[first:at])
    launcher = _base(words[at])
    launcher = "python" if launcher.startswith("python") else launcher
    return _started(launcher, words[at + 1 :], command, step, words[at])


def _base(word: Word) -> str:
    return word.text.rpartition("/")[2]


def _begin(words: Sequence[Word]) -> int | None:
    """Where the starter stands: at first, or behind commands that run another one."""
    if not words:
        return None
    if _starts(words[0]):
        return 0
    if _base(words[0]) not in _THROUGH:
        return None
    for at, word in enumerate(words):
        if at and _starts(word) and not _is_value(words, at):
            return at
    return None


def _starts(word: Word) -> bool:
    return bool(_STARTERS.fullmatch(_base(word))) or _base(word) in _TOOLS


def _is_value(words: Sequence[Word], at: int) -> bool:
    """Whether a word is the value of the option before it: of those that name a thing as a starter is named."""
    before = words[at - 1].text
    return before in ("-J", "--job-name", "--name", "-o", "--output", "-n", "--comment", "-p", "--label")


def _started(
    launcher: str, words: Sequence[Word], command: Command, step: Mapping[str, Option], starter: Word
) -> Launch | None:
    if launcher == "accelerate-launch":
        launcher = "accelerate"
    elif launcher == "accelerate":
        if not words or words[0].text != "launch":
            return None
        words = words[1:]
    if launcher in _TOOLS:
        return _tool(launcher, words, command, step) if words else None
    if launcher not in _BARE:
        kind = "python" if launcher.endswith(".py") else "shell"
        return Launch(kind, starter.text, tuple(words), command, {}, step)
    settings, rest = _settings(launcher, words)
    if launcher == "python" and ("c" in settings or "-" in settings):
        return None
    module = settings.get("module") if launcher == "python" else None
    if module is not None:
        name = module.value.text if module.value else ""
        if name in _MODULES:
            started, _, lead = _MODULES[name].partition(" ")
            return _started(started, [Word(lead), *rest] if lead else rest, command, step, starter)
        return Launch("python", name, tuple(rest), command, {}, step)
    if not rest:
        return None
    return Launch(launcher, rest[0].text, tuple(rest[1:]), command, settings, step)


def _tool(launcher: str, words: Sequence[Word], command: Command, step: Mapping[str, Option]) -> Launch:
    """A tool's subcommand: `tune run` takes torchrun's options before its recipe, `axolotl train` behind `--`."""
    settings, rest = dict[str, Setting](), list(words[1:])
    if launcher == "tune":
        settings, rest = _settings("torchrun", rest)
    elif launcher == "axolotl":
        cut = next((at for at, word in enumerate(rest) if word.text == "--"), len(rest))
        settings, rest = _settings("torchrun", rest[cut + 1 :])[0], rest[:cut]
    return Launch(launcher, words[0].text, tuple(rest), command, settings, step)


def _settings(launcher: str, words: Sequence[Word]) -> tuple[dict[str, Setting], list[Word]]:
    """The launcher's own options, and the words from its script on; python's -m ends its options."""
    bare = _BARE_FLAGS[launcher]
    found: dict[str, Setting] = {}
    at = 0
    while at < len(words) and words[at].text.startswith("-"):
        word = words[at]
        at += 1
        text, equals, _ = word.text.partition("=")
        name = text.lstrip("-").replace("-", "_")
        name = _LETTERS.get(name, name) if not text.startswith("--") else name
        flag = Word(text, word.places[: len(text)], "" if equals else word.unknown)
        if equals:
            begin = len(text) + 1
            found[name] = Setting(flag, Word(word.text[begin:], word.places[begin:], word.unknown))
        elif (name in bare and launcher != "python") or (launcher == "python" and set(name) <= bare):
            found[name] = Setting(flag)
        elif at < len(words):
            found[name] = Setting(flag, words[at])
            at += 1
        if launcher == "python" and name in ("module", "c"):
            break
    return found, list(words[at:])
