"""The pages `docs/serving.md` and `docs/post-training.md`: published logs and runs beside what is predicted of them.

Run as a script, this file writes the tables of both anew.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import memcalc
from memcalc import catalog
from memcalc.errors import InputError
from memcalc.results.posttraining import Rl
from memcalc.results.serving import Served
from memcalc.serving.engines import engine_of
from memcalc.units import GIB

PAGE = Path(__file__).resolve().parents[1] / "docs" / "serving.md"
RL_PAGE = PAGE.with_name("post-training.md")
TABLE = re.compile(r"(<!-- (\w+): written by tests/engines.py -->\n).*?(<!-- end -->)", re.DOTALL)
CAMPAIGN = "llm-d-incubation/llm-d-planner"
"""Who ran nearly all of them."""
PARTS = {"weights": "weights", "activations": "activations", "non_torch": "outside PyTorch", "graphs": "CUDA graphs"}
"""What a log prints, and the part that it is compared with."""
STATED = 0.005
"""Half of the last digit that a log prints of a size [GiB]."""


@dataclass(frozen=True)
class Log:
    """One start-up log, and the answer for it."""

    id: str
    source: str
    model: str
    gpu: str
    told: dict[str, Any]
    logged: dict[str, float]
    outcome: str
    total: float = 0
    served: str = ""
    comment: str = ""
    assumed: list[str] = field(default_factory=list)

    @property
    def family(self) -> str:
        """The kind of model, by which constants are refitted."""
        return self.model.partition("-")[0]

    @property
    def campaign(self) -> str:
        """Who ran it."""
        return self.source.partition(" ")[0].partition("#")[0]

    @property
    def answer(self) -> Served:
        """What is predicted of it."""
        return answered(self.id)

    def part(self, name: str) -> float:
        """A predicted part of rank 0 [GiB]."""
        return self.answer.stages[0].size(PARTS[name]) / GIB

    @property
    def cache(self) -> float:
        """The predicted cache of rank 0, whose figures are logged [GiB]."""
        return self.answer.stages[0].cache / GIB

    @property
    def error(self) -> float:
        """Predicted less logged cache [GiB]."""
        return self.cache - self.logged["cache"]


@cache
def logs() -> tuple[Log, ...]:
    """Return the shipped logs."""
    return tuple(Log(**table) for table in tables()["engine"])


@cache
def tables() -> dict[str, Any]:
    return catalog.read_toml(catalog.shipped() / "serving" / "logs.toml")


@cache
def answered(id_: str) -> Served:
    """Return what is predicted of a log from what its engine was told."""
    log = next(log for log in logs() if log.id == id_)
    gpu = catalog.gpu(log.gpu)
    if log.total:
        gpu = gpu.model_copy(update={"memory_bytes": int(log.total * GIB)})
    return memcalc.serve(model=log.model, gpu=gpu, **log.told)


def with_cache() -> tuple[Log, ...]:
    """Return the logs of vLLM that print the memory of their cache."""
    return tuple(log for log in logs() if "cache" in log.logged and log.told["engine"].startswith("vllm"))


def quantile(values: list[float], share: float) -> float:
    """Return the value that a share of all does not exceed, the larger one between two."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


# --------------------------------------------------------------------------------------------------- the pool of a log


def tokens_of(log: Log) -> float:
    """Return the tokens that the logged cache holds, by the groups and the blocks that are predicted.

    The log prints the cache of rank 0, and the smallest stage rules the pool, so that stages count as far apart as
    they are predicted.
    """
    stages, first = log.answer.stages, log.answer.stages[0]
    smallest = min(stages, key=lambda stage: stage.blocks)
    group = smallest.groups[0]
    size = log.logged["cache"] * GIB + smallest.cache - first.cache
    blocks = int(size // (log.answer.block_tokens * group.layers * group.token_bytes))
    return blocks // len(smallest.groups) * log.answer.block_tokens


def token_errors() -> dict[str, float]:
    """Return by log how far its tokens are from those of the logged cache, as a share."""
    counted = [log for log in with_cache() if "tokens" in log.logged]
    return {log.id: tokens_of(log) / log.logged["tokens"] - 1 for log in counted}


# ------------------------------------------------------------------------------------------------ constants, refitted


def fitted(rows: tuple[Log, ...]) -> dict[Any, float]:
    """Return the constants as medians of some logs: the step's rest, and what lies outside PyTorch by ranks [GiB]."""
    found: dict[Any, float] = {}
    rest = [
        log.logged["activations"] - log.part("activations")
        for log in rows
        if "activations" in log.logged and log.told["pp"] == 1
    ]
    found["rest"] = median(rest) if rest else 0
    for tp in {log.told["tp"] for log in with_cache()}:
        beside = [
            log.logged["non_torch"] - log.part("non_torch")
            for log in rows
            if log.told["tp"] == tp and log.told["pp"] == 1 and "non_torch" in log.logged
        ]
        found[tp] = median(beside) if beside else 0
    return found


def crossed() -> dict[str, float]:
    """Return by log the error of its cache [GiB] with constants of the other families of models alone."""
    errors: dict[str, float] = {}
    for family in {log.family for log in with_cache()}:
        moved = fitted(tuple(log for log in with_cache() if log.family != family))
        for log in with_cache():
            if log.family == family:
                errors[log.id] = log.error - moved["rest"] - moved[log.told["tp"]]
    return errors


def unfitted(log: Log) -> float:
    """Return the error of a log's cache [GiB] without any constant that was fitted: an upper end for another campaign.

    The sampler's width for each logit stays, which follows from what is computed.
    """
    era = engine_of(log.told["engine"])
    return log.error + log.part("non_torch") + (era.sampler_rest / GIB if log.told["pp"] == 1 else 0)


def elsewhere() -> tuple[Log, ...]:
    """Return the logs of others than the one campaign that nearly all constants are from."""
    return tuple(log for log in with_cache() if log.campaign != CAMPAIGN)


# ------------------------------------------------------------------------------------------------------------ the page


def figures() -> list[tuple[str, list[float], list[float]]]:
    """Return each figure that is scored, its errors [GiB], and the same as shares of what was logged."""
    rows = with_cache()
    found = []
    for name in PARTS:
        listed = [log for log in rows if name in log.logged]
        errors = [log.part(name) - log.logged[name] for log in listed]
        found.append(
            (name.replace("_", " "), errors, [e / log.logged[name] for e, log in zip(errors, listed, strict=True)])
        )
    shares = [log.error / log.logged["cache"] for log in rows]
    found.append(("cache, from what was told", [log.error for log in rows], shares))
    moved = crossed()
    shares = [moved[log.id] / log.logged["cache"] for log in rows]
    found.append(("the same, constants of other model families", [moved[log.id] for log in rows], shares))
    alone = [unfitted(log) for log in rows if log.told["tp"] == 1]
    shares = [unfitted(log) / log.logged["cache"] for log in rows if log.told["tp"] == 1]
    found.append(("the same on one rank, without fitted constants", alone, shares))
    others = elsewhere()
    found.append(
        (
            "cache, logs of others than the campaign",
            [o.error for o in others],
            [o.error / o.logged["cache"] for o in others],
        )
    )
    return found


def summary() -> str:
    """Return the table of errors."""
    lines = ["| figure | logs | median [GiB] | 95% within [GiB] | worst [GiB] | median [%] |", "| --- " * 6 + "|"]
    for name, errors, shares in figures():
        sizes, parts = [abs(e) for e in errors], [abs(s) for s in shares]
        lines.append(
            f"| {name} | {len(sizes)} | {median(sizes):.3f} | {quantile(sizes, 0.95):.2f} | {max(sizes):.2f} "
            f"| {100 * median(parts):.2f} |"
        )
    tokens = [abs(error) for error in token_errors().values()]
    lines.append(
        f"| tokens, from the logged cache | {len(tokens)} | | | | {100 * median(tokens):.4f} (worst "
        f"{100 * max(tokens):.2f}) |"
    )
    return "\n".join([*lines, ""])


def outcomes() -> str:
    """Return the table of verdicts beside what happened."""
    counts: dict[tuple[str, str], int] = {}
    for log in logs():
        key = (log.outcome, log.answer.verdict)
        counts[key] = counts.get(key, 0) + 1
    lines = ["| the engine | predicted | logs |", "| --- | --- | --- |"]
    lines += [f"| {outcome} | {verdict} | {count} |" for (outcome, verdict), count in sorted(counts.items())]
    return "\n".join([*lines, ""])


def each() -> str:
    """Return the table of all logs."""
    lines = ["| log | model | engine | tp, pp | weights | step | cache logged | predicted | source |"]
    lines.append("| --- " * 9 + "|")
    for log in logs():
        logged = f"{log.logged['cache']:.2f}" if "cache" in log.logged else ""
        engine = log.told["engine"] + (f", {log.told['quantization']}" if "quantization" in log.told else "")
        lines.append(
            f"| {log.id} | {log.served or log.model} | {engine} | {log.told['tp']}, {log.told['pp']} "
            f"| {log.part('weights'):.2f} | {log.part('activations'):.2f} | {logged} | {log.cache:.2f} | {log.source} |"
        )
    return "\n".join([*lines, ""])


def left_out() -> str:
    """Return the table of logs that are not scored, by the reason."""
    reasons: dict[str, list[str]] = {}
    for table in tables()["left_out"]:
        reasons.setdefault(table["reason"], []).append(table["id"])
    lines = ["| reason | logs |", "| --- | --- |"]
    return "\n".join([*lines, *(f"| {reason} | {', '.join(ids)} |" for reason, ids in reasons.items()), ""])


@dataclass(frozen=True)
class Ran:
    """A public run of post-training with an outcome."""

    id: str
    source: str
    told: dict[str, Any]
    outcome: str
    comment: str = ""
    explained: str = ""

    @property
    def agrees(self) -> bool:
        """Whether the verdict is what happened; where there is none, it is not."""
        answer = ran_answer(self.id)
        return answer is not None and (answer.verdict == "does-not-fit") == (self.outcome == "ran-out")

    @property
    def verdict(self) -> str:
        """What is predicted, or that the release was not read."""
        answer = ran_answer(self.id)
        return answer.verdict if answer is not None else "no answer"


@cache
def runs() -> tuple[Ran, ...]:
    """Return the shipped runs."""
    return tuple(Ran(**table) for table in catalog.read_toml(catalog.shipped() / "serving" / "rl.toml")["run"])


@cache
def ran_answer(id_: str) -> Rl | None:
    """Return what is predicted of a run; none where its source states a release that was not read."""
    told = next(run.told for run in runs() if run.id == id_)
    try:
        return memcalc.rl(**told, advice=False)
    except InputError as error:
        if error.field != "framework":
            raise
        return None


def role_outcomes() -> str:
    """Return the table of verdicts of post-training beside what happened."""
    counts: dict[tuple[str, str], int] = {}
    for run in runs():
        counts[run.outcome, run.verdict] = counts.get((run.outcome, run.verdict), 0) + 1
    lines = ["| the run | predicted | runs |", "| --- | --- | --- |"]
    lines += [f"| {outcome} | {verdict} | {count} |" for (outcome, verdict), count in sorted(counts.items())]
    return "\n".join([*lines, ""])


def each_run() -> str:
    """Return the table of runs: verdicts against outcomes."""
    lines = ["| run | job | outcome | predicted | binding phase [GiB] | what parts them | source |", "| --- " * 7 + "|"]
    for run in runs():
        answer, told = ran_answer(run.id), run.told
        job = f"{told['algorithm']} of {told['model']}, {told['gpus']} × {told['gpu']}, {told['framework']}"
        binding = ""
        if answer is not None:
            most = max(phase.allocated for phase in answer.phases)
            binding = f"{answer.binding}, {most / GIB:.1f} of {answer.capacity / GIB:.1f}"
            mean = answer.longest_mean
            binding += f"; fits up to a mean of {mean:,} tokens" if mean is not None else ""
        said = run.explained or run.comment
        lines.append(f"| {run.id} | {job} | {run.outcome} | {run.verdict} | {binding} | {said} | {run.source} |")
    return "\n".join([*lines, ""])


def filled(page: str) -> str:
    """Return the page with its tables written anew."""
    makers = {"errors": summary, "outcomes": outcomes, "logs": each, "left_out": left_out, "runs": each_run}
    return TABLE.sub(lambda match: match[1] + makers[match[2]]() + match[3], page)


if __name__ == "__main__":
    for path in (PAGE, RL_PAGE):
        path.write_text(filled(path.read_text(encoding="utf-8")), encoding="utf-8")
