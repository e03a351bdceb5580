"""The page on which a job is put together."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from memcalc.cli.options import free, given
from memcalc.cli.registry import command
from memcalc.cli.serving import post_training
from memcalc.errors import InputError
from memcalc.units import parse_count

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
