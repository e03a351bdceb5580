"""Commands about measurements: predictions beside them, new ones, what is fitted to them, and failures."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

import typer

from memcalc.cli import calibrate as fitting
from memcalc.cli import validate as comparison
from memcalc.cli.modules import A_MODULES_STEP, refuse_module
from memcalc.cli.options import CALIBRATION, DESTINATION, FREE, PRESETS
from memcalc.cli.registry import command

_Runs = Annotated[
    list[str] | None,
    typer.Argument(metavar="[RUNS.toml|DIR]...", help="Files of measured runs; the shipped ones when left out."),
]
_Strict = Annotated[bool, typer.Option("--strict", help="Leave out runs with a setting that is assumed.")]
_Group = Annotated[str | None, typer.Option(metavar="NAME", help="Only the runs of this group.")]
_Grade = Annotated[str | None, typer.Option(metavar="GRADE", help="Only this grade: A (which takes A- too), A- or B.")]
_Figure = Annotated[str | None, typer.Option(metavar="NAME", help="Score only allocated, reserved or device.")]
_Worst = Annotated[str, typer.Option(metavar="N", rich_help_panel="Output", help="How many of the worst are listed.")]


@command("Measurements", *CALIBRATION, *PRESETS, *DESTINATION)
def validate(
    runs: _Runs = None,
    *,
    strict: _Strict = False,
    group: _Group = None,
    grade: _Grade = None,
    figure: _Figure = None,
    worst: _Worst = "10",
    **options: Any,
) -> int:
    """Compare predictions with measured runs: the shipped ones, or your own."""
    return comparison.show(
        runs or (), strict=strict, group=group, grade=grade, figure=figure, worst=worst, options=options
    )


_Device = Annotated[str, typer.Option(metavar="NAME", help="cuda, cpu (tiny models, counted) or fake (your --module).")]
_Gpu = Annotated[
    str | None, typer.Option(metavar="NAME", help="The GPU's preset; by the driver's name of it when left out.")
]
_Suite = Annotated[
    str, typer.Option(metavar="NAME", help="full, small (a quick look), steps (of training alone) or machine.")
]
_Minutes = Annotated[str | None, typer.Option(metavar="N", help="Begin no job that would end later.")]
_Ranks = Annotated[
    str | None, typer.Option(metavar="N", help="Processes of the jobs of several GPUs; all GPUs when left out.")
]
_Dry = Annotated[bool, typer.Option("--dry-run", help="Only say what would run, and what it needs.")]
_RUNS_FILE = (
    replace(DESTINATION[0], help="Of what is shown: rich, plain, markdown, csv, json, latex, html or svg."),
    replace(DESTINATION[1], help="The runs file; probe.toml when left out."),
    replace(DESTINATION[2], help="Begin anew, and replace FILE where it exists."),
)


@command("Measurements", *PRESETS, *A_MODULES_STEP, *_RUNS_FILE)
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
    """Measure training steps and rates on this machine, to a runs file; an interrupted probe goes on.

    --device fake needs none: a module of your own is run on fake tensors.
    """
    from memcalc.cli import probe as measuring
    from memcalc.cli import probe_module

    if device == "fake":
        return probe_module.show(options)
    refuse_module(options)
    return measuring.show(options, device=device, gpu=gpu, suite=suite, minutes=minutes, ranks=ranks, dry_run=dry_run)


_Failure = Annotated[
    str,
    typer.Argument(
        metavar="FILE|-", help="A log with an out-of-memory message, or a memory snapshot.", show_default=False
    ),
]
_Config = Annotated[
    list[str] | None,
    typer.Option(metavar="FILE", rich_help_panel="Job", help="A config file of the job, as for check; repeatable."),
]
_Planned = Annotated[
    str | None, typer.Option("--plan", metavar="FILE", rich_help_panel="Job", help="The job as plan --save wrote it.")
]


@command("Measurements", *FREE, *PRESETS, *DESTINATION)
def triage(file: _Failure, *, config: _Config = None, saved: _Planned = None, **options: Any) -> int:
    """Say why a job ran out of memory, from its message or a snapshot, and what would help.

    Exit code 0 where a cause is at least likely, 3 where more must be recorded.
    """
    from memcalc.cli import triage as failures

    return failures.show(file, config=config or (), plan=saved, options=options)


_OfGpu = Annotated[str | None, typer.Option(metavar="NAME", help="Which GPU, where the rows are of several.")]
_Install = Annotated[
    bool, typer.Option("--install", help="Keep it in your configuration, where commands for this GPU find it.")
]


@command("Measurements", *PRESETS, *DESTINATION)
def calibrate(runs: _Runs = None, *, gpu: _OfGpu = None, install: _Install = False, **options: Any) -> int:
    """Fit what your own measured runs tell of a GPU, and say how much better held-back runs are predicted.

    --output FILE.toml writes the calibration, which commands take with --calibration FILE; other endings the report.
    """
    return fitting.show(runs or (), gpu=gpu, install=install, options=options)
