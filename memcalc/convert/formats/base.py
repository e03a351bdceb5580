"""What a format is, the list of them, which one a document is of, and the job as their writers take it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib import import_module
from importlib.resources import files
from itertools import islice
from typing import TYPE_CHECKING, Any

from memcalc import catalog
from memcalc.convert.config import Config, Finding
from memcalc.convert.document import Document, KeyPath, Kind, Span, write_yaml
from memcalc.convert.objectives import refuse_trainer
from memcalc.errors import CombinationError, FileError, UnknownFormatError, UnknownNameError, cut
from memcalc.files import document_text
from memcalc.frameworks.capabilities import FORMATS_OF, capabilities_of, fed_with, needs_of
from memcalc.preset_names import key as name_key
from memcalc.specs.strategy import Strategy

if TYPE_CHECKING:
    from memcalc.formulas.images import Seen
    from memcalc.results.estimates import Estimate
    from memcalc.specs.model import Model


@dataclass(frozen=True)
class ConfigJob:
    """One strategy of one model on one kind of hardware, every field resolved."""

    model: str
    """As the user named it: a preset's name or a path."""
    gpu: str
    gpus: int
    nodes: int
    seq_len: int
    global_batch: int
    """Sequences an optimizer step."""
    accumulation: int
    strategy: Strategy
    check: str = ""
    """The command that checks what is written, for a comment at its head."""
    spec: Model | None = None
    """The model itself; a writer of its sizes needs it."""
    predicted: Mapping[str, int] = field(default_factory=dict)
    """What memcalc predicts [bytes]: allocated and reserved."""

    blas_workspace: int | None = None
    """Of one cuBLAS handle [bytes]; PyTorch's own where None."""
    eval_micro_batch: int | None = None
    """Sequences of a rank in one step of an evaluation; as many as in training where None."""
    beside: Mapping[str, str] = field(default_factory=dict)
    """Names of the files that are written for one job, by format: what another of them says need not stand twice."""
    images: int = 0
    """Of each sequence; 0 for text alone."""
    image: Seen | None = None
    """What the model sees of one of them."""
    image_sides: tuple[int, int] = (0, 0)
    """Its width and height once resized [px]; 0 where the tower has one size of image."""
    editing: bool = False
    """What is written is only compared, to edit a file: what that file cannot say stands elsewhere and stays."""

    @classmethod
    def of(cls, estimate: Estimate, spec: Model | None = None) -> ConfigJob:
        """The job that an estimate is of; `spec` is its model."""
        hardware, workload = estimate.hardware, estimate.workload
        return cls(
            model=estimate.model.name,
            gpu=hardware.gpu,
            gpus=hardware.gpus,
            nodes=hardware.nodes,
            seq_len=workload.seq_len,
            global_batch=workload.global_batch,
            accumulation=workload.accumulation_steps,
            strategy=estimate.strategy,
            spec=spec,
            predicted={"allocated": estimate.peak.allocated, "reserved": estimate.peak.reserved},
        )

    @property
    def framework(self) -> str:
        """The framework's name, without its era."""
        return self.strategy.framework.partition("@")[0]

    @property
    def fed(self) -> str:
        """What the model is fed in training (:func:`memcalc.frameworks.capabilities.fed_with`)."""
        return fed_with(self.spec)

    @property
    def gpus_per_node(self) -> int:
        """GPUs of each host [-]."""
        return -(-self.gpus // self.nodes)

    @property
    def capability(self) -> float:
        """The GPU's compute capability [-]; 0 where its preset is the user's own."""
        return float(catalog.gpu(self.gpu).compute_capability or 0) if self.gpu in catalog.names("gpu") else 0.0

    def sized(self) -> Model:
        """The model, or a refusal where only its name was handed over."""
        if self.spec is None:
            raise CombinationError("model", self.model, "its sizes are not known here: give a preset or a config.json")
        return self.spec

    def require(self, fine: bool, word: str, allowed: str, value: Any = None) -> None:
        """Refuse what a format cannot say: the value of a word, which is the job's own where none is given."""
        if not fine and not self.editing:
            raise CombinationError(word, self.value(word) if value is None else value, allowed)

    def require_one_of(self, word: str, names: Iterable[str], lead: str) -> None:
        """Refuse a value that is not among those that a format can say; ``lead`` begins what is allowed."""
        names = tuple(names)
        self.require(self.value(word) in names, word, f"{lead} {', '.join(names)}")

    def value(self, word: str) -> Any:
        """The value of a word; a list as it is typed."""
        name = word.removeprefix("strategy.").replace("-", "_")
        value = getattr(self if name in ("framework", "model") else self.strategy, name)
        return ",".join(value) if isinstance(value, tuple) else value


FORMATS: dict[str, tuple[Kind, ...]] = {
    "deepspeed": ("json",),
    "fsdp2": ("shell",), "torchtitan": ("toml",), "megatron": ("yaml",), "swift_megatron": ("yaml", "json"),
    "swift": ("yaml", "json"), "axolotl": ("yaml",),
    "llamafactory": ("yaml", "json"), "torchtune": ("yaml", "flags"), "litgpt": ("yaml", "flags"),
    "verl_tuning": ("yaml",), "verl": ("yaml",), "nemo_rl": ("yaml",), "openrlhf": ("flags",),
    "accelerate": ("yaml", "json"), "trainer": ("json", "yaml", "flags"),
    "fsdp_config": ("json",), "foundry": ("yaml",), "manifest": ("yaml",), "launch": ("shell",),
}  # fmt: skip
"""Names of the formats, each a module of this package, and the kinds of document that it is known by; the most
particular first, since the first that knows a document reads it. A module is imported for its own kinds alone."""
BY_OMEGACONF = frozenset({"llamafactory", "torchtune", "verl_tuning", "verl", "nemo_rl", "foundry"})
"""Formats whose framework stops at a YAML key that stands twice; PyYAML, by which the others read, takes the last."""
MOST_TWICE = 16
"""Keys that stand twice of which something is said."""
WRITABLE = ("deepspeed", "accelerate", "trainer", "torchtitan", "megatron", "swift_megatron", "axolotl", "fsdp2")
"""Those that `memcalc export` writes."""


@dataclass(frozen=True)
class Format:
    """One framework's config."""

    name: str
    title: str
    """For people, such as `DeepSpeed JSON`."""
    software: str
    """The version whose schema and defaults these are."""
    recognise: Callable[[Document], bool]
    read: Callable[[Document], Config]
    write: Callable[[ConfigJob], dict[str, Any]] | None = None
    """Dotted keys and values of the config that runs a job; None where the format is only read."""
    text: Callable[[ConfigJob], str] | None = None
    """The whole text, where that is more than the fields."""
    kind: Kind = "json"
    """What is written."""
    hyphens: bool = False
    """Whether flags have hyphens between their words, not underscores."""
    filename: str = ""
    """As its framework's own examples call it."""
    era: str = ""
    """The framework's era for which it is written, where the newest has no such file."""
    decided: tuple[str, ...] = ()
    """Fields of a strategy that its framework decides, whatever the file says."""
    beside: tuple[str, ...] = ()
    """Formats of the files that hold what this one leaves to the training code."""
    launched: bool = False
    """Whether a launcher runs the model's own training, not a script of memcalc's over the framework itself."""
    adds: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """What it says beyond what its frameworks can be told, by option (:mod:`memcalc.frameworks.capability`)."""
    settles: Mapping[str, Any] = field(default_factory=dict)
    """Fields that its framework sets for every job: a search for it has them."""
    over_adapters: Mapping[str, Any] = field(default_factory=dict)
    """Options that its framework settles for every job with adapters: a search for it has them."""
    narrows: Mapping[str, str] = field(default_factory=dict)
    """Options of which it says less than its frameworks have: a search for it tries these values."""
    casts_shards: bool = True
    """Its FSDP 2 holds what is trained in fp32 under mixed precision, as Accelerate prepares it."""
    script: Callable[[ConfigJob], str] | None = None
    """The training script that reads what is written; None where the framework has a program of its own."""
    choices: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Words that the file can say, with the values that it can say of each: what an edit may change."""
    spelling: Callable[[Document, str], str] = lambda _, key: key
    """How a document calls a key of `write`, where versions or forms differ; empty where it has no name for it."""


def get_format(name: str) -> Format:
    """The format of a name."""
    if name not in FORMATS:
        raise UnknownNameError("format", name, f"must be one of {', '.join(FORMATS)}", FORMATS)
    form: Format = import_module(f"memcalc.convert.formats.{name}").FORMAT
    return form


def recognise(document: Document) -> Format:
    """The format that a document is of; refused by name where it is none that is known, or none that is read."""
    if document.kind not in ("shell", "flags"):
        refuse_trainer(document)
    for name, kinds in FORMATS.items():
        if document.kind in kinds and (form := get_format(name)).recognise(document):
            return form
    titles = ", ".join(get_format(name).title for name in FORMATS)
    raise UnknownFormatError("file", str(document.path), f"must be one of: {titles}")


def read_config(form: Format, document: Document) -> Config:
    """Return what a document says of a job, with a finding for each key that stands twice.

    Raises :class:`memcalc.errors.FileError` where its framework stops at such a key.
    """
    config = form.read(document)
    findings = []
    for key_path, line in islice(document.twice.items(), MOST_TWICE):
        key = cut(".".join(map(str, key_path)))
        if form.name in BY_OMEGACONF:
            allowed = f"has the key {key!r} twice (line {line}), at which {form.software}'s parser stops"
            raise FileError("file", str(document.path), allowed)
        findings.append(Finding("warning", "MC003", key, f"{key} stands twice: the last counts", key_path=key_path))
    return replace(config, findings=(*config.findings, *findings)) if findings else config


def inner_document(document: Document, key_path: KeyPath) -> Document:
    """A table of a document as a document of its own, which still knows where its values stand."""
    data: Any = document.data
    for key in key_path:
        data = data[key]

    def spans() -> dict[KeyPath, Span]:
        return {at[len(key_path) :]: span for at, span in document.spans.items() if at[: len(key_path)] == key_path}

    return Document(document.path, document.kind, document.text, data, spans)


def nested(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys as tables; what is None is left out.

    >>> nested({"a.b": 1, "a.c": None, "d": 2})
    {'a': {'b': 1}, 'd': 2}
    """
    result: dict[str, Any] = {}
    for key, value in fields.items():
        if value is None:
            continue
        *tables, last = key.split(".")
        table = result
        for name in tables:
            table = table.setdefault(name, {})
        table[last] = value
    return result


def render_config(form: Format, job: ConfigJob) -> str:
    """Return the text of the config that runs a job.

    Raises :class:`memcalc.errors.CombinationError` for what the format cannot say.
    """
    if form.write is None:
        raise UnknownNameError("to", form.name, f"must be one of {', '.join(WRITABLE)}", WRITABLE)
    check_written(get_format(next(iter(job.beside), form.name)), job)
    if form.text is not None:
        return form.text(job)
    fields = form.write(job)
    head = f"Written by memcalc; check it with: {job.check}" if job.check else "Written by memcalc."
    if form.kind == "json":
        return json.dumps(nested(fields), indent=2) + "\n"
    if form.kind == "toml":
        return f"# {head}\n\n{document_text(nested(fields))}"
    if form.kind == "yaml":
        return f"# {head}\n{write_yaml(nested(fields))}"
    stated = {key: value for key, value in fields.items() if value is not None and value is not False}
    names = {key: key.replace("_", "-") if form.hyphens else key for key in stated}
    flags = " \\\n".join(f"--{names[key]}{_flag_value(value)}" for key, value in stated.items())
    return f"# {head}\n{flags}\n"


def is_written(job: ConfigJob) -> bool:
    """Whether some format of its framework says a job."""
    for name in FORMATS_OF.get(job.framework, ()):
        form = get_format(name)
        with suppress(CombinationError):
            render_config(
                form, replace(job, beside={other: get_format(other).filename for other in (name, *form.beside)})
            )
            return True
    return False


def check_written(form: Format, job: ConfigJob) -> None:
    """Refuse what the framework is not told, neither by its configuration nor by what a format says beyond it."""
    plan = job.strategy
    able = capabilities_of(plan.framework, job.spec, adapters=bool(plan.lora))
    able = able.tuned if form.launched and able.tuned is not None else able
    for need in needs_of(plan, able, job.spec):
        if all(value not in form.adds.get(option, ()) for option, value in need.sides):
            field, value = need.field(plan)
            needs = f"{need.beside(plan)}{plan.framework} needs code of your own: {need.code}"
            raise CombinationError(field, value, needs)


def config_changes(form: Format, before: ConfigJob, after: ConfigJob) -> dict[KeyPath, Any]:
    """Return what a config must say differently for another job: None for what it must no longer say."""
    if form.write is None:
        return {}
    try:
        old, new = (form.write(replace(job, editing=True)) for job in (before, after))
    except KeyError:  # a value that the format has no name for
        return {}
    keys = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    return {tuple(key.split(".")): new.get(key) for key in keys}


def _flag_value(value: Any) -> str:
    if value is True:
        return ""
    parts = value if isinstance(value, list | tuple) else (value,)
    return "".join(f" {shlex.quote(str(part))}" for part in parts)


@dataclass(frozen=True)
class KeyTable:
    """Lists of keys, and tables of keys with what each does, by name."""

    lists: Mapping[str, tuple[str, ...]]
    tables: Mapping[str, dict[str, Any]]

    @property
    def harmless(self) -> tuple[str, ...]:
        """Keys that change no byte on a GPU while training runs."""
        return self.lists["harmless"]

    @property
    def not_modelled(self) -> dict[str, str]:
        """Keys that change memory in a way that is not modelled, with what each does."""
        return self.tables["not_modelled"]

    @property
    def not_counted(self) -> dict[str, Any]:
        """Keys that change memory or time and are not counted: what each moves and does, and its default."""
        return self.tables["not_counted"]

    def names(self, *parts: str) -> tuple[str, ...]:
        """The keys of some lists and tables."""
        return tuple(key for part in parts for key in (self.lists.get(part) or self.tables[part]))


def key_table(name: str) -> KeyTable:
    """Return the keys of a format."""
    tables = catalog.read_toml(files(__name__.removesuffix(".base")) / f"{name}.toml")
    lists = {part: tuple(text.split()) for part, text in tables.pop("lists").items()}
    return KeyTable(lists, tables)


def hub_name(job: ConfigJob) -> str:
    """The name by which the Hub has a preset, where it is known; else the model as the user named it, as a path is."""
    return hub_named(job.model, job.spec)


def hub_named(model: str, spec: Model | None) -> str:
    """The same of a model as the user named it, and the model whose sizes it has.

    Another name than the preset's own and its aliases may be that of other weights (-Instruct, -Coder).
    """
    names: dict[str, str] = catalog.read_toml(files(__name__.removesuffix(".base")) / "hub.toml")["names"]
    is_path = "/" in model or model.endswith((".json", ".toml"))
    exact = names.get(name_key(model))
    if is_path or exact is not None or spec is None:
        return exact or model
    return names.get(spec.name, model) if name_key(model) in {spec.name, *spec.aliases} else model
