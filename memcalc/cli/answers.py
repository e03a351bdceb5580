"""Commands that answer for one job: plans, an estimate, its terms, a page of them, and the page on which it is changed.

Each parses, makes one library call, and renders; what it returns is the exit code.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from memcalc.cli import plans
from memcalc.cli.options import (
    CHART,
    DESTINATION,
    DETAILS,
    MODULE,
    PRESETS,
    TIMELINE,
    free,
    given,
    model_or_module,
    with_model,
)
from memcalc.cli.output import destination, draw, picture_targets
from memcalc.cli.registry import command
from memcalc.cli.serving import post_training, refuse_post_training, rl_plans, rl_report
from memcalc.errors import InputError
from memcalc.units import parse_count

SEARCH = "Search"
"""The panel of options that say what is searched, and how."""
_Top = Annotated[
    str | None, typer.Option(metavar="N", rich_help_panel="Output", help="Number of plans [default: 6, with --all 30]")
]
_All = Annotated[
    bool, typer.Option("--all", rich_help_panel="Output", help="Rank every strategy, not one plan of each idea.")
]
_Objective = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        rich_help_panel=SEARCH,
        help="simplicity (the simplest within 5% of the fastest), throughput, memory, gpus or cost (GPU-hours).",
    ),
]
_Critical = Annotated[str | None, typer.Option(metavar="TOKENS", rich_help_panel=SEARCH, help="Critical batch size")]
_Tokens = Annotated[
    str | None, typer.Option(metavar="TOKENS", rich_help_panel=SEARCH, help="Token budget for GPU-hours")
]
_Recipe = Annotated[bool, typer.Option("--recipe", rich_help_panel=SEARCH, help="Also show tuning steps and remedies")]
Beyond = Annotated[
    bool,
    typer.Option(
        "--beyond", rich_help_panel=SEARCH, help="Search also what the framework cannot be told; plans say the code."
    ),
]
"""The option of every search that goes beyond what the framework can be told."""
_Why = Annotated[
    str | None,
    typer.Option(metavar="WORDS", rich_help_panel=SEARCH, help='Explain why a strategy is not #1: "tp=1,zero=3"'),
]
_Save = Annotated[str | None, typer.Option(metavar="FILE", rich_help_panel="Output", help="Save plan #1 for export")]
_For = Annotated[
    str | None,
    typer.Option("--to", metavar="FORMAT", rich_help_panel=SEARCH, help="Only plans that this format of export says."),
]
_Write = Annotated[
    str | None,
    typer.Option(metavar="DIR", rich_help_panel="Output", help="Write a plan's files there, and a script to start it."),
]
_Rank = Annotated[
    str | None,
    typer.Option(
        metavar="N", rich_help_panel="Output", help="Which plan is saved or written; the first when left out."
    ),
]


@command("What should I run?", model_or_module, post_training, *PRESETS, *DESTINATION, *DETAILS, *CHART)
def plan(
    *,
    objective: _Objective = "simplicity",
    critical_batch: _Critical = None,
    tokens: _Tokens = None,
    why: _Why = None,
    recipe: _Recipe = False,
    beyond: Beyond = False,
    to: _For = None,
    top: _Top = None,
    rank_all: _All = False,
    save: _Save = None,
    write: _Write = None,
    rank: _Rank = None,
    **options: Any,
) -> int:
    """Find the best strategy that fits. Options you leave out are searched.

    What is searched may be left open in part: 2/4, 2..8, not:8, any. With --algorithm it is how to lay out
    post-training: trainer and engines on the same GPUs or apart, ranks and share of an engine, micro-batches.
    """
    from memcalc import report
    from memcalc.report.progress import waiting

    if options["algorithm"] is not None:
        searching: dict[str, Any] = {
            "objective": objective,
            "critical_batch": critical_batch,
            "tokens": tokens,
            "why": why,
        }
        searching |= {"recipe": recipe, "beyond": beyond, "to": to, "save": save, "write": write, "rank": rank}
        return rl_plans(options, {**searching, "all": rank_all, "top": top})
    refuse_post_training(options)
    plans.check_target(save, write, rank, options)
    force, dirs = bool(options["force"]), tuple(options["preset_dir"] or ())
    pictures = picture_targets(options, "chart")
    target = destination(options)
    keywords = with_model(options)
    with waiting("plan", "strategies") as listen:
        answer = plans.search(to)(
            **keywords,
            objective=objective,
            critical_batch=critical_batch,
            tokens=tokens,
            why=why,
            recipe=recipe,
            beyond=beyond,
            top=top,
            rank_all=rank_all,
            on_progress=listen,
        )
    target.show(report.of_plans(answer, written=bool(save or write), starts=plans.can_start(answer)))
    plans.say_time(answer.elapsed, details=target.details)
    draw(pictures, {"chart": "plan"}, answer)
    code = 0 if answer.plans else 1
    if save is not None:
        code = plans.save_plan(answer, save, rank, force=force, dirs=dirs, details=target.details)
    if write is not None:
        code = plans.write_plan(answer, write, to, rank, force=force, dirs=dirs)
    return code


_Shown = Annotated[
    str | None, typer.Argument(metavar="PLAN", help="What plan --save wrote, or plans in JSON, in the place of a job.")
]


@command("Will it fit?", free, *MODULE, *PRESETS, *DESTINATION, *DETAILS, *CHART, *TIMELINE)
def estimate(plan: _Shown = None, **options: Any) -> int:
    """Estimate the memory of one strategy, and whether it fits."""
    from memcalc import report

    pictures = picture_targets(options, "chart", "timeline")
    target = destination(options)
    answer = plans.estimated(plan, options, timeline="timeline" in pictures)
    target.show(report.of_estimate(answer))
    draw(pictures, {"chart": "estimate", "timeline": "timeline"}, answer)
    return int(answer.verdict == "does-not-fit")


_Fold = Annotated[
    str | None,
    typer.Option(
        metavar="LIST",
        rich_help_panel="Output",
        help="In one line: others (not alive at the peak; the default), none, all, or components by name.",
    ),
]
_Only = Annotated[
    str | None, typer.Option(metavar="LIST", rich_help_panel="Output", help="Fold all components but these.")
]


@command("Will it fit?", free, *MODULE, *PRESETS, *DESTINATION, *DETAILS)
def explain(plan: _Shown = None, *, fold: _Fold = None, only: _Only = None, **options: Any) -> int:
    """Explain an estimate: every term with formula, values and source."""
    from memcalc import report
    from memcalc.report.explain import folding

    target = destination(options)
    folded = folding(fold, only) if fold or only else None
    answer = plans.estimated(plan, options)
    target.show(report.of_terms(answer, folded))
    return int(answer.verdict == "does-not-fit")


_Alone = Annotated[
    bool, typer.Option("--estimate", rich_help_panel=SEARCH, help="Show the strategy that is typed; search nothing.")
]
_Which = Annotated[
    str | None,
    typer.Option(
        metavar="N", rich_help_panel="Output", help="Which plan is shown term by term; the first when left out."
    ),
]
_Title = Annotated[str, typer.Option(metavar="TEXT", rich_help_panel="Output", help="The page's heading.")]
_Note = Annotated[str, typer.Option(metavar="TEXT", rich_help_panel="Output", help="Note below the heading.")]
_PAGE = (DESTINATION[1]._replace(metavar="FILE", help=f"Write there; {plans.PAGE} when left out."), DESTINATION[2])


@command("To share", free, post_training, *MODULE, *PRESETS, *_PAGE)
def report_(
    plan: _Shown = None,
    *,
    alone: _Alone = False,
    objective: _Objective = "simplicity",
    critical_batch: _Critical = None,
    tokens: _Tokens = None,
    why: _Why = None,
    top: _Top = None,
    rank_all: _All = False,
    rank: _Which = None,
    title: _Title = "",
    note: _Note = "",
    **options: Any,
) -> int:
    """Write an HTML report for a design review.

    It needs no network. A job is searched as plan does; --estimate shows the strategy that is typed. With --algorithm
    it is about post-training.
    """
    search: dict[str, Any] = {"objective": objective, "critical_batch": critical_batch, "tokens": tokens, "why": why}
    search |= {"top": top, "rank_all": rank_all}
    given: dict[str, Any] = {"alone": alone, "rank": rank, "title": title, "note": note, "search": search}
    code = rl_report(plan, **given, options=options)
    if code is not None:
        return code
    refuse_post_training(options)
    return plans.report(plan, **given, options=options)


_Port = Annotated[str, typer.Option(metavar="N", help="The port; the next free one where it is taken.")]
_NoOpen = Annotated[bool, typer.Option("--no-open", help="Do not open a browser.")]


@command("To share", free, post_training)
def ui(*, port: _Port = "8765", no_open: _NoOpen = False, **options: Any) -> int:
    """Open a page with controls on which the bar moves while you drag; its address holds the job.

    Served to this machine alone, under 127.0.0.1; options are what it opens with.
    """
    from memcalc.ui.app import serve

    serve(_link(options), port=_number(port), opens=not no_open, announce=_announce)
    return 0


def _announce(address: str) -> None:
    typer.echo(f"memcalc ui at {address} (Ctrl-C stops)")


def _number(port: str) -> int:
    number = parse_count(port, "port")
    if not 0 < number < 65536:
        raise InputError("port", port, "must be a whole number from 1 to 65,535")
    return number


def _link(options: dict[str, Any]) -> str:
    """Return what the page's address holds; a model's own file goes with it."""
    from memcalc.ui.link import LinkedJob

    keywords = given(options)
    keywords.pop("preset_dirs")
    settings = keywords.pop("settings")
    texts = {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in keywords.items()}
    path = Path(texts.get("model", ""))
    if path.suffix != ".json" and not (path / "config.json").is_file():
        return LinkedJob(texts, settings).text()
    from memcalc.convert.document import read_text

    config = read_text(path if path.suffix == ".json" else path / "config.json")
    return LinkedJob({name: value for name, value in texts.items() if name != "model"}, settings, config).text()
