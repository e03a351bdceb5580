"""Everyday jobs: what plan lists first is written without a loss, and docs/export.md says how often."""

from __future__ import annotations

from importlib.resources import files

import everyday
import pytest

import memcalc
from memcalc.catalog import read_toml
from memcalc.convert.formats.base import hub_named
from memcalc.convert.named_model import named_model
from memcalc.handoff import exported
from memcalc.handoff.saved import saved_plan
from memcalc.preflight.names import model_named


@pytest.mark.slow
def test_everyday_plans_are_written_without_a_loss() -> None:
    table = everyday.outcomes()
    assert [name for row in table.values() for name in row.lost] == []
    plans = sum(row.plans for row in table.values())
    written = sum(row.same + row.noted for row in table.values())
    assert sum(row.jobs for row in table.values()) == 100
    assert written == plans, [name for row in table.values() for name in row.refused]
    assert sum(row.same for row in table.values()) >= 0.95 * plans
    assert everyday.block(table) in everyday.PAGE.read_text(encoding="utf-8"), "python tests/everyday.py"


def test_the_list_has_a_hundred_jobs() -> None:
    jobs = list(everyday.jobs())
    assert len({tuple(words.values()) for _, words in jobs}) == 100


def test_names_on_the_hub_lead_back_to_their_presets() -> None:
    names = read_toml(files("memcalc.convert.formats") / "hub.toml")["names"]
    for given, name in names.items():
        assert model_named(name) == named_model(given).model.name


def test_an_export_never_names_the_weights_of_another_model_of_the_same_sizes() -> None:
    """Llama 3.3 70B, Qwen2.5-Coder and tuned forms have a preset's sizes, and other weights (the cards on the Hub)."""
    cases = {
        "llama-3.3-70b": "meta-llama/Llama-3.3-70B-Instruct",
        "llama-3.1-8b-instruct": "meta-llama/Llama-3.1-8B-Instruct",
        "qwen2.5-coder-7b": "Qwen/Qwen2.5-Coder-7B",
        "deepseek-r1": "deepseek-ai/DeepSeek-R1",
        "phi-4": "microsoft/phi-4",
        "bloomz-7b1": "bloomz-7b1",
        "8b": "meta-llama/Llama-3.1-8B",
        "Llama3.1-8B": "meta-llama/Llama-3.1-8B",
    }
    assert {name: hub_named(name, named_model(name).model) for name in cases} == cases


def test_a_name_that_the_hub_may_not_have_is_said() -> None:
    job = {"gpu": "a100-80g", "gpus": 8, "framework": "hf", "recompute": "full", "zero": 3, "top": 1}
    for model, said in (("bloomz-7b1", True), ("bloom-7b1", False)):
        plans = memcalc.plan(model=model, **job)
        notes = exported(saved_plan(plans)).notes
        assert any("the Hub's name of bloomz-7b1 is not known" in note for note in notes) is said
