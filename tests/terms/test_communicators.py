"""NCCL's communicators, and what is kept to send to single ranks, against published measurements."""

from __future__ import annotations

from typing import Any

import pytest

import memcalc

GB = 10**9
DENSE: dict[str, Any] = {
    "model": "qwen3-8b", "gpu": "h100", "gpus": 8, "framework": "megatron", "tp": 2, "pp": 2,
}  # fmt: skip
EXPERTS = DENSE | {"model": "qwen3-30b-a3b", "ep": 2}


def outside(**words: Any) -> dict[str, int]:
    """Bytes outside of the allocator by group, and by the parallelism whose ranks are sent to."""
    terms = memcalc.estimate(**words).outside
    joined = {str(t.inputs["group"]): t.bytes for t in terms if "group" in t.inputs}
    return joined | {f"to {t.inputs['between']}": t.bytes for t in terms if "between" in t.inputs}


def groups(**words: Any) -> dict[str, int]:
    return {
        str(t.inputs["group"]): int(t.inputs["ranks"])
        for t in memcalc.estimate(**words).outside[1:]
        if "ranks" in t.inputs
    }


def test_an_exchange_of_8_gpus_opens_all_channels() -> None:
    """NVIDIA/nccl#1685: 1.06 GB outside PyTorch before the first all-to-all of 8 H100, 4.34 GB after it."""
    found = outside(**EXPERTS | {"tp": 1, "pp": 1, "ep": 8})["to ep"]
    assert found == 7 * 32 * (2_097_152 + 10_485_760)
    assert 0.8 < found / ((4.34 - 1.06) * GB) <= 1


def test_what_experts_add_to_the_communicators_of_8_gpus() -> None:
    """verl-project/verl#6408: about 7 GB a rank of a dense model, about 9.5 GB of one with experts (TP2, PP2, DP2)."""
    dense, routed = sum(outside(**DENSE).values()), sum(outside(**EXPERTS).values())
    assert routed - dense == pytest.approx(2.5 * GB, rel=0.1)
    assert dense < 7 * GB


def test_each_group_that_megatron_uses_counts() -> None:
    """core/parallel_state.py: 8 ranks by hand; two groups of the same ranks have a communicator each."""
    dense = {"world": 8, "tp": 2, "pp": 2, "dp": 2, "mp": 4, "dist_opt": 8}
    assert groups(**DENSE) == dense
    assert groups(**EXPERTS) == dense | {"ep": 2, "tp_ep": 4, "etp": 2, "tp_cp": 2}
    assert groups(**EXPERTS, settings={"strategy.etp": 1}) == dense | {"ep": 2, "tp_ep": 2, "tp_cp": 2, "edp": 2}
    assert groups(**DENSE | {"zero": 0}) == {name: n for name, n in dense.items() if name != "dist_opt"}
    assert groups(**DENSE | {"framework": "megatron@2022-01"}) == {"world": 8, "tp": 2, "pp": 2}


def test_who_is_sent_to() -> None:
    """A stage has a neighbour on each side; only an all-to-all sends to every rank, and only within a node."""
    four = outside(**DENSE | {"tp": 1, "pp": 4})
    assert four["to pp"] == 2 * outside(**DENSE)["to pp"]
    for name in ("allgather", "deepep"):
        assert "to ep" not in outside(**EXPERTS, moe_dispatcher=name)
    assert "to ep" not in outside(**EXPERTS | {"tp": 1, "pp": 1, "ep": 16, "gpus": 16})
    assert "to pp" not in outside(**DENSE | {"gpus": 16})
    assert not [name for name in outside(**EXPERTS | {"gpu": "a100-pcie-80g"}) if name.startswith("to ")]
    ring, exchange = (
        outside(**DENSE | {"pp": 1, "cp": 4}, settings={"strategy.cp_kind": kind}) for kind in ("ring", "a2a")
    )
    assert exchange["to cp"] * 2 == ring["to cp"] * 3
