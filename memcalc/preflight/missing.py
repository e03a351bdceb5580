"""What a merged job lacks that no default can stand for, asked for at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from memcalc.convert.config import ROLE_KEYS
from memcalc.errors import MissingError
from memcalc.preflight.by_model import refuse_images, unnamed, unsized
from memcalc.preflight.job import MergedJob
from memcalc.preflight.roles import lacking_roles
from memcalc.specs.options import FIELDS

_NEEDED = ("model", "gpu", "gpus", "seq_len", "micro_batch")
"""Each changes the answer by as much as the job is large."""
_FEW = 2
"""Files that a sentence names."""
_GIVEN_AS = {
    "gpus_per_node": "gpus", "nodes": "gpus", "accumulation": "global_batch", "train_batch": "global_batch",
    "sharing": "zero",
}  # fmt: skip
"""What files count, and the option of check that says it."""


def tell(job: MergedJob, folder: str = ".", dirs: tuple[str, ...] = (), files: Sequence[str] = ()) -> None:
    """Ask at once for all that no file says and no default can stand for, an unknown model among it.

    The sentence names the ``files`` where they are few: of two jobs beside one another each has its own.
    """
    refuse_images(job, folder, dirs)
    known = {**job.options, **job.facts}
    missing: dict[str, str] = {}
    for name, (config, setting) in job.origins.items():
        option = _GIVEN_AS.get(name, name)
        if name.startswith("rl.") and not job.algorithm:
            continue
        if setting.unknown and (option == name or known.get(option) is None):
            why = setting.reason or f"is {setting.unknown!r}, known only at run time"
            where = f"{setting.field} {why}"
            missing.setdefault(_flag(option), f" (line of {config.document.path.name}: {where})")
    for name in _NEEDED:
        if known.get(name) is None and name not in job.origins:
            missing.setdefault(_flag(name), "")
    missing |= {_flag(name): f" ({why})" for name, why in lacking_roles(job)}
    if unsized(job, folder, dirs):
        missing["--image-size"] = " (WIDTHxHEIGHT of the images, before any resizing; --images 0 for text alone)"
    sizes = job.facts.get("model")
    if isinstance(sizes, Mapping) and sizes.get("vocab") is None and known.get("model.vocab") is None:
        missing["--set model.vocab=…"] = " (the tokenizer's)"
    if missing and (why := unnamed(job, folder, dirs)):
        missing.setdefault("--model", why)
    if missing:
        listed = ", ".join(flag + why for flag, why in missing.items())
        raise MissingError(f"not in {_called(files)}: {listed}. Pass {'them' if len(missing) > 1 else 'it'}.")


def _called(files: Sequence[str]) -> str:
    """Return what files are called.

    >>> _called(["a.yaml", "ds.json", "a.yaml"]), _called(list("abcd"))
    ('a.yaml or ds.json', 'the files')
    """
    names = tuple(dict.fromkeys(files))
    return " or ".join(names) if 0 < len(names) <= _FEW else "the files"


def _flag(name: str) -> str:
    return f"--set {name}=…" if name in FIELDS or name in ROLE_KEYS else f"--{name.replace('_', '-')}"
