"""Sums in the order and in the blocks that are fast are the sums in any order."""

import random
from typing import Any

import numpy as np
import pytest

from memcalc import ledger
from memcalc.catalog import model
from memcalc.trace.layers import BlockConfig
from memcalc.trace.template import trace
from memcalc.trace.working_sets import key_of

PHASES = ("forward", "loss", "backward", "step")
GRID = (7, 3, 2, 4, 2, 3, 5)


def random_parts(seed: int) -> list[tuple[tuple[str, ...], Any]]:
    """Arrays along some of the axes, of both signs, each alive in some of the phases."""
    draw, values = random.Random(seed), np.random.default_rng(seed)  # noqa: S311 - a seeded choice of test cases
    parts = []
    for _ in range(draw.randint(0, 12)):
        shape = [length if draw.random() < 0.5 else 1 for length in GRID]
        alive = tuple(draw.sample(PHASES, draw.randint(1, len(PHASES))))
        parts.append((alive, values.integers(-(2**40), 2**50, shape)))
    return parts


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("block", [1, 1000, 2**30])
def test_largest_phase_is_that_of_whole_sums(seed: int, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "BLOCK", block)
    parts = random_parts(seed)
    by_phase = [sum((a for alive, a in parts if phase in alive), np.zeros(GRID, np.int64)) for phase in PHASES]
    tree = ledger.largest(ledger.alike(parts), frozenset(PHASES))
    assert np.array_equal(np.broadcast_to(ledger.computed(tree), GRID), np.max(by_phase, axis=0))


@pytest.mark.parametrize("seed", range(40))
def test_stages_that_are_left_out_have_no_peak(seed: int) -> None:
    """Rows of one layout stand together; steps of 0 and 1 make many of them no larger than the row before."""
    owners = np.array([0, 0, 0, 1, 2, 2, 2])
    values, parts = np.random.default_rng(seed), random_parts(seed)
    parts = [(alive, array[:, :1]) for alive, array in parts]
    small = [(alive, values.integers(0, 2, array.shape)) for alive, array in parts]
    for each in (parts, small):
        tree = ledger.largest(ledger.alike(each), frozenset(PHASES))
        whole = np.broadcast_to(ledger.computed(tree), (len(owners), *tree.shape[1:]))
        found = ledger.MaxOverStages(tree, owners)
        expected = np.stack([whole[owners == layout].max(axis=0) for layout in range(3)])
        assert np.array_equal(np.broadcast_to(found.rows(slice(0, 3)), expected.shape), expected)
        assert np.array_equal(np.broadcast_to(found.rows(slice(1, 3)), expected[1:].shape), expected[1:])
        assert all(found.at((i, 0, 0, 0, 0, 0, 0)) == expected[i, 0, 0, 0, 0, 0, 0] for i in range(3))


@pytest.mark.parametrize("seed", range(5))
def test_a_row_no_larger_than_the_one_before_is_not_computed(seed: int) -> None:
    falling = np.arange(7, 0, -1).reshape(7, 1, 1, 1, 1, 1, 1) + np.random.default_rng(seed).integers(0, 9, (1,) * 7)
    assert list(ledger.MaxOverStages(ledger.leaf(falling), np.array([0, 0, 0, 1, 2, 2, 2])).kept) == [0, 3, 4]


@pytest.mark.parametrize("name", ["llama-3.2-1b", "mixtral-8x7b", "t5-base"])
@pytest.mark.parametrize("policy", ["none", "full", "selective-ops"])
def test_no_moment_is_larger_than_the_peaks_kept(name: str, policy: str) -> None:
    setting = BlockConfig(weight=2, residual=2, autocast=False, kernels="model")
    template = trace(model(name).groups[-1].block, setting, policy)
    weights = {key: 1 + place**2 for place, key in enumerate(sorted({key_of(r) for r in template.records}))}
    for kept, start, events in (
        (template.forward_peaks, template.at_start, template.forward),
        (template.backward_peaks, template.kept | {template.incoming}, template.backward),
    ):
        size = [r.size.bytes * weights[key_of(r)] * (r.kind != "observed") for r in template.records]
        now = most = sum(size[storage] for storage in start)
        for event in events:
            now += size[event] if event >= 0 else -size[~event]
            most = max(most, now)
        assert max(sum(value * weights[key] for key, value in one.items()) for one in kept) == most
