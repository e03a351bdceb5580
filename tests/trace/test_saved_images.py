"""What vision towers and projectors keep for backward, against PyTorch's own list on the real classes."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from autograd import images

from memcalc.convert.huggingface import from_huggingface
from memcalc.specs.model import Model
from memcalc.trace.layers import BlockConfig
from memcalc.trace.template import Template, trace, trace_entry, trace_exit

RANDOM = (".rng_state", ".unused", ".philox_seed", ".philox_offset")
"""What a fused attention's random state is called."""
SETTING = BlockConfig(weight=2, residual=2, attention="flash", reentrant=False, sdpa=True)


def units_of(model: Model) -> dict[str, int]:
    """How many of each unit two views have."""
    assert model.images is not None
    rows = images.PATCHES + model.images.class_tokens
    joined = model.groups[0].block.attention.joins_batch
    length, number = (images.VIEWS * rows, 1) if joined else (rows, images.VIEWS)
    return {
        "token": images.VIEWS * rows,
        "row": length,
        "pair": number * length**2,
        "filled_token": number * (-(-length // 32) * 32),
        "sample": images.VIEWS,
        "image": images.VIEWS * images.PATCHES // model.images.merge**2,
        "once": 1,
    }


def size(template: Template, units: dict[str, int], *, early: bool = False) -> int:
    """Bytes that a template keeps; what a projector reads `early` is a block's input, which that block keeps."""
    kept = [record for record in template.kept_records if not (early and record.kind == "external")]
    return sum(record.size.bytes * units[record.size.unit] for record in kept)


@pytest.mark.parametrize("kind", images.SMALL)
def test_tower_and_projector_keep_what_autograd_saves(kind: str) -> None:
    tower = images.saved_by_tower(kind)
    model = from_huggingface(tower.config.to_dict())
    units, ends = units_of(model), model.ends_of("vision")
    assert ends.projector is not None
    ends = ends.model_copy(update={"pixels": images.PATCHES * ends.patch})
    stored = [storage for storage in tower.storages if not storage.node.endswith(RANDOM)]
    blocks = [size(trace(model.groups[index].block, SETTING), units) for index in model.sequence[: len(tower.blocks)]]
    hidden = model.groups[0].block.hidden
    entry = trace_entry(ends, model.groups[0].block, SETTING)
    end = trace_exit(ends, hidden, SETTING, read=False)
    ours = size(entry, units) + sum(blocks) + size(end, units, early=ends.projector.early)
    assert ours == sum(storage.nbytes for storage in stored)
    if not ends.projector.deep:  # else the further projectors are the first to keep what a block keeps too
        last = [storage.nbytes for storage in stored if storage.part == tower.blocks[-1]]
        assert blocks[-1] == sum(last)
