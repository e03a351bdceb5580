"""Why a given strategy is not the plan: it cannot run, does not fit, or is slower, and by what."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memcalc.errors import CombinationError, InputError
from memcalc.planner.finalists import finalists
from memcalc.planner.reasons import gib, largest_component, short
from memcalc.planner.request import SEARCHED, check_words, flag

if TYPE_CHECKING:
    from memcalc import results
    from memcalc.planner.job import Job
    from memcalc.planner.search import Found


def asked(job: Job, question: str, counts: list[int], plans: tuple[results.Plan, ...]) -> str:
    """One sentence about the best strategy with the words of ``question``, beside the first plan."""
    words = parse_question(question)
    gpus = words.pop("gpus", plans[0].gpus if plans else counts[-1])
    one = job.pinned(**words)
    try:
        outcome = one.search([gpus], 3).get(gpus)
    except CombinationError as error:
        return f"{question} cannot run: {error}"
    if outcome is None or outcome.smallest is None:
        return f"{question} cannot run on {gpus} GPUs: no legal layout and micro-batch has it."
    ready = finalists(one, outcome.best, 1)
    if not ready:
        return _too_large(one, question, outcome.best[0] if outcome.best else outcome.smallest)
    same = [plan for plan in plans if plan.gpus == gpus]
    return _slower(question, ready[0].found, same[0]) if same else f"{question} fits: {short(ready[0].found)}."


def parse_question(question: str) -> dict[str, Any]:
    """The words of ``tp=1,zero=3``, each checked as on the command line."""
    raw = split_words(question, "why", SEARCHED)
    return {key: value for key, value in check_words(raw, None).given.items() if key != "fields"}


def split_words(text: str, field: str, known: tuple[str, ...], flags: tuple[str, ...] = ()) -> dict[str, str]:
    """Words with values as typed after an option ``field``; a value may have commas, and a flag needs no value.

    >>> split_words("tp=1,offload=optimizer,params", "why", ("tp", "offload"))
    {'tp': '1', 'offload': 'optimizer,params'}
    """
    raw: dict[str, str] = {}
    name = ""
    for part in text.split(","):
        key, equals, value = part.partition("=")
        word = key.strip().removeprefix("--")
        word = word if "." in word else word.replace("-", "_")
        if equals or word in flags:
            name = word
            if name not in known:
                raise InputError(field, key.strip(), *_allowed(known))
            if name in raw:
                raise InputError(field, key.strip(), "must stand once: its values, if several, behind one =")
            raw[name] = value.strip() if equals else "true"
        elif name:
            raw[name] += f",{part.strip()}"
        else:
            raise InputError(field, text, "must be words with values, such as tp=1,zero=3")
    return raw


def _allowed(known: tuple[str, ...]) -> tuple[str, list[str]]:
    """What a word may be, and all its names; fields with a dot are too many to list."""
    names = [name if "." in name else flag(name) for name in known]
    plain = ", ".join(name for name in names if "." not in name)
    return f"a word is one of {plain}{', or a field of --set' if len(plain) < len(', '.join(names)) else ''}", names


def _too_large(job: Job, question: str, found: Found) -> str:
    name, size, device, capacity = largest_component(job, found)
    return (
        f"{question} does not fit: its smallest strategy ({short(found)}) needs {gib(device)} of {gib(capacity)} GiB, "
        f"of which {name} {gib(size)} GiB."
    )


def _slower(question: str, found: Found, first: results.Plan) -> str:
    """What takes the time that it loses to the first plan."""
    lost = found.step / found.grid.fixed.global_batch - first.time.step / first.global_batch
    if lost <= 0:
        return f"{question} is as fast as the first plan: {short(found)}."
    each = {
        name: seconds / found.grid.fixed.global_batch - getattr(first.time, name) / first.global_batch
        for name, seconds in found.times.items()
    }
    worst = max(each, key=lambda name: each[name])
    share = found.step * first.global_batch / (first.time.step * found.grid.fixed.global_batch) - 1
    batch = found.grid.fixed.global_batch
    return (
        f"{question} fits and is {share:.1%} slower than the first plan: its best strategy ({short(found)}) takes "
        f"{found.step:.3g} s a step, and {each[worst] * batch:+.3g} s of the difference is {worst}."
    )
