"""Commands about engines that generate, by themselves and beside what is trained.

Each parses, makes one library call, and renders; what it returns is the exit code.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import memcalc
from memcalc.cli.options import CHART, DESTINATION, DETAILS, PRESETS, Shared, job
from memcalc.cli.output import deliver, destination, draw, picture_targets, tell
from memcalc.cli.plans import page_target, refuse
from memcalc.cli.registry import command
from memcalc.errors import CombinationError, InputError
from memcalc.files import output_path, replacing, there

if TYPE_CHECKING:
    from memcalc.results.posttraining import Rl, RlPlans

PLACES = frozenset({"model", "gpu", "gpus", "node", "tp", "pp"})
"""Options of a training job that an engine has too."""


def engine() -> tuple[Shared, ...]:
    """Return the options that say an engine, read from their tables when the command is built."""
    from memcalc.specs.posttraining import ENGINE_OPTIONS

    shared = (option for option in job() if option.name in PLACES)
    return (*shared, *(Shared.of(option) for option in ENGINE_OPTIONS))


@command("Will it fit?", engine, *PRESETS, *DESTINATION, *DETAILS)
def serve(**options: Any) -> int:
    """Say whether an inference engine starts, and what its cache holds."""
    from memcalc.report.serving import report
    from memcalc.serving import remedies

    target = destination(options)
    keywords = {name: value for name, value in options.items() if value is not None}
    keywords["preset_dirs"] = tuple(keywords.pop("preset_dir", None) or ())
    answer = memcalc.serve(**keywords)
    target.show(report(answer, remedies(answer, keywords)))
    return int(answer.verdict == "does-not-fit")


RL_PLACES = frozenset({"model", "gpu", "gpus", "node"})
SIMPLEST = "simplicity"
"""The objective of a search that is always there."""


def roles() -> tuple[Shared, ...]:
    """Return the options that say post-training, read from their tables when the command is built."""
    from memcalc.specs.posttraining import LAYOUT, RL_OPTIONS, TRAINING

    places = (option for option in job() if option.name in RL_PLACES)
    trains = (option for option in job() if option.name in (*TRAINING, *LAYOUT))
    return (*places, *(Shared.of(option) for option in RL_OPTIONS), *trains)


_Script = Annotated[
    str | None,
    typer.Option(metavar="FILE", rich_help_panel="Output", help="Write the job there as a script of TRL or verl."),
]


def post_training() -> tuple[Shared, ...]:
    """Return the options of post-training that a training job has not, for a command that takes both."""
    from memcalc.specs.posttraining import RL_OPTIONS

    there = {option.name for option in job()}
    return tuple(Shared.of(option)._replace(required=False) for option in RL_OPTIONS if option.name not in there)


def rl_plans(options: dict[str, Any], searching: dict[str, Any]) -> int:
    """List plans of post-training; what says a training job alone is refused. Return the exit code."""
    from memcalc.report.posttraining import plans_report

    target, top = destination(options), searching.pop("top")
    typed = role_options(options, searching, "searches post-training, which has no such option")
    answer = memcalc.plan_rl(**typed, top=top)
    target.show(plans_report(answer))
    return 0 if answer.plans else 1


_WRITTEN = ("save", "write", "to", "rank")
"""What a plan of training is written with."""


def role_options(options: dict[str, Any], beside: dict[str, Any], why: str) -> dict[str, Any]:
    """Return the keywords of :func:`memcalc.rl` among those typed; what says a training job alone is refused."""
    from memcalc.specs.posttraining import LAYOUT, RL_WORDS, TRAINING

    options["preset_dirs"] = tuple(options.pop("preset_dir", None) or ())
    known = {*RL_WORDS, *TRAINING, *LAYOUT, *RL_PLACES, "preset_dirs"}
    typed = {name: value for name, value in options.items() if value not in (None, [])}
    for name, value in (*typed.items(), *beside.items()):
        if name not in known and value not in (None, False, SIMPLEST):
            further = "; the plan's own line, memcalc rl, writes a script with --write" * (name in _WRITTEN)
            further += "; its lengths are --prompt and --response" * (name == "seq_len")
            raise CombinationError(name.replace("_", "-"), str(value), f"--algorithm {why}{further}")
    return typed


def rl_ladder(options: dict[str, Any], *, stage: list[str] | None, recipe: bool, mode: str | None) -> int:
    """Show the ladder of a job of post-training; return the exit code."""
    from memcalc.report.rl_steps import of_ladder

    pictures, target = picture_targets(options, "chart"), destination(options)
    typed = role_options(options, {"reading": mode}, "is of post-training, which has no such option")
    if "model" not in typed:
        raise InputError("model", "", "give --model")
    answer = memcalc.ladder_rl(**typed, stages=stage or (), recipe=recipe)
    target.show(of_ladder(answer))
    draw(pictures, {"chart": "posttraining"}, answer)
    return int(answer.first is None)


def rl_report(
    saved: str | None, *, alone: bool, rank: str | None, title: str, note: str, search: dict[str, Any],
    options: dict[str, Any],
) -> int | None:  # fmt: skip
    """Write the page of a job of post-training; return the exit code, None where neither file nor words say one."""
    from memcalc.handoff.review import load_roles, roles_of
    from memcalc.report.page import markup
    from memcalc.report.page.roles import role_page, said_of

    algorithm = options["algorithm"]
    answer = load_roles(saved) if saved is not None and algorithm is None and there(Path(saved)) else None
    if answer is None and algorithm is None:
        return None
    path, name = page_target(options)
    if answer is None:
        if saved is not None:
            raise CombinationError("algorithm", algorithm, f"{saved} tells the job")
        answer = _asked(options, search, alone=alone)
    else:
        job = {word: value for word, value in options.items() if word != "preset_dir"}
        refuse({"estimate": alone or None, **search, **job}, f"{saved} tells the job")
    result, listed = roles_of(answer, rank)
    deliver(role_page(result, listed, title=title, note=note), path)
    without = "" if markup.draws() else f" {markup.UNDRAWN}"
    fits, sentence = said_of(result, listed)
    deliver(f"{sentence}\nWrote {name}, {path.stat().st_size / 1024:.0f} KiB.{without}\n", None)
    return int(not fits)


def _asked(options: dict[str, Any], search: dict[str, Any], *, alone: bool) -> Rl | RlPlans:
    """Answer the job that was typed, or search its plans."""
    top = search.pop("top")
    beside = {**search, "top": top} if alone else search
    typed = role_options(options, beside, "is of post-training, which has no such option")
    for name in ("model", "gpu"):
        if name not in typed:
            raise InputError(name, "", f"give --{name}")
    return memcalc.rl(**typed) if alone else memcalc.plan_rl(**typed, top=top)


def refuse_post_training(options: dict[str, Any]) -> None:
    """Take the options of post-training out of those of a training job; any that was typed is refused."""
    for option in post_training():
        value = options.pop(option.name)
        if value is not None and option.name != "algorithm":
            raise CombinationError(option.name.replace("_", "-"), str(value), "is said with --algorithm")


_Most = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        rich_help_panel="Output",
        help="Also find the largest response, micro-batch or micro-tokens with which all of it fits with the margin.",
    ),
]


@command("Will it fit?", roles, *PRESETS, *DESTINATION, *DETAILS, *CHART)
def rl(*, write: _Script = None, largest: _Most = None, **options: Any) -> int:
    """Say which roles of post-training fit together, phase by phase."""
    from memcalc.handoff.role_scripts import role_script
    from memcalc.report.posttraining import report

    force = bool(options.get("force"))
    pictures = picture_targets(options, "chart")
    target = destination(options)
    keywords = {name: value for name, value in options.items() if value is not None}
    keywords["preset_dirs"] = tuple(keywords.pop("preset_dir", None) or ())
    script = role_script(**keywords) if write is not None else ""
    answer = memcalc.rl(**keywords, largest=largest)
    target.show(report(answer))
    if write is not None:
        with replacing(output_path(write, force, "write")) as stream:
            stream.write(script.encode())
        tell(f"memcalc: wrote {write}; check it with: memcalc check {shlex.quote(write)}")
    draw(pictures, {"chart": "posttraining"}, answer)
    return int(answer.verdict == "does-not-fit")
