"""A probe: its bar while it runs, what it found, and how to go on after an interrupt."""

from __future__ import annotations

from typing import Any

from memcalc.cli.errors import fail
from memcalc.cli.output import destination

__all__ = ["show"]

_INTERRUPTED = 130


def show(options: dict[str, Any], **words: Any) -> int:
    """Measure, or say what would be measured; return the exit code."""
    from memcalc.probe.measure.driver import probe
    from memcalc.report.probe import report
    from memcalc.report.progress import bar

    output, force = options.pop("output"), bool(options.pop("force"))
    target = destination({"output": None, "force": None, "format": options["format"]})
    done = 0

    def listen(state: Any) -> None:
        nonlocal done
        done = state.done
        draw(state)

    try:
        with bar(noun="probe") as draw:
            found = probe(
                **words, output=output, force=force, preset_dirs=tuple(options["preset_dir"] or ()), on_progress=listen
            )
    except KeyboardInterrupt:
        return fail(f"interrupted after {done} jobs; the same command goes on from there.", _INTERRUPTED)
    target.show(report(found))
    return 0
