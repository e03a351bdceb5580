"""Every format that is written: a plan, exported and then checked with the printed command, is the same to the byte."""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import pytest
from command_lines import keywords
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import memcalc
from memcalc.api import load_model
from memcalc.convert.formats import get_format, render_config
from memcalc.convert.formats.base import WRITABLE, ConfigJob
from memcalc.errors import CombinationError, MemcalcError
from memcalc.frameworks import habits_of
from memcalc.handoff import exported
from memcalc.handoff import saved as saving
from memcalc.handoff.saved import estimate_of, saved_plan
from memcalc.preflight import check
from memcalc.results.plans import SavedPlan
from memcalc.specs.strategy import FRAMEWORKS
from memcalc.units import GIB

pytestmark = pytest.mark.usefixtures("answers_once")

MODELS = ("llama-3-8b", "llama-3-8b", "llama-3-8b", "llama-3.2-1b", "llama-3.2-3b", "llama-2-7b", "qwen2.5-0.5b")
"""Presets that are drawn; the first is one that every framework names."""
DRAWN = [pytest.param(6, 1, 3, id="some"), pytest.param(14, 3, 14, id="many", marks=pytest.mark.slow)]
"""Plans that are drawn for each format, and how many of them it must be able to say, at least and at most."""
ORDINARY = {"tp": 1, "pp": 1, "cp": 1, "ep": 1, "micro_batch": 1, "offload": "none", "recompute": "none"}


MUTE = ("reduce_dtype", "reshard", "vpp", "whole_accumulation")
"""Fields that some strategies have no use for: equal bytes say that they are such."""


def written(saved: SavedPlan, to: str, folder: str) -> tuple[list[str], dict[str, Any], tuple[str, ...]]:
    """Write a plan; return the files, the words of the command that checks it, none of the strategy, and the notes."""
    done = exported(saved, to)
    for path, text in done.files.items():
        (Path(folder) / path).write_text(text, encoding="utf-8")
    words = keywords(done.check)
    files = [str(Path(folder) / name) for name in words.pop("files")]
    left = {name for name, value in words.items() if value} - {"settings"} | set(words["settings"])
    assert left <= {"model", "gpu", "gpus", "seq_len", "strategy.expandable_segments"}
    return files, words, done.notes


def unusual(framework: str) -> dict[str, list[Any]]:
    """Return what may be drawn of a framework besides the ordinary, by word or field."""
    habits = habits_of(framework)
    degrees = {name: [2] for name in ("tp", "pp") if habits.tensor_parallel and name not in habits.lacks}
    return {
        **degrees,
        "zero": list(habits.zero),
        "recompute": ["full", "every-2", "mlp", "selective-core-attn", "block-4"],
        "offload": ["params", "optimizer", "optimizer,params", "activations"],
        "optimizer": ["sgd", "sgd-momentum", "adamw-8bit", "lion"],
        "optimizer_impl": ["fused", "foreach", "loop"],
        "attention": ["efficient", "math", "eager"],
        "kernels": ["fused"],
        "precision": [name for name in habits.widths if "fp16" not in name],
        "strategy.expandable_segments": ["true"],
        "strategy.reduce_dtype": ["bf16"],
    }


def drawn(data: st.DataObject, framework: str) -> SavedPlan | None:
    """Draw an ordinary job with up to three unusual words, and of the plans for it one; None where there is none."""
    draw = data.draw
    table = unusual(framework)
    gpus = 1 if framework == "plain" else draw(st.sampled_from([2, 4, 8, 16]), "gpus")
    words: dict[str, Any] = {
        **ORDINARY,
        "gpus": gpus,
        "micro_batch": "any",
        "recompute": "none",
        "seq_len": draw(st.sampled_from([512, 1024, 2048]), "seq_len"),
        "global_batch": gpus * draw(st.sampled_from([1, 2, 4, 8]), "batch"),
    }
    for name in draw(st.lists(st.sampled_from(sorted(table)), max_size=3, unique=True), "unusual"):
        words[name] = draw(st.sampled_from(table[name]), name)
    fields = {name: words.pop(name) for name in list(words) if "." in name}
    model = draw(st.sampled_from(MODELS), "model")
    try:
        plans = memcalc.plan(
            model=model, gpu="h100", framework=framework, settings=fields, top=3, advice=False, **words
        )
        rank = draw(st.integers(1, max(len(plans.plans), 1)), "rank")
        with mock.patch.object(saving, "fallbacks", return_value=()):  # they have a test of their own
            return saved_plan(plans, rank)
    except MemcalcError:  # the framework does not have what was drawn, or it does not fit
        return None


@functools.cache
def ordinary(framework: str) -> tuple[ConfigJob, ...]:
    """Return ordinary jobs of a framework."""
    found = []
    for model, recompute, tp in (("llama-3.2-1b", "full", 1), ("llama-3-8b", "none", 2), ("llama-3-8b", "none", 1)):
        words = ORDINARY | {"gpus": 1 if framework == "plain" else 2, "seq_len": 512, "global_batch": 2}
        with contextlib.suppress(MemcalcError):  # the framework does not have it
            estimate = memcalc.estimate(
                model=model, gpu="h200", framework=framework, **words | {"recompute": recompute, "tp": tp}
            )
            found.append(ConfigJob.of(estimate, load_model(model)))
    return tuple(found)


def frameworks_of(to: str) -> list[str]:
    """The frameworks of which a format takes an ordinary job."""
    era = get_format(to).era
    if era:  # the newest has no such file
        return [era]
    return [framework for framework in FRAMEWORKS if any(_takes(to, job) for job in ordinary(framework))]


def _takes(to: str, job: ConfigJob) -> bool:
    try:
        render_config(get_format(to), job)
    except CombinationError:  # named: the format cannot say it
        return False
    return True


@pytest.mark.parametrize("to", WRITABLE)
@pytest.mark.parametrize(("examples", "needed", "enough"), DRAWN)
def test_what_is_exported_and_checked_is_the_plan(to: str, examples: int, needed: int, enough: int) -> None:
    accepted: list[SavedPlan] = []
    frameworks = frameworks_of(to)

    @settings(max_examples=examples, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(data=st.data())
    def one(data: st.DataObject) -> None:
        saved = drawn(data, data.draw(st.sampled_from(frameworks), "framework"))
        if saved is None or len(accepted) == enough:
            return
        with TemporaryDirectory() as folder:
            try:
                files, words, notes = written(saved, to, folder)
            except CombinationError:  # named: the format cannot say it
                return
            again = check(files, **words).estimate
        plan = estimate_of(saved)
        own = "reentrant" if habits_of(plan.strategy.framework).reentrant else "non-reentrant"
        left = {name: getattr(again.strategy, name) for name in MUTE}
        if again.strategy.checkpoint == own and not plan.strategy.checkpoint:
            left["checkpoint"] = own
        usual = habits_of(plan.strategy.framework).float8[:1] if plan.strategy.precision == "fp8-mixed" else ()
        if not plan.strategy.float8 and again.strategy.float8 in usual:
            left["float8"] = again.strategy.float8
        known = (name for name in get_format(to).decided if name in type(plan.strategy).model_fields)
        decided = {name: getattr(again.strategy, name) for name in known}
        moved = {name for name, value in decided.items() if value != getattr(plan.strategy, name)}
        assert again.strategy == plan.strategy.model_copy(update=left | decided)
        if moved - set(left) and again.peak != plan.peak:  # said with its figure, which is that of what runs
            assert any(f"{again.peak.device / GIB:.2f} GiB" in note for note in notes), notes
            accepted.append(saved)
            return
        assert (again.peak, again.components, again.workload) == (plan.peak, plan.components, plan.workload)
        assert (again.model, again.hardware) == (plan.model, plan.hardware)
        assert again.peak.device == saved.plan.peak.device
        accepted.append(saved)

    assert frameworks, f"{to} takes no ordinary plan"
    one()
    assert len(accepted) >= needed
