"""The JSON file that the Trainer's `fsdp_config` names (Transformers 5.23, training_args.py, _process_fsdp_args)."""

from __future__ import annotations

from memcalc.convert.config import Config, Reading
from memcalc.convert.document import Document
from memcalc.convert.formats.base import Format
from memcalc.convert.formats.fsdp_options import read_options, said_version

_SIGNS = frozenset({"transformer_layer_cls_to_wrap", "fsdp_transformer_layer_cls_to_wrap", "fsdp_version"})


def read(document: Document) -> Config:
    """Return what the file says of FSDP; without a version it is the second."""
    reading = Reading(document, "fsdp_config", "Transformers 5.23")
    read_options(reading, "", said_version(reading, "", 2), wraps="transformer_based_wrap")
    return reading.finish()


FORMAT = Format(
    name="fsdp_config",
    title="the Trainer's FSDP JSON",
    software="Transformers 5.23",
    recognise=lambda document: document.kind == "json" and bool(_SIGNS & set(document.data)),
    read=read,
)
"""FSDP's options, beside the Trainer's own arguments."""
