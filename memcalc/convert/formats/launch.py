"""A job's launch script: what it asks of Slurm, what it sets, and the training command, read and never run.

The command's own arguments are those of a framework, whose format reads them; this one finds them. `#SBATCH` lines are
read as sbatch 26.11 reads them, launchers' options as torchrun (PyTorch 2.13), Accelerate 1.15 and DeepSpeed 0.19 do.
A line `#MEMCALC --model llama-3-8b --set strategy.x=y` says what no config says, and has its way.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from memcalc import catalog
from memcalc.convert.argument_source import ArgumentSource, flag_document, format_of
from memcalc.convert.config import Config, ConfigReader, Setting
from memcalc.convert.directives import (
    OPTIONS,
    Option,
    Request,
    directives,
    read_directives,
    sbatch_options,
    seconds,
    variables,
)
from memcalc.convert.document import Document, KeyPath, Span
from memcalc.convert.formats.base import Format
from memcalc.convert.launchers import Launch, flags_of, is_other_work, launch_of, read_ranks, recipe_of
from memcalc.convert.objectives import (
    ALGORITHMS,
    ROLES,
    method_of_keys,
    method_of_script,
    refuse_heads,
    refuse_idle,
    refuse_library,
    refuse_megatron,
    refuse_method,
    refuse_pictures,
    refuse_switches,
    refuse_unknown,
)
from memcalc.convert.shell import Script, read_script
from memcalc.convert.shell_values import Token
from memcalc.errors import InputError, MissingError, cut, shown
from memcalc.frameworks import environment

_DISTRIBUTED = ("torchrun", "accelerate", "deepspeed")
_COUNTED = ("verl", "nemo_rl")
"""Formats whose own keys say how many ranks there are, whatever starts them."""
_BY_RAY = ("train_ppo_ray", "sft_trainer_ray")  # scripts that start their ranks themselves
_SETTING = frozenset({"", ".", "source", "echo", "printf", "exit", "set", "export", "cd", "trap", "pip"})
"""Commands of a script that prepares what another one starts; a variable of that one has no text here."""
_RANKS = ("NGPU", "NNODES", "NPROC_PER_NODE", "SWIFT_SINGLE_DEVICE_MODE")
"""Variables from which some launch scripts and tools take the number of ranks, and the GPUs of each."""
_SLURM_COUNTS = (
    "nodes", "ntasks", "ntasks-per-node", "tasks-per-node", "gpus", "gpus-per-node", "gres", "gpus-per-task",
    "tres-per-task", "gpus-per-socket", "mem", "mem-per-gpu", "mem-per-cpu", "time", "constraint",
)  # fmt: skip


def read(document: Document) -> Config:
    """Return what a launch script says of a job, and which configs it hands over."""
    if document.kind == "flags":
        return read_directives(document)
    text, name = document.text, document.path.name
    options = sbatch_options(text)
    script = read_script(text * (not name.endswith(".py")), variables(Request(options)) if options else {}, name)
    directive_lines = directives(document)
    launch = _chosen(script, name, text, directive_lines)
    values = _ScriptValues(text)
    for key, option in options.items():
        values.add(f"#SBATCH --{key}", option.value or True, Span(option.key, option.begin, option.end))
    if launch is not None:
        _check_objective(launch, name)
        _check_name(launch, document)
    _collect(values, launch, script, bool(options))
    reader = ConfigReader(values.document(document), "launch", "Slurm 26.11 and the launchers")
    _slurm(reader, _request(options, launch), bool(options))
    if launch is not None:
        if format_of(launch) not in _COUNTED and not launch.script.removesuffix(".py").endswith(_BY_RAY):
            read_ranks(reader, launch, script)
        _set_algorithm(reader, launch)
        _set_loaded(reader, launch)
        reader.references += ArgumentSource(document.path, text, script, launch).references()
        _refuse_unknown_words(reader)
        _ask_for_config(reader, launch)
        if launch.launcher != "shell" and not format_of(launch):
            _own_arguments(reader, launch, directed=bool(directive_lines.data))
        if launch.launcher == "shell" and not reader.references:
            reader.refer("launch", launch.script, path=launch.script)
    elif not directive_lines.data:
        reader.ask("framework", "#SBATCH", "-", "lines have no training beside them that memcalc knows")
    _read_environment(reader)
    reader.harmless(*_RANKS)
    if directive_lines.data:
        reader.refer("launch", "#MEMCALC", document=directive_lines)
    return reader.finish(known=[f"#SBATCH --{name}" for name in OPTIONS])


def _ask_for_config(reader: ConfigReader, launch: Launch) -> None:
    """Ask for a config whose name only a run knows: as a file, or for what it says."""
    first = launch.arguments[0] if launch.arguments else Token("-")
    configs = [reference.document.unknown.get(("config",), "") for reference in reader.references if reference.document]
    if first.unknown and not first.text and format_of(launch) in ("", "trainer"):
        if re.search("(?i)arg|opt|flag|param", first.unknown):
            raise _unknown_words(reader.document, [f"${first.unknown}"])
        configs.append(first.unknown)
    for config in filter(None, configs):
        says = f"is {config!r}, a file that only a run knows: give it as a FILE, or"
        reader.ask("model", "config", config, says)


def _refuse_unknown_words(reader: ConfigReader) -> None:
    """Refuse arguments that hang on a variable which the script sets to one thing or another."""
    for reference in reader.references:
        for document in filter(None, (reference.document, reference.over)):
            names = [" ".join(str(path[0]).split()) for path in document.unknown if str(path[0]).startswith("$")]
            if names:
                raise _unknown_words(document, names)


def _unknown_words(document: Document, names: list[str]) -> MissingError:
    return MissingError(
        f"{document.path.name} hands {cut(', '.join(names))} to its training, whose words only a run knows: give the "
        "script's arguments in a copy of it, as a line `set -- ARGUMENT …` at its top, or set "
        f"{cut(names[0][1:])} in a line before it is used."
    )


def _own_arguments(reader: ConfigReader, launch: Launch, *, directed: bool) -> None:
    """A script of nobody that is known: what its switches choose is refused, and what runs it is asked for.

    ``directed``: lines `#MEMCALC` say what it trains, and what they leave out is by default.
    """
    document = reader.document
    refuse_switches(document.path.name, flag_document(document.path, document.text, launch.arguments).data)
    script = cut(" ".join(launch.script.split())) or f"what {launch.launcher} starts"  # an open quote is many lines
    says = f"{script}'s own arguments are of no framework that memcalc knows, and count for nothing here"
    reader.note("warning", "MC001", "", says)
    if not directed:
        option = "own_arguments" if reader.references else "framework"
        reader.ask(option, script, "-", "has arguments of its own, which memcalc does not know")


def own_settings(document: Document, script: str) -> Config:
    """A config of nobody that is known, which counts for nothing; of a ``script`` whose name says a method, if any."""
    refuse_method(document.path.name, method_of_script(script), script)
    refuse_switches(document.path.name, document.data)
    reader = ConfigReader(document, "launch", "")
    says = "has settings of its script's own, which memcalc does not know"
    reader.note("warning", "MC001", "", f"{document.path.name} {says}: they count for nothing here")
    reader.ask("framework", "it", "-", says)
    return Config(document, "launch", tuple(reader.settings), tuple(reader.findings))


@dataclass
class _ScriptValues:
    """What was found, each under a name as the script has it, with its place."""

    text: str
    data: dict[str, Any] = field(default_factory=dict)
    spans: dict[KeyPath, Span] = field(default_factory=dict)
    unknown: dict[KeyPath, str] = field(default_factory=dict)

    def add(self, key: str, value: Any, span: Span | None, unknown: str = "") -> None:
        """Note one."""
        if unknown:
            self.unknown[(key,)] = unknown
        else:
            self.data[key] = value
        if span is not None:
            self.spans[(key,)] = span

    def token(self, key: str, token: Token) -> None:
        """Note the word that is an option's or a variable's value."""
        begin = next((position for position in token.positions if position >= 0), None)
        span = None if begin is None else Span(begin, *(token.span or (-1, -1)))
        self.add(key, token.text, span, token.unknown)

    def document(self, origin: Document) -> Document:
        """All of it as a document."""
        return Document(origin.path, "shell", origin.text, self.data, lambda: self.spans, self.unknown)


def _collect(values: _ScriptValues, launch: Launch | None, script: Script, sbatch: bool) -> None:
    """Note the launcher's options, those of its srun, and the variables that change memory."""
    settings = {**script.variables, **(launch.command.variables if launch else {})}
    for name in (*environment.VARIABLES, *_RANKS):
        if name in settings:
            values.token(name, settings[name])
    if launch is None:
        return
    for name, setting in (launch.options if launch.launcher != "python" else {}).items():
        key = f"{launch.launcher} --{name}"
        values.token(key, setting.value or Token("True", setting.flag.positions, setting.flag.unknown))
    for key, option in launch.step.items():
        if not sbatch and key in _SLURM_COUNTS:
            values.add(f"srun --{key}", option.value, Span(option.key, option.begin, option.end))


def _request(options: dict[str, Option], launch: Launch | None) -> Request:
    """What the job asks for: of sbatch, and without it of the srun that starts the training."""
    step = launch.step if launch else {}
    return Request(options or {key: option for key, option in step.items() if key in _SLURM_COUNTS})


def _chosen(script: Script, name: str, text: str, directive_lines: Document) -> Launch | None:
    """The training command. Of several the one that a line `#MEMCALC --launch N` names; else it is asked for."""
    launches = [launch for command in script.commands if (launch := launch_of(command)) is not None]
    likely = [launch for launch in launches if not is_other_work(launch)]
    trains = [launch for launch in likely if launch.launcher in _DISTRIBUTED or format_of(launch)]
    candidates = _different(trains or [launch for launch in likely if launch.launcher != "shell"] or likely)
    if not candidates and not launches and not directive_lines.data and "#SBATCH" not in text:
        named = {command.tokens[0].text for command in script.commands if command.tokens}
        refuse_unknown(name, fragment=bool(script.variables) and named <= _SETTING)
    if launches and not likely and not directive_lines.data:
        refuse_idle(name, map(recipe_of, launches))
    wanted = directive_lines.data.pop("launch", None)
    if wanted is not None:
        if not str(wanted).isdecimal() or len(str(wanted)) > 4 or not 1 <= int(wanted) <= len(candidates):
            allowed = f"must be from 1 to {len(candidates)}, the launches of {name}"
            raise InputError("#MEMCALC --launch", wanted, allowed)
        return candidates[int(wanted) - 1]
    if len(candidates) > 1:
        lines = [text.count("\n", 0, launch.command.begin) + 1 for launch in candidates]
        listed = "; ".join(
            f"{number}: {launch.launcher} {shown(launch.script)[1:-1]} of line {line}"
            for number, (launch, line) in enumerate(zip(candidates[:9], lines, strict=False), 1)
        )
        raise MissingError(
            f"{name} starts {len(candidates)} jobs ({listed}). Choose one with a line `#MEMCALC --launch 1` in it, or "
            "give each its own script."
        )
    return candidates[0] if candidates else None


def _check_objective(launch: Launch, name: str) -> None:
    """Refuse what trains something else than the next token of a decoder."""
    form = format_of(launch)
    nanotron = launch.script.endswith("run_train.py") and "config_file" in flags_of(launch.arguments)
    refuse_pictures(name, launch.script, flags_of(launch.arguments))
    refuse_library(name, "nanotron.run_train" if nanotron else launch.script, flags_of(launch.arguments), form)
    if form in ROLES:
        return
    refuse_heads(name, launch.script)
    method = method_of_script(recipe_of(launch))
    if launch.launcher not in ("axolotl", "litgpt", "swift", "megatron") and not _by_trl(form, method):
        refuse_method(name, method, recipe_of(launch))
    if form == "megatron":
        refuse_megatron(name, launch.script, flags_of(launch.arguments))


def _check_name(launch: Launch, document: Document) -> None:
    """Refuse a script that is called after a method where what it starts does not tell: its arguments are its own."""
    method = method_of_script(document.path.stem)
    if not method or "sft" in document.path.stem.lower() or format_of(launch) not in ("", "trainer"):
        return
    config = next((token for token in launch.arguments if token.text.endswith((".yaml", ".yml", ".json"))), None)
    flags = flag_document(document.path, document.text, launch.arguments).data
    if not (config and format_of(launch)) and not method_of_script(recipe_of(launch)) and not method_of_keys(flags)[0]:
        refuse_method(document.path.name, method, "by its name")


def _by_trl(form: str, method: str) -> bool:
    """Whether a script's name says a method of TRL's trainers, whose arguments are read."""
    return form == "trainer" and method in ALGORITHMS


def _set_algorithm(reader: ConfigReader, launch: Launch) -> None:
    """What a script of TRL's trainers optimizes, which its name says before its arguments do."""
    method = method_of_script(recipe_of(launch))
    if _by_trl(format_of(launch), method):
        reader.settings.append(Setting("rl.algorithm", ALGORITHMS[method], recipe_of(launch)))


_LOADED = ("open_instruct/finetune", "tuning/sft_trainer")
"""They load 16-bit weights where no key says so (open-instruct e6c30440; fms-hf-tuning d3c30a03 config/configs.py)."""


def _set_loaded(reader: ConfigReader, launch: Launch) -> None:
    if launch.script.removesuffix(".py").replace(".", "/").endswith(_LOADED):
        reader.settings.append(Setting("weights", "bf16", launch.script, default=True))


def _different(launches: list[Launch]) -> list[Launch]:
    """Each launch once: branches of a condition often start the same one."""
    distinct: dict[tuple[str, ...], Launch] = {}
    for launch in launches:
        distinct.setdefault(tuple(token.text for token in launch.command.tokens), launch)
    return list(distinct.values())


def _slurm(reader: ConfigReader, request: Request, sbatch: bool) -> None:
    """Set nodes, GPUs, host memory and time limit from the job's request to Slurm."""
    lead = "#SBATCH --" if sbatch else "srun --"
    if not request.options:
        return
    name, each, total, types = request.gpus
    if request.nodes is not None or total is None or "nodes" in request.options:
        _nodes(reader, request.nodes, lead + (request.value("nodes", "ntasks")[0] or "nodes"))
    if each is not None:
        reader.set("gpus_per_node", each, lead + name)
    elif total is not None:
        reader.set("gpus", total, lead + name)
    elif name:
        reader.ask("gpus_per_node", lead + name, str(reader.raw(lead + name)))
    if types:
        key = lead + request.value("gpus-per-node", "gres", "gpus", "gpus-per-task", "tres-per-task")[0]
        if len(types) > 1:
            allowed = f"asks for GPUs of {len(types)} types: memcalc counts one type a job"
            raise reader.error(key, reader.raw(key), allowed)
        reader.set("gpu", types[0], key)
    else:
        _constraint(reader, request, lead)
    key, memory = request.memory
    if memory is not None:
        reader.set("host_memory", memory, lead + key)
    limit = request.value("time")[1]
    if limit and seconds(limit) is not None:
        reader.set("time_limit", seconds(limit), f"{lead}time")
    reader.harmless(*(lead + option for option in OPTIONS))


def _nodes(reader: ConfigReader, value: int | None, key: str) -> None:
    if value is None:
        reader.ask("nodes", key, str(reader.raw(key, key)))
    elif value < 1:
        raise reader.error(key, value, "must be a whole number from 1")
    else:
        reader.set("nodes", value, key)


def _constraint(reader: ConfigReader, request: Request, lead: str) -> None:
    """A feature that is called as a GPU is, such as `a100-80g` or `v100-32g`, names the GPU."""
    presets = [re.sub(r"[\s_]+", "-", name.lower()) for name in catalog.names("gpu")]
    features = re.split(r"[&|,*()\[\]]+", request.value("constraint")[1])
    alike = {feature: feature.lower().replace("_", "-") for feature in features}
    matches = [feature for feature in features if any(_begins(name, alike[feature]) for name in presets)]
    if len(matches) == 1:
        reader.set("gpu", matches[0], f"{lead}constraint")


def _begins(name: str, feature: str) -> bool:
    return bool(re.match(r"[a-z]+\d", feature)) and (name == feature or name.startswith(f"{feature}-"))


def _read_environment(reader: ConfigReader) -> None:
    """Set what the variables among a document's keys say."""
    for name in environment.ALLOCATOR:
        _allocator(reader, name)
    _workspace(reader)
    for name, says in environment.NOT_MODELLED.items():
        value = reader.raw(name)
        if value is not None and str(value) not in ("", "0" if re.search("ENABLE|BLOCKING", name) else ""):
            message = f"{name} {value} changes memory but is not counted: {says}"
            reader.note("warning", "MC002", name, message)
    if reader.text(name := "CUDA_MODULE_LOADING").upper() == "EAGER":
        message = f"{name} EAGER changes memory but is not counted: all kernels are loaded into the context"
        reader.note("warning", "MC002", name, message)
    reader.raw("CUDA_VISIBLE_DEVICES")


def _allocator(reader: ConfigReader, name: str) -> None:
    text = reader.text(name)
    for part in filter(None, re.split(r",(?![^\[]*\])", text)):
        option, _, value = map(str.strip, part.partition(":"))
        if option == "expandable_segments" and value.lower() in ("true", "false"):
            reader.set("strategy.expandable_segments", value.lower() == "true", name)
        elif option == "expandable_segments":
            raise reader.error(name, text, "expandable_segments must be True or False")
        elif option in environment.ALLOCATOR_OPTIONS and (option, value) != ("backend", "native"):
            effect = environment.ALLOCATOR_OPTIONS[option]
            message = f"{option}:{value} of {name} changes memory but is not counted: {effect}"
            reader.note("warning", "MC002", name, message)
        elif option not in environment.HARMLESS_OPTIONS and option != "backend":
            says = "is not an option of PyTorch 2.13 that memcalc knows, and counts for nothing"
            reader.note("warning", "MC001", name, f"{option[:60]} of {name} {says}")


def _workspace(reader: ConfigReader) -> None:
    """`:SIZE:COUNT` pairs, sizes in KiB (aten/src/ATen/cuda/CublasHandlePool.cpp)."""
    name = "CUBLAS_WORKSPACE_CONFIG"
    text = reader.text(name)
    size = environment.workspace_bytes(text)
    if text and size is None:
        raise reader.error(name, text, "must be pairs of a size in KiB and a count, as in :4096:8")
    if size is not None:
        reader.set("strategy.blas_workspace", size, name)


FORMAT = Format(
    "launch",
    "launch script",
    "Slurm 26.11, torchrun 2.13, Accelerate 1.15, DeepSpeed 0.19",
    lambda document: document.kind == "shell" and bool(document.text.strip()),
    read,
    kind="shell",
)
