"""The command that closes the loop: what the file that was written says, and on the command line all that it cannot."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from memcalc.convert.facts import FACTS
from memcalc.errors import CombinationError, MemcalcError
from memcalc.frameworks import habits_of
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
    from memcalc.specs.strategy import Strategy

__all__ = ["check_command"]

_FIRST = ("model", "gpu", "node", "gpus", "seq_len", "micro_batch", "global_batch", "framework", "precision")
"""Words in the order in which they are typed; the others follow."""
_PROOF = ("model", "hardware", "workload", "peak", "components")
"""What must be the same beside the strategy."""


def check_command(
    form: Format, files: Mapping[Path, str], job: SavedJob, found: Estimate, dirs: tuple[str, ...]
) -> tuple[str, tuple[str, ...]]:
    """Return the ``memcalc check`` line by which files come to the estimate again, and what is said beside it.

    It has the words that files cannot say, found by reading them as ``memcalc check`` does; the first file names the
    others. A word that they say differently is said too, since only the user's own code can make it true.

    Raises :class:`memcalc.errors.CombinationError` where no words make them say the plan: then they are not written.
    """
    configs = _read_back(files)
    if all(config.format != form.name for config in configs):
        name = next(iter(files)).name
        raise CombinationError("output", name, f"would not be read as {form.title}: name it as its framework does")
    wanted = _wanted(job, found)
    needed = dict(wanted)
    for word in (*wanted, *wanted):  # some are said once others are no longer typed
        rest = {key: value for key, value in needed.items() if key != word}
        if _says(configs, rest, dirs, word, wanted[word]):
            needed = rest
    needed = _completed(configs, needed, found, dirs, form)
    words, settings = _parts(needed)
    presets = [part for folder in dirs for part in ("--preset-dir", folder)]
    line = command_line("check", str(next(iter(files))), *flags_of(words, settings), *presets)
    return line, tuple(_contradicted(configs, needed, dirs, form))


def _contradicted(
    configs: tuple[Config, ...], needed: dict[str, Any], dirs: tuple[str, ...], form: Format
) -> Iterator[str]:
    """Yield what the framework does by itself otherwise than the plan has it."""
    for word, value in needed.items():
        try:
            known = joined(configs, _typed({key: one for key, one in needed.items() if key != word}), dirs)
        except MemcalcError:  # it is not said at all
            continue
        said = known.place(word).get(word)
        if said is not None and not _same(said, value):
            name = word.replace("_", "-")
            yield f"{form.title}: {name} comes to {_shown(said)}, the plan has {_shown(value)}; your code must set it."


def _read_back(files: Mapping[Path, str]) -> tuple[Config, ...]:
    with TemporaryDirectory() as folder:
        paths = [Path(folder) / path.name for path in files]
        for path, text in zip(paths, files.values(), strict=True):
            path.write_text(text, encoding="utf-8")
        return gathered([str(paths[0])])


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
) -> dict[str, Any]:
    """Add what the framework's own defaults make different, and prove that the estimate is the same."""
    again = estimated(joined(configs, _typed(needed), dirs), dirs)
    other = _differences(again, found)
    if other:
        strategy = _resolved(found.strategy)
        needed = {**needed, **{_word(name): strategy[name] for name in other}}
        again = estimated(joined(configs, _typed(needed), dirs), dirs)
        other = _differences(again, found)
    wrong = [*other, *(name for name in _PROOF if getattr(again, name) != getattr(found, name))]
    if wrong:
        said = _resolved(again.strategy)
        named = [f"{name} {_shown(said[name])}" if name in said else f"another {name}" for name in wrong]
        allowed = f"{form.title}: what runs has {', '.join(named)}, and the plan has not, so plan with that"
        raise CombinationError("to", form.name, allowed)
    return needed


def _differences(again: Estimate, found: Estimate) -> list[str]:
    """The fields in which two strategies differ."""
    said, wanted = _resolved(again.strategy), _resolved(found.strategy)
    return [name for name in wanted if said[name] != wanted[name]]


def _resolved(strategy: Strategy) -> dict[str, Any]:
    """The fields of a strategy, checkpoints as the framework does them where that is left to it."""
    own = "reentrant" if habits_of(strategy.framework).reentrant else "non-reentrant"
    return {**strategy.model_dump(), "checkpoint": strategy.checkpoint or own}


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
