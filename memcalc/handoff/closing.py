"""The command that closes the loop: what the file that was written says, and on the command line all that it cannot."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from memcalc.convert.facts import FACTS
from memcalc.errors import CombinationError, MemcalcError
from memcalc.handoff.words import command_line, flags_of
from memcalc.planner.request import SETTINGS, WORDS
from memcalc.planner.settings import FIELDS
from memcalc.preflight.answer import estimated
from memcalc.preflight.gather import gathered
from memcalc.preflight.join import joined

if TYPE_CHECKING:
    from memcalc.convert.config import Config
    from memcalc.convert.formats import Format
    from memcalc.results import Estimate, SavedJob

__all__ = ["check_command", "closing_words"]

_FIRST = ("model", "gpu", "node", "gpus", "seq_len", "micro_batch", "global_batch", "framework", "precision")
"""Words in the order in which they are typed; the others follow."""
_PROOF = ("model", "hardware", "workload", "peak", "components")
"""What must be the same beside the strategy."""


def check_command(form: Format, text: str, path: Path, job: SavedJob, found: Estimate, dirs: tuple[str, ...]) -> str:
    """Return the ``memcalc check`` line by which the file that was written comes to the estimate again."""
    words, settings = closing_words(form, text, path.name, job, found, dirs)
    presets = [part for folder in dirs for part in ("--preset-dir", folder)]
    return command_line("check", str(path), *flags_of(words, settings), *presets)


def closing_words(
    form: Format, text: str, name: str, job: SavedJob, found: Estimate, dirs: tuple[str, ...]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the words and fields that a file cannot say, found by reading it as ``memcalc check`` does.

    Raises :class:`memcalc.errors.CombinationError` where no words make the file say the plan: then it is not written.
    """
    configs = _read_back(text, name)
    if configs[0].format != form.name:
        raise CombinationError("output", name, f"would not be read as {form.title}: name it like {form.filename}")
    wanted = _wanted(job, found)
    needed = dict(wanted)
    for word in wanted:
        rest = {key: value for key, value in needed.items() if key != word}
        if _says(configs, rest, dirs, word, wanted[word]):
            needed = rest
    return _completed(configs, needed, found, dirs, form)


def _read_back(text: str, name: str) -> tuple[Config, ...]:
    with TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_text(text, encoding="utf-8")
        return gathered([str(path)])


def _wanted(job: SavedJob, found: Estimate) -> dict[str, Any]:
    """The words that come to the estimate: those of the job, and what its strategy says under the words of the plan."""
    strategy, workload, hardware = found.strategy, found.workload, found.hardware
    words: dict[str, Any] = {
        **job.words,
        **{SETTINGS.get(key, key): value for key, value in job.settings.items()},
        "model": job.model,
        "gpu": job.gpu,
        "node": job.node,
        "gpus": hardware.gpus,
        "seq_len": workload.seq_len,
        "micro_batch": workload.micro_batch,
        "global_batch": workload.global_batch,
        **{name: getattr(strategy, name) for name in ("framework", "precision", "optimizer", "zero", "recompute")},
        **{name: getattr(strategy, name) for name in ("tp", "pp", "cp", "ep") if getattr(strategy, name) > 1},
        **({"sp": strategy.sp} if strategy.tp > 1 else {}),
        **({"pp_schedule": strategy.pp_schedule, "vpp": strategy.vpp} if strategy.pp > 1 else {}),
        **({"offload": strategy.offload} if strategy.offload else {}),
    }
    return {name: value for name, value in words.items() if value is not None}


def _says(configs: tuple[Config, ...], given: Mapping[str, Any], dirs: tuple[str, ...], word: str, value: Any) -> bool:
    """Whether the files say a word by themselves, beside the words that are given."""
    try:
        known = joined(configs, _typed(given), dirs)
    except MemcalcError:
        return False
    return _same(known.place(word).get(word), value)


def _typed(given: Mapping[str, Any]) -> dict[str, Any]:
    words = {name: value for name, value in given.items() if name not in FIELDS}
    return {**words, "settings": {name: value for name, value in given.items() if name in FIELDS}}


def _same(said: Any, value: Any) -> bool:
    """Whether two values are one: a list is its text with commas, true is `true`."""
    return said is not None and _shown(said) == _shown(value)


def _shown(value: Any) -> str:
    if isinstance(value, tuple | list):
        return ",".join(map(str, value)) or "none"
    return str(value).lower()


def _completed(
    configs: tuple[Config, ...], needed: dict[str, Any], found: Estimate, dirs: tuple[str, ...], form: Format
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Add what the framework's own defaults make different, and prove that the estimate is the same."""
    again = estimated(joined(configs, _typed(needed), dirs), dirs)
    other = _differences(again, found)
    if other:
        needed = {**needed, **{_word(name): getattr(found.strategy, name) for name in other}}
        again = estimated(joined(configs, _typed(needed), dirs), dirs)
        other = _differences(again, found)
    wrong = [*other, *(name for name in _PROOF if getattr(again, name) != getattr(found, name))]
    if wrong:
        raise CombinationError("to", form.name, f"{form.title} would be read with another {', '.join(wrong)}")
    return _parts(needed)


def _differences(again: Estimate, found: Estimate) -> list[str]:
    """The fields in which two strategies differ."""
    names = type(found.strategy).model_fields
    return [name for name in names if getattr(again.strategy, name) != getattr(found.strategy, name)]


def _word(name: str) -> str:
    """The word or the field that a field of the strategy has on a command line."""
    if f"strategy.{name}" in SETTINGS or name in WORDS:
        return name
    return next((key for key in (f"strategy.{name}", f"workload.{name}") if key in FIELDS), name)


def _parts(needed: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Words in the order of a command line, and fields; a list is typed with commas."""
    order = {name: place for place, name in enumerate(_FIRST)}
    words = {name: needed[name] for name in sorted(needed, key=lambda name: order.get(name, len(order)))}
    typed = {name: _text(value) for name, value in words.items()}
    known = {*WORDS, *FACTS}
    return {n: v for n, v in typed.items() if n in known}, {n: v for n, v in typed.items() if n not in known}


def _text(value: Any) -> Any:
    return value if isinstance(value, bool) else _shown(value) if isinstance(value, tuple | list) else str(value)
