"""Every option of a launch command, constant of a script and key of an FSDP file that is read has an end.

As for the other formats (test_every_key.py): a changed value moves the job, is a finding or is refused; the rest is
named harmless. A launch script and one of FSDP2 are read from their text, so that values are changed there.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from memcalc.convert.config import Config, ConfigReader
from memcalc.convert.document import Document
from memcalc.convert.formats.base import get_format
from memcalc.convert.formats.fsdp2 import MARKER
from memcalc.errors import MemcalcError
from memcalc.frameworks import environment

VALUES: tuple[Any, ...] = (
    True,
    False,
    2,
    3,
    "17",
    "none",
    "operators",
    "mlp",
    "fp32",
    "bfloat16",
    "SDPA",
    [0, None, 2],
)
CONSTANTS = {"MODEL": "llama-3.1-8b", "GPUS": 8, "SEQ_LEN": 4096, "MICRO_BATCH": 1, "CHECKPOINTED_BLOCKS": (0, None, 1)}
OPTIONS = {
    "nodes": ("2", "3"), "ntasks": ("8", "16"), "ntasks-per-node": ("4", "8"), "tasks-per-node": ("4", "8"),
    "gpus": ("8", "4"), "gpus-per-node": ("4", "8"), "gres": ("gpu:4", "gpu:8"), "gpus-per-task": ("1", "2"),
    "tres-per-task": ("gres/gpu:1", "gres/gpu:2"), "gpus-per-socket": ("2", "4"), "mem": ("64G", "128G"),
    "mem-per-gpu": ("8G", "16G"), "mem-per-cpu": ("1G", "2G"), "time": ("1:00:00", "2:00:00"),
    "constraint": ("a100-80g", "v100-32g"),
}  # fmt: skip
"""Of sbatch, those that say how many GPUs, how much memory or how much time a job has."""
BESIDE = {
    "tasks-per-node": "--nodes=2 --gpus-per-task=1", "ntasks-per-node": "--nodes=2 --gpus-per-task=1",
    "ntasks": "--gpus-per-task=1", "gpus-per-task": "--nodes=2 --ntasks-per-node=4",
    "tres-per-task": "--nodes=2 --ntasks-per-node=4", "gpus-per-socket": "--nodes=2 --sockets-per-node=2",
    "mem-per-gpu": "--nodes=1 --gpus-per-node=8", "mem-per-cpu": "--nodes=1 --ntasks-per-node=1 --cpus-per-task=8",
    "constraint": "--nodes=1 --gpus-per-node=8",
}  # fmt: skip
"""What has to stand beside an option for it to count."""
COMMANDS = {
    "torchrun": ("nproc_per_node", "nnodes"),
    "deepspeed": ("num_gpus", "num_accelerators", "num_nodes", "include", "exclude", "hostfile", "autotuning"),
}
"""Options of launchers that say what runs: torch 2.13 distributed/run.py, DeepSpeed 0.19 launcher/runner.py."""
WORDS = {
    "include": "localhost:0,1", "exclude": "localhost:0", "hostfile": "/etc/hosts", "autotuning": "tune",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "PYTORCH_ALLOC_CONF": "max_split_size_mb:512",
    "CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUDA_MODULE_LOADING": "EAGER", "CUDA_VISIBLE_DEVICES": "0,1",
}  # fmt: skip


def said(config: Config) -> set[tuple[str, ...]]:
    settings = {(one.name, str(one.value), one.unknown) for one in config.settings}
    return settings | {(one.code, one.field, one.message) for one in config.findings if one.code != "MC001"}


def of_script(command: str, *lines: str) -> set[tuple[str, ...]]:
    text = "\n".join(("#!/bin/bash", *lines, command, ""))
    return said(get_format("launch").read(Document(Path("job.sh"), "shell", text, {}, dict)))


@pytest.mark.parametrize("name", OPTIONS)
def test_what_a_job_asks_of_slurm_counts(name: str) -> None:
    beside = f"#SBATCH {BESIDE[name]}" if name in BESIDE else "#"
    first, second = (of_script("srun python train.py", f"#SBATCH --{name}={value}", beside) for value in OPTIONS[name])
    assert first != second


@pytest.mark.parametrize(("launcher", "name"), [(one, name) for one, names in COMMANDS.items() for name in names])
def test_what_a_launcher_starts_counts(launcher: str, name: str) -> None:
    plain = of_script(f"{launcher} train.py")
    assert of_script(f"{launcher} --{name}={WORDS.get(name, '3')} train.py") != plain


@pytest.mark.parametrize("name", environment.VARIABLES)
def test_a_variable_that_is_looked_at_counts(name: str) -> None:
    command = "deepspeed train.py"
    assert of_script(command, f"export {name}={WORDS.get(name, '1')}") != of_script(command)


def of_constants(constants: dict[str, Any]) -> Document:
    text = "\n".join((MARKER, *(f"{name} = {value!r}" for name, value in constants.items()), "import torch", ""))
    return Document(Path("train.py"), "shell", text, {}, dict)


def watched(monkeypatch: pytest.MonkeyPatch, form: str) -> set[str]:
    """The keys that a format's reader asks for from here on."""
    asked: set[str] = set()
    raw = ConfigReader.raw

    def watch(self: ConfigReader, key: str, default: Any = None) -> Any:
        if self.format == form:
            asked.add(key)
        return raw(self, key, default)

    monkeypatch.setattr(ConfigReader, "raw", watch)
    return asked


def shows(form: str, documents: Iterable[tuple[Document, Document]], key: str) -> bool:
    """Whether one of some documents with a value says other than the one without, or is refused by the key's name."""
    read = get_format(form).read
    for plain, changed in documents:
        try:
            if said(read(changed)) != said(read(plain)):
                return True
        except MemcalcError as error:
            if key.removeprefix("fsdp_") in str(error):
                return True
    return False


def nested(key: str, value: Any) -> dict[str, Any]:
    """A key and its value, in its table."""
    table, _, last = key.rpartition(".")
    return {table: {last: value}} if table else {key: value}


def test_each_constant_of_the_script_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = watched(monkeypatch, "fsdp2")
    plain = of_constants(CONSTANTS)
    get_format("fsdp2").read(plain)
    keys = sorted(asked - {"STEPS"})
    assert len(keys) > 15

    def with_value(key: str) -> Iterable[tuple[Document, Document]]:
        return ((plain, of_constants({**CONSTANTS, **nested(key, value)})) for value in (*VALUES, {"x": 1}))

    assert [key for key in keys if not shows("fsdp2", with_value(key), key)] == []


def test_each_key_of_an_fsdp_file_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, unmoved = watched(monkeypatch, "fsdp_config"), list[set[str]]()
    named = ConfigReader.harmless

    def harmless(self: ConfigReader, *keys: str) -> None:
        unmoved[-1].update(key.removeprefix("fsdp_") for key in keys)
        named(self, *keys)

    monkeypatch.setattr(ConfigReader, "harmless", harmless)
    bases: list[dict[str, Any]] = [{"fsdp_version": 1}, {"fsdp_version": 2}]
    for base in bases:
        unmoved.append(set())
        get_format("fsdp_config").read(Document(Path("fsdp.json"), "json", "", base, dict))
    keys = sorted({key.removeprefix("fsdp_") for key in asked} - (unmoved[0] & unmoved[1]))
    assert len(keys) > 8

    def with_value(key: str) -> Iterable[tuple[Document, Document]]:
        for base in bases:
            for value in (*VALUES, "no_wrap", "no_shard", "full_state_dict", "backward_post", {"x": 1}, ["x"]):
                changed = {**base, f"fsdp_{key}": value}
                yield (
                    Document(Path("x.json"), "json", "", base, dict),
                    Document(Path("x.json"), "json", "", changed, dict),
                )

    assert [key for key in keys if not shows("fsdp_config", with_value(key), key)] == []
