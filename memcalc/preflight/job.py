"""One job merged from several configs: which setting overrides which, and the estimate that it comes to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from memcalc import api
from memcalc.convert.config import JOB_KEYS, Config, Finding, Setting, Severity
from memcalc.errors import ObjectiveError, UncountedError, UnmodelledError
from memcalc.frameworks import habits_of
from memcalc.planner.direct import OWN_CODE
from memcalc.planner.idle import IDLE, labelled, lacking
from memcalc.results.estimates import Estimate
from memcalc.specs.options import BY_NAME, FIELDS

PRESETS = ("model", "gpu", "node")
"""Facts that name a preset or a file."""
BATCHES = {"batching": "batch_rule", "pad_multiple": "padded_to"}
"""Options that say something beside lengths alone, which no file has, and the facts that files state of them."""
COMPARED = {
    "micro_batch": ("deepspeed",), "accumulation": ("deepspeed", "accelerate"), "mixed": ("deepspeed",),
}  # fmt: skip
"""Options that the Trainer compares with its own, and in which file (integrations/deepspeed.py, fill_match)."""


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
            (setting.default and not yields(before[1], setting)) or self._prevails(before, config, setting)
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

    @staticmethod
    def _prevails(before: tuple[Config, Setting], config: Config, setting: Setting) -> bool:
        return not before[1].default and prevails(before, config, setting)

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
    return estimate.model_copy(update={"warnings": warnings, "occasions": occasions})


def compared(before: tuple[Config, Setting], config: Config, setting: Setting) -> bool:
    """Whether two different values are a mismatch of the Trainer and DeepSpeed: an error of its own."""
    formats = {before[0].format, config.format}
    return "trainer" in formats and bool(formats & set(COMPARED.get(setting.name, ())))


def prevails(before: tuple[Config, Setting], config: Config, setting: Setting) -> bool:
    """Whether the setting before overrides the later one.

    DeepSpeed's own optimizer runs where its config names one (integrations/deepspeed.py, deepspeed_optim_sched).
    """
    return setting.name in {"optimizer", "optimizer_impl"} and (before[0].format, config.format) == (
        "deepspeed",
        "trainer",
    )


def yields(before: Setting, setting: Setting) -> bool:
    """Whether one default gives way to another: mixed precision is on where either turns it on."""
    return setting.name == "mixed" and before.default and before.value == "no"


def _shown(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple | list) else str(value)
