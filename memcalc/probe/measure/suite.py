"""The suite of training steps: rows as data, the most telling ones first, since a time budget cuts the tail."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Literal

from memcalc.catalog import read_toml
from memcalc.errors import UnknownNameError

if TYPE_CHECKING:
    from memcalc.specs.hardware import GPU

Config = dict[str, Any]


_TABLES = read_toml(files("memcalc.probe.measure") / "suite.toml")
SHAPES: dict[str, Config] = _TABLES["shapes"]
"""Configs of the models by name."""
LAYERS = {"gpt2": "n_layer"}
"""The key of the number of blocks where a model type has one of its own."""


def config_of(name: str, layers: int | None = None) -> Config:
    """Return the config of a model, with another number of blocks where one is given.

    >>> config_of("gpt2", 3)["n_layer"]
    3
    """
    config = dict(SHAPES[name])
    if layers is not None:
        config[LAYERS.get(config["model_type"], "num_hidden_layers")] = layers
    return config


SUITES = ("full", "small", "steps", "machine")
"""Everything; a quick look; training steps alone; the machine alone."""
SMALL = 6
"""Rows of the quick look."""


@dataclass(frozen=True)
class Row:
    """One training step to measure."""

    model: str
    """A name of :data:`memcalc.probe.measure.suite.SHAPES`."""
    precision: str
    recompute: str
    attention: str
    optimizer_impl: str
    micro_batch: int
    seq_len: int
    accumulation: int = 1
    """Micro-batches of one optimizer step."""
    lora: str = ""
    lora_dropout: float = 0.0
    autocast: bool = False
    """Over 16-bit weights."""
    grows: Literal["", "layers", "micro_batch"] = ""
    """What is chosen so that the row fills the GPU."""
    fill: float = 0.0
    """To which share of its capacity; above 1 the row is meant to run out of memory."""

    @property
    def id(self) -> str:
        """The row in words.

        >>> Row("gpt2", "bf16", "none", "flash", "fused", 4, 1024, lora="16:q,v").id
        'gpt2/bf16/none/flash/fused/4x1024/lora-16-qv'
        """
        parts = [self.model, self.precision, self.recompute, self.attention, self.optimizer_impl]
        parts.append(f"{self.micro_batch}x{self.seq_len}" + f"x{self.accumulation}" * (self.accumulation > 1))
        if self.lora:
            rank, _, targets = self.lora.partition(":")
            parts.append(f"lora-{rank}-{targets.replace(',', '')}" + "-autocast" * self.autocast)
        if self.grows:
            parts.append(f"{self.grows.replace('_', '-')}-to-{self.fill:.0%}")
        return "/".join(parts)

    @property
    def group(self) -> str:
        """How a comparison groups it: by the kind of model."""
        return "probe LoRA" if self.lora else f"probe {self.model.partition('-')[0]}"

    @property
    def meant_to_fail(self) -> bool:
        """Whether it shall run out of memory."""
        return self.fill > 1

    def strategy(self, framework: str) -> dict[str, Any]:
        """Return the strategy of a run."""
        fields = {
            "framework": framework,
            "precision": self.precision,
            "zero": 0,
            "recompute": self.recompute,
            "attention": self.attention,
            "optimizer": "adamw",
            "optimizer_impl": self.optimizer_impl,
        }
        fields |= {"checkpoint": "non-reentrant"} if self.recompute != "none" else {}
        adapters = {"lora": self.lora, "adapter_dtype": "fp32", "autocast": self.autocast} if self.lora else {}
        return fields | adapters

    def workload(self) -> dict[str, Any]:
        """Return the workload of a run."""
        fed = {
            "seq_len": self.seq_len,
            "micro_batch": self.micro_batch,
            "global_batch": self.micro_batch * self.accumulation,
        }
        return fed | ({"lora_dropout": self.lora_dropout} if self.lora_dropout else {})


def _rows(lists: Iterable[Sequence[Any]]) -> tuple[Row, ...]:
    """Return rows of the file: seven values in order, then a table of what else is set."""
    return tuple(Row(*values[:7], **(values[7] if len(values) > 7 else {})) for values in lists)


def _interleaved(*lists: tuple[Row, ...]) -> Iterator[Row]:
    """Yield the first of each list, then the second of each, so that what a budget cuts is of every kind."""
    for index in range(max(map(len, lists))):
        for rows in lists:
            yield from rows[index : index + 1]


TELLING, CPU = _rows(_TABLES["telling"]), _rows(_TABLES["cpu"])
CUDA = (*TELLING, *_interleaved(*map(_rows, _TABLES["groups"].values())))
SHARDED: dict[str, list[list[Any]]] = _TABLES["sharded"]
"""Values of the rows of several ranks, by device."""


def rows_of(suite: str, device: str, gpu: GPU) -> tuple[Row, ...]:
    """Return the training steps of a suite, as the GPU can run them."""
    if suite not in SUITES:
        raise UnknownNameError("suite", suite, f"must be one of {', '.join(SUITES)}", SUITES)
    if suite == "machine":
        return ()
    rows = tuple({row.id: row for row in (_runnable(row, gpu) for row in CUDA)}.values()) if device == "cuda" else CPU
    return rows[:SMALL] if suite == "small" else rows


def _runnable(row: Row, gpu: GPU) -> Row:
    """Return the row with fp16 or another kernel where a GPU has no bf16 or no flash attention."""
    if row.precision.startswith("bf16") and not gpu.supports("bf16"):
        row = replace(row, precision="fp16-autocast", autocast=bool(row.lora))
    if row.attention == "flash" and not gpu.flash_attention:
        row = replace(row, attention="efficient")
    return row
