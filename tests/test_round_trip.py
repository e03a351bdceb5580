"""Every format that is written: a plan, exported and then checked with the printed command, is the same to the byte."""

from __future__ import annotations

import contextlib
import functools
import shlex
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import memcalc
from memcalc.api import load_model
from memcalc.convert.formats import format_named
from memcalc.convert.formats import written as written_text
from memcalc.convert.formats.base import WRITABLE
from memcalc.convert.job import Job
from memcalc.errors import CombinationError, MemcalcError
from memcalc.frameworks import habits_of
from memcalc.handoff import saved as saving
from memcalc.handoff.exporting import exported
from memcalc.handoff.saved import estimate_of, saved_plan
from memcalc.handoff.words import typed
from memcalc.preflight import check
from memcalc.results import SavedPlan
from memcalc.specs.strategy import FRAMEWORKS

MODELS = ("llama-3-8b", "llama-3-8b", "llama-3-8b", "llama-3.2-1b", "llama-3.2-3b", "llama-2-7b", "qwen2.5-0.5b")
"""Presets that are drawn; the first is one that every framework names."""
DRAWN = [pytest.param(6, 1, id="some"), pytest.param(40, 6, id="many", marks=pytest.mark.slow)]
"""Plans that are drawn for each format, and how many of them at least it must be able to say."""
ORDINARY = {"tp": 1, "pp": 1, "cp": 1, "ep": 1, "micro_batch": 1, "offload": "none", "recompute": "none"}


def written(saved: SavedPlan, to: str, folder: str) -> tuple[str, dict[str, Any]]:
    """Write a plan; return the file and the words of the command that checks it."""
    done = exported(saved, to)
    for path, text in done.files.items():
        (Path(folder) / path).write_text(text, encoding="utf-8")
    path = next(iter(done.files))
    parts = shlex.split(done.check)
    assert parts[:3] == ["memcalc", "check", str(path)]
    line = typed(shlex.join(["memcalc", "check", *parts[3:]]))
    named = {"model": line.model, "gpu": line.gpu, "node": line.node, **line.words}
    words = {name: value for name, value in named.items() if value not in (None, "None")}
    return str(Path(folder) / path), {**words, "settings": line.settings}


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
        plans = memcalc.plan(model=model, gpu="h100", framework=framework, settings=fields, top=3, **words)
        rank = draw(st.integers(1, max(len(plans.plans), 1)), "rank")
        with mock.patch.object(saving, "fallbacks", return_value=()):  # they have a test of their own
            return saved_plan(plans, rank)
    except MemcalcError:  # the framework does not have what was drawn, or it does not fit
        return None


@functools.cache
def ordinary(framework: str) -> tuple[Job, ...]:
    """Return ordinary jobs of a framework."""
    found = []
    for model, recompute, tp in (("llama-3.2-1b", "full", 1), ("llama-3-8b", "none", 2), ("llama-3-8b", "none", 1)):
        words = ORDINARY | {"gpus": 1 if framework == "plain" else 2, "seq_len": 512, "global_batch": 2}
        with contextlib.suppress(MemcalcError):  # the framework does not have it
            estimate = memcalc.estimate(
                model=model, gpu="h200", framework=framework, **words | {"recompute": recompute, "tp": tp}
            )
            found.append(replace(Job.of(estimate), spec=load_model(model)))
    return tuple(found)


def frameworks_of(to: str) -> list[str]:
    """The frameworks of which a format takes an ordinary job."""
    return [framework for framework in FRAMEWORKS if any(_takes(to, job) for job in ordinary(framework))]


def _takes(to: str, job: Job) -> bool:
    try:
        written_text(format_named(to), job)
    except CombinationError:  # named: the format cannot say it
        return False
    return True


@pytest.mark.parametrize("to", WRITABLE)
@pytest.mark.parametrize(("examples", "needed"), DRAWN)
def test_what_is_exported_and_checked_is_the_plan(to: str, examples: int, needed: int) -> None:
    accepted: list[SavedPlan] = []
    frameworks = frameworks_of(to)

    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(data=st.data())
    def one(data: st.DataObject) -> None:
        saved = drawn(data, data.draw(st.sampled_from(frameworks), "framework"))
        if saved is None:
            return
        with TemporaryDirectory() as folder:
            try:
                file, words = written(saved, to, folder)
            except CombinationError:  # named: the format cannot say it
                return
            again = check([file], **words).estimate
        plan = estimate_of(saved)
        own = "reentrant" if habits_of(plan.strategy.framework).reentrant else "non-reentrant"
        left = {"checkpoint": again.strategy.checkpoint} if again.strategy.checkpoint == own else {}
        assert again.strategy == plan.strategy.model_copy(update={} if plan.strategy.checkpoint else left)
        assert (again.peak, again.components, again.workload) == (plan.peak, plan.components, plan.workload)
        assert (again.model, again.hardware) == (plan.model, plan.hardware)
        assert again.peak.device == saved.plan.peak.device
        accepted.append(saved)

    assert frameworks, f"{to} takes no ordinary plan"
    one()
    assert len(accepted) >= needed
