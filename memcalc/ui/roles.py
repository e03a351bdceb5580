"""Post-training on the page: each request as one call of the library, and how a job becomes one of another kind."""

from __future__ import annotations

from typing import Any

from memcalc.errors import CombinationError
from memcalc.posttraining import rl
from memcalc.posttraining.frameworks import RECIPES, TOOLKITS
from memcalc.posttraining.plans import plan_rl
from memcalc.posttraining.steps import PLACES
from memcalc.posttraining.words import OFFLINE_ALONE
from memcalc.results.posttraining import Rl, RlPlans
from memcalc.specs.options import COMMAND_LINE
from memcalc.specs.posttraining import RL_WORDS, TRAINING
from memcalc.ui.link import LinkedJob
from memcalc.units import parse_tokens

ROLES_OPEN = (
    "micro_batch", "micro_tokens", "logprob_batch", "logprob_tokens", "engine_tp", "engine_gpus", "utilization",
    "max_seqs", "sleep", "park", "zero", "recompute", "offload",
)  # fmt: skip
"""What a plan of post-training decides."""
START = {"framework": "verl", "prompt": "1k", "response": "3k", "micro_tokens": "16k", "prompts": "128", "samples": "8"}
"""What a job that generates begins with."""
PAIRS = {"framework": "trl", "prompt": "1k", "response": "1k", "micro_batch": "1"}
"""What a job without generation begins with."""


def words_of(job: LinkedJob) -> dict[str, Any]:
    """The keywords of :func:`memcalc.rl` for a link."""
    typed = job.keywords()
    if typed.pop("settings"):
        raise CombinationError("set", next(iter(job.settings)), "post-training takes the options of memcalc rl alone")
    return typed


def asked(job: LinkedJob, *, advice: bool = True) -> Rl:
    """The job as it stands."""
    return rl(**words_of(job), advice=advice)


def searched(job: LinkedJob) -> RlPlans:
    """Its plans."""
    return plan_rl(**words_of(job.without(*ROLES_OPEN)))


def fitted(job: LinkedJob) -> dict[str, Any]:
    """The first change, of those that cost least, that makes the job fit, as a link."""
    edit = asked(job).edit
    if edit is None:
        return {"changes": [], "link": ""}
    options = {name.strip().replace("-", "_"): value for name, _, value in map(_parted, edit.change.split("--")[1:])}
    changed = job.without("micro_batch") if "micro_tokens" in options else job
    return {"changes": [edit.change], "link": changed.having(options).text()}


def _parted(text: str) -> tuple[str, str, str]:
    return text.strip().partition(" ")


def script_of(job: LinkedJob) -> str:
    """The script that starts the job."""
    from memcalc.handoff.role_scripts import role_script

    return role_script(**words_of(job))


def turned(job: LinkedJob) -> LinkedJob:
    """The job of a link with the options that its algorithm has, the others left out; what is missing gets a start."""
    options = {name: value for name, value in job.options.items() if value}
    algorithm = options.get("algorithm", "")
    if not algorithm:
        return _trained(job, options)
    recipe = RECIPES.get(algorithm)
    online = recipe is None or recipe.online
    allowed = {*PLACES, *RL_WORDS, *TRAINING} - ({*OFFLINE_ALONE} if not online else set())
    staying = {name: value for name, value in options.items() if name in allowed}
    start = START if online else PAIRS
    if options.get("framework", "").partition("@")[0] not in TOOLKITS or "prompt" not in staying:
        batch = {"micro_batch", "micro_tokens"}
        staying = {name: value for name, value in staying.items() if name not in {"framework", *batch}} | start
    missing = {} if {"micro_batch", "micro_tokens"} & set(staying) else {"micro_batch": "1"}
    rest = {name: value for name, value in start.items() if name in ("prompts", "samples") and name not in staying}
    return LinkedJob({**staying, **missing, **rest, "gpus": staying.get("gpus", "8")}, {}, job.config)


def _trained(job: LinkedJob, options: dict[str, str]) -> LinkedJob:
    """The same model on the same GPUs without post-training."""
    known = {row.name for row in COMMAND_LINE} - {"framework"}
    staying = {name: value for name, value in options.items() if name in known}
    lengths = [int(parse_tokens(options[name], name)) for name in ("prompt", "response") if name in options]
    length = {"seq_len": str(sum(lengths))} if lengths else {}
    return LinkedJob({**staying, **length}, job.settings, job.config)
