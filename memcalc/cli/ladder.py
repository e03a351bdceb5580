"""A ladder: the job at fp32, then one remedy after another."""

from __future__ import annotations

from typing import Annotated, Any

import typer

import memcalc
from memcalc.cli.modules import MODEL_OR_MODULE, with_model
from memcalc.cli.options import CHART, DESTINATION, PRESETS
from memcalc.cli.output import destination, draw, picture_targets
from memcalc.cli.registry import command

_SEARCH = "Search"
_Stage = Annotated[
    list[str] | None,
    typer.Option(
        metavar="WORDS",
        rich_help_panel=_SEARCH,
        help='The next stage, as in "recompute=full,micro-batch=2"; repeatable. precision=16-bit is the reading\'s.',
    ),
]
_Recipe = Annotated[
    bool, typer.Option("--recipe", rich_help_panel=_SEARCH, help="The usual order of tuning, which ends where it fits.")
]
_Reading = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        rich_help_panel=_SEARCH,
        help="Only one reading of 16 bits: pure-16-bit, fp32-master or autocast.",
    ),
]


@command("Jobs", *MODEL_OR_MODULE, *PRESETS, *DESTINATION, *CHART)
def ladder(*, stage: _Stage = None, recipe: _Recipe = False, reading: _Reading = None, **options: Any) -> int:
    """Show what each remedy saves and costs, stage by stage, and the first stage that fits."""
    from memcalc.report.ladder import report

    pictures, target = picture_targets(options, "chart"), destination(options)
    found = memcalc.ladder(**with_model(options), stages=stage or (), recipe=recipe, reading=reading)
    target.show(report(found))
    draw(pictures, {"chart": "ladder"}, found)
    return int(all(one.first is None for one in found.readings))
