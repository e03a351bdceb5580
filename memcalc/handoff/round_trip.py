"""Written configs read back: the ``memcalc check`` line by which they come to the same estimate again.

The line names the job and the software that runs it, never the strategy, which the files must hold: an export that
would leave a part of it to code that nobody writes is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memcalc.convert.config import JOB_KEYS
from memcalc.convert.formats.tuning import ANY_FORM
from memcalc.errors import CombinationError, MemcalcError
from memcalc.files import replacing, scratch
from memcalc.frameworks import habits_of
from memcalc.planner.job import pinned, split_options, value_text
from memcalc.preflight.job import estimate_merged, read_files
from memcalc.preflight.merge import merge
from memcalc.specs.job import render
from memcalc.specs.options import BATCHING, BY_NAME, OPTIONS, WORDS

if TYPE_CHECKING:
    from memcalc.convert.config import Config
    from memcalc.convert.formats import Format
    from memcalc.results.estimates import Estimate
    from memcalc.specs.job import JobRecord

ENVIRONMENT = ("strategy.expandable_segments", "strategy.blas_workspace")
"""Fields that an environment variable sets, which the launch line has (:mod:`memcalc.handoff`)."""
_SOFTWARE = ("calibration", "strategy.bnb", "strategy.peft", "strategy.te")
"""What is installed where the job runs."""
_FIRST = ("model", "gpu", "node", "gpus", "seq_len")
"""Options that come first on the line."""
_PLACED = frozenset(row.key for row in OPTIONS if row.group == "workload" and not row.searched)
_ASSUMED = frozenset(row.word for row in OPTIONS if row.kind == "factor")
"""What is measured or assumed of a run, and so stands in no file."""
_PROOF = ("model", "hardware", "workload", "peak", "components")
"""What must be the same beside the strategy."""
_MUTE = frozenset({"reduce_dtype", "reshard", "vpp", "whole_accumulation"})
"""Fields whose values some strategies do not tell apart: they are the same where all bytes are."""
_REENTRANT = {True: "reentrant", False: "non-reentrant"}


def check_command(
    form: Format, files: Mapping[Path, str], job: JobRecord, estimate: Estimate, dirs: tuple[str, ...]
) -> tuple[str, Estimate]:
    """Return the ``memcalc check`` line by which files come to the estimate again, and what they come to.

    It has the options of the job that files cannot state, found by reading them as ``memcalc check`` does, and those of
    the files that no other one names. What the launcher does by itself (``form.decided``) may make another estimate.

    Raises :class:`memcalc.errors.CombinationError` for a part of the strategy that the files do not state.
    """
    configs, given = _read_back(files)
    trip = _RoundTrip(configs, form.title, dirs)
    if all(config.format != form.name for config in trip.configs):
        name = next(iter(files)).name
        raise CombinationError("output", name, f"would not be read as {form.title}: name it as its framework does")
    options = _options(job, estimate)
    needed = {name: value for name, value in options.items() if not _same(trip.stated(options, name), value)}
    runs = trip.proven(needed, estimate, form.decided)
    plain, fields = _ordered(needed)
    return render("check", *map(str, given), options=plain, settings=fields, dirs=dirs), runs


def _read_back(files: Mapping[Path, str]) -> tuple[tuple[Config, ...], list[Path]]:
    """The configs of all files that are one, and those files of them that no other names."""
    with scratch() as folder:
        for path, text in files.items():
            with replacing(folder / path.name) as stream:
                stream.write(text.encode())
        configs: tuple[Config, ...] = ()
        given: list[Path] = []
        for path in sorted(files, key=lambda path: _named(path, files)):
            if path.suffix == ".py" and len(files) > 1:  # a program that reads the configs beside it
                continue
            if all(config.document.path.name != path.name for config in configs):
                given.append(path)
                configs = read_files([str(folder / path.name) for path in given])
        return configs, given


def _named(path: Path, files: Mapping[Path, str]) -> bool:
    """Whether another file has the name of one."""
    return any(path.name in text for other, text in files.items() if other != path and other.suffix != ".py")


@dataclass(frozen=True)
class _RoundTrip:
    """Written configs, read with options beside them."""

    configs: tuple[Config, ...]
    title: str
    """The format's name in sentences."""
    dirs: tuple[str, ...]
    """Folders with presets of the user's own."""

    def stated(self, given: Mapping[str, Any], name: str) -> Any:
        """What the files say of an option beside the others that are given; None where they do not."""
        others = {other: value for other, value in given.items() if other != name}
        try:
            return merge(self.configs, split_options(others), self.dirs).value(name)
        except MemcalcError:
            return None

    def proven(self, needed: Mapping[str, Any], estimate: Estimate, decided: tuple[str, ...]) -> Estimate:
        """Return what the files come to; refuse those that miss a part of the strategy, which is named."""
        try:
            again = estimate_merged(merge(self.configs, split_options(needed), self.dirs), self.dirs)
        except CombinationError as error:
            allowed = f"what {self.title} adds resolves to no job that runs: {error}"
            raise CombinationError("to", self.title, allowed) from None
        wanted, actual = _resolved(estimate), _resolved(again)
        other = [name for name in wanted if actual[name] != wanted[name]]
        moved = [name for name in _PROOF if getattr(again, name) != getattr(estimate, name)]
        missing = [name for name in other if name not in decided and (moved or name not in _MUTE)]
        if missing:
            runs = f"{self.title}: what runs has {value_text(actual[missing[0]]) or 'none'}"
            raise CombinationError(missing[0].replace("_", "-"), value_text(wanted[missing[0]]), runs)
        if moved and not set(other) & set(decided):
            raise CombinationError("to", self.title, f"what runs has another {moved[0]} than the plan")
        return again if moved else estimate


def _options(job: JobRecord, estimate: Estimate) -> dict[str, Any]:
    """The options of the job itself, of the software that runs it, and of its environment."""
    workload, hardware = estimate.workload, estimate.hardware
    given = {**pinned(job).options, **job.settings}
    beside = {*_SOFTWARE, *ENVIRONMENT, *_PLACED, *_ASSUMED}
    installed = {name: value for name, value in given.items() if name in beside}
    if "lengths" in given:  # a file may make other batches than those that were asked about
        installed |= {name: given.get(name, BY_NAME[name].default) for name in BATCHING if name != "token_budget"}
    framework = estimate.strategy.framework
    options = {
        **installed,
        "model": job.model,
        "gpu": job.gpu,
        "node": job.node,
        "gpus": hardware.gpus,
        "seq_len": workload.seq_len,
        **({"framework": framework} if "@" in framework else {}),
    }
    return {name: value for name, value in options.items() if value is not None}


def _same(stated: Any, value: Any) -> bool:
    """Whether two values are the same: a list is its text with commas, true is `true`."""
    return stated is not None and value_text(stated).lower() == value_text(value).lower()


def _resolved(estimate: Estimate) -> dict[str, Any]:
    """The fields of a strategy, one name for what the framework does alike and for what is left to it."""
    strategy = estimate.strategy
    habits = habits_of(strategy.framework)
    fields = {**strategy.model_dump(), "checkpoint": strategy.checkpoint or _REENTRANT[habits.reentrant]}
    alike = (name for name, how in habits.losses.items() if how == habits.losses.get(strategy.loss))
    fields["loss"] = next(alike, strategy.loss)
    fields["etp"] = strategy.etp or strategy.tp
    if strategy.dp * strategy.cp == 1:  # no gradient is reduced and no weight gathered: nothing can overlap
        fields |= dict.fromkeys(("overlap_comm", "overlap_param_gather"))
    if strategy.first_stage_layers or strategy.last_stage_layers:  # of one alone the other follows
        ends = estimate.stages[0].layers, estimate.stages[-1].layers
        fields["first_stage_layers"], fields["last_stage_layers"] = ends
    if habits.full_shard and "params" in strategy.offload:  # FSDP takes the states along
        fields["offload"] = tuple(part for part in strategy.offload if part != "optimizer")
    if strategy.precision == "fp8-mixed":
        fields["float8"] = strategy.float8 or habits.float8[0]
    if strategy.framework == "hf" and strategy.zero == 0 and strategy.dp > 1:  # the Trainer's files have no other name
        fields["framework"] = "ddp"
    if strategy.optimizer in ANY_FORM:
        fields["optimizer_impl"] = ""
    return fields


def _ordered(needed: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options in the order of a command line, and fields; a list is typed with commas."""
    order = {name: index for index, name in enumerate(_FIRST)}
    names = sorted(needed, key=lambda name: order.get(name, len(order)))
    texts = {name: needed[name] if isinstance(needed[name], bool) else value_text(needed[name]) for name in names}
    plain = {name: text for name, text in texts.items() if name in {*WORDS, *JOB_KEYS}}
    return plain, {name: text for name, text in texts.items() if name not in plain}
