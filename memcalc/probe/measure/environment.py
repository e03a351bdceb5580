"""Which machine is probed: versions, the GPU and its preset, and the environment that changes its memory."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any

from memcalc import catalog
from memcalc._version import __version__
from memcalc.errors import InputError, MissingError
from memcalc.probe.measure import smi
from memcalc.probe.measure.process import ProbeJob, run_job
from memcalc.specs.hardware import GPU
from memcalc.units import GIB

NEEDS = ("torch", "transformers")
_TRANSFORMERS = 5
"""The oldest release whose classes the suite builds."""
_LOOK_S = 180.0
_SAME_MEMORY = 0.06
"""How far a capacity may be from a preset's: error correction and the driver take their parts."""
_NO_CUDA = (
    "no CUDA device is visible; --device cpu counts the steps of tiny models on this processor, "
    "--dry-run --gpu NAME shows what would run"
)
_NOT_A_MODEL = re.compile(r"nvidia|geforce|tesla|generation|hbm\w*|sxm\d*|pcie|\d{2,3}gb?|blackwell|server|edition")
_FORM = "pcie"


@dataclass(frozen=True)
class Environment:
    """What is known of the machine; empty where a dry run asks for none."""

    torch: str = ""
    cuda: str = ""
    transformers: str = ""
    peft: str = ""
    gpus: int = 1
    name: str = ""
    """What the driver calls the GPU, or the platform its processor."""
    memory: int = 0
    """Capacity that torch reports [bytes]."""
    driver: str = ""
    used: int = 0
    """By other processes before the probe [bytes]."""
    settings: dict[str, str] = field(default_factory=dict)
    """Environment variables that change memory."""

    @property
    def framework(self) -> str:
        """The framework of the suite's runs: the classes of the installed Transformers, or of the newest."""
        number = re.match(r"\d+\.\d+", self.transformers)
        return f"hf@{number[0]}" if number else "hf"

    def machine(self, device: str) -> dict[str, Any]:
        """Return what must be the same for a probe to go on."""
        same = ("torch", "cuda", "transformers", "peft", "gpus", "name", "memory", "driver", "settings")
        return {"device": device, "memcalc": __version__, **{name: getattr(self, name) for name in same}}


def look(device: str) -> Environment:
    """Return the environment of this machine.

    Raises :class:`memcalc.errors.InputError` where a package or a CUDA device is absent.
    """
    absent = [name for name in NEEDS if find_spec(name) is None]
    if absent:
        raise InputError("device", device, f"it needs {' and '.join(absent)}: pip install 'memcalc[probe]'")
    result = run_job(ProbeJob("look", "look", {}), device, _LOOK_S)
    if not result["ok"]:
        raise InputError("device", device, f"a look at it failed: {result['message']}")
    answer = result["look"]
    uuid = answer.pop("uuid", "")
    if int(answer["transformers"].partition(".")[0]) < _TRANSFORMERS:
        old = f"it needs Transformers {_TRANSFORMERS} or newer, and {answer['transformers']} is installed"
        raise InputError("device", device, f"{old}: pip install 'memcalc[probe]'")
    if device == "cuda" and not answer["gpus"]:
        raise InputError("device", device, _NO_CUDA)
    environment = Environment(**answer, settings=settings_of(os.environ))
    if device == "cpu":
        return replace(environment, gpus=1, name=platform.processor() or platform.machine())
    card = _matching_card(smi.cards(), uuid)
    return environment if card is None else replace(environment, driver=card.driver, used=card.used)


def settings_of(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that change memory or speed on a GPU."""
    from memcalc.frameworks.environment import VARIABLES

    return {name: environ[name] for name in VARIABLES if name in environ}


def _matching_card(cards: list[smi.Card], uuid: str) -> smi.Card | None:
    match = next((card for card in cards if uuid and card.uuid.endswith(uuid)), None)
    return match or (cards[0] if len(cards) == 1 else None)


# ---------------------------------------------------------------------------------------------------------- presets


def preset_of(name: str, memory: int, preset_dirs: tuple[str, ...] = ()) -> GPU:
    """Return the preset of a GPU by what the driver calls it and its capacity [bytes].

    Raises :class:`memcalc.errors.MissingError` where none or several would do.
    """
    presets = catalog.gpus(preset_dirs)
    core, form = _chip_name(name), _FORM in name.lower()
    same_core = [gpu for gpu in presets if _chip_name(gpu.name) == core]
    same_memory = [gpu for gpu in same_core if abs(memory / gpu.memory_bytes - 1) < _SAME_MEMORY]
    matches = [gpu for gpu in same_memory if (_FORM in gpu.name) == form] or same_memory
    if len(matches) == 1:
        return matches[0]
    listed = same_core or [gpu for gpu in presets if _chip_name(gpu.name) in core]
    guess = f", such as {' or '.join(gpu.name for gpu in listed)}" if listed else ""
    message = f"which preset is the GPU {name!r} with {memory / GIB:.1f} GiB? give --gpu NAME{guess}; "
    raise MissingError(f"{message}`memcalc gpus` lists them, and docs/presets.md says how to add one.")


def _chip_name(name: str) -> str:
    """Return what makes the chip, without vendor, memory and form.

    >>> _chip_name("NVIDIA GeForce RTX 3090"), _chip_name("NVIDIA A100-SXM4-80GB"), _chip_name("h100-96g")
    ('rtx3090', 'a100', 'h100')
    """
    tokens = re.findall(r"[a-z0-9]+", name.lower())
    return "".join(t for t in tokens if (t.isdigit() and len(t) >= 4) or not _NOT_A_MODEL.fullmatch(t))
