"""Whose arguments a training script takes: the framework that a launch is of, and the configs that it hands over."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from memcalc.convert.config import Reference
from memcalc.convert.document import Document, Place, Span
from memcalc.convert.flags import flag_document
from memcalc.convert.launchers import Launch, Setting
from memcalc.convert.shell import Script, Word
from memcalc.convert.written import written_document

__all__ = ["Handover", "family", "is_other_work"]

_TRAINER = frozenset((
    "per_device_train_batch_size", "per_gpu_train_batch_size", "per_device_eval_batch_size",
    "num_train_epochs", "do_train", "overwrite_output_dir", "save_total_limit", "save_strategy",
    "lr_scheduler_type", "logging_steps", "report_to", "fsdp", "gradient_checkpointing",
    "gradient_accumulation_steps", "model_name_or_path", "output_dir",
))  # fmt: skip
"""Arguments of transformers' TrainingArguments, and of the examples written in its manner; two of them tell it."""
_OTHER_WORK = re.compile(
    r"(^|[_./-])(eval\w*|convert\w*|preprocess\w*|merge\w*|export\w*|generat\w*|infer\w*|download\w*|prepare\w*|"
    r"tokeniz\w*|serve\w*|server|chat|bench\w*|test\w*|pytest|setup|upload\w*|consolidate\w*|install|combine\w*)($|[_./-])"
)
_TOOL_TRAINS = {
    "axolotl": re.compile("train"),
    "llamafactory-cli": re.compile("train"),
    "lmf": re.compile("train"),
    "tune": re.compile("run"),
    "litgpt": re.compile(r"(finetune|pretrain)\w*"),
    "trl": re.compile(r"\w+"),
}
_FAMILIES = {"llamafactory-cli": "llamafactory", "lmf": "llamafactory", "tune": "torchtune", "trl": "trainer"}
_CONFIG = re.compile(r".*\.(ya?ml|json|toml)")


def is_other_work(launch: Launch) -> bool:
    """Whether a command's name says that it does not train: it evaluates, converts, prepares data."""
    if launch.launcher in _TOOL_TRAINS:
        return not _TOOL_TRAINS[launch.launcher].fullmatch(launch.script)
    return bool(_OTHER_WORK.search(launch.script.lower()))


def family(launch: Launch) -> str:
    """The format that a launch's arguments are of; empty where nothing tells it."""
    if launch.launcher in _TOOL_TRAINS:
        return _FAMILIES.get(launch.launcher, launch.launcher)
    if launch.launcher == "shell":
        return "torchtitan" if launch.name.startswith("run_train") or "CONFIG_FILE" in launch.command.settings else ""
    script, flags = launch.script, _flags(launch.arguments)
    for name in ("axolotl", "llamafactory", "torchtitan", "litgpt"):
        if name in script.lower().replace("-", "").split("/")[-1] or script.startswith(f"{name}."):
            return name
    if "job.config_file" in flags or {"module", "config"} <= flags:
        return "torchtitan"
    if "/torchtitan/" in f"/{script}":
        return "torchtitan"
    if script.endswith(("src/train.py", "src/train_bash.py", "llamafactory/launcher.py")) or "finetuning_type" in flags:
        return "llamafactory"
    if launch.name.startswith("pretrain_") or {"num_layers", "hidden_size"} <= flags or "micro_batch_size" in flags:
        return "megatron"
    if re.search(r"(^|/)(lora|full|qlora|qat|knowledge_distillation)\w*_(single_device|distributed)(\.py)?$", script):
        return "torchtune"
    if len(_TRAINER & flags) > 1 or _positional(launch.arguments) or _trl(launch):
        return "trainer"
    return ""


def _flags(words: Sequence[Word]) -> set[str]:
    return {word.text.partition("=")[0].lstrip("-").replace("-", "_") for word in words if word.text.startswith("--")}


def _positional(words: Sequence[Word]) -> Word | None:
    """A config file that is the first argument, as HfArgumentParser takes it."""
    return words[0] if words and _CONFIG.fullmatch(words[0].text) else None


def _valued(words: Sequence[Word], *names: str) -> Word | None:
    """The value of a flag."""
    for at, word in enumerate(words):
        name, equals, _ = word.text.partition("=")
        if name in names and equals:
            begin = len(name) + 1
            return replace(word, text=word.text[begin:], places=word.places[begin:])
        if name in names and at + 1 < len(words) and not words[at + 1].text.startswith("-"):
            return words[at + 1]
    return None


def _trl(launch: Launch) -> bool:
    """Whether it takes `--config FILE.yaml`, as TRL's parser does."""
    config = _valued(launch.arguments, "--config")
    return config is not None and bool(_CONFIG.fullmatch(config.text))


@dataclass(frozen=True)
class Handover:
    """A launch among the rest of its script, and what it hands over to other formats."""

    path: Path
    text: str
    script: Script
    launch: Launch

    def references(self) -> list[Reference]:
        """The configs and flags of the launcher, then those of the script."""
        name = family(self.launch)
        found = self._accelerate() if self.launch.launcher == "accelerate" else []
        particular = {
            "megatron": self._megatron, "axolotl": self._axolotl, "torchtune": self._torchtune,
            "torchtitan": self._torchtitan, "litgpt": self._litgpt,
        }  # fmt: skip
        found += particular.get(name, self._plain)(name) if name else []
        config = _valued(self.launch.arguments, "--deepspeed_config", "--deepspeed-config") or self._deepspeed(name)
        if config is not None and _CONFIG.fullmatch(config.text):
            found.append(self._file("deepspeed", config, "--deepspeed"))
        return found

    def _deepspeed(self, name: str) -> Word | None:
        return None if name == "megatron" else _valued(self.launch.arguments, "--deepspeed")

    def _document(self, words: Sequence[Word], *, pairs: bool = False) -> Document:
        return flag_document(self.path, self.text, words, pairs=pairs)

    def _file(self, name: str, word: Word, key: str, over: Document | None = None) -> Reference:
        """A file that is named, which the script itself may write."""
        for written in self.script.files:
            if Path(written.name) == Path(word.text):
                return Reference(name, document=written_document(self.path, self.text, written), field=key)
        return Reference(name, path=word.text, field=key, over=over if over and (over.data or over.unknown) else None)

    def _without_written(self, words: Sequence[Word]) -> list[Word]:
        """Arguments without DeepSpeed's config where the script itself writes it: it is handed over as it is."""
        names = {Path(written.name) for written in self.script.files}
        kept: list[Word] = []
        for word in words:
            named = Path(word.text.rpartition("=")[2]) in names
            if named and kept and kept[-1].text.startswith("--deepspeed"):
                kept.pop()
            elif not (named and word.text.startswith("--deepspeed")):
                kept.append(word)
        return kept

    def _plain(self, name: str) -> list[Reference]:
        """A file as first argument or as `--config`, with flags over it, or flags alone."""
        words = self._without_written(self.launch.arguments)
        config = _positional(words)
        if config is not None:
            over = self._document(words[1:], pairs=name == "llamafactory")
            return [self._file(name, config, "config", over)]
        config = _valued(words, "--config")
        if config is not None and _CONFIG.fullmatch(config.text):
            rest = [
                word
                for word in words
                if word is not config and word.text not in ("--config", f"--config={config.text}")
            ]
            return [self._file(name, config, "--config", self._document(rest, pairs=name == "torchtune"))]
        return [Reference(name, document=self._document(words), field=self.launch.script)]

    def _megatron(self, name: str) -> list[Reference]:
        words = self.launch.arguments
        config = _valued(words, "--deepspeed_config", "--deepspeed-config")
        dropped = {"--deepspeed", "--deepspeed_config", "--deepspeed-config"}
        kept = [word for word in words if word is not config and word.text.partition("=")[0] not in dropped]
        return [Reference(name, document=self._document(kept), field=self.launch.script)]

    def _axolotl(self, name: str) -> list[Reference]:
        """`axolotl train FILE --flags`."""
        words = [word for word in self.launch.arguments if word.text != "train"]
        config = _positional(words)
        if config is None:
            return []
        return [self._file(name, config, "config", self._document(words[1:]))]

    def _torchtune(self, name: str) -> list[Reference]:
        """`RECIPE --config NAME key=value`."""
        words = list(self.launch.arguments)
        config = _valued(words, "--config")
        if config is None:
            return [Reference(name, document=self._document(words, pairs=True), field=self.launch.script)]
        words = [Word("--recipe"), *words] if not words[0].text.startswith("-") else words
        rest = [
            word for word in words if word is not config and word.text not in ("--config", f"--config={config.text}")
        ]
        return [self._file(name, config, "--config", self._document(rest, pairs=True))]

    def _torchtitan(self, name: str) -> list[Reference]:
        """Flags, with the config file from CONFIG_FILE where a launch script takes it from there."""
        words = list(self.launch.arguments)
        named = self.launch.command.settings.get("CONFIG_FILE") or self.script.variables.get("CONFIG_FILE")
        if named is not None and "job.config_file" not in _flags(words):
            words = [Word("--job.config_file"), named, *words]
        return [Reference(name, document=self._document(words), field=self.launch.script)]

    def _litgpt(self, name: str) -> list[Reference]:
        """`litgpt SUBCOMMAND [CHECKPOINT] --config FILE --flags`; the subcommand has defaults of its own."""
        words = list(self.launch.arguments)
        command = self.launch.script
        if self.launch.launcher != "litgpt" and words and not words[0].text.startswith("-"):
            command, words = words[0].text, words[1:]
        if words and not words[0].text.startswith("-"):
            words = [Word("--model_name" if command == "pretrain" else "--checkpoint_dir"), *words]
        config = _valued(words, "--config")
        over = [word for word in words if word is not config and word.text.partition("=")[0] != "--config"]
        flags = self._document([Word("--command"), Word(command), *over])
        if config is None:
            return [Reference(name, document=flags, field=self.launch.script)]
        return [self._file(name, config, "--config", flags)]

    def _accelerate(self) -> list[Reference]:
        """Options of `accelerate launch`, under the names that its YAML has, over the YAML that they name."""
        settings = dict(self.launch.settings)
        config = settings.pop("config_file", None)
        over = _as_yaml(self._document(_words(settings)))
        if config is not None and config.value is not None:
            return [self._file("accelerate", config.value, "--config_file", over)]
        return [Reference("accelerate", document=over, field="accelerate launch")] if over.data or over.unknown else []


def _words(settings: Mapping[str, Setting]) -> list[Word]:
    """A launcher's options as words again, under the names with underscores."""
    found: list[Word] = []
    for name, setting in settings.items():
        places = setting.flag.places[:1] * (len(name) + 2)
        found += [Word(f"--{name}", places, setting.flag.unknown), *([setting.value] if setting.value else [])]
    return found


_DEEPSPEED = (
    "deepspeed_config_file", "zero_stage", "offload_optimizer_device", "offload_param_device",
    "offload_optimizer_nvme_path", "offload_param_nvme_path", "gradient_accumulation_steps", "gradient_clipping",
    "zero3_init_flag", "zero3_save_16bit_model", "deepspeed_hostfile", "deepspeed_moe_layer_cls_names",
)  # fmt: skip
_ENGINES = {
    "use_deepspeed": "DEEPSPEED", "use_fsdp": "FSDP", "use_megatron_lm": "MEGATRON_LM", "multi_gpu": "MULTI_GPU",
}  # fmt: skip


def _as_yaml(flags: Document) -> Document:
    """Put the options of `accelerate launch` where its YAML has them."""
    data: dict[str, object] = {}
    tables: dict[str, dict[str, object]] = {}
    names: dict[str, tuple[str, ...]] = {}
    for name in (*flags.data, *(str(place[0]) for place in flags.unknown)):
        table = (
            "fsdp_config" if name.startswith("fsdp_") else "deepspeed_config" if name in _DEEPSPEED
            else "megatron_lm_config" if name.startswith("megatron_lm_")
            else "dynamo_config" if name.startswith("dynamo_")
            else "parallelism_config" if name.startswith("parallelism_config_") else ""
        )  # fmt: skip
        names[name] = (table, name) if table else ("distributed_type",) if name in _ENGINES else (name,)
        if name in flags.data:
            value = _ENGINES.get(name, flags.data[name])
            (tables.setdefault(table, {}) if table else data)[names[name][-1]] = value
    found = flags.find_spans()
    spans: dict[Place, Span] = {names[str(place[0])]: span for place, span in found.items() if str(place[0]) in names}
    unknown: dict[Place, str] = {names[str(place[0])]: name for place, name in flags.unknown.items()}
    return replace(flags, data={**data, **tables}, find_spans=lambda: spans, unknown=unknown)
