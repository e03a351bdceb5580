"""Configs of trainers whose keys are not read: known by name, so that none is taken for another's, and refused with it.

nanotron 0.4 at 2411b022. Its states are those of a mixed-precision optimizer with ZeRO 0 or 1
(optim/gradient_accumulator.py, optim/zero.py), but its gradients are kept three times: fp32 buffers of all weights, the
16-bit ones of each micro-batch's backward, and torch's DDP buckets of them (trainer.py). No framework here has these,
and its own layers keep more for backward: counted as Megatron-LM's, 40 of its published runs that were drawn at random
(presets/runs/layouts/nanotron.toml) come out between half too small and two fifths too large, 13% too small in the
median.
"""

from __future__ import annotations

from memcalc.convert.config import Config
from memcalc.convert.document import Document
from memcalc.convert.formats.base import Format
from memcalc.errors import FileError, ObjectiveError

_KEYS = ("parallelism", "tokens", "optimizer", "general")
"""Tables that its configs must have, or always have."""


def recognise(document: Document) -> bool:
    """Whether a document is a config of nanotron."""
    return isinstance(document.data, dict) and all(key in document.data for key in _KEYS)


def read(document: Document) -> Config:
    """Refuse it by its trainer's name."""
    if not recognise(document):
        raise FileError("file", str(document.path), "must be a config of nanotron")
    raise ObjectiveError(
        f"{document.path.name} is a config of nanotron ({', '.join(_KEYS)}), whose gradients stand in fp32, in 16 bits "
        "and in DDP's buckets at once: no framework here has them, and the nearest, memcalc estimate --framework "
        "megatron, says too little, often by 10% to 40%."
    )


FORMAT = Format("unread", "nanotron YAML (not read)", "nanotron 0.4", recognise, read)
