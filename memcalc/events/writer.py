"""The writer of a step's events, for a grid of one strategy on one pipeline stage."""

from __future__ import annotations

from functools import cached_property, partial
from itertools import chain
from typing import TYPE_CHECKING

from memcalc.events.log import COMPUTE, Event, Names, Run
from memcalc.events.passing import Chunked, PassingTerms
from memcalc.events.stage import ALTERNATING, STEPS, in_shares, passes, storage_bytes
from memcalc.events.units import FlatParameter, Flattened, Partitioned, PerParameter, Pipelined, Whole
from memcalc.ledger import ALWAYS
from memcalc.terms.buffers import casts_to_reduce, copies_reduced, held_by_replicas, prefetches
from memcalc.terms.fsdp2 import Units, reshards_root
from memcalc.terms.gradients import added_in_place, tied_matrix
from memcalc.terms.head import head_templates, holds_logits
from memcalc.terms.order import unread
from memcalc.terms.pipeline import blocks_before_backward, in_flight
from memcalc.terms.settings import enters_units_again
from memcalc.trace.template import Template, trace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from memcalc.events.stage import Rank
    from memcalc.ledger import Ledger, Term
    from memcalc.terms.activations import GroupActivations
    from memcalc.terms.model_on_grid import ModelOnGrid
    from memcalc.trace.tape import Record


def step_events(
    census: ModelOnGrid, ledger: Ledger, stage: int, rank: Rank = "middle", *, observed: bool = True
) -> Iterator[Event]:
    """Allocations and frees of a few optimizer steps on a stage, with a mark where a phase begins.

    Written as the replay comes to it. ``rank``: the one whose part of the optimizer's states it is. ``observed``: with
    what measured runs reserve although no tensor was found for it, and the blocks that FSDP 1's wrapping leaves free.
    """
    return chain.from_iterable(StepWriter(census, ledger, stage, rank, observed=observed).parts())


class StepWriter(PassingTerms):
    """Writes two steps of one stage."""

    def __init__(
        self, census: ModelOnGrid, ledger: Ledger, stage: int, rank: Rank = "middle", *, observed: bool
    ) -> None:
        super().__init__(census, ledger, stage, rank)
        self.observed = observed
        self.runs: dict[int, list[list[Run]]] = {}
        self.heads: dict[int, Run] = {}
        self.made: dict[int, Names] = {}
        self.known: dict[tuple[int, int], list[int]] = {}
        self.templates: dict[tuple[int, bool, bool], Template] = {}
        self.sent: Run | None = None
        self.shared: list[int] = []
        self.given: list[int] = []
        self.units = self._units()

    def parts(self) -> Iterator[list[Event]]:
        """The events, in parts."""
        self.log.mark("start")
        self._start()
        self.units.wrap(self.loaded * self.observed)
        for index in range(ALTERNATING if self.grid.habits.flattened_gradients else STEPS):
            yield from self._step(first=index == 0)

    @cached_property
    def head(self) -> Template:
        """The execution of final norm, head and loss."""
        return head_templates(self.census, copies=self.copies)[0]

    def _sizes(self, activations: GroupActivations, template: Template) -> list[int]:
        """Bytes of each storage of a template, computed once for all blocks that share it."""
        key = id(activations), id(template)
        if key not in self.known:
            self.known[key] = storage_bytes(activations, template, self.scalar, observed=self.observed)
        return self.known[key]

    def _step(self, *, first: bool) -> Iterator[list[Event]]:
        """One optimizer step: micro-batches as the schedule orders them, a few for all, then the update.

        In the first step those in flight alone are enough for the optimizer's states to appear, but where DeepSpeed has
        made a buffer by then: a micro-batch beside it reserves more.
        """
        self.units.begin()
        flight = self.scalar(in_flight(self.grid))
        cut = self.scalar(blocks_before_backward(self.census))
        rest: Iterator[None] = iter(())
        one_more = not first or self.grid.habits.zero_optimizer is not None
        for forward, index in passes(flight, min(self.scalar(self.grid.accumulation), flight + one_more)):
            if forward:
                rest = self._forward_parts(index, cut if index >= flight - 1 else 0)
                next(rest, None)
            else:
                self._backward(index)
                next(rest, None)
            yield self.log.taken()
        self.units.end()
        self._update(first=first)
        yield self.log.taken()

    def _forward(self, index: int) -> None:
        """Blocks and head of one micro-batch."""
        next(self._forward_parts(index, 0), None)

    def _forward_parts(self, index: int, cut: int) -> Iterator[None]:
        """The same in two parts, the first of ``cut`` blocks; in one where it is 0."""
        self._begin("forward-last")
        self.log.free_all(self.shared)
        self.units.enter(self.first_unit, None)
        x = self.log.alloc(self._embedded_bytes(), COMPUTE, "embedding output")
        self._first_product("forward")
        if self.split:
            self.units.leave_forward(self.first_unit)
        self.runs[index] = []
        unit = 0
        for blocks, again in self.plan:
            runs: list[Run] = []
            for position, activations in enumerate(blocks):
                self.units.enter(unit, None)
                self._grow(unit)
                run = self._run(activations, untreated=not again, first=unit == 0)
                x = run.forward(self.log, x)
                if position:  # a unit keeps the input of its first block alone
                    run.drop(self.log, x)
                runs.append(run)
                self._send(run, x)
                self.units.leave_forward(unit)
                unit += 1
            self.runs[index].append(runs)
            if 0 < cut <= unit < len(self.layers):
                cut = 0
                yield
                self._begin("forward-last")
        if self.is_head_late:
            self.log.free(x)
        else:
            self._end_forward(index, x)

    def _end_forward(self, index: int, x: int) -> None:
        self._head_forward(index, x)
        self.units.forwarded()

    @cached_property
    def is_head_late(self) -> bool:
        """Whether a micro-batch comes to the head after others of the stage have begun, right before its backward.

        Those in flight on the last stage are in earlier chunks, or have had the head's backward and wait for the pass
        over weights: one at a time has logits (Megatron-LM 23e00ed core/pipeline_parallel/schedules.py,
        ``forward_backward_pipelining_with_interleaving``). GPipe runs all forwards first.
        """
        waits = self.grid.is_last * (in_flight(self.grid) > 1) & ~self.grid.runs("gpipe")
        return bool(self.scalar(waits))

    def _send(self, run: Run, flowing: int) -> None:
        """Where activations are offloaded: a block's are on their way while the next one's forward runs."""
        if "activations" in self.grid.offloads[0]:
            if self.sent is not None:
                self.sent.leave(self.log, flowing)
            self.sent = run

    def _run(self, activations: GroupActivations, *, untreated: bool, first: bool = False) -> Run:
        """A block; the stage's ``first`` where no gradient flows to its input keeps less."""
        kind = id(activations), untreated, first
        if kind not in self.templates:
            self.templates[kind] = self._template(activations, untreated=untreated, first=first)
        template = self.templates[kind]
        return Run(template, self._sizes(activations, template), self._added_by(activations), self.exchanges)

    def _template(self, activations: GroupActivations, *, untreated: bool, first: bool) -> Template:
        policy, setting, copies = self.grid.policies[0], activations.settings[0], self.copies
        template = activations.template(policy, setting, untreated=untreated, copies=copies)
        if first and self.scalar(self.grid.is_first) and unread(activations.census, activations.index, policy):
            template = self.census.traces.get(trace, activations.group.block, setting, wanted=False, copies=copies)
        return template

    @cached_property
    def exchanges(self) -> bool:
        """Whether there are context-parallel ranks."""
        return self.scalar(self.grid.degree("cp")) > 1

    def _added_by(self, activations: GroupActivations) -> Callable[[Record], None] | None:
        return partial(self._keep_dummy, activations) if self.dummies else None

    def _input_bytes(self) -> int:
        activations = self.widths[0]
        return self._sizes(activations, activations.template(self.grid.policies[0], activations.settings[0]))[0]

    def _embedded_bytes(self) -> int:
        """What the stage's first block is given: an fp32 residual stream begins with the embedding's own width."""
        setting, first = self.widths[0].settings[0], self.scalar(self.grid.is_first)
        narrow = self.census.model.wide_residual and first
        return self._input_bytes() * setting.embedding // setting.residual if narrow else self._input_bytes()

    def _head_forward(self, index: int, x: int) -> None:
        if not self.scalar(self.grid.is_last):
            self.log.free(x)
            return
        self._begin("forward")
        self.units.enter(self.last_unit, None)
        self.heads[index] = run = Run(
            self.head, self._sizes(self.widths[-1], self.head), self._added_by(self.widths[-1])
        )
        out = run.forward(self.log, x, partial(self._hand_over, run))
        if self.head_in_loss is not None:
            self.made[index] = self.head_in_loss.forward(self.log)
        self.log.free(out)

    def _hand_over(self, run: Run) -> None:
        """The model gives its logits to the loss; a pipeline's stage refers to them until their backward is done."""
        self.units.hand_over(self.last_unit)
        if self.scalar(holds_logits(self.census)):
            self.given += run.pin(self.head.handed_over, 0)

    @cached_property
    def head_in_loss(self) -> Chunked | None:
        """The loss, if the head is in it."""
        return self._head_in_loss(self._sizes(self.widths[-1], self.head)[self.head.output])

    def _backward(self, index: int) -> None:
        """Head and blocks of one micro-batch, last first."""
        if self.is_head_late:
            self._end_forward(index, self.log.alloc(self._input_bytes(), COMPUTE, "output of the last block"))
        gradient, head = self._head_backward(index)
        self._embedding_backward(self._blocks_backward(index, gradient), head)
        self.log.free_all(self.given)
        self._keep_dummies()
        self.units.finish()

    def _head_backward(self, index: int) -> tuple[int, list[int]]:
        """Loss and head: the gradient of what the last block gives, and those of the head's weights."""
        self._begin("loss")
        head: list[int] = []
        gather = partial(self.units.enter, self.last_unit, self._before(self.last_unit), backward=True)
        if not self.scalar(reshards_root(self.census)):
            gather()
        if index in self.heads:  # a tied weight's gradient waits for that of its other use, the embedding
            owner = None if self.units.accumulates(self.last_unit) and not self.tied else head
            product = partial(self._first_product, "backward")
            given = 0
            if self.head_in_loss is not None:
                given, weight = self.head_in_loss.backward(self.made.pop(index))
                head.append(weight)
            gradient = self.heads.pop(index).backward(self.log, given, owner, gather, product)
            if owner is None:
                self.log.free_all(head)
        else:
            gradient = self.log.alloc(self._input_bytes(), COMPUTE, "gradient from the next stage")
        self._first_product("backward")
        self._begin("backward-last")
        if self.split:
            self.units.leave_backward(self.last_unit, head, head[0] if head else 0)
        return gradient, head

    def _blocks_backward(self, index: int, gradient: int) -> int:
        """Blocks, from the gradient of the last one's output to that of the first one's input."""
        unit = len(self.layers)
        live: list[int] = []
        coming = self.runs.pop(index)
        while coming:
            runs, (blocks, treated) = coming.pop(), self.plan[len(coming)]
            for run in [*runs, *(coming[-1] if coming else [])]:  # the next ones are fetched ahead
                run.come_back(self.log)
            again = self._recompute(blocks, runs, unit - len(blocks)) if len(blocks) > 1 else runs
            for run in reversed(again):
                unit -= 1
                self.units.enter(unit, self._before(unit), backward=True)
                gradients: list[int] = []
                inside = self.grid.fixed.checkpoint == "reentrant-inside"
                if self.grid.policies[0].treatment == "full" and treated and not inside:
                    self.units.recomputed(unit)
                pinned = run.pin(0, gradient) if self.pins and treated else []
                run.pinned |= {gradient} & {*self.shared}
                gradient = run.backward(self.log, gradient, None if self.units.accumulates(unit) else gradients)
                self.shared += run.left(run.template.shared)
                self.shared += [gradient] * (run.template.outgoing in run.template.shared and not self.pins)
                self.units.leave_backward(unit, gradients)
                live += [key for key in pinned if key not in live]  # a gradient may go through a segment's blocks
                self._melt()
                self._let_go(unit)
            if again is not runs:
                runs[0].drop(self.log)
        self.log.free_all([key for key in live if key != gradient])
        return gradient

    def _embedding_backward(self, gradient: int, head: list[int]) -> None:
        """The gradient of the embedding, and with it that of a head that is tied to it or of its unit."""
        self._begin("backward-end")
        adds = self.units.accumulates(self.first_unit)
        gradients = self.embedding_gradient()
        shared = self.scalar(tied_matrix(self.census)) * self.embedding_gradient_width * self.tied
        matrix = min(shared, gradients)
        undivided = self.log.alloc(self.undivided_gradient(), COMPUTE, "gradient of the embedding, undivided")
        made = [self.log.alloc(gradients - matrix, COMPUTE, "gradient of the embedding")]
        last = head[0] if head and not matrix else 0
        if matrix:
            # Positions are added after the tokens' rows, so that backward comes to them first
            if adds:
                self.log.free_all(made)
            made.append(self._added(head, matrix, gradient))
            head, gradient = [], 0
        self.log.free(undivided)
        self.log.free(gradient)
        if adds:
            self.log.free_all(made)
            made = []
        self.units.leave_backward(self.first_unit, [*made, *([] if self.split else head)], 0 if self.split else last)

    def _added(self, head: list[int], matrix: int, gradient: int) -> int:
        """The sum of a tied weight's two gradients, out of place unless one of them is a tensor of its own.

        The ``gradient`` of the embedding's output goes when the lookup's backward returns, before the sum.
        """
        embedding = self.log.alloc(matrix, COMPUTE, "gradient of the tied embedding")
        self.log.free(gradient)
        if self.scalar(added_in_place(self.census)):
            self.log.free_all(head)
            return embedding
        both = self.log.alloc(matrix, COMPUTE, "gradient of the tied embedding")
        self.log.free_all([embedding, *head])
        return both

    def _before(self, unit: int) -> int | None:
        """The unit whose backward follows that of ``unit``; the root's, gathered already, comes last."""
        if unit == 0:
            return self.first_unit if self.split else None
        return min(unit, len(self.layers)) - 1

    @cached_property
    def pins(self) -> bool:
        """Whether FSDP 1's hooks hold inputs of frozen checkpoints, and their gradients, until backward ends."""
        frozen = self.grid.fixed.adapters is not None and enters_units_again(self.grid)
        return isinstance(self.units, FlatParameter) and frozen and self.grid.policies[0].treatment == "full"

    def _recompute(self, blocks: list[GroupActivations], runs: list[Run], first: int) -> list[Run]:
        """Run a unit of several blocks again, with a graph, from the unit's input."""
        x = runs[0].keys.pop(0, 0)
        if not x:  # what is kept of the input is narrower, or a part of it
            x = self.log.alloc(runs[0].sizes[0], COMPUTE, "checkpoint's input, whole")
        again = []
        for position, activations in enumerate(blocks):
            self.units.enter(first + position, None, backward=True)
            run = self._run(activations, untreated=True)
            x = run.forward(self.log, x)
            again.append(run)
            self.units.leave_forward(first + position)
        self.log.free(x)
        return again

    def _update(self, *, first: bool) -> None:
        """The optimizer's step."""
        for name in tuple(self.during):
            self.log.free_all(self.during.pop(name))
        self.log.mark("step")
        self.units.update()
        temporaries: list[int] = []
        if self.grid.habits.zero_optimizer is not None and self.scalar(self.grid.zero):
            self.units.zero_grad()
            read = self.gradients() - self.kept_gradients
            temporaries.append(self.log.alloc(read, COMPUTE, "gradients that the step reads"))
        late: list[Term] = []
        for term in self.ledger.written_apart:
            if len(term.phases) == len(ALWAYS) and term.component == "optimizer" and first and not self._is_early(term):
                late.append(term)
                if self.grid.habits.zero_optimizer is None:  # its step copies gradients before it makes moments
                    self._split(late.pop())
            elif term.phases == ("step",):
                temporaries += self._in_turn(term) if any(term.in_turn) else self._split(term)
        for term in late:
            self._split(term)
        self.log.free_all(temporaries)
        self.log.free_all(self.shared)
        if not self.grid.habits.zeroes_gradients:
            self.units.zero_grad()

    def _units(self) -> Whole:
        """How weights and their gradients come and go."""
        habits, zero = self.grid.habits, self.scalar(self.grid.zero)
        sizes = self.unit_sizes()
        if habits.gather != "blocks" or zero < 2:
            if habits.flattened_gradients:
                count, width = self.scalar(self.census.parameters), self.scalar(self.grid.width("gradient"))
                main = in_shares(count * habits.main_gradients, self.shares)
                return Flattened(self.log, sizes, flat=count * width, main=main)
            stay = self.gradients("backward-end") > self.kept_gradients
            partitioned = zero >= 2 or not stay or self.grid.persistent_gradients
            return Partitioned(self.log, sizes) if partitioned else Whole(self.log, sizes)
        keep = frozenset(range(len(sizes)) if zero == 2 else [self.last_unit])
        if habits.flat_units:
            ahead, casts = (bool(self.scalar(of(self.census))) for of in (prefetches, casts_to_reduce))
            return FlatParameter(self.log, sizes, keep=keep, ahead=ahead, casts=casts, ranks=self.sharers)
        units, copies = Units(self.census), bool(self.scalar(copies_reduced(self.census)))
        keep |= {self.last_unit - 1} if units.keeps_last else set()
        keep -= {self.last_unit} if self.scalar(units.reshards_root) else set()
        kind = Pipelined if self.scalar(units.pipelined) else PerParameter
        plain, replicated = units.pool == "compute", bool(self.scalar(held_by_replicas(self.grid)))
        return kind(self.log, sizes, roots=self.roots, keep=keep, plain=plain, copies=copies, replicated=replicated)
