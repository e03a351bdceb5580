"""What is said of a strategy on a screen: what it is called, what it assumes, and the time of its step.

The time is throughput with its range, and what the step is spent on.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from memcalc.frameworks import habits_of
from memcalc.report.tables import UNMET, Column, Line, Table, gib, percent, said
from memcalc.results.estimates import Estimate, StepTime
from memcalc.specs.job import JobRecord, command_line
from memcalc.specs.strategy import Strategy
from memcalc.units import format_seconds

if TYPE_CHECKING:
    from memcalc.results.plans import Fit, Plan


TIERS = {"cpu": "CPU", "nvme": "NVMe", "cxl": "CXL"}
_POLICIES = {
    "attention": "the attention of each block",
    "mlp": "the MLP of each block",
    "submodules": "each module of a block apart",
    "selective-core-attn": "core attention",
    "selective-ops": "all but attention, collectives and every second matmul",
    "sqrt": "√n segments",
}
_COUNTED = {
    "every": "one block in {}",
    "segments": "{} segments",
    "block": "the first {} blocks",
    "uniform": "{} blocks per checkpoint",
}

_STAGED = " of each stage"
"""What Megatron-LM counts its first blocks of."""


def parallelism(strategy: Strategy, *, scheduled: bool = False) -> str:
    """Return how a plan is spread over GPUs, as its framework calls it; a dash where there is one GPU.

    The usual schedules of a pipeline are named only where `scheduled` asks for it.

    >>> parallelism(Strategy(framework="megatron", zero=1, dp=4, tp=8, sp=True, pp=4, vpp=2))
    'dist-opt TP8+SP PP4(×2)'
    >>> parallelism(Strategy(framework="megatron", zero=1, dp=4, tp=2, sp=True, ep=8, etp=1))
    'dist-opt TP2+SP EP8 ETP1'
    >>> parallelism(Strategy(framework="fsdp2", zero=3, dp=16, dp_replicate=2))
    'HSDP2×8'
    >>> parallelism(Strategy(framework="fsdp2", zero=3, dp=1))
    '-'
    """
    parts = [_data(strategy)] if strategy.dp * strategy.cp > 1 else []
    parts += [f"TP{strategy.tp}" + "+SP" * strategy.sp] * (strategy.tp > 1)
    if strategy.pp > 1:
        usual = strategy.pp_schedule in {"1f1b", "interleaved"} and not scheduled
        schedule = "" if usual else f" {strategy.pp_schedule}"
        parts.append(f"PP{strategy.pp}" + f"(×{strategy.vpp})" * (strategy.vpp > 1) + schedule)
    parts += [f"{name.upper()}{getattr(strategy, name)}" for name in ("cp", "ep") if getattr(strategy, name) > 1]
    parts += [f"ETP{strategy.etp}"] * (strategy.etp not in {0, strategy.tp})
    return " ".join(parts) or "-"


def _data(strategy: Strategy) -> str:
    habits = habits_of(strategy.framework)
    replicas = strategy.dp_replicate
    parts = f"{replicas}×{strategy.dp // replicas}"
    if habits.full_shard:
        name = {3: "FSDP", 2: "FSDP no-reshard"}.get(strategy.zero, "DDP")
        return name if replicas == 1 else name.replace("FSDP", f"HSDP{parts}")
    if habits.name == "megatron":
        return f"dist-opt {parts}" if replicas > 1 else "dist-opt" if strategy.zero else "DP"
    return f"ZeRO-{strategy.zero}" if strategy.zero else "DDP"


def offload(strategy: Strategy) -> str:
    """Return what leaves the GPU, and where to if that is not the CPU; a dash for nothing."""
    tier = "" if strategy.offload_to == "cpu" else f" to {TIERS.get(strategy.offload_to, strategy.offload_to)}"
    return "+".join(strategy.offload) + tier if strategy.offload else "-"


def strategy_words(of: Strategy) -> tuple[str, ...]:
    """Return a strategy in a few words: what runs, how it is spread over GPUs, what it stores.

    >>> strategy_words(Strategy(zero=3, recompute="full", dp=4, tp=2))
    ('fsdp2', 'bf16-mixed', 'adamw', 'FSDP TP2', 'recompute full')
    >>> strategy_words(Strategy(framework="plain", precision="bf16", zero=0, lora="16", quantize="nf4"))
    ('plain', 'bf16', 'adamw', 'lora 16', 'base nf4', 'recompute none')
    """
    adapters = (f"lora {of.lora}",) if of.lora else ()
    base = () if of.quantize == "none" else (f"base {of.quantize}",)
    spread = parallelism(of, scheduled=True)
    layout = () if spread == "-" else (spread,)
    away = (f"offload {offload(of)}",) if of.offload else ()
    return (of.framework, of.precision, of.optimizer, *adapters, *base, *layout, f"recompute {of.recompute}", *away)


_UNNAMED = frozenset({"framework", "precision", "optimizer", "optimizer_impl"})
"""Assumptions whose value says what they are."""
_NAMED_AFTER = frozenset({"attention", "loss", "kernels"})


def assumed(assumptions: Mapping[str, str], *, label: str = "Assumed") -> tuple[Line, ...]:
    """Return what was assumed in as few words as say it: no line where nothing was.

    >>> assumed({"zero": "3", "framework": "fsdp2", "attention": "flash", "seq_len": "4096"})[0].items
    ('zero 3', 'fsdp2', 'flash attention', 'seq-len 4096')
    """
    items = tuple(_assumption(name, value) for name, value in assumptions.items())
    return (said(label, *items, role="faint"),) if items else ()


def _assumption(name: str, value: str) -> str:
    if name in _UNNAMED and not value.startswith("searched"):
        return value
    title = name.replace("_", "-")
    return f"{value} {title}" if name in _NAMED_AFTER else f"{title} {value}"


_ASKED = ("gpus", "seq_len", "lengths", "global_batch", "framework", "lora", "quantize", "optimizer")
"""What a search keeps of a job whose strategy does not fit."""


_SOFTWARE = ("strategy.bnb", "strategy.peft", "strategy.te")
"""Settings that say what is installed, which no search changes."""


def search_line(job: JobRecord) -> str:
    """Return the line that searches for what fits in the place of a job's own strategy.

    >>> search_line(JobRecord(command="estimate", model="7b", gpu="h100", options={"gpus": 2, "zero": 3}))
    'memcalc plan --model 7b --gpu h100 --gpus 2'
    """
    options = {name: value for name, value in job.options.items() if name in _ASKED}
    settings = {k: value for k, value in job.settings.items() if k.startswith("workload.") or k in _SOFTWARE}
    return command_line(job.model_copy(update={"options": options, "settings": settings, "query": {}}), "plan")


def fewest_line(job: JobRecord) -> str:
    """Return the line that asks on how many GPUs a job fits that fits on none of those that were searched.

    >>> fewest_line(JobRecord(command="plan", model="7b", gpu="h100", options={"gpus": 1, "tp": "1"}))
    'memcalc min gpus --model 7b --gpu h100 --tp 1'
    """
    options = {name: value for name, value in job.options.items() if name != "gpus"}
    return command_line(job.model_copy(update={"what": "gpus", "options": options, "query": {}}), "min")


def batch(plan: Plan) -> str:
    """Return the micro-batch and how often it is accumulated."""
    return f"{plan.strategy.micro_batch} × {plan.accumulation_steps}"


def precision(strategy: Strategy) -> str:
    """Return the optimizer with how it is run."""
    return f"{strategy.optimizer} ({strategy.optimizer_impl})"


def legend(plans: Iterable[Plan]) -> Iterator[str]:
    """Yield what each recompute policy of some plans computes again, where its name does not say so.

    >>> from types import SimpleNamespace as Some
    >>> list(legend([Some(strategy=Some(recompute=name, pp=1)) for name in ("full", "block-8", "none")]))
    ['block-8: the first 8 blocks']
    >>> list(legend([Some(strategy=Some(recompute="block-2", pp=4))]))
    ['block-2: the first 2 blocks of each stage']
    >>> list(legend([Some(strategy=Some(recompute=name, pp=1)) for name in ("uniform-2", "uniform-4")]))
    ['uniform-N: N blocks per checkpoint']
    >>> list(legend([Some(strategy=Some(recompute="modules:mlp,moe_act", pp=1))]))
    ['modules: mlp, moe_act of each block']
    """
    strategies = [plan.strategy for plan in plans]
    names = dict.fromkeys(strategy.recompute for strategy in strategies)
    piped = {"block"} if any(each.pp > 1 for each in strategies if each.recompute.startswith("block-")) else set()
    matches = {name: re.fullmatch(r"(every|segments|block|uniform)-(\d+)", name) for name in names}
    kinds = [counted[1] for counted in matches.values() if counted]
    texts: dict[str, str | None] = {}
    for name, counted in matches.items():
        if counted is None:
            modules = name.removeprefix("modules:")
            texts[name] = _POLICIES.get(name) if modules == name else f"{modules.replace(',', ', ')} of each block"
        else:
            number = counted[2] if kinds.count(counted[1]) == 1 else "N"
            texts[f"{counted[1]}-{number}"] = _COUNTED[counted[1]].format(number) + _STAGED * (counted[1] in piped)
    single = sum(name.startswith("modules:") for name in names) == 1
    yield from (f"{short_policy(name) if single else name}: {text}" for name, text in texts.items() if text)


def short_policy(policy: str) -> str:
    """Return a recompute policy without the modules that it lists."""
    return policy.partition(":")[0]


def host(plans: Iterable[Plan | Fit]) -> str:
    """Return the memory off the GPU that plans need; nothing where they need none.

    >>> from types import SimpleNamespace as Some
    >>> host([Some(host_memory=2**30, tier_memory=0, strategy=Some(offload_to="cpu"))])
    '1 GiB of host memory per node'
    """
    needs = {"host memory": [plan.host_memory for plan in plans]}
    for plan in plans:
        needs.setdefault(TIERS.get(plan.strategy.offload_to, ""), []).append(plan.tier_memory)
    text = " and ".join(f"{_span(sizes)} of {name}" for name, sizes in needs.items() if any(sizes))
    return f"{text} per node" if text else ""


def _span(sizes: list[int]) -> str:
    ends = [gib(size, 0) for size in (min(size for size in sizes if size), max(sizes))]
    return f"{'–'.join(dict.fromkeys(ends))} GiB"


def open_order(plans: Sequence[Plan]) -> str:
    """What is said where the first plan may be slower than the second: one has no measured runs, unlike the other.

    Speeds that rest on the same runs err alike, so that their order holds where a range is wide.
    """
    listed = [plan for plan in plans if plan.special or plan is plans[0]]
    if len(listed) < 2:
        return ""
    first, second = listed[:2]
    alike = first.time.basis == second.time.basis and not first.strategy.offload
    if alike or (first.time.validated and second.time.validated):
        return ""
    speeds = [plan.time.tokens_per_second_per_gpu for plan in (first, second)]
    for plan, other in ((first, speeds[1]), (second, speeds[0])):
        here = plan.time
        slow, fast = (here.tokens_per_second_per_gpu * here.step / end for end in (here.high, here.low))
        if not plan.time.validated and slow <= other <= fast:
            unmeasured = [f"#{each.rank}" for each in (first, second) if not each.time.validated]
            which = f"the speed of {unmeasured[0]} is" if len(unmeasured) == 1 else "their speeds are"
            return f" Order of #{first.rank} and #{second.rank} undecided: {which} unmeasured."
    return ""


LARGEST = 2
"""Parts of a step that one line names."""
SMALLEST = 0.01
"""Share of the step below which a line does not name a part."""
_PARTS = {
    "compute": "forward and backward",
    "host": "launches, data and the loop itself",
    "recompute": "forward passes again, for backward",
    "tensor": "between tensor-parallel ranks",
    "context": "keys and values beyond attention's time",
    "expert": "tokens to experts and back",
    "pipeline": "between stages",
    "data": "weights gathered, gradients reduced",
    "bubble": "waits for other stages",
    "optimizer": "the update, on the GPU",
    "offload": "transfers, and an update on the CPU",
}
"""What a step is spent on."""
_NAMES = {
    "tensor": "TP messages",
    "context": "CP messages",
    "expert": "EP messages",
    "pipeline": "PP messages",
    "data": "DP messages",
}


class StepPart(NamedTuple):
    """One part of a step."""

    name: str
    """As it is said."""
    seconds: float
    says: str
    """What it is."""


def parts_of(time: StepTime) -> tuple[StepPart, ...]:
    """Return what a step is spent on, messages by kind: all parts, which add up to the step."""
    return tuple(StepPart(part_name(name), seconds, _PARTS[name]) for name, seconds in time.parts.items())


def part_name(name: str) -> str:
    """Return a part of a step as it is said.

    >>> part_name("bubble"), part_name("tensor")
    ('bubble', 'TP messages')
    """
    return _NAMES.get(name, name)


def speed(time: StepTime) -> str:
    """Return the throughput with its 90% range."""
    rate = time.tokens_per_second_per_gpu
    return rate_range(rate, *(rate * time.step / end if end else None for end in (time.high, time.low)))


def rate_range(rate: float, slowest: float | None, fastest: float | None) -> str:
    """Return a throughput with the ends of its range.

    >>> rate_range(3185.2, 2493.0, 3697.2)
    '3185 (2490–3700)'
    """
    low, high = ("?" if end is None else _rounded(end) for end in (slowest, fastest))
    return f"{rate:.0f} ({low}–{high})"


def _rounded(rate: float) -> str:
    """Return a rate to ten where that is finer than one percent.

    >>> _rounded(3697.2), _rounded(87.4)
    ('3700', '87')
    """
    return f"{rate:.0f}" if rate < 1000 else f"{10 * round(rate / 10)}"


def time_lines(result: Estimate) -> Iterator[Line]:
    """Yield the line below a verdict: throughput, the step and its largest parts; none where no time is known."""
    time = result.time
    if time is None:
        return
    unmet = UNMET if result.verdict == "does-not-fit" else ""
    doubt = () if time.validated else (time.basis,)
    items = (f"{unmet}{speed(time)} tok/s/GPU", f"{format_seconds(time.step)}/step", _spent(time), *doubt)
    yield Line(" · ".join(items), "verdict", items=items)


def _spent(time: StepTime) -> str:
    most = sorted(parts_of(time), key=lambda part: -part.seconds)[:LARGEST]
    named = [part for part in most if part.seconds >= SMALLEST * time.step]
    return ", ".join(f"{part.name} {percent(part.seconds, time.step)}%" for part in named)


def parts_table(time: StepTime) -> Table:
    """Return what a step is spent on, part by part, without parts that take no time."""
    columns = (
        Column("part"),
        Column("time", right=True),
        Column("share", "%", right=True, meter=True, priority=1),
        Column("spent on", priority=2),
    )
    rows = [
        (part.name, format_seconds(part.seconds), percent(part.seconds, time.step), part.says)
        for part in parts_of(time)
        if part.seconds
    ]
    rows.append(("step", format_seconds(time.step), percent(time.step, time.step), "one update of the weights"))
    return Table("Time of a step (messages and transfers: what is not overlapped)", columns, tuple(rows))


def stands_on(time: StepTime) -> Line:
    """Return the range of a step, how busy the GPU is, and what that stands on."""
    items = (
        f"{format_seconds(time.low)} to {format_seconds(time.high)} per step",
        f"MFU {100 * time.mfu:.1f}%",
        f"HFU {100 * time.hfu:.1f}%",
        time.basis,
    )
    return Line(f"Time: {', '.join(items)}.", label="Time", items=items)


def time_facts(time: StepTime) -> dict[str, str]:
    """Return all that is said of a step by name: its range, its parts, throughput, how busy the GPU is, the basis."""
    values = {"step": f"{format_seconds(time.step)} ({format_seconds(time.low)} to {format_seconds(time.high)})"}
    for part in parts_of(time):
        if part.seconds:
            values[part.name] = f"{format_seconds(part.seconds)}, {percent(part.seconds, time.step)}%"
    return {
        **values,
        "throughput": f"{time.tokens_per_second_per_gpu:.0f} tokens/s per GPU",
        "MFU": f"{100 * time.mfu:.1f}%",
        "basis": time.basis,
    }
