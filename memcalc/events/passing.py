"""Terms of a stage that nothing else in a step's events writes, as they come and go: by phase, block, product."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from memcalc.events.log import COMPUTE, REDUCE, STREAMS, Log, Names
from memcalc.events.stage import Stage, filled, in_shares, melts, weights_of
from memcalc.formulas.activations import TILE_TOKENS, TILE_VOCAB, chunk_rows
from memcalc.formulas.recompute import units_of_chunks
from memcalc.ledger import ALWAYS
from memcalc.terms.buffers import dummies, has_dummies
from memcalc.terms.gradients import learned_head
from memcalc.terms.head import head_settings, linear_of
from memcalc.terms.moments import updated_elements
from memcalc.terms.settings import in_tiles
from memcalc.terms.states import in_one_buffer, offloaded_states
from memcalc.terms.zero import FP32_GRADIENTS, era, steps_at_start
from memcalc.units import MIB

if TYPE_CHECKING:
    from memcalc.events.stage import Rank
    from memcalc.frameworks.losses import Linear
    from memcalc.ledger import Ledger, Term
    from memcalc.terms.activations import GroupActivations
    from memcalc.terms.model_on_grid import ModelOnGrid
    from memcalc.trace.tape import Record


BROADCAST_BUCKET = 250 * MIB
ENOUGH = 3
"""Chunks after which the next ones find the memory that those before have left, and so reserve nothing."""
INPUT, WEIGHT = "gradient of the head's input", "gradient of the head"


@dataclass(frozen=True)
class Chunked:
    """Liger's loss with the head in it, which makes both gradients in its forward (:class:`Linear` says how)."""

    tokens: int
    vocab: int
    hidden: int
    width: int
    """Bytes of a logit."""
    given: int
    """Bytes of all hidden states."""
    learned: int
    """Elements of the head that are trained."""
    weight: int
    """Bytes of an element of the head, and so of its gradient."""
    linear: Linear

    @property
    def is_cast(self) -> bool:
        """Whether the head is wider than what the product takes."""
        return self.weight > self.width

    def forward(self, log: Log) -> Names:
        """Write forward and return what stays."""
        names = Names(log)
        names.bind(INPUT, self.given)
        names.bind(WEIGHT, self.learned * self.weight)
        rows = int(chunk_rows(self.tokens, self.vocab, self.hidden))
        for _ in range(min(-(-self.tokens // rows), ENOUGH)):
            self._chunk(names, rows)
        names.drop("logits", "scaled", COPY)
        return names

    def _chunk(self, names: Names, rows: int) -> None:
        head, apart = self.vocab * self.hidden, self.linear.sums_apart and self.learned
        names.bind("transposed head, cast", head * self.width * self.is_cast)
        for name, size in self.linear.bindings(self.width):
            names.bind(name, size * self.vocab * rows)
            names.drop("transposed head, cast")
        if COPY not in names.keys:  # of the weight itself, which autocast keeps until the model's forward ends
            names.bind(COPY, head * self.width * self.is_cast)
        names.bind("product", self.learned * self.width * bool(apart))
        names.bind("product, fp32", self.learned * 4 * bool(apart))
        names.drop("product", "product, fp32")
        if self.linear.lets_go:
            names.drop("logits")

    def backward(self, names: Names) -> tuple[int, int]:
        """The gradients of the hidden states and of the head, which are there."""
        return names.take(INPUT), names.take(WEIGHT)


COPY = "autocast's 16-bit copy of the head"


class Tiled(Chunked):
    """TRL's, which makes tiles of logits once more in its backward, and there the gradients, in fp32 first."""

    def forward(self, log: Log) -> Names:
        """Write forward and return what stays: the hidden states of tokens with a label, put together."""
        names = Names(log)
        names.bind("scored hidden states", self.given)
        self._tiles(names, in_backward=False)
        names.drop("tile", "hidden states, cast")
        return names

    def _tiles(self, names: Names, *, in_backward: bool) -> None:
        rows, columns = min(self.tokens, TILE_TOKENS), min(self.vocab, TILE_VOCAB)
        names.bind("tile", rows * TILE_VOCAB * self.width)
        for _ in range(min(-(-self.tokens // rows), ENOUGH)):
            names.bind("hidden states, cast", rows * self.hidden * self.width * self.is_cast)
            for _ in range(min(-(-self.vocab // columns), ENOUGH)):
                names.bind("head, cast", columns * self.hidden * self.width * self.is_cast)
                names.drop(*["head, cast"] * (not in_backward))

    def backward(self, names: Names) -> tuple[int, int]:
        """The same, as copies in the widths of hidden states and head; then back to all tokens and positions."""
        wide = self.tokens * self.hidden * 4
        names.bind("fp32 input", wide)
        names.bind("fp32 weight", self.learned * 4)
        self._tiles(names, in_backward=True)
        names.bind(INPUT, self.given * (self.given < wide))
        names.bind(WEIGHT, self.learned * self.weight * (self.weight < 4))
        weight = names.take(WEIGHT) or names.take("fp32 weight")
        if not names.keys[INPUT]:
            names.keys[INPUT] = names.take("fp32 input")
        names.drop("tile", "hidden states, cast", "head, cast", "fp32 input", "fp32 weight", "scored hidden states")
        for _ in ("index", "slice"):
            names.bind(INPUT, self.given)
        return names.take(INPUT), weight


class PassingTerms(Stage):
    """Writes them on one stage."""

    def __init__(self, census: ModelOnGrid, ledger: Ledger, stage: int, rank: Rank = "middle") -> None:
        super().__init__(census, ledger, stage, rank)
        self.log = Log()
        self.during: dict[str, list[int]] = {}
        self.dummies = self._dummies()
        """Those that are not there yet."""
        self.handles: dict[str, list[tuple[int, int, str]]] = {"forward": [], "backward": []}

    @cached_property
    def plan(self) -> list[tuple[list[GroupActivations], bool]]:
        """Checkpoint units of the stage: their blocks, and whether these are computed again."""
        out: list[tuple[list[GroupActivations], bool]] = []
        for indices in self.census.stacks:
            blocks = [a for a in self.layers if a.index in indices]
            chunks = zip(*(self.census.chunks[index] for index in indices), strict=True)
            sizes = [sum(map(self.scalar, chunk)) for chunk in chunks]
            for size in units_of_chunks(self.grid.policies[0], sizes):
                out.append((blocks[: max(size, 1)], size > 0))
                del blocks[: max(size, 1)]
        return out

    def _head_in_loss(self, given: int) -> Chunked | None:
        """A loss with the head in it, which is given so many bytes of hidden states; None for a loss of logits."""
        census, model = self.census, self.census.model
        if self.grid.fixed.loss != "fused-linear" or not model.vocab:
            return None
        kind, hidden = Tiled if in_tiles(self.grid) else Chunked, model.embedding_dim or model.hidden
        tokens, learned = self.scalar(self.grid.tokens), self.scalar(learned_head(census))
        widths = census.settings[0].compute, given, learned, head_settings(census)[0].weight
        return kind(tokens, model.vocab, hidden, *widths, linear_of(self.grid))

    @cached_property
    def melting(self) -> list[Term]:
        """Terms that go with the blocks of a backward."""
        return [term for term in self.ledger.written_apart if melts(term)]

    def _start(self) -> None:
        """What is there before the first step; Megatron-LM's buffers are made beside the weights that they replace."""
        there = [term for term in self.ledger.written_apart if len(term.phases) == len(ALWAYS)]
        weights = [term for term in there if term.with_model and term.component != "optimizer"]
        made = [key for term in weights for key in self._split(term)]
        buffers = [sum(sizes) for sizes in self.buffered or (self.shares,)]
        remade = self.buffered is not None and self.scalar(self.grid.zero) > 0
        sizes = [(term.name, self.scalar(term.bytes)) for term in weights if remade]
        sizes += [("gradient buffer", self.gradients())] if self.grid.persistent_gradients else []
        for name, total in sizes:
            for size in in_shares(total, buffers):
                self.log.alloc(size, COMPUTE, name)
        if remade:
            self.log.free_all(made)
        if self.grid.habits.zero_optimizer is not None:
            self._start_engine([term for term in there if self._is_early(term)])
            there = [term for term in there if term.component != "optimizer"]
        for term in there:
            if term.with_model == (term.component == "optimizer"):
                self._split(term)
        parameters = [term for term in self.ledger.written_apart if term.component == "parameters"]
        self._broadcast(sum(self.scalar(term.bytes) for term in parameters))
        self.log.alloc(self.kept_gradients, COMPUTE, "gradients")

    def _broadcast(self, total: int) -> None:
        """DDP's first broadcast of the weights, in flat copies: two at a time, and yet none has another's memory.

        Each is freed while the communication's stream still has it (``recordStream``), of which the host runs ahead.
        A full card waits for that stream.
        Source: torch/csrc/distributed/c10d/comm.cpp (``broadcast_coalesced``) and ProcessGroupNCCL.cpp of 2.4 to 2.7,
        nn/parallel/distributed.py (``broadcast_bucket_size``); since 2.8 tensors wait on the host (pytorch#148590).
        """
        habits = self.grid.habits
        if habits.broadcasts_ahead and (habits.gradient_copy or self.scalar(self.grid.copied_gradients)):
            sizes = filled(in_shares(total, self.shares), BROADCAST_BUCKET)
            self.log.pass_through(sizes, REDUCE, "flat copies of the weights")

    def _is_early(self, term: Term) -> bool:
        """Whether a state of the optimizer is there before the first step."""
        return term.component == "optimizer" and (term.with_model or self.has_early_moments)

    @cached_property
    def has_early_moments(self) -> bool:
        """Whether DeepSpeed's engine has made them as it started."""
        return self.grid.habits.zero_optimizer is not None and bool(self.scalar(steps_at_start(self.grid)))

    def _start_engine(self, states: list[Term]) -> None:
        """What DeepSpeed makes of a state as it starts, and zeros for gradients, which leave their segments.

        Stage 3 has zeros for its largest sub-group, ``BF16_Optimizer`` none, ``FP16_UnfusedOptimizer`` 16-bit ones too.
        """
        grid, zero = self.grid, self.scalar(self.grid.zero)
        masters = [term for term in states if term.with_model]
        copy = 0
        for term in masters:
            for size in in_shares(self.scalar(term.bytes), self.updated):
                first = self.log.alloc(size * (zero == 3 and era(grid).masters_cloned), COMPUTE, term.name)
                self.log.free(copy)
                copy = first
                self.log.alloc(size, COMPUTE, term.name)
        self.log.free(copy)
        has_zeros = not self.scalar(offloaded_states(grid)) and (zero > 0 or self.wraps_weights)
        width = has_zeros * (4 if self.flat else 4 + self.gradient_width)
        sizes = in_shares(width * self.scalar(updated_elements(self.trained)), self.updated)
        zeros = [self.log.alloc(size, COMPUTE, "zeros") for size in ([max(sizes)] if zero == 3 else sizes)]
        for term in states:
            if not term.with_model:
                self._split(term)
        self.log.free_all(zeros)

    def _split(self, term: Term) -> list[int]:
        """Allocate a term as tensors in proportion to the weights; a buffer as one piece."""
        total, stream = self.scalar(term.bytes), STREAMS[term.pool]
        apart = self.wraps_weights and term.name == FP32_GRADIENTS
        if not apart and (term.apart or term.component in {"buffers", "activations"}):
            if term.by_thread:
                for thread, size in zip(self.handles, in_shares(total, [1] * len(self.handles)), strict=True):
                    self.handles[thread].append((size, stream, term.name))
                return []
            return [self.log.alloc(total, stream, term.name)]
        shares = self.updated if term.component == "optimizer" else self.shares
        if self.flat and term.component == "parameters" and self.grid.fixed.adapters is None:
            shares = [1] if self.scalar(in_one_buffer(self.grid)) else self.flat
        sizes = in_shares(total, shares)
        if term.tensors > 1:
            sizes = [part for size in sizes for part in in_shares(size, [1] * term.tensors)]
        return [self.log.alloc(size, stream, term.name) for size in sizes]

    def _begin(self, phase: str) -> None:
        """A phase begins: terms that live in it and not before are allocated, those that ended are freed."""
        self.log.mark(phase)
        passing = (t for t in self.ledger.written_apart if len(t.phases) != len(ALWAYS) and t.phases != ("step",))
        for term in passing:
            if phase in term.phases and term.name not in self.during:
                self.during[term.name] = self._appearing(term)
            elif phase not in term.phases and term.name in self.during:
                self.log.free_all(self.during.pop(term.name))

    def _appearing(self, term: Term) -> list[int]:
        """What is there of a term as its first phase begins."""
        if term.grows:
            return []
        return self._in_pieces(term) if melts(term) else self._split(term)

    @cached_property
    def growing(self) -> dict[str, list[list[int]]]:
        """Of each term that comes with forwards, the sizes of its tensors in each block: none where that is kept."""
        terms = [term for term in self.ledger.written_apart if term.grows]
        weights = [weights_of(a) if terms and again else [] for blocks, again in self.plan for a in blocks]
        flat = [share for block in weights for share in block]
        out: dict[str, list[list[int]]] = {}
        for term in terms if flat else ():
            sizes = iter(in_shares(self.scalar(term.bytes), flat))
            out[term.name] = [[next(sizes) for _ in block] for block in weights]
        return out

    def _grow(self, unit: int) -> None:
        """A block's forward begins: its part of what comes with the forwards."""
        for name, sizes in self.growing.items():
            self.during[name] += [self.log.alloc(size, COMPUTE, name) for size in sizes[unit]]

    def _in_pieces(self, term: Term) -> list[int]:
        """Allocate a term as one piece for each block."""
        count = max(len(self.layers), 1)
        size, rest = divmod(self.scalar(term.bytes), count)
        return [self.log.alloc(size + rest * (index == 0), STREAMS[term.pool], term.name) for index in range(count)]

    def _melt(self) -> None:
        """A block's backward is done: its share of what goes with the blocks is freed."""
        for term in self.melting:
            if self.during.get(term.name):
                self.log.free(self.during[term.name].pop())

    def _let_go(self, unit: int) -> None:
        """A block's backward is done, which was the last to need some terms."""
        for term in self.ledger.written_apart:
            if term.until == unit:
                self.log.free_all(self.during.pop(term.name, []))

    def _first_product(self, thread: str) -> None:
        """A thread has a handle of its own from its first product on, and with it what that allocates."""
        while self.handles[thread]:
            self.log.alloc(*self.handles[thread].pop())

    def _dummies(self) -> list[int]:
        """Bytes of TransformerEngine's dummy gradients."""
        width = self.scalar(self.grid.width("compute"))
        elements = dummies(self.census) if has_dummies(self.grid) else []
        return [width * self.scalar(count) for count in elements]

    def _keep_dummy(self, activations: GroupActivations, record: Record) -> None:
        """A product has added to a weight's gradient: with the first of a shape comes its dummy."""
        elements = record.size.elements // self.scalar(activations.ranks(record.size.shard))
        size = elements * self.scalar(self.grid.width("compute"))
        if size in self.dummies:
            self.dummies.remove(size)
            self.log.alloc(size, COMPUTE, "dummy weight gradients")

    def _keep_dummies(self) -> None:
        """All others, where a product was not told from others."""
        while self.dummies:
            self.log.alloc(self.dummies.pop(), COMPUTE, "dummy weight gradients")

    def _in_turn(self, term: Term) -> list[int]:
        """What an update that goes weight by weight takes for each; the last one's is still there."""
        taken, stay = term.in_turn
        elements, width = self.scalar(updated_elements(self.census)), self.scalar(self.census.width("moment"))
        left: list[int] = []
        for size in in_shares(elements * width, self.shares):
            made = [self.log.alloc(size, COMPUTE, term.name) for _ in range(taken)]
            self.log.free_all(made[: taken - stay])
            self.log.free_all(left)
            left = made[taken - stay :]
        return left
