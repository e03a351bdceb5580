"""What a strategy needs beyond what its framework can be told, from the one table of what that is."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from memcalc.errors import CombinationError
from memcalc.frameworks import habits_of
from memcalc.frameworks.capability import (
    OFFLOADS,
    OPTIONS,
    Capabilities,
    Clash,
    Support,
    kinds_of,
    policy_kind,
    text_of,
    values_of,
)
from memcalc.frameworks.needs import MASTER
from memcalc.specs.options import FIELDS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memcalc.frameworks.habits import Habits
    from memcalc.specs.model import Model
    from memcalc.specs.strategy import Strategy

__all__ = [
    "FORMATS_OF", "OFFLOADS", "OPTIONS", "Capabilities", "Clash", "Need", "Support", "capabilities_of", "check_told",
    "fitting", "formats_of", "kinds_of", "needs_of", "own_code", "policy_kind", "text_of", "usual_form", "values_of",
]  # fmt: skip
_FIELDS = frozenset(row.name for row in FIELDS.values())
"""Options that ``--set`` alone takes, by their dotted name."""
FORMATS_OF = {
    "fsdp2": ("fsdp2", "trainer", "accelerate", "axolotl"),
    "torchtitan": ("torchtitan",),
    "megatron": ("megatron", "swift_megatron"),
    "deepspeed": ("deepspeed", "trainer", "accelerate", "axolotl"),
    "hf": ("trainer", "accelerate", "axolotl"),
    "ddp": ("trainer", "accelerate", "axolotl"),
    "fsdp1": ("accelerate",),
    "plain": ("accelerate",),
}
"""By framework the formats that run its plans, the usual one first."""


def capabilities_of(framework: str, model: Model | None = None, *, adapters: bool = False) -> Capabilities:
    """What a framework (``name`` or ``name@era``) can be told for a model."""
    return fitting(habits_of(framework).capabilities, model, adapters=adapters)


def fitting(able: Capabilities, model: Model | None = None, *, adapters: bool = False) -> Capabilities:
    """What can be told of an era that is known: by its script, or where that does not run the model without it."""
    return able.tuned if able.tuned is not None and (adapters or not runs_script(model)) else able


def runs_script(model: Model | None) -> bool:
    """Whether a model is one that a script of memcalc's runs: a decoder of dense blocks."""
    return model is None or (not model.is_moe and all(group.tower == "decoder" for group in model.groups))


def formats_of(framework: str, model: Model | None = None, *, adapters: bool = False) -> tuple[str, ...]:
    """The formats that run a framework's plans of a model, the usual one first.

    A script of memcalc's comes last where it does not run the model.
    """
    name = framework.partition("@")[0]
    if name not in FORMATS_OF:
        able = ", ".join(FORMATS_OF)
        allowed = f"memcalc writes no config of {name}: set what the plan says in yours, and give that to memcalc check"
        allowed += f"; or plan with {able}"
        raise CombinationError("framework", framework, allowed)
    if habits_of(framework).pipeline_engine == "always":
        allowed = "memcalc writes no arguments of Megatron-DeepSpeed; plan again with deepspeed, or megatron"
        raise CombinationError("framework", framework, allowed)
    says = habits_of(framework).capabilities
    scripted = says.tuned is not None and fitting(says, model, adapters=adapters) is says.tuned
    return tuple(sorted(FORMATS_OF[name], key=lambda form: scripted and form == name))


def fed_with(spec: Model | None) -> str:
    """What a model is fed in training, by its part of the Trainer's script; empty where nothing is written of it."""
    towers = {group.tower for group in spec.groups} if spec is not None else {"decoder"}
    if spec is not None and spec.images is not None:
        return "images"
    if spec is None or towers == {"decoder"}:
        return "text"
    if towers == {"encoder", "decoder"}:
        return "speech" if any(ends.mel_bins for ends in spec.ends) else "pairs"
    if towers == {"encoder"}:
        pooled = "classes" if any(tensor.name == "pooler" for tensor in spec.outside) else ""
        return ("text" if spec.tail.wide_loss else "masked") if spec.head else pooled
    return "pictures" if towers == {"vision"} and spec.tail.classes else ""


def own_code(strategy: Strategy, model: Model | None = None) -> tuple[str, ...]:
    """A sentence for each part of a strategy that somebody has to write; empty where the framework can be told it all.

    >>> from memcalc.specs.strategy import Strategy
    >>> own_code(Strategy(framework="fsdp2", zero=3, recompute="sqrt"))
    ('recompute sqrt: wrap runs of blocks in torch.utils.checkpoint yourself',)
    """
    able = capabilities_of(strategy.framework, model, adapters=bool(strategy.lora))
    needs = list(needs_of(strategy, able, model))
    if not needs or (able.tuned is not None and not any(needs_of(strategy, able.tuned, model))):
        return ()  # by the script, or by a launcher's configuration without it
    sides = [" with ".join(_shown(strategy, *side) for side in need.sides) for need in needs]
    return tuple(dict.fromkeys(f"{side}: {need.code}" for side, need in zip(sides, needs, strict=True)))


class Need(NamedTuple):
    """What somebody has to write, and for what."""

    sides: tuple[tuple[str, str], ...]
    """Options of :class:`Capabilities` with their values: one that is not told, or two that are not told together."""
    code: str
    """One command."""

    def field(self, strategy: Strategy) -> tuple[str, object]:
        """The option as it is typed, and its value."""
        option, value = self.sides[0]
        if option == "parallel" and value != "hsdp":
            degree = value.partition("+")[0]
            return degree, getattr(strategy, degree)
        return _field(strategy, option, value)

    def beside(self, strategy: Strategy) -> str:
        """What else is needed for it to clash; empty where it is not told at all."""
        return "".join(f"with {_shown(strategy, *side)} " for side in self.sides[1:])


def needs_of(strategy: Strategy, able: Capabilities, model: Model | None = None) -> Iterator[Need]:
    """Yield what of a strategy is not told, in the order of the options, then what is not told together."""
    stated = list(values_of(strategy))
    for option, value in stated:
        entry: Support = getattr(able, option)
        code = entry.needs(value, model)
        if code and not (code == MASTER and strategy.lora):  # a frozen base needs no copies to be updated
            yield Need(((option, value),), code)
    for clash in able.apart:
        pair = _pair(clash, stated)
        if clash.code and pair:
            yield Need(pair, clash.code)
    habits = habits_of(strategy.framework)
    if strategy.pp > 1 and strategy.pp_schedule in habits.fork_schedules:
        yield Need((("pp_schedule", strategy.pp_schedule),), f"run the fork {habits.fork}")


def usual_form(habits: Habits, optimizer: str) -> str:
    """The form in which an optimizer steps by default: the framework's own, where the optimizer has that one.

    >>> usual_form(habits_of("hf"), "adafactor")
    'loop'
    """
    able = habits.capabilities.tuned or habits.capabilities
    named = {form for clash in able.clashes for form in _forms_of(clash, optimizer)}
    forms = (habits.optimizer_impl, *able.optimizer_impl.direct)
    return next((form for form in forms if form not in named), habits.optimizer_impl)


def _forms_of(clash: Clash, optimizer: str) -> tuple[str, ...]:
    """The forms that an optimizer does not have, where a clash is of both."""
    of_both = (clash.first[0], clash.second[0]) == ("optimizer", "optimizer_impl")
    return clash.second[1] if of_both and optimizer in clash.first[1] else ()


def check_told(strategy: Strategy, model: Model | None = None) -> None:
    """Refuse what does not exist in the framework; :class:`CombinationError` names the option and what there is."""
    able = capabilities_of(strategy.framework, model, adapters=bool(strategy.lora))
    stated = list(values_of(strategy))
    for option, value in stated:
        entry: Support = getattr(able, option)
        if entry.needs(value, model) is None:
            raise CombinationError(*_field(strategy, option, value), entry.said_by(strategy.framework), entry.values)
    for clash in able.apart:
        pair = _pair(clash, stated)
        if pair and not clash.code:
            raise CombinationError(*_field(strategy, *pair[0]), clash.why)


def _pair(clash: Clash, stated: list[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """What of a strategy cannot be told together; nothing where it does not meet."""
    sides = (clash.first, clash.second)
    met = [next((pair for pair in stated if pair[0] == name and pair[1] in values), None) for name, values in sides]
    return () if None in met else tuple(pair for pair in met if pair)


def _field(strategy: Strategy, option: str, value: str) -> tuple[str, object]:
    """The field that an option's value is of, as typed, and its value."""
    if value == "hsdp":
        return "dp-replicate", strategy.dp_replicate
    if option == "parallel":
        name = value.partition("+")[0] if not value.endswith("+sp") or strategy.tp == 1 else "sp"
        return name, getattr(strategy, name)
    if option == "uneven":
        return f"strategy.{value}", getattr(strategy, value)
    if option == "recompute":
        return option, strategy.recompute
    return f"strategy.{option}" if option in _FIELDS else option.replace("_", "-"), value


def _shown(strategy: Strategy, option: str, value: str) -> str:
    name, shown = _field(strategy, option, value)
    if option == "parallel":
        return value
    return f"{name} {shown}"
