"""A module on fake tensors: its own steps shown, and the recorded model written where it is asked for."""

from __future__ import annotations

from typing import Any

from memcalc.cli.modules import OF_A_STEP, source_of
from memcalc.cli.output import deliver, destination
from memcalc.errors import MissingError
from memcalc.files import output_path

__all__ = ["show"]


def show(options: dict[str, Any]) -> int:
    """Run the module, show what it keeps and holds; return the exit code."""
    from memcalc.probe.module import probe
    from memcalc.report.module import report
    from memcalc.report.progress import waiting

    words = {name: options.pop(name) for name in OF_A_STEP}
    source = source_of(options, words["seq_len"])
    if source is None:
        raise MissingError("which module? give --module package.module:factory.")
    save = options.pop("save")
    path = output_path(save, bool(options.get("force"))) if save is not None else None
    target = destination(options)
    with waiting("record the module", "series") as listen:
        found, text = probe(source, **words, whole=path is not None, on_progress=listen)
    if path is not None:
        deliver(text, path)
        found = found.model_copy(update={"file": save})
    target.show(report(found))
    return 0
