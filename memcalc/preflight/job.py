"""One job from its files: those that are given and named, which setting overrides which, and the estimate of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from memcalc import api
from memcalc.convert.config import COMMITS, JOB_KEYS, Config, Finding, Reference, Setting, Severity, shipped
from memcalc.convert.document import Document, inside, overlay, parse_document, read_document
from memcalc.convert.formats import get_format, recognise
from memcalc.convert.formats.base import read_config
from memcalc.convert.formats.fsdp2 import MARKER
from memcalc.errors import (
    FileError,
    MissingError,
    ObjectiveError,
    UncountedError,
    UnknownFormatError,
    UnmodelledError,
    cut,
    shown,
)
from memcalc.files import asks, there
from memcalc.frameworks import deepspeed, habits_of
from memcalc.planner.direct import OWN_CODE
from memcalc.planner.idle import IDLE, labelled, lacking
from memcalc.preflight.names import known_text, of_folder
from memcalc.results.estimates import Estimate
from memcalc.specs.options import BY_NAME, FIELDS
from memcalc.units import GIB

MOST_FILES = 16
"""Of one job; the most that a known launch names is four."""


def read_files(
    paths: Iterable[str], texts: Mapping[Path, str] | None = None, folders: Iterable[Path] = ()
) -> tuple[Config, ...]:
    """Return the configs of the files and of all that they name, each once, in the order in which they are met.

    ``texts`` stands in for files: that is how an edit is checked before it is written. A file that is named by another
    one must lie in the folder of that file, in the working directory, in one of ``folders``, or below: what leads
    elsewhere must be given.
    """
    given = [Path(path) for path in paths]
    for folder in given:
        if asks(folder.is_dir):
            raise FileError("file", str(folder), of_folder(folder))
    reader = _References(dict(texts or {}), tuple(folders), {_real(path) for path in given})
    code = [path for path in given if len(given) > 1 and path.suffix.lower() == ".py"]
    for path in sorted(given, key=code.__contains__):
        (reader.read_code if path in code else reader.read)(path)
    return tuple(reader.configs)


class _References:
    """Follows references, each file once: a loop ends where it began."""

    def __init__(self, texts: dict[Path, str], folders: tuple[Path, ...], given: set[Path]) -> None:
        self.texts = texts
        self.folders = folders
        self.given = given
        self.configs: list[Config] = []
        self.seen: set[Path] = set()

    def read(self, path: Path, reference: Reference | None = None) -> None:
        """Read a file, then what it names."""
        real = _real(path)
        over = reference.over if reference else None
        if real in self.seen and over is None:
            return
        self.seen.add(real)
        if len(self.seen) > MOST_FILES:
            raise FileError("file", str(path), f"a job may have at most {MOST_FILES} files")
        text = self.loaded(path)
        if over is not None:
            self.configs = [config for config in self.configs if _real(config.document.path) != real]
            text = overlay(text, over)
        if reference is None:
            self.take(text, "")
        else:
            self.take_named(text, reference)

    def read_code(self, path: Path) -> None:
        """Read a script in Python that stands beside the files of its job; of one without known settings a note."""
        try:
            self.read(path)
        except UnknownFormatError:
            if not self.configs:
                raise
            note = Finding("note", "MC004", "", f"{path.name} is Python, of which no setting is read")
            self.configs[0] = replace(self.configs[0], findings=(*self.configs[0].findings, note))

    def loaded(self, path: Path) -> Document:
        """The document of a file, as on disk or as it would be after an edit."""
        if path in self.texts:
            kind = read_document(path).kind
            return parse_document(path, self.texts[path], kind)
        return read_document(path)

    def take(self, text: Document, name: str) -> None:
        """Keep the config of a document, and go on to its references."""
        form = get_format(name) if name else recognise(text)
        config = read_config(form, text)
        if form.name == "launch":
            config = _with_own_script(config)
        self.configs.append(config)
        for reference in config.references:
            if reference.document is not None:
                self.take_named(reference.document, reference)
            else:
                self.follow(config, reference)

    def take_named(self, text: Document, reference: Reference) -> None:
        """Keep the config that another one hands over: of a script of its own only as its keys tell what it is."""
        if (reference.format, reference.sure) == ("trainer", True) and reference.field.endswith("config"):
            # TRL's own parser takes it
            text = replace(text, data={**text.data, "training_script": "trl"})
        if reference.sure:
            self.take(text, reference.format)
            return
        from memcalc.convert.formats.launch import own_settings

        try:
            name = recognise(text).name  # the most particular: LLaMA-Factory's keys are beside those of the Trainer
        except UnknownFormatError:
            named = next((script for config in self.configs if (script := _optimizing(config))), "")
            self.configs.append(own_settings(text, named))
        else:
            self.take(text, name)

    def handed(self, named: Path) -> list[Path]:
        """Of the files that were given, those of that name, which says where it lies seen from another folder."""
        return sorted(path for path in self.given if path.name == named.name)

    def follow(self, config: Config, reference: Reference) -> None:
        """Read a file that another one names; of those that its framework ships the one that it ships."""
        origin = config.document.path
        if reference.unknown:
            self.read(self.meant(origin, reference), reference)
            return
        folder, named = origin.parent, Path(reference.path)
        starts = (folder, Path(), *self.folders)
        candidates = [named] if named.is_absolute() else [start / named for start in starts]
        path = next((candidate for candidate in (*candidates, *self.handed(named)) if there(candidate)), candidates[0])
        message = f"{origin.name} names {shown(reference.path)}"
        if not there(path) and (known := shipped(config.format, reference.path)) is not None:
            says = f"{reference.path} is not there: counted as {COMMITS[config.format]} ships it, which no edit changes"
            note = Finding("note", "MC004", reference.field, says)
            self.configs[-1] = replace(self.configs[-1], findings=(*self.configs[-1].findings, note))
            self.take(known, "deepspeed")
            return
        if _real(path) not in self.given and not any(inside(path, root) for root in starts):
            if there(path) and path.is_symlink():
                raise FileError("file", str(path), f"it leads out of {folder}")
            raise MissingError(f"{message} outside its folder. Pass it as a FILE to read it.")
        if not there(path):
            recipe = reference.format == "torchtune" and not path.suffix
            hint = f" (tune cp {reference.path} FILE.yaml writes torchtune's own)" if recipe else ""
            elsewhere = "is neither here nor beside it. Start memcalc where the job starts, or pass it"
            if named.name.startswith("."):
                elsewhere = "is an ending alone. Set its variable in a copy of the script, or pass what starts it"
            missing = "does not exist. Pass it" if named.is_absolute() else elsewhere
            raise MissingError(f"{message}, which {missing} as a FILE{hint}.")
        self.read(path, reference)

    def meant(self, origin: Path, reference: Reference) -> Path:
        """The file, given beside another one, whose name in that one only a run can tell: one of its format."""
        form = get_format(reference.format)
        for path in sorted(self.given - {_real(origin)}):
            if not reference.sure or form.recognise(self.loaded(path)):
                return path
        raise MissingError(
            f"{origin.name} starts its training with a config that only a run knows ({cut(reference.unknown)}): pass "
            f"that file{f' ({form.title})' if reference.sure else ''} as a FILE too."
        )


def _with_own_script(config: Config) -> Config:
    """A launch script that starts a script of memcalc's: it is read, and nobody is asked for its arguments."""
    folder = config.document.path.parent
    for setting in config.settings:
        script = folder / setting.field
        if setting.name != "framework" or setting.value is not None or script.suffix != ".py":
            continue
        if inside(script, folder) and (known_text(script) or "").startswith(MARKER):
            settings = tuple(other for other in config.settings if other is not setting)
            findings = tuple(finding for finding in config.findings if not finding.message.startswith(setting.field))
            references = (*config.references, Reference("fsdp2", setting.field, field=setting.field))
            return replace(config, settings=settings, findings=findings, references=references)
    return config


def _optimizing(config: Config) -> str:
    """The script whose name says what post-training optimizes; empty for training on the next token."""
    return next((setting.field for setting in config.settings if setting.name == "rl.algorithm"), "")


def _real(path: Path) -> Path:
    """Where a path leads; itself where it leads nowhere, for reading it says why."""
    try:
        return path.resolve()
    except (OSError, RuntimeError, ValueError):  # a loop of links; a name that is no name
        return path


REQUESTED = "host memory requested of the queue"
"""How a reason begins where that is too little."""
PRESETS = ("model", "gpu", "node")
"""Facts that name a preset or a file."""
BATCHES = {"batching": "batch_rule", "pad_multiple": "padded_to"}
"""Options that say something beside lengths alone, which no file has, and the facts that files state of them."""
COMPARED = {
    "micro_batch": ("deepspeed",), "accumulation": ("deepspeed", "accelerate"), "mixed": ("deepspeed",),
}  # fmt: skip
"""Options that the Trainer compares with its own, and in which file (integrations/deepspeed.py, fill_match)."""
TRAINERS = ("trainer", "swift", "llamafactory")
"""Formats whose default optimizer is that of Transformers."""


@dataclass
class MergedJob:
    """The options of a job, where each came from, and what was noticed while merging."""

    options: dict[str, Any] = field(default_factory=dict)
    """Keywords of :func:`memcalc.estimate`."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Fields of ``--set`` by dotted name."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Values of :data:`memcalc.convert.config.JOB_KEYS`."""
    origins: dict[str, tuple[Config, Setting]] = field(default_factory=dict)
    """By option, field or fact: the config whose setting counts; none for what the user typed."""
    engines: set[str] = field(default_factory=set)
    """Runtimes that the files name."""
    findings: list[tuple[Config, Finding]] = field(default_factory=list)

    def table(self, name: str) -> dict[str, Any]:
        """The table to which a name belongs."""
        return self.facts if name in JOB_KEYS else self.settings if name in FIELDS else self.options

    def value(self, name: str) -> Any:
        """What a name is set to; None where it is not."""
        return self.table(name).get(name)

    def take(self, config: Config, setting: Setting) -> None:
        """Take a setting of a file; what is stated overrides a default, and of two statements the later one counts."""
        if setting.name == "engine":
            self.engines.add(setting.value)
            return
        before = self.origins.get(setting.name)
        if before is not None and (
            (setting.default and not yields(before[1], setting)) or prevails(before, config, setting)
        ):
            return
        if before is not None and setting.name == "gpu" and str(setting.value) in str(before[1].value):
            return
        if before is not None and setting.name == "offload":  # each file names a part
            setting = replace(setting, value=tuple(dict.fromkeys((*before[1].value, *setting.value))))
            before = None
        if before is not None and not before[1].default and before[1].value != setting.value:
            self._conflict(before, config, setting)
        self.origins[setting.name] = (config, setting)
        self.table(setting.name)[setting.name] = setting.value

    def _conflict(self, before: tuple[Config, Setting], config: Config, setting: Setting) -> None:
        if compared(before, config, setting) or setting.name in {"optimizer_impl", "gpu"}:
            return  # a queue's word for a GPU is often a part of its name
        if (config.format, config.document.kind) == ("launch", "flags"):  # a line #MEMCALC: the user's own
            return
        first, other = before[0].document.path.name, before[1]
        message = (
            f"{setting.field} is {_shown(setting.value)}, and {other.field} of {first} is {_shown(other.value)}: "
            f"counted as {_shown(setting.value)}"
        )
        self.findings.append(
            (config, Finding("warning", "MC003", setting.field, message, "say it once", setting.key_path))
        )

    def note(self, severity: Severity, code: str, name: str, message: str, suggestion: str = "") -> None:
        """Add a finding where an option is set."""
        config, setting = self.origins[name]
        self.findings.append((config, Finding(severity, code, setting.field, message, suggestion, setting.key_path)))

    def override(self, options: Mapping[str, Any]) -> None:
        """Take what the user typed, which overrides the files."""
        for name, value in options.items():
            if value is not None:
                self.origins.pop(name, None)
                self.table(name)[name] = value

    def forget_idle(self) -> None:
        """Take away what a file states and the runtime has nothing of: it is no setting of the job."""
        if self.options.get("framework") is None:
            return
        stated = {name.rpartition(".")[2]: value for name, value in self.settings.items() if name in self.origins}
        for name, _ in lacking(stated, habits_of(str(self.options["framework"]))):
            del self.settings[BY_NAME[name].key]

    def take_older_optimizer(self) -> None:
        """Where no file names an optimizer, what an era of Transformers ran: adamw_torch before 4.54."""
        stated, framework = self.origins.get("optimizer_impl"), str(self.options.get("framework"))
        if stated is None or not stated[1].default or stated[0].format not in TRAINERS or "@" not in framework:
            return
        habits = habits_of(framework)
        if habits.optimizer_impl != "foreach" and not any(habits is era for era in deepspeed.BEFORE_FUSED):
            return
        self.options["optimizer_impl"] = "foreach"
        for name in {"optimizer", "optimizer_impl"} & self.origins.keys():
            config, setting = self.origins[name]
            value = "foreach" if name == "optimizer_impl" else setting.value
            self.origins[name] = (config, replace(setting, value=value, usual="adamw_torch"))

    def fill_accumulation(self) -> None:
        """Set the micro-batches of a step that reaches a number of sequences, and what holds for one process alone."""
        gpus, micro, goal = (self.value(name) for name in ("gpus", "micro_batch", "batch_goal"))
        stated = self.facts.get("accumulation") or self.options.get("global_batch")
        if goal and gpus and micro and not stated:
            self.facts["accumulation"] = max(-(-int(goal) // (int(micro) * max(int(gpus) // self.ways, 1))), 1)
        if gpus and int(gpus) == 1 and self.facts.get("checkpoint_alone"):
            self.settings["strategy.checkpoint"] = self.facts["checkpoint_alone"]

    @property
    def keywords(self) -> dict[str, Any]:
        """The job as keywords of :func:`memcalc.estimate`; of post-training there are none."""
        if self.algorithm:
            raise ObjectiveError(
                f"the files train by {self.algorithm.upper()}, whose roles have no single estimate: ask memcalc check, "
                "or memcalc rl."
            )
        presets = {name: self.facts[name] for name in PRESETS if self.facts.get(name) is not None}
        options = {name: value for name, value in self.options.items() if value not in (None, ())}
        batches = {option: self.facts[fact] for option, fact in BATCHES.items() if fact in self.facts}
        return {**presets, **(batches if "lengths" in options else {}), **options, "settings": self.settings}

    @property
    def algorithm(self) -> str:
        """What post-training optimizes; empty for training on the next token."""
        return str(self.facts.get("rl.algorithm") or "")

    @property
    def ways(self) -> int:
        """Ranks that share one copy of the data [-]."""
        return int(self.options.get("tp", 1)) * int(self.options.get("pp", 1)) * int(self.options.get("cp", 1))


def estimate_merged(job: MergedJob, dirs: tuple[str, ...], *, advice: bool = False) -> Estimate:
    """The estimate of a merged job, whose own files are what runs it: no code is missing.

    What no file asks for is no evaluation of the job.
    """
    try:
        estimate = api.estimate(**job.keywords, preset_dirs=dirs, advice=advice)
    except (UncountedError, UnmodelledError) as error:
        raise ObjectiveError(str(error)) from None
    labels = tuple(f"{labelled(name)} " for name in job.origins if name in FIELDS or name in BY_NAME)
    warnings = tuple(
        text for text in estimate.warnings if OWN_CODE not in text and not (IDLE in text and text.startswith(labels))
    )
    silent = job.settings.get("workload.eval_micro_batch") is None
    occasions = tuple(each for each in estimate.occasions if not (silent and each.name == "evaluation"))
    beside = {"warnings": warnings, "occasions": occasions, **_over_request(job, estimate)}
    return estimate.model_copy(update=beside)


def _over_request(job: MergedJob, estimate: Estimate) -> dict[str, str]:
    """The verdict and its reason where the job asks its queue for less host memory than it offloads; none elsewhere."""
    requested = job.facts.get("host_memory")
    offloads = estimate.strategy.offload and estimate.verdict != "does-not-fit"
    if requested is None or not offloads or estimate.host_memory <= int(requested):
        return {}
    lack = (estimate.host_memory - int(requested)) / GIB
    over = {"verdict": "does-not-fit", "reason": f"{REQUESTED} lacks {lack:.1f} GiB"}
    return over if estimate.expandable_verdict is None else {**over, "expandable_verdict": "does-not-fit"}


def compared(before: tuple[Config, Setting], config: Config, setting: Setting) -> bool:
    """Whether two different values are a mismatch of the Trainer and DeepSpeed: an error of its own."""
    formats = {before[0].format, config.format}
    return "trainer" in formats and bool(formats & set(COMPARED.get(setting.name, ())))


def prevails(before: tuple[Config, Setting], config: Config, setting: Setting) -> bool:
    """Whether the setting before, which its file states, overrides the later one.

    DeepSpeed's own optimizer runs where its config names one (integrations/deepspeed.py, deepspeed_optim_sched).
    """
    of_optimizer = not before[1].default and setting.name in {"optimizer", "optimizer_impl"}
    return of_optimizer and (before[0].format, config.format) == ("deepspeed", "trainer")


def yields(before: Setting, setting: Setting) -> bool:
    """Whether one default gives way to another: mixed precision is on where either turns it on."""
    return setting.name == "mixed" and before.default and before.value == "no"


def _shown(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple | list) else str(value)
