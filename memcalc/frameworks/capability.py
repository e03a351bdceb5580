"""What a framework can be told, as a record: of each option the values that it has, and what those beyond them need.

A value is *told* where the framework's configuration, or the script that memcalc writes for it, says it all. It *needs
own code* where its bytes are modelled but somebody has to write a part: one command says which. What is in neither
list does not exist in the framework.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

from memcalc.formulas.recompute import PARTS, parse_policy
from memcalc.frameworks import needs
from memcalc.specs.strategy import Offload

if TYPE_CHECKING:
    from memcalc.specs.model import Model
    from memcalc.specs.strategy import Strategy

OFFLOADS: tuple[str, ...] = get_args(Offload)
SPLITS = ("first_stage_layers", "last_stage_layers", "embedding_in_split", "loss_in_split")
"""Fields of a strategy by which pipeline stages have unequal shares of the blocks."""


@dataclass(frozen=True)
class Support:
    """The values of one option."""

    direct: tuple[str, ...] = ()
    """What the configuration, or the script that memcalc writes, says; the framework's own default first."""
    code: Mapping[str, str] = field(default_factory=dict)
    """What else there is, with what somebody has to write for it, as a command."""
    classes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Support values that only some classes of Transformers have; models of other classes need the code."""

    @property
    def values(self) -> tuple[str, ...]:
        """All that exists."""
        return (*self.direct, *(value for value in self.code if value not in self.direct))

    def said_by(self, framework: str) -> str:
        """What there is, as a sentence's end about a framework."""
        listed = ", ".join(text or "none" for text in self.values) or "none"
        return f"{framework} cannot be told to" if self.values == ("false",) else f"{framework} has {listed}"

    def needs(self, value: str, model: Model | None = None) -> str | None:
        """What has to be written for a value: nothing where it is told; None where it does not exist."""
        classes = self.classes.get(value)
        if value in self.direct and (classes is None or model is None or _is_planned(model, classes)):
            return ""
        return self.code.get(value)


def _is_planned(model: Model, classes: tuple[str, ...]) -> bool:
    """Whether a class has a plan, unless its norms have a weight for each head, which are in none.

    Command R+ has such norms (Transformers 5.24 ``models/cohere/modeling_cohere.py``: ``use_qk_norm``).
    """
    attentions = [group.block.attention for group in model.groups if group.block.attention is not None]
    return model.hf_class in classes and not any(attention.qk_norm == "full" for attention in attentions)


NEVER, EITHER = Support(("false",)), Support(("false", "true"))
"""Of a flag: always off, or as told."""


def support_of(direct: Iterable[str], values: Iterable[str] = (), code: str = "", **special: str) -> Support:
    """Support values, and others that all need the same code; ``special`` has what one of those needs instead.

    >>> support_of(["adamw"], ["adamw", "soap"], "build it").needs("soap")
    'build it'
    """
    direct = tuple(direct)
    return Support(direct, {value: special.get(value, code) for value in (*values, *special) if value not in direct})


class Clash(NamedTuple):
    """Values of two options that the framework cannot be told together."""

    first: tuple[str, tuple[str, ...]]
    """An option of :class:`Capabilities` and its values."""
    second: tuple[str, tuple[str, ...]]
    """Another one."""
    code: str = ""
    """What has to be written for both; empty where they do not go together at all."""
    why: str = ""
    """What is allowed instead, where they do not go together at all."""


def offloads(direct: Iterable[str], code: Mapping[str, str] | None = None) -> Support:
    """Combinations of what leaves the GPU, as in ``optimizer,params``.

    ``code`` is by part: a combination beyond what is told needs the code of each of its parts that has some.

    >>> offloads(("none", "params"), {"activations": "a hook"}).needs("params,activations")
    'a hook'
    """
    direct, code = tuple(direct), code or {}
    parts = {part for value in direct for part in value.split(",")} | set(code)
    needed = {}
    for length in (1, 2, 3):
        for combination in combinations(OFFLOADS, length):
            sentences = dict.fromkeys(code[part] for part in combination if part in code)
            if sentences and parts.issuperset(combination):
                needed[",".join(combination)] = "; ".join(sentences)
    return Support(direct, {value: says for value, says in needed.items() if value not in direct})


_PACKED = ("compress_activations", ("int8", "int4"))
PACKING = (
    Clash(
        _PACKED,
        ("compile", ("blocks", "blocks+loss", "model")),
        why="a compiled graph packs what its partitioner keeps, which is not modelled: --compile none or loss",
    ),
    Clash(
        _PACKED,
        ("offload", tuple(",".join(parts) for n in (1, 2, 3) for parts in combinations(OFFLOADS, n)
                          if "activations" in parts)),
        why="of nested hooks only the inner ones run: drop activations from --offload",
    ),
)  # fmt: skip
"""What packing of saved tensors does not go with, whatever the framework."""


class Capabilities(NamedTuple):
    """What one era of a framework can be told. A field is an option, and its values are those of :func:`values_of`."""

    zero: Support
    """Sharding stages."""
    precision: Support
    """Widths of weights and arithmetic."""
    recompute: Support
    """Kinds of policies: ``every`` stands for every K."""
    offload: Support
    """Combinations of what leaves the GPU, with commas."""
    optimizer: Support
    """Optimizers."""
    optimizer_impl: Support
    """Forms of the optimizer's step."""
    loss: Support
    """How the loss is computed."""
    offload_to: Support = Support(("cpu",))
    """Where what is offloaded goes."""
    parallel: Support = Support(("dp",))
    """Kinds of parallelism: dp, ``tp`` without sequence parallelism and ``tp+sp`` with it, pp, cp, ep, and ``hsdp``:
    replicas of the shards."""
    uneven: Support = Support()
    """Fields by which stages have unequal shares of the blocks (:data:`SPLITS`)."""
    compile: Support = Support(("none",))
    """What ``torch.compile`` compiles."""
    compress_activations: Support = Support(("none",), dict.fromkeys(("int8", "int4"), needs.PACKING))
    """What hooks pack saved tensors into."""
    fsdp_schedule: Support = Support(("default",))
    """Where FSDP gathers and reduces: around blocks, or as part of the compiled graph."""
    reduce_dtype: Support = Support(("fp32", "bf16"))
    """Width in which gradients are reduced."""
    precision_aware: Support = NEVER
    """Whether the optimizer's library holds the main weights, and its states can be narrow."""
    main_params_dtype: Support = Support(("fp32",))
    """Width of the main weights that it holds."""
    exp_avg_dtype: Support = Support(("fp32",))
    """Width of its first moment."""
    exp_avg_sq_dtype: Support = Support(("fp32",))
    """Width of its second moment."""
    grad_accum_dtype: Support = Support(("",))
    """Width in which gradients are added up."""
    moe_dispatcher: Support = Support(("alltoall",))
    """How tokens reach their experts."""
    ep_overlap: Support = NEVER
    """Whether tokens of one micro-batch travel while another computes."""
    tp_comm_overlap: Support = NEVER
    """Whether products are cut into parts that overlap with their tensor-parallel messages."""
    cuda_graphs: Support = Support(("none",))
    """How much of a block is a CUDA graph."""
    zero_gather: Support = Support(("allgather",))
    """How updated weights reach all ranks."""
    clashes: tuple[Clash, ...] = ()
    """What cannot be told together."""
    tuned: Capabilities | None = None
    """What holds instead for adapters, and for models that the script does not run; None where the same does."""
    script: str = ""
    """What the script that memcalc writes for the framework runs; empty where there is a configuration alone."""

    @property
    def apart(self) -> tuple[Clash, ...]:
        """What cannot be told together, in this framework or in any."""
        return (*self.clashes, *PACKING)


OPTIONS = tuple(name for name in Capabilities._fields if name not in ("clashes", "tuned", "script"))
"""The fields that are options."""


def text_of(value: object) -> str:
    """How :class:`Capabilities` names a value.

    >>> text_of(3), text_of(True)
    ('3', 'true')
    """
    return str(value).lower() if isinstance(value, bool) else str(value)


def policy_kind(name: str) -> str:
    """The kind of a recompute policy, as :attr:`Capabilities.recompute` lists it.

    >>> policy_kind("every-2"), policy_kind("modules:mlp"), policy_kind("mlp")
    ('every', 'modules', 'mlp')
    """
    policy = parse_policy(name)
    return policy.kind if policy.kind != "parts" else name if name in PARTS else "modules"


def kinds_of(layout: Any) -> tuple[str, ...]:
    """The kinds of parallelism of a layout or a strategy, as :attr:`Capabilities.parallel` lists them."""
    tensor = ("tp+sp" if layout.sp else "tp",) if layout.tp > 1 else ()
    replicated = ("hsdp",) if layout.dp_replicate > 1 else ()
    return (*tensor, *(name for name in ("dp", "pp", "cp", "ep") if getattr(layout, name) > 1), *replicated)


def values_of(strategy: Strategy) -> Iterator[tuple[str, str]]:
    """The options of a strategy with their values, as :class:`Capabilities` names both."""
    joined = {
        "recompute": policy_kind(strategy.recompute),
        "offload": ",".join(strategy.offload) or "none",
        "offload_to": strategy.offload_to if strategy.offload else "cpu",
        "zero_gather": strategy.zero_gather if strategy.zero else "allgather",
    }
    for option in OPTIONS:
        if option == "parallel":
            yield from ((option, kind) for kind in kinds_of(strategy))
        elif option == "uneven":
            yield from ((option, name) for name in SPLITS if strategy.pp > 1 and getattr(strategy, name))
        else:
            yield option, joined.get(option) or text_of(getattr(strategy, option))
