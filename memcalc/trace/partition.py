"""What a compiled block keeps for backward: the minimum cut that PyTorch's partitioner takes through its forward graph.

AOT autograd joins forward and backward into one graph and cuts it where the least has to be stored. What backward reads
in a matrix product or in fused attention stands in memory and is stored as it is; nor are those operators, reductions
and random ones repeated. All else is computed again inside of the kernels that read it, from what is stored.

Source: PyTorch 2.13 ``torch/_functorch/partitioners.py``, ``min_cut_rematerialization_partition`` and
``should_ban_recomputation``, at the default budget of 1.

What torchtitan's policy for operators keeps of a block, compiled or not.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from memcalc.specs.block import Mlp
from memcalc.trace.tape import Kind, Node, Record, Size, Storage, Tape, Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from memcalc.specs.block import Block
    from memcalc.trace.layers import BlockConfig
    from memcalc.trace.tape import Edge, Rule

SEQUENCE = 4096
"""Tokens of a sequence by which tensors of tokens and keys are weighed against those of tokens; the cut is the same
for any length above a few."""
UNFUSED, FUSED = 1, 2
"""How a tensor's bytes are weighed: one that only exists inside of a kernel would have to be written for backward."""
UNBOUNDED = 1 << 62


@dataclass
class Step:
    """One operator that was recorded: storages by their index."""

    outs: tuple[int, ...]
    inputs: tuple[int, ...]
    saved: tuple[int, ...]
    repeated: bool
    """Whether it may run again in backward; a matrix product, attention or a message may not."""


@dataclass
class Cut:
    """What is kept, and what each operator's backward reads of it, by the operator's number."""

    stored: frozenset[int] = frozenset()
    reads: tuple[tuple[int, ...], ...] = ()


class ObservedTape(Tape):
    """A tape that frees nothing and notes who made what from what."""

    def __init__(self, *, accumulating: bool = False) -> None:
        super().__init__(accumulating=accumulating)
        self.steps: list[Step] = []
        self._everything: list[Storage] = []
        self._unrepeated: set[int] = set()

    def new(self, name: str, size: Size, kind: Kind = "activation") -> Tensor:
        """Allocate a storage."""
        tensor = super().new(name, size, kind)
        self._everything.append(tensor.storage)
        return tensor

    def operator(self, kind: str, make: Callable[[], Tensor]) -> Tensor:
        """Run an operator that a compiled graph never repeats."""
        out = super().operator(kind, make)
        self._unrepeated.add(out.storage.index)
        return out

    def record_many(
        self,
        outs: list[Tensor],
        inputs: Sequence[Tensor | Edge | None],
        rule: Rule,
        saved: Sequence[Storage | None] = (),
    ) -> list[Tensor]:
        """Put an operator into the graph."""
        made = tuple(out.storage.index for out in outs)
        given = tuple(i.storage.index for i in inputs if isinstance(i, Tensor))
        read = tuple(storage.index for storage in saved if storage is not None)
        self.steps.append(Step(made, given, read, self._unrepeated.isdisjoint(set(made) - set(given))))
        return super().record_many(outs, inputs, rule, saved)


class PartitionedTape(Tape):
    """A tape on which operators keep what a cut says, until backward has read it last."""

    def __init__(self, cut: Cut, *, accumulating: bool = False) -> None:
        super().__init__(accumulating=accumulating)
        self.cut = cut
        self._stored: dict[int, Storage] = {}
        self._nodes: list[tuple[Node, tuple[int, ...]]] = []
        self._steps = 0

    def new(self, name: str, size: Size, kind: Kind = "activation") -> Tensor:
        """Allocate a storage."""
        tensor = super().new(name, size, kind)
        if tensor.storage.index in self.cut.stored:
            self._stored[tensor.storage.index] = tensor.storage
        return tensor

    def record_many(
        self,
        outs: list[Tensor],
        inputs: Sequence[Tensor | Edge | None],
        rule: Rule,
        saved: Sequence[Storage | None] = (),
    ) -> list[Tensor]:
        """Put an operator into the graph; what it keeps is settled when forward has ended."""
        del saved
        outs = super().record_many(outs, inputs, rule)
        edge = outs[0].edge
        if isinstance(edge, tuple) and self._steps < len(self.cut.reads):
            self._nodes.append((edge[0], self.cut.reads[self._steps]))
        self._steps += 1
        return outs

    def settle(self) -> None:
        """End of forward: from here on a kept storage lives until the last backward that reads it."""
        for node, reads in self._nodes:
            node.saved = [self._stored[index] for index in reads]
        self._nodes.clear()
        self._stored.clear()


def weight(record: Record) -> int:
    """Bytes of a tensor for a token of a sequence of :data:`SEQUENCE` tokens."""
    wide = record.size.unit.endswith(("pair", "square", "filled_cross", "even_cross"))
    return max(record.size.bytes, 1) * (SEQUENCE if wide else 1)


def partition(tape: ObservedTape) -> Cut:
    """The cut of what a tape observed.

    A tensor is a pair of vertices with its weight between them; the source leads to what is never repeated, and what
    backward reads leads to the sink.
    """
    makers = {out: step for step in reversed(tape.steps) for out in step.outs if out not in step.inputs}
    heavy = [step for step in tape.steps if not step.repeated]
    standing = {index for step in heavy for index in (*step.outs, *step.inputs, *step.saved)}
    standing |= {index for step in tape.steps for index in step.outs if index in step.saved}
    stored = {index for step in heavy for index in step.saved}
    network = Network()
    for index, record in enumerate(tape.records):
        maker = makers.get(index)
        network.join(f"{index}>", f"{index}<", weight(record) * (UNFUSED if index in standing or not maker else FUSED))
        if maker is None or not maker.repeated or index in stored:
            network.join("source", f"{index}>", UNBOUNDED)
        for given in maker.inputs if maker and maker.repeated and index not in stored else ():
            network.join(f"{given}<", f"{index}>", UNBOUNDED)
    for index in {index for step in tape.steps for index in step.saved}:
        network.join(f"{index}<", "sink", UNBOUNDED)
    before = network.before_cut("source", "sink")
    crossing = frozenset(i for i in range(len(tape.records)) if f"{i}>" in before and f"{i}<" not in before)
    reads = tuple(tuple(sorted(_sources(step.saved, crossing, makers))) for step in tape.steps)
    return Cut(frozenset(index for each in reads for index in each), reads)


def _sources(wanted: Iterable[int], stored: frozenset[int], makers: Mapping[int, Step]) -> set[int]:
    """The kept storages from which some are computed again."""
    sources, waiting, seen = set[int](), list(wanted), set[int]()
    while waiting:
        index = waiting.pop()
        if index in stored:
            sources.add(index)
        elif index not in seen:
            seen.add(index)
            waiting += makers[index].inputs
    return sources


@dataclass
class Network:
    """Capacities between named vertices, for one maximum flow (Edmonds and Karp)."""

    capacity: dict[str, dict[str, int]] = field(default_factory=dict)

    def join(self, start: str, end: str, capacity: int) -> None:
        """Let so much flow from one vertex to another."""
        self.capacity.setdefault(start, {})[end] = capacity
        self.capacity.setdefault(end, {}).setdefault(start, 0)

    def before_cut(self, source: str, sink: str) -> set[str]:
        """The vertices on the sink's far side of the minimum cut next to the sink."""
        while path := self._path(source, sink):
            flow = min(self.capacity[a][b] for a, b in path)
            for a, b in path:
                self.capacity[a][b] -= flow
                self.capacity[b][a] += flow
        behind, waiting = {sink}, deque([sink])
        while waiting:
            end = waiting.popleft()
            for start in self.capacity[end]:
                if start not in behind and self.capacity[start][end]:
                    behind.add(start)
                    waiting.append(start)
        return set(self.capacity) - behind

    def _path(self, source: str, sink: str) -> list[tuple[str, str]]:
        """A shortest path along which more can flow; empty where there is none."""
        came, waiting = {source: source}, deque([source])
        while waiting and sink not in came:
            start = waiting.popleft()
            for end, left in self.capacity.get(start, {}).items():
                if left and end not in came:
                    came[end] = start
                    waiting.append(end)
        path, at = list[tuple[str, str]](), sink if sink in came else source
        while at != source:
            path.append((came[at], at))
            at = came[at]
        return path


def operators_of(block: Block, setting: BlockConfig) -> tuple[tuple[str, str], ...]:
    """The block's layers, by the interface's words, whose product is no ``mm`` to that policy, and what it is.

    A layer with a bias is ``addmm`` (torch 2.13 ``Linear.cpp``); a router's product is known by its weight's shape.
    """
    spec, mlp = block.attention, block.mlp
    q, k, v, o = (spec.q_bias, spec.k_bias, spec.v_bias, spec.o_bias) if spec is not None else (False,) * 4
    inner = isinstance(mlp, Mlp) and mlp.bias
    having = {"q": q, "k": k, "v": v, "qkv": q, "o": o, "gate": inner, "up": inner, "gate_up": inner, "down": inner}
    named = [(word, "addmm") for word, is_biased in having.items() if is_biased]
    return (*setting.operators, *named)


def kept_operator(block: Block, setting: BlockConfig, kind: str, number: int) -> bool:
    """The operators whose outputs torchtitan keeps: communication, attention, every second matmul from the first on.

    Of modules that are compiled apart, inside of the checkpoint, its policy sees what Inductor calls by name,
    attention and collectives, but not ``aten.mm.out``. Source: torchtitan ``parallelize_llama.py`` (9dec370),
    ``_save_list`` and ``_custom_policy``; torch 2.13 ``utils/checkpoint.py``, ``ignore_compile_internals``.
    """
    apart = setting.compiled_parts and block.is_moe
    if kind == "mm":
        return not apart and (number % 2 == 0 or setting.keeps_every_matmul)
    if kind == "addmm":
        return not apart and setting.keeps_biased
    if kind == "all-to-all":
        return setting.keeps_exchange
    return kind == "reduce-scatter" or (kind == "sdpa" and setting.keeps_attention)


def kept_products(block: Block, setting: BlockConfig, layers: Sequence[tuple[str, bool]]) -> list[bool]:
    """Whether it keeps the product of each layer, in the order in which they run, by its word and whether it is routed.

    Routed experts run in grouped products, which no list has.
    """
    operators, chosen, numbers = dict(operators_of(block, setting)), list[bool](), Counter[str]()
    for target, is_routed in layers:
        kind = "grouped_mm" if is_routed else operators.get(target, "mm")
        chosen.append(kept_operator(block, setting, kind, numbers[kind]))
        numbers[kind] += 1
    return chosen
