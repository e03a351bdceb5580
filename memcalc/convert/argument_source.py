"""Whose arguments a training script takes: its framework, the configs that it hands over, and those that it writes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from memcalc.convert.config import Reference
from memcalc.convert.document import Document, KeyPath, Span
from memcalc.convert.launchers import TABLES, Launch, LauncherOption, flags_of, recipe_of
from memcalc.convert.objectives import ALGORITHMS, method_of_script, trainers_script
from memcalc.convert.shell import Script
from memcalc.convert.shell_values import Token, written_document

_TRAINER, _DECISIVE, _DEEPSPEED, _FACTORY, _MEGATRON = (
    frozenset(TABLES["arguments"][part].split())
    for part in ("trainer", "decisive", "deepspeed", "llamafactory", "megatron")
)
_ENGINES = frozenset((*TABLES["engines"], "cpu", "tpu", "use_xpu", "use_mps_device"))
_DEEPSPEED_FLAGS = ("--deepspeed_config", "--deepspeed-config")
_SWIFT = re.compile(r"(?:^|[./])swift[./]cli[./](_?megatron[./])?(?P<command>sft|pt|rlhf)(?:\.py)?$")
"""Scripts of ms-swift's commands, which other launchers start too."""
_LISTED = re.compile(r"data|path|file|split|blend|source")
"""Flags that take a list of words, any of which may be unknown."""
_CONFIG = re.compile(r".*\.(ya?ml|json|toml)")


def format_of(launch: Launch) -> str:
    """The format that a launch's arguments are of; empty where nothing tells it."""
    if launch.launcher in TABLES["trains"]:
        return str(TABLES["formats"].get(launch.launcher, launch.launcher))
    if launch.launcher == "shell":
        dotted = all("." in flag or flag in ("module", "config") for flag in flags_of(launch.arguments))
        named = launch.name.startswith("run_train") and dotted  # run_train.sh of torchtitan hands on its flags alone
        return "torchtitan" if named or "CONFIG_FILE" in launch.command.variables else ""
    script, flags = launch.script, flags_of(launch.arguments)
    if match := _SWIFT.search(script):
        return "swift_megatron" if match[1] else "swift"
    if any(token.text.lstrip("+").startswith("actor_rollout_ref.") for token in launch.arguments):
        return "verl"
    if script == "verl.trainer.main" and launch.arguments:  # EasyR1's
        return "verl"
    if re.search(r"(^|[./])verl[./]trainer[./]sft_trainer(_ray)?(\.py)?$", script):
        return "verl_tuning"
    if re.search(r"(^|/)examples/run_(grpo|dpo|rm|ppo|sft)\w*\.py$", script) and launch.arguments:
        return "nemo_rl"
    if script.startswith("openrlhf.cli.") or "/openrlhf/cli/" in f"/{script}":
        return "openrlhf"
    for name in ("axolotl", "llamafactory", "torchtitan", "litgpt"):
        if name in script.lower().replace("-", "").split("/")[-1] or script.startswith(f"{name}."):
            return name
    if "job.config_file" in flags or {"module", "config"} <= flags:
        return "torchtitan"
    if "/torchtitan/" in f"/{script}":
        return "torchtitan"
    if script.endswith(("src/train_bash.py", "llamafactory/launcher.py")) or "finetuning_type" in flags:
        return "llamafactory"
    if script.endswith("src/train.py") and (_FACTORY & flags or _positional(launch.arguments)):
        return "llamafactory"  # the most usual name of a script is also that of LLaMA-Factory's
    if launch.name.startswith("pretrain_") or len(_MEGATRON & flags) > 1:
        return "megatron"
    if re.search(r"(^|/)(lora|full|qlora|qat|knowledge_distillation)\w*_(single_device|distributed)(\.py)?$", script):
        return "torchtune"
    if (len(_TRAINER & flags) > 1 and _DECISIVE & flags) or _positional(launch.arguments) or _trl(launch):
        return "trainer"
    trains = {*_DECISIVE, "config"} & flags or trainers_script("", script) == "trl"  # TRL's own have its defaults
    return "trainer" if trains and method_of_script(recipe_of(launch)) in ALGORITHMS else ""


def _positional(tokens: Sequence[Token], *, sure: bool = False) -> Token | None:
    """A config file that is the first argument, as HfArgumentParser takes it; where it must be one, an unknown word."""
    first = tokens[0] if tokens else Token("-")
    named = _CONFIG.fullmatch(first.text) and not first.text.startswith("-")
    return first if named or (sure and first.unknown and not first.text) else None


def _valued(tokens: Sequence[Token], *names: str) -> Token | None:
    """The value of a flag."""
    for at, token in enumerate(tokens):
        name, equals, _ = token.text.partition("=")
        if name in names and equals:
            begin = len(name) + 1
            return replace(token, text=token.text[begin:], positions=token.positions[begin:])
        if name in names and at + 1 < len(tokens) and not tokens[at + 1].text.startswith("-"):
            return tokens[at + 1]
    return None


def _trl(launch: Launch) -> bool:
    """Whether it takes `--config FILE.yaml`, as TRL's parser does."""
    return bool(_CONFIG.fullmatch((_valued(launch.arguments, "--config") or Token("-")).text))


@dataclass(frozen=True)
class ArgumentSource:
    """A launch among the rest of its script, and what it hands over to other formats."""

    path: Path
    text: str
    script: Script
    launch: Launch

    def references(self) -> list[Reference]:
        """The configs and flags of the launcher, then those of the script."""
        name = format_of(self.launch)
        references = self._accelerate() if self.launch.launcher == "accelerate" else []
        particular = {
            "megatron": self._megatron, "axolotl": self._axolotl, "torchtune": self._torchtune,
            "torchtitan": self._torchtitan, "litgpt": self._litgpt, "swift": self._swift,
            "swift_megatron": self._swift, "verl": self._verl, "openrlhf": self._commanded,
            "verl_tuning": self._grouped,
        }  # fmt: skip
        references += particular.get(name, self._plain)(name) if name else []
        config = _valued(self.launch.arguments, *_DEEPSPEED_FLAGS)
        if config is None and name != "megatron":
            config = _valued(self.launch.arguments, "--deepspeed")
        if config is not None and _CONFIG.fullmatch(config.text):
            references.append(self._file("deepspeed", config, "--deepspeed"))
        return references

    def _document(self, tokens: Sequence[Token], *, pairs: bool = False) -> Document:
        return flag_document(self.path, self.text, tokens, pairs=pairs)

    def _file(self, name: str, token: Token, key: str, over: Document | None = None) -> Reference:
        """A file that is named, which the script itself may write."""
        sure = self._is_sure(name)
        for written in self.script.files:
            if Path(written.name) == Path(token.text):
                document = written_document(self.path, self.text, written.name, written.text)
                return Reference(name, document=document, field=key, sure=sure)
        flags = over if over and (over.data or over.unknown) else None
        return Reference(name, path=token.text, field=key, over=flags, sure=sure, unknown=token.unknown)

    def _is_sure(self, name: str) -> bool:
        """Whether a config has a format's keys: any script may have a `--config` with keys of its own."""
        return name != "trainer" or trainers_script(self.launch.launcher, self.launch.script) == "trl"

    def _without_written(self, tokens: Sequence[Token]) -> list[Token]:
        """Arguments without DeepSpeed's config where the script itself writes it: it is handed over as it is."""
        names = {Path(written.name) for written in self.script.files}
        remaining: list[Token] = []
        for token in tokens:
            named = Path(token.text.rpartition("=")[2]) in names
            if named and remaining and remaining[-1].text.startswith("--deepspeed"):
                remaining.pop()
            elif not (named and token.text.startswith("--deepspeed")):
                remaining.append(token)
        return remaining

    def _plain(self, name: str) -> list[Reference]:
        """A file as first argument or as `--config`, with flags over it, or flags alone."""
        tokens = self._without_written(self.launch.arguments)
        config = _positional(tokens, sure=name != "trainer")
        if config is not None:
            over = self._document(tokens[1:], pairs=name in ("llamafactory", "foundry"))
            return [self._file(name, config, "config", over)]
        config = _valued(tokens, "--config")
        if config is not None and (_CONFIG.fullmatch(config.text) or (self._is_sure(name) and config.unknown)):
            return self._over_config(name, config, tokens)
        script = Token(trainers_script(self.launch.launcher, self.launch.script))
        named = [*tokens, Token("--training_script"), script] if name == "trainer" else tokens
        return [Reference(name, document=self._document(named, pairs=name == "nemo_rl"), field=self.launch.script)]

    def _megatron(self, name: str) -> list[Reference]:
        tokens = self.launch.arguments
        config = _valued(tokens, *_DEEPSPEED_FLAGS)
        dropped = {"--deepspeed", *_DEEPSPEED_FLAGS}
        remaining = [token for token in tokens if token is not config and token.text.partition("=")[0] not in dropped]
        return [Reference(name, document=self._document(remaining), field=self.launch.script)]

    def _axolotl(self, name: str) -> list[Reference]:
        """`axolotl train FILE --flags`."""
        tokens = [token for token in self.launch.arguments if token.text != "train"]
        config = _positional(tokens, sure=True)
        return [] if config is None else [self._file(name, config, "config", self._document(tokens[1:]))]

    def _torchtune(self, name: str) -> list[Reference]:
        """`RECIPE --config NAME key=value`."""
        tokens = list(self.launch.arguments)
        config = _valued(tokens, "--config")
        if config is None:
            return [Reference(name, document=self._document(tokens, pairs=True), field=self.launch.script)]
        tokens = [Token("--recipe"), *tokens] if not tokens[0].text.startswith("-") else tokens
        return self._over_config(name, config, tokens)

    def _verl(self, name: str) -> list[Reference]:
        """`key=value`, over the file of `--config-name` (EasyR1's `config=`) where that is none of verl's own."""
        pairs = self._document([Token(f"command={self.launch.script}"), *self.launch.arguments], pairs=True)
        if self.launch.script == "verl.trainer.main" and ("config" in pairs.data or ("config",) in pairs.unknown):
            unknown = pairs.unknown.get(("config",), "")
            return [
                Reference(name, path=str(pairs.data.get("config", "")), field="config", over=pairs, unknown=unknown)
            ]
        config, folder = pairs.data.get("config_name"), str(pairs.data.get("config_path", ""))
        stem = str(config or "").removesuffix(".yaml")
        if not stem or stem.endswith("trainer"):
            return [Reference(name, document=pairs, field=self.launch.script)]
        path, unknown = Path(folder, f"{stem}.yaml").as_posix(), pairs.unknown.get(("config_path",), "")
        return [Reference(name, path=path, field="--config-name", over=pairs, unknown=unknown)]

    def _commanded(self, name: str) -> list[Reference]:
        """Flags beside the name of their command."""
        command = self.launch.script.removesuffix(".py").replace("/", ".").rpartition(".")[2]
        flags = self._document([Token("--command"), Token(command), *self.launch.arguments])
        return [Reference(name, document=flags, field=self.launch.script)]

    def _grouped(self, name: str) -> list[Reference]:
        """`key=value` beside the script's name; a whole group (`engine=fsdp`) is no table, and has its own name."""
        command = self.launch.name.rpartition(".")[2]
        groups = (re.sub(r"^(engine|optim|model)=", r"\1_group=", token.text) for token in self.launch.arguments)
        tokens = [replace(token, text=text) for token, text in zip(self.launch.arguments, groups, strict=True)]
        pairs = self._document([Token(f"command={command}"), *tokens], pairs=True)
        return [Reference(name, document=pairs, field=self.launch.script)]

    def _over_config(self, name: str, config: Token, tokens: Sequence[Token]) -> list[Reference]:
        """The file that `--config` names, with the other flags over it."""
        names = ("--config", "--job.config_file", "--job.config-file")
        rest = [token for token in tokens if token is not config and token.text.partition("=")[0] not in names]
        return [self._file(name, config, "--config", self._document(rest, pairs=name in ("torchtune", "nemo_rl")))]

    def _torchtitan(self, name: str) -> list[Reference]:
        """Flags, with the config file from CONFIG_FILE where a launch script takes it from there."""
        tokens = list(self.launch.arguments)
        named = self.launch.command.variables.get("CONFIG_FILE") or self.script.variables.get("CONFIG_FILE")
        if named is not None and "job.config_file" not in flags_of(tokens):
            tokens = [Token("--job.config_file"), named, *tokens]
        config = _valued(tokens, "--job.config_file", "--job.config-file")
        if config is not None and config.unknown:
            return self._over_config(name, config, tokens)
        return [Reference(name, document=self._document(tokens), field=self.launch.script)]

    def _litgpt(self, name: str) -> list[Reference]:
        """`litgpt SUBCOMMAND [CHECKPOINT] --config FILE --flags`; the subcommand has defaults of its own."""
        tokens = list(self.launch.arguments)
        command = self.launch.script
        if self.launch.launcher != "litgpt" and tokens and not tokens[0].text.startswith("-"):
            command, tokens = tokens[0].text, tokens[1:]
        if tokens and not tokens[0].text.startswith("-"):
            tokens = [Token("--model_name" if command == "pretrain" else "--checkpoint_dir"), *tokens]
        config = _valued(tokens, "--config")
        over = [token for token in tokens if token is not config and token.text.partition("=")[0] != "--config"]
        flags = self._document([Token("--command"), Token(command), *over])
        if config is None:
            return [Reference(name, document=flags, field=self.launch.script)]
        return [self._file(name, config, "--config", flags)]

    def _swift(self, name: str) -> list[Reference]:
        """`swift sft FILE --flags`, or flags alone."""
        match = _SWIFT.search(self.launch.script)
        command = match["command"] if match else self.launch.script
        fsdp, written = _valued(self.launch.arguments, "--fsdp"), {Path(file.name): file for file in self.script.files}
        table = written[Path(fsdp.text)].text if fsdp and Path(fsdp.text) in written else fsdp
        tokens = [table if table and token is fsdp else token for token in self.launch.arguments]
        config = _positional(tokens, sure=True)
        flags = self._document([Token("--command"), Token(command), *(tokens[1:] if config else tokens)])
        if config is None:
            return [Reference(name, document=flags, field=self.launch.script)]
        return [self._file(name, config, "config", flags)]

    def _accelerate(self) -> list[Reference]:
        """Options of `accelerate launch`, under the names that its YAML has, over the YAML that they name."""
        counts = ("num_processes", "num_machines") if self.launch.through else ()
        settings = {name: option for name, option in self.launch.options.items() if name not in counts}
        config = settings.pop("config_file", None)
        if config is None and not _ENGINES & settings.keys():
            # commands/launch.py, _validate_launch_command: without a config, more than one GPU is multi_gpu
            settings["multi_gpu"] = LauncherOption(Token("--multi_gpu"))
        over = _as_yaml(self._document(_tokens(settings)))
        if config is not None and config.value is not None:
            return [self._file("accelerate", config.value, "--config_file", over)]
        return [Reference("accelerate", document=over, field="accelerate launch")] if over.data or over.unknown else []


def _tokens(settings: Mapping[str, LauncherOption]) -> list[Token]:
    """A launcher's options as words again, under the names with underscores."""
    tokens: list[Token] = []
    for name, setting in settings.items():
        positions = setting.flag.positions[:1] * (len(name) + 2)
        tokens += [Token(f"--{name}", positions, setting.flag.unknown), *([setting.value] if setting.value else [])]
    return tokens


def _as_yaml(flags: Document) -> Document:
    """Put the options of `accelerate launch` where its YAML has them."""
    data: dict[str, object] = {}
    tables: dict[str, dict[str, object]] = {}
    names: dict[str, KeyPath] = {}
    for name in (*flags.data, *(str(key_path[0]) for key_path in flags.unknown)):
        table = (
            "fsdp_config" if name.startswith("fsdp_") else "deepspeed_config" if name in _DEEPSPEED
            else "megatron_lm_config" if name.startswith("megatron_lm_")
            else "dynamo_config" if name.startswith("dynamo_")
            else "parallelism_config" if name.startswith("parallelism_config_") else ""
        )  # fmt: skip
        names[name] = (table, name) if table else ("distributed_type",) if name in TABLES["engines"] else (name,)
        if name in flags.data:
            value = TABLES["engines"].get(name, flags.data[name])
            (tables.setdefault(table, {}) if table else data)[str(names[name][-1])] = value
    flag_spans = flags.find_spans()
    spans = {names[name]: span for path, span in flag_spans.items() if (name := str(path[0])) in names}
    unknown = {names[str(path[0])]: name for path, name in flags.unknown.items()}
    return replace(flags, data={**data, **tables}, find_spans=lambda: spans, unknown=unknown)


def flag_path(flag: str) -> KeyPath:
    """The place of a flag: a hyphen is an underscore, a dot leads into a table.

    >>> flag_path("--training.seq-len")
    ('training', 'seq_len')
    """
    return tuple(flag.lstrip("-+~").replace("-", "_").split("."))


def flag_document(path: Path, text: str, tokens: Iterable[Token], *, pairs: bool = False) -> Document:
    """Return the flags among some words of a script; words before the first flag belong to nobody.

    A flag without a value is True, one with several has a list, of one that stands twice the last holds. With `pairs`,
    `key=value` is a flag too. A flag that is there only if a run decides so is unknown, and so is a word behind a value
    that may be flags: its name with a dollar sign is the key.
    """
    data: dict[str, Any] = {}
    spans: dict[KeyPath, Span] = {}
    unknown: dict[KeyPath, str] = {}
    for flag, following in _grouped(tokens, pairs):
        key_path = flag_path(flag.text)
        may_be_flags = [
            token
            for at, token in enumerate([] if _LISTED.search(flag.text) else following)
            if token.unknown and not token.text and (at or any("--" in value for value in _values(text, token.unknown)))
        ]
        names = {token.unknown for token in may_be_flags if not token.unset or len(_values(text, token.unknown)) > 1}
        unknown |= {(f"${name}",): name for name in names}
        values = [token for token in following if token not in may_be_flags]
        doubts = [token.unknown for token in (flag, *values) if token.unknown]
        if doubts:
            unknown[key_path] = doubts[0]
        else:
            unknown.pop(key_path, None)
            _put(data, key_path, [value.text for value in values])
        spans[key_path] = _span(flag, values)
    return Document(path, "flags", text, data, lambda: spans, unknown, part=True)


def _values(text: str, name: str) -> set[str]:
    """What a script sets a variable to, one thing or another, although not as it is read here."""
    value = r"""("(?:[^"\\]|\\.)*"|'[^']*'|[^;\n]*)"""
    return set(re.findall(rf"(?ms)(?:^|[\s;])(?:export )?{re.escape(name)}={value}", text))


def _grouped(tokens: Iterable[Token], pairs: bool) -> list[tuple[Token, list[Token]]]:
    groups: list[tuple[Token, list[Token]]] = []
    for token in tokens:
        name, equals, _ = token.text.partition("=")
        if re.match(r"--\w", name) or (pairs and equals and re.fullmatch(r"[+~]{0,2}[A-Za-z_][\w.@/]*", name)):
            at = len(name) + 1
            value = [Token(token.text[at:], token.positions[at:], token.unknown)] if equals else []
            groups.append((Token(name, token.positions[: len(name)], "" if equals else token.unknown), value))
        elif groups:
            groups[-1][1].append(token)
    return groups


def _put(data: dict[str, Any], key_path: KeyPath, values: list[str]) -> None:
    table = data
    for key in key_path[:-1]:
        inner = table.setdefault(str(key), {})
        table = inner if isinstance(inner, dict) else {}
    table[str(key_path[-1])] = True if not values else values[0] if len(values) == 1 else values


def _span(flag: Token, values: list[Token]) -> Span:
    """Where flag and value stand; begin is -1 where the value cannot be edited in one piece."""
    key = flag.positions[0] if flag.positions else -1
    pieces = [value.span for value in values]
    if not values:
        end = flag.positions[-1] + 1 if flag.positions else -1
        return Span(key, end, end)
    if any(piece is None or piece[0] < 0 for piece in pieces):
        return Span(key, -1, -1)
    return Span(key, pieces[0][0], pieces[-1][1])  # type: ignore[index]
