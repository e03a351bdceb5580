"""A module in the place of a model: its options, and the recording that they ask for."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from memcalc.cli.options import JOB, MODULE, Shared, given
from memcalc.errors import CombinationError, InputError

if TYPE_CHECKING:
    from memcalc.probe.module import Source

__all__ = ["A_MODULES_STEP", "MODEL_OR_MODULE", "OF_A_STEP", "refuse_module", "source_of", "with_model"]

WORDS = ("module", "inputs", "loss_fn", "block_class")
OF_A_STEP = ("precision", "recompute", "optimizer", "optimizer_impl", "micro_batch", "seq_len")
"""What the steps of ``probe --device fake`` are told."""
MODEL_OR_MODULE = (*(replace(option, required=option.required and option.name != "model") for option in JOB), *MODULE)
A_MODULES_STEP = (
    *MODULE,
    *(replace(option, panel=MODULE[0].panel) for option in JOB if option.name in OF_A_STEP),
    Shared("save", MODULE[0].panel, "FILE", "Where the recorded model is written, for --model."),
)


def source_of(options: dict[str, Any], seq_len: str | None) -> Source | None:
    """Take the words of a module out of the options."""
    words = {name: options.pop(name, None) for name in WORDS}
    if words["module"] is None:
        for name, value in words.items():
            if value is not None:
                raise CombinationError(name.replace("_", "-"), value, "needs --module")
        return None
    from memcalc.planner.request import positive
    from memcalc.probe.module import Source

    length = 0 if seq_len is None else positive(seq_len, "seq_len")
    return Source(
        words["module"], words["inputs"] or "", words["loss_fn"] or "", words["block_class"] or "", seq_len=length
    )


def refuse_module(options: dict[str, Any]) -> None:
    """Refuse the words of a module where a device is measured."""
    for name in (*WORDS, *OF_A_STEP, "save"):
        if options.get(name) is not None:
            raise CombinationError(name.replace("_", "-"), options[name], "is said with --device fake")


def with_model(options: dict[str, Any], *, needed: bool = True) -> dict[str, Any]:
    """Return the words for the library, with the model that a module was recorded as where one is named."""
    source = source_of(options, options.get("seq_len"))
    named = options.get("model")
    if source is None:
        if named is None and needed:
            raise InputError("model", "", "give --model, or --module package.module:factory")
        return given(options)
    if named is not None:
        raise CombinationError("model", named, "--module is given too; one of them says what is trained")
    from memcalc.probe.module import modes_for, record_model
    from memcalc.report.progress import waiting

    with waiting("record the module", "series") as listen:
        model = record_model(source, modes_for(options.get("precision")), on_progress=listen)
    return {**given(options), "model": model}
