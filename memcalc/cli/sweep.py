"""A sweep: its bar while it runs, its table or the file at the end, and how to go on after an interrupt."""

from __future__ import annotations

from typing import Any

from memcalc.cli.output import INTERRUPTED, destination, fail
from memcalc.units import parse_count


def show(file: str, *, jobs: str | None, scheduler: str | None, top: str, options: dict[str, Any]) -> int:
    """Answer every job of the file, and show the table or where it was written; return the exit code."""
    import memcalc
    from memcalc.report.progress import bar
    from memcalc.report.sweep import report

    output, force = options.pop("output"), bool(options.pop("force"))
    target = destination({"output": None, "force": None, "format": options["format"]})
    most = parse_count(top, "top")
    done = 0

    def listen(state: Any) -> None:
        nonlocal done
        done = state.done
        draw(state)

    try:
        with bar() as draw:
            answer = memcalc.sweep(
                file,
                output=output,
                force=force,
                jobs=jobs,
                scheduler=scheduler,
                preset_dirs=tuple(options["preset_dir"] or ()),
                calibration=options["calibration"],
                on_progress=listen,
            )
    except KeyboardInterrupt:
        sentence = f"interrupted after {done:,} jobs; run the same command to resume." if output else "interrupted."
        return fail(sentence, INTERRUPTED)
    target.show(report(answer, most, output or ""))
    return 0
