"""A symbolic autograd: tensors that have a size and a lifetime but no values.

A block is written with the operators that the framework runs; each operator allocates its output, keeps what PyTorch's
derivative rule needs, and its backward allocates gradients. A storage lives for as long as a Python object refers to
it, as in PyTorch, so what is kept for backward, the working set of a block's backward and the sequence of allocations
are all read from one execution.

That needs CPython's reference counts, see :func:`memcalc.trace.counts_references`.

Rules followed: PyTorch 2.13 ``tools/autograd/derivatives.yaml`` (what each operator saves),
``torch/csrc/autograd/engine.cpp`` (nodes run by falling sequence number; saved tensors are released after a node) and
``torch/csrc/autograd/input_buffer.cpp`` (gradients are added in place where nobody else holds the storage).
"""

from __future__ import annotations

import heapq
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, NamedTuple

Unit = Literal[
    "token", "pair", "sink_pair", "filled_pair", "cross", "cross_pair", "square", "filled_square", "filled_cross",
    "even_cross", "filled_token", "convolved", "scan_chunk", "row", "sample", "image", "routed", "once",
]  # fmt: skip
"""What a size is counted by: `token`; `pair`, a token and a key, `sink_pair` with the sink among the keys; `cross` and
`cross_pair`, the same of the other tower; `square`, a query and a key without the batch (a position bias that all
sequences share); `row`, a position of one sequence; `sample`, a sequence or a view of an image; `image`, a token that
an image is in the text; `routed`, a token for each of its experts; `once`, a weight's gradient. `filled`: with the keys
filled up to a multiple of 16 (none in `filled_cross` where they are one already; `even_cross` then has them all), or
with the tokens of a sequence filled up to one of 32, as the memory-efficient kernel has them; `convolved`:
with the places that a convolution adds to each sequence; `scan_chunk`, a part of a sequence at whose
end a scan keeps a state."""
Shard = Literal[
    "tp", "sp", "ep", "none", "full if sp", "tp if batched", "tp if single", "tp if cp", "rows", "rows if ep",
    "rows if sorted", "routed ffn", "experts", "gathered", "part if tp", "full if tp", "if ep", "unless ep",
]  # fmt: skip
"""`tp`: divided by tensor parallelism; `sp`: by TP where sequence parallelism is on; `ep`: by expert parallelism;
`none`: whole on each rank. Some tensors exist under a condition alone: a whole one where sequence parallelism shards
what it was made from (`full if sp`), a copy where there are several sequences or context-parallel ranks, and what a
view is of where there is one. `rows` are routed tokens: divided by TP where the experts are not, copied where they are
exchanged (`rows if ep`) and sorted by experts (`rows if sorted`); `routed ffn`: the same with the experts' width
divided; `experts`, a weight of all experts; `gathered` is whole, of a product whose weight TP divides: on the way are a
rank's `part if tp` and all ranks' `full if tp`; `if ep` and `unless ep` are whole, where experts are split or not."""
Kind = Literal["activation", "exchanged", "gradient", "weight copy", "dequantised", "external", "workspace", "sum",
               "observed"]  # fmt: skip
"""`exchanged`: on a stream of context parallelism; `workspace`: what one operator's kernels allocate and free again;
`sum`: of two gradients, new since both are views; `observed`: reserved in measured runs, no tensor was found for it."""


class Size(NamedTuple):
    """Extent of a tensor: ``elements`` of ``width`` bytes for each ``unit``."""

    elements: int
    width: int
    unit: Unit = "token"
    shard: Shard = "none"
    label: str = ""
    """The elements in the letters of the legend."""

    @property
    def bytes(self) -> int:
        """Bytes for each unit, before sharding."""
        return self.elements * self.width

    def part(self, parts: int) -> Size:
        """One of equal parts of the rows."""
        return self._replace(elements=-(-self.elements // parts))

    def wide(self, width: int) -> Size:
        """The same extent in another width [bytes]."""
        return self._replace(width=width)


class Record(NamedTuple):
    """One storage that was allocated."""

    name: str
    size: Size
    kind: Kind


class Storage:
    """Memory of one tensor and its views; the tape hears when the last reference goes."""

    __slots__ = ("__weakref__", "base", "index", "tape")

    def __init__(self, tape: Tape, index: int) -> None:
        self.tape, self.index = tape, index
        self.base: Storage | None = None
        """Lives as long as this one: what it is a view of where it is no copy."""

    def __del__(self) -> None:
        self.tape.events.append(~self.index)

    @property
    def size(self) -> Size:
        """The extent of the whole storage."""
        return self.tape.records[self.index].size


class Node:
    """One backward function: the edges to its inputs, what it saved, and its rule; ``lends`` where hooks lend that."""

    __slots__ = ("edges", "lends", "outputs", "reads", "rule", "saved", "seq")

    def __init__(
        self, seq: int, edges: Sequence[Edge | None], rule: Rule, saved: list[Storage], outputs: int, *,
        lends: bool = False,
    ) -> None:  # fmt: skip
        self.seq, self.edges, self.rule, self.saved, self.outputs = seq, edges, rule, saved, outputs
        self.lends, self.reads = lends, bool(saved)


@dataclass(frozen=True, slots=True)
class Leaf:
    """Where a gradient ends: a parameter (``keep`` true: its gradient stays) or the block's input."""

    name: str
    keep: bool


Edge = tuple[Node, int] | Leaf


class Tensor:
    """A view of a storage, with its own extent and its place in the graph."""

    __slots__ = ("base", "edge", "size", "storage")

    def __init__(self, storage: Storage, size: Size, edge: Edge | None = None) -> None:
        self.storage, self.size, self.edge = storage, size, edge
        self.base: Storage | None = None

    @property
    def requires_grad(self) -> bool:
        """Whether a gradient flows to it."""
        return self.edge is not None

    def as_view(self) -> Tensor:
        """The same, as a view: it holds its base, so that nothing is added in place (``can_accumulate_inplace``)."""
        self.base = self.storage
        return self

    def view(self, elements: int | None = None, label: str = "") -> Tensor:
        """A view (of ``elements`` a unit) in the same storage and the same place of the graph."""
        size = self.size if elements is None else self.size._replace(elements=elements, label=label)
        return Tensor(self.storage, size, self.edge)


Grads = list[Tensor | None]
Rule = Callable[[Grads], Sequence[Tensor | None]]
Recorder = Callable[[str, Callable[[], Tensor]], Tensor]
"""Runs an operator of a kind, or gives back what it made before."""


class Tape:
    """What was allocated and freed, in order, with the marks set on the way."""

    def __init__(self, *, accumulating: bool = False) -> None:
        self.records: list[Record] = []
        self.events: list[int] = []
        """Index of a storage where it is allocated, its complement (~index) where it is freed."""
        self.crossings: list[int] = []
        """Events so far when the head's logits were handed to the loss, and when their gradient came back."""
        self.gradients: dict[str, Tensor] = {}
        self.accumulating = accumulating
        """Weight gradients are added to those of an earlier micro-batch, so that new ones go at once."""
        self.copies_weights = self.referred = False
        """Autocast's 16-bit weights are tensors of this execution, as of a block computed again; see :meth:`share`."""
        self.needed = 0
        """Events when the last operator that saves something was about to run, or had, where it saves its result."""
        self._copies: dict[str, weakref.ref[Storage]] = {}
        self._held: list[Storage] = []
        self.shared: list[Storage] = []
        self._uses, self._summed = Counter[str](), set[str]()
        self.again = self._lends = False
        self._seq, self._grad = 0, True
        self._recorder: Recorder | None = None
        self._running = Node(0, (), _spent, [], 0)

    def new(self, name: str, size: Size, kind: Kind = "activation") -> Tensor:
        """Allocate a storage."""
        self.records.append(Record(name, size, kind))
        self.events.append(len(self.records) - 1)
        return Tensor(Storage(self, len(self.records) - 1), size)

    def hold(self, *tensors: Tensor) -> None:
        """Let somebody outside refer to tensors until backward has ended."""
        self._held += [tensor.storage for tensor in tensors]

    def hold_with_graph(self, storage: Storage) -> None:
        """Let the graph itself refer to a storage, which no node gives back: until its loss goes, after backward.

        The graph of a computation that is run again goes with that run's backward, and keeps nothing longer.
        """
        if self._grad and not self.again:
            self._held.append(storage)

    def share(self, tensors: list[Tensor], graph: list[Storage]) -> None:
        """Let a table of the model hold tensors in the place of an earlier run's, if checkpoints refer to it."""
        if self.referred or self.again or not self._grad:
            self.shared = [tensor.storage for tensor in tensors] + (graph if self._lends else [])

    def let_go(self) -> list[int]:
        """Drop what :meth:`hold` and :meth:`hold_with_graph` were given; the storages that were alive for it."""
        live = list(dict.fromkeys(storage.index for storage in self._held))
        self._held.clear()
        return live

    def leaf(self, name: str, size: Size, *, requires_grad: bool = True) -> Tensor:
        """A tensor from outside, whose gradient ends here."""
        tensor = self.new(name, size, "external")
        tensor.edge = Leaf(name, keep=False) if requires_grad else None
        return tensor

    def weight_copy(self, name: str, size: Size) -> Storage | None:
        """A 16-bit weight, made at its first use; where executions do not make them they are a term of their own."""
        if not (self.copies_weights and self._grad):
            return None
        made = self._copies[name]() if name in self._copies else None
        if made is None:
            made = self.new(f"{name} weight, 16-bit copy", size, "weight copy").storage
            self._copies[name] = weakref.ref(made)
        return made

    def cast_weight(self, leaf: Leaf, weight: Size) -> Edge:
        """The edge of a weight's copy in another width: its gradient is cast back after the product's backward."""
        if not self._grad:
            return leaf
        self._seq += 1
        self._uses[leaf.name] += 1
        return Node(self._seq, [leaf], lambda _: [self.new(f"gradient of {leaf.name}", weight, "gradient")], [], 1), 0

    def record(
        self, out: Tensor, inputs: Sequence[Tensor | Edge | None], rule: Rule, saved: Sequence[Storage | None] = (),
        *, reads: bool = False,
    ) -> Tensor:  # fmt: skip
        """Put an operator with one output into the graph, where one of its inputs needs a gradient.

        ``reads``: it saves something else than ``saved``, as a frozen weight.
        """
        self.record_many([out], inputs, rule, saved)
        if reads and isinstance(out.edge, tuple):
            out.edge[0].reads = True
        if self.again and isinstance(out.edge, tuple) and out.edge[0].reads:
            self.needed = self._before(out, inputs, saved)
        return out

    def _before(self, out: Tensor, inputs: Sequence[Tensor | Edge | None], saved: Sequence[Storage | None]) -> int:
        """Events before an operator made its output; those so far where it saves that, or wrote over its input."""
        given = [i.storage for i in inputs if isinstance(i, Tensor)]
        if out.storage in (*given, *saved):
            return len(self.events)
        return len(self.events) - 1 - self.events[::-1].index(out.storage.index)

    def record_many(
        self,
        outs: list[Tensor],
        inputs: Sequence[Tensor | Edge | None],
        rule: Rule,
        saved: Sequence[Storage | None] = (),
    ) -> list[Tensor]:
        """Put an operator into the graph; ``rule`` takes the outputs' gradients and returns the inputs'."""
        edges = [i.edge if isinstance(i, Tensor) else i for i in inputs]
        if not self._grad or all(edge is None for edge in edges):
            return outs
        self._seq += 1
        self._uses.update(edge.name for edge in edges if isinstance(edge, Leaf))
        node = Node(self._seq, edges, rule, [s for s in saved if s is not None], len(outs), lends=self._lends)
        for index, out in enumerate(outs):
            out.edge = (node, index)
        return outs

    @contextmanager
    def no_grad(self) -> Iterator[None]:
        """Without a graph."""
        before, self._grad = self._grad, False
        try:
            yield
        finally:
            self._grad = before

    @contextmanager
    def enable_grad(self, *, lends: bool = False) -> Iterator[None]:
        """With a graph, whatever stands around: for what is run again; ``lends`` as of :class:`Node`."""
        before, self._grad, self.again, self._lends = (self._grad, self.again, self._lends), True, True, lends
        try:
            yield
        finally:
            self._grad, self.again, self._lends = before

    def operator(self, kind: str, make: Callable[[], Tensor]) -> Tensor:
        """Run an operator that a selective checkpoint may keep, by its kind (``mm``, ``bmm``, ``sdpa``)."""
        return make() if self._recorder is None else self._recorder(kind, make)

    @contextmanager
    def recording(self, recorder: Recorder) -> Iterator[None]:
        """Let a selective checkpoint decide about operators."""
        before, self._recorder = self._recorder, recorder
        try:
            yield
        finally:
            self._recorder = before

    @contextmanager
    def unread(self, *, active: bool) -> Iterator[None]:
        """Without a checkpoint's decision: compiled graphs keep nothing that backward does not read (partitioners)."""
        before = self._recorder
        self._recorder = None if active else before
        try:
            yield
        finally:
            self._recorder = before

    def backward(self, edge: Edge | None, grad: list[Tensor], reads: list[int] | None = None) -> dict[str, Tensor]:
        """Run the graph from an edge; ``grad`` is a one-element list, emptied so that the caller holds nothing.

        Returns gradients of leaves from outside, by name; ``reads``: events before each node that reads what was saved.
        """
        pending: dict[Node, Grads] = {}
        queue: list[tuple[int, int, Node]] = []
        ended: dict[str, Tensor] = {}

        def arrive(to: Edge | None, value: Tensor | None) -> None:
            if to is None or value is None:
                return
            if isinstance(to, Leaf):
                self._end(to, value, ended)
                return
            node, index = to
            if node not in pending:
                pending[node] = [None] * node.outputs
                heapq.heappush(queue, (-node.seq, id(node), node))
            pending[node][index] = self._sum(pending[node][index], value)

        arrive(edge, grad.pop())
        while queue:
            self._running = node = heapq.heappop(queue)[2]
            if reads is not None and node.reads:
                reads.append(len(self.events))
            results = list(node.rule(pending.pop(node)))
            edges, node.saved, node.edges, node.rule = node.edges, [], (), _spent
            results.reverse()
            for to in edges:
                arrive(to, results.pop())
        return ended

    def release(self) -> None:
        """Let go of what hooks lent to the running node, which is gone when its function returns.

        The engine brings gradients to their inputs' form after that, and only then releases what nodes save themselves
        (torch/csrc/autograd/engine.cpp of PyTorch 2.13, ``call_function`` and ``evaluate_function``); a checkpoint that
        is no function of its own hands out what it has computed again (torch/utils/checkpoint.py, ``unpack_hook``).
        """
        if self._running.lends:
            self._running.saved.clear()

    def _end(self, leaf: Leaf, value: Tensor, ended: dict[str, Tensor]) -> None:
        if not leaf.keep:
            ended[leaf.name] = self._sum(ended.get(leaf.name), value)
            return
        self.gradients[leaf.name] = self._sum_of_uses(leaf, value)
        self._uses[leaf.name] -= 1
        if self.accumulating and not self._uses[leaf.name]:
            # AccumulateGrad runs when the gradients of all uses have been added up
            del self.gradients[leaf.name]

    def _sum_of_uses(self, leaf: Leaf, value: Tensor) -> Tensor:
        """Add a weight's gradient to those of its other uses: the first time in a new tensor.

        Both are then views (``linear`` transposes its weight), and a view refers to its base, so that neither is alone.
        """
        before = self.gradients.get(leaf.name)
        if before is None or leaf.name in self._summed:
            return self._sum(before, value)
        self._summed.add(leaf.name)
        return self.new("sum of gradients", before.size, "gradient")

    def _sum(self, before: Tensor | None, value: Tensor) -> Tensor:
        """Add two gradients: in place where one of the storages has no other holder."""
        if before is None:
            return value
        if sys.getrefcount(before.storage) <= ALONE:
            return before
        if sys.getrefcount(value.storage) <= ALONE:
            return value
        return self.new("sum of gradients", before.size, "sum" if before.base and value.base else "activation")


def _spent(_: Grads) -> Grads:
    raise RuntimeError("a backward function runs once")


ALONE = 2
"""References to a storage that only one tensor holds, as :func:`sys.getrefcount` counts its own argument too."""
