"""Commands about measurements: predictions beside them, new ones, what is fitted to them, and failures."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from memcalc.cli.options import (
    DESTINATION,
    DETAILS,
    OF_A_STEP,
    PRESETS,
    calibration,
    completes,
    free,
    given,
    module_step,
    refuse_module,
    source_of,
)
from memcalc.cli.output import INTERRUPTED, Destination, deliver, destination, fail, tell
from memcalc.cli.registry import command
from memcalc.errors import FileError, InputError, MissingError, UnknownNameError
from memcalc.files import OutputError, output_path, replacing
from memcalc.units import parse_count

if TYPE_CHECKING:
    from memcalc.results.probe import Calibrated

_Runs = Annotated[
    list[str] | None,
    typer.Argument(metavar="[RUNS.toml|DIR]...", help="Files of measured runs; the shipped ones when left out."),
]
_Strict = Annotated[bool, typer.Option("--strict", help="Leave out runs with a setting that is assumed.")]
_Group = Annotated[str | None, typer.Option(metavar="NAME", help="Only the runs of this group.")]
_Grade = Annotated[str | None, typer.Option(metavar="GRADE", help="Only this grade: A (which takes A- too), A- or B.")]
_Figure = Annotated[str | None, typer.Option(metavar="NAME", help="Score only allocated, reserved or total.")]
_Worst = Annotated[
    str | None,
    typer.Option(
        metavar="N",
        rich_help_panel="Output",
        help="How many of the figures furthest off are listed [default: 4; 10 with -v]",
    ),
]


@command("Measurements", calibration, *PRESETS, *DESTINATION, *DETAILS)
def validate(
    runs: _Runs = None,
    *,
    strict: _Strict = False,
    group: _Group = None,
    grade: _Grade = None,
    figure: _Figure = None,
    worst: _Worst = None,
    **options: Any,
) -> int:
    """Compare predictions with measured runs."""
    return _validate(runs or (), strict=strict, group=group, grade=grade, figure=figure, worst=worst, options=options)


def _validate(
    paths: Sequence[str],
    *,
    strict: bool,
    group: str | None,
    grade: str | None,
    figure: str | None,
    worst: str | None,
    options: dict[str, Any],
) -> int:
    """Compare the runs of the files, or the shipped ones, and show the answer; return the exit code."""
    from memcalc import validation
    from memcalc.report.accuracy import validation_report
    from memcalc.report.progress import waiting
    from memcalc.results.names import component_name
    from memcalc.runs import read_runs
    from memcalc.specs.strict import FIGURES

    target, most = destination(options), None if worst is None else parse_count(worst, "worst")
    scored = next((name for name in FIGURES if figure in {name, component_name(name)}), None)
    if figure is not None and scored is None:
        names = [component_name(name) for name in FIGURES]
        raise UnknownNameError("figure", figure, f"must be one of {', '.join(names)}", names)
    runs = validation.chosen(read_runs(paths), strict=strict, group=group, grade=grade, figure=scored)
    if not runs.run:
        raise InputError("runs", ", ".join(paths) or "shipped", "no run is left to compare")
    dirs = tuple(options["preset_dir"] or ())
    with waiting("validate", "runs") as listen:
        answer = validation.validate(runs, dirs, calibration=options["calibration"], on_progress=listen)
    target.show(validation_report(answer, most, full=target.form != "rich"))
    return 0


_Device = Annotated[str, typer.Option(metavar="NAME", help="cuda, cpu (tiny models, counted) or fake (your --module).")]
_OF_GPUS = completes(presets="gpus")
_Gpu = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="The GPU's preset; by the driver's name of it when left out.", autocompletion=_OF_GPUS
    ),
]
_Suite = Annotated[
    str, typer.Option(metavar="NAME", help="full, small (a quick look), steps (of training only) or machine.")
]
_Minutes = Annotated[str | None, typer.Option(metavar="N", help="Begin no job that would end later.")]
_Ranks = Annotated[
    str | None, typer.Option(metavar="N", help="Processes of the jobs of several GPUs; all GPUs when left out.")
]
_Dry = Annotated[bool, typer.Option("--dry-run", help="Only say what would run, and what it needs.")]
_RUNS_FILE = (
    DESTINATION[0]._replace(help="Of what is shown: rich, plain, markdown, csv, json, latex, html or svg."),
    DESTINATION[1]._replace(help="The runs file; probe.toml when left out."),
    DESTINATION[2]._replace(help="Begin anew, and replace FILE where it exists."),
)


@command("Measurements", *PRESETS, module_step, *_RUNS_FILE)
def probe(
    *,
    device: _Device = "cuda",
    gpu: _Gpu = None,
    suite: _Suite = "full",
    minutes: _Minutes = None,
    ranks: _Ranks = None,
    dry_run: _Dry = False,
    **options: Any,
) -> int:
    """Measure this GPU: memory and speed of short runs. Resumable.

    --device fake needs none: a module of your own is run on fake tensors.
    """
    if device == "fake":
        return _probe_module(options)
    refuse_module(options)
    return _probe(options, device=device, gpu=gpu, suite=suite, minutes=minutes, ranks=ranks, dry_run=dry_run)


def _probe(options: dict[str, Any], **query: Any) -> int:
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
            answer = probe(
                **query, output=output, force=force, preset_dirs=tuple(options["preset_dir"] or ()), on_progress=listen
            )
    except KeyboardInterrupt:
        return fail(f"interrupted after {done} jobs; run the same command to resume.", INTERRUPTED)
    target.show(report(answer))
    return 0


def _probe_module(options: dict[str, Any]) -> int:
    """Run the module, show what it keeps and holds; return the exit code."""
    from memcalc.probe.module import probe
    from memcalc.report.probe import module_report
    from memcalc.report.progress import waiting

    step = {name: options.pop(name) for name in OF_A_STEP}
    source = source_of(options, step["seq_len"])
    if source is None:
        raise MissingError("which module? give --module package.module:factory.")
    save = options.pop("save")
    path = output_path(save, bool(options.get("force")), "save") if save is not None else None
    target = destination(options)
    with waiting("record the module", "series") as listen:
        answer, text = probe(source, **step, with_model=path is not None, on_progress=listen)
    if path is not None:
        deliver(text, path)
        answer = answer.model_copy(update={"file": save})
    target.show(module_report(answer))
    return 0


_Failure = Annotated[
    str,
    typer.Argument(
        metavar="FILE|-",
        help="A log with an out-of-memory message, a memory snapshot, or vLLM's log of its start.",
        show_default=False,
    ),
]
_Config = Annotated[
    list[str] | None,
    typer.Option(metavar="FILE", rich_help_panel="Job", help="A config file of the job, as for check; repeatable."),
]
_Planned = Annotated[
    str | None, typer.Option("--plan", metavar="FILE", rich_help_panel="Job", help="The job as plan --save wrote it.")
]


@command("What changed, or failed?", free, *PRESETS, *DESTINATION, *DETAILS)
def triage(file: _Failure, *, config: _Config = None, saved: _Planned = None, **options: Any) -> int:
    """Explain an out-of-memory error from a log or snapshot.

    Exit code 0 where a cause is at least likely, 3 where more must be recorded.
    """
    return _triage(file, config=config or (), plan=saved, options=options)


def _triage(file: str, *, config: Sequence[str], plan: str | None, options: dict[str, Any]) -> int:
    """Explain a failure, and show the answer; return 3 where something must be recorded or told."""
    from memcalc import report, triage
    from memcalc.results.serving import EngineLog

    target = destination(options)
    answer = triage(_standard_input() if file == "-" else file, config=config, plan=plan, **given(options))
    if file == "-":
        answer = answer.model_copy(update={"source": "standard input"})
    if isinstance(answer, EngineLog):
        from memcalc.report.serving import log_report

        target.show(log_report(answer))
    else:
        target.show(report.of_triage(answer, file))
    return 0 if answer.answered else 3


def _standard_input() -> bytes:
    from memcalc.probe.triage.answer import LARGEST_LOG

    if sys.stdin is None:
        raise FileError("file", "-", "the standard input is closed")
    content = sys.stdin.buffer.read(LARGEST_LOG + 1)
    if len(content) > LARGEST_LOG:
        raise FileError("file", "-", f"must be at most {LARGEST_LOG >> 20} MiB on standard input")
    return content


_OfGpu = Annotated[
    str | None, typer.Option(metavar="NAME", help="Which GPU, where the rows are of several.", autocompletion=_OF_GPUS)
]
_Install = Annotated[
    bool, typer.Option("--install", help="Keep it in your configuration, where commands for this GPU find it.")
]


@command("Measurements", *PRESETS, *DESTINATION)
def calibrate(runs: _Runs = None, *, gpu: _OfGpu = None, install: _Install = False, **options: Any) -> int:
    """Fit predictions to your own measured runs.

    --output FILE.toml writes the calibration, which commands take with --calibration FILE; other endings the report.
    """
    return _calibrate(runs or (), gpu=gpu, install=install, options=options)


_FILE = "toml"


def _calibrate(paths: Sequence[str], *, gpu: str | None, install: bool, options: dict[str, Any]) -> int:
    """Fit, show the figures, and write the file; return the exit code."""
    import memcalc
    from memcalc import catalog
    from memcalc.report.progress import bar

    force, name = bool(options["force"]), options["output"]
    if options["format"] is None and str(options["output"] or "").lower().endswith(f".{_FILE}"):
        options["format"] = _FILE
    target = destination(options, (_FILE,))
    dirs = tuple(options["preset_dir"] or ())
    if install and gpu is not None:
        _home(catalog.gpu(gpu, dirs).name, force=force)  # before a fit that takes its time
    with bar(noun="calibrate") as listen:
        answer = memcalc.calibrate(paths, gpu=gpu, preset_dirs=dirs, on_progress=listen)
    _show_calibration(answer, target)
    if answer.calibration.empty:
        return fail("nothing predicts held-back rows better, so no calibration was written.", 1)
    for path in _write_calibration(answer, target, install=install, force=force):
        shown = name if path == target.path else path
        tell(f"memcalc: wrote {shown}")
    return 0


def _show_calibration(answer: Calibrated, target: Destination) -> None:
    """Show the figures; the text of the file alone where that was asked for on the screen."""
    from memcalc.probe.calibrate.fit import calibration_text
    from memcalc.report.probe import calibration_report

    if target.form != _FILE:
        target.show(calibration_report(answer))
    elif target.path is None:
        deliver(calibration_text(answer.calibration), None)
    else:
        Destination("rich", None).show(calibration_report(answer))


def _write_calibration(answer: Calibrated, target: Destination, *, install: bool, force: bool) -> list[Path]:
    """Write the file where it was asked for."""
    from memcalc.probe.calibrate.fit import calibration_text

    written = [target.path] if target.form == _FILE and target.path is not None else []
    if install:
        written.append(_home(answer.gpu, force=force))
    for path in written:
        with replacing(path) as stream:
            stream.write(calibration_text(answer.calibration).encode())
    return written


def _home(gpu: str, *, force: bool) -> Path:
    """Return where an installed calibration goes, if it can."""
    from memcalc.calibrations import home_of

    home = home_of(gpu)
    if home is None:
        raise InputError("install", gpu, "the platform tells of no place for it: give --output FILE.toml")
    try:
        home.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError("install", str(home), error.strerror or "its folder must be writable") from None
    return output_path(str(home), force)
