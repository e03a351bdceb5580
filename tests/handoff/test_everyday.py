"""Everyday jobs: what plan lists first is written without a loss, and docs/export.md says how often."""

from __future__ import annotations

from importlib.resources import files

import everyday
import pytest

from memcalc.catalog import read_toml
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
    for preset, name in names.items():
        assert model_named(name) == preset
