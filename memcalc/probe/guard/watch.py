"""A run watched against its plan: counted in steps, reported every few of them, moved on where memory is short."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from memcalc.errors import CombinationError, InputError, MemcalcError, RestartNeeded
from memcalc.probe.guard.ladder import AllowedActions, RestartOption, ladder_of, restarts_of
from memcalc.probe.guard.options import (
    WINDOWS,
    Options,
    PressureLevel,
    PressureRule,
    check_given,
    limit_of,
    settings_for,
)
from memcalc.probe.guard.reporter import LOG, Reporter, Value, Window
from memcalc.results.plans import Plan

if TYPE_CHECKING:
    from memcalc.probe.guard.ladder import Given, Ladder, Restarts
    from memcalc.probe.guard.options import Reading
    from memcalc.probe.live.guard_torch import Ranks, RecomputeTimer, Switch
    from memcalc.results.plans import SavedPlan


class Watch:
    """What :func:`memcalc.guard` returns: a context manager with a call for each optimizer step."""

    def __init__(self, plan: Given | None, options: Options) -> None:
        check_given(options, planned=plan is not None)
        self.options = options
        self._ladder: Ladder | None = None
        self._restarts: Restarts | None = None
        self.plan: Plan | None = None
        """The plan in force; None for a run without one."""
        self.limit: int | None = None
        """Reserved bytes above which memory is short; without a plan, known once the watch has begun."""
        self.name = options.name or ""
        if plan is not None:
            self._follow(plan)
        self.step = 0
        self.restart: RestartNeeded | None = None
        """The restart that is needed, if one is."""
        self._rule = PressureRule(self.limit, peaks=options.reset_peaks)
        self._over: set[str] = set()
        self._before: list[Plan] = []
        self._not_again: list[Plan] = []
        self._calm = 0
        self._warned = False
        self._reads = False
        self._open = False

    def _follow(self, plan: Given) -> None:
        """Take the plan that the run was started with, and make ready what it can be left for."""
        options, dirs = self.options, tuple(self.options.preset_dirs)
        ladder = self._ladder = ladder_of(plan, dirs, live=options.on_pressure == "step")
        restarts = self._restarts = restarts_of(ladder, options.restart_dir, options.to, dirs)
        if options.on_pressure == "restart" and not restarts.options:
            raise InputError("on_pressure", "restart", restarts.refusal)
        self.limit = limit_of(options.threshold, ladder.usable)
        self.plan = ladder.saved.plan
        self.name = self.name or ladder.saved.job.model or ""

    # ------------------------------------------------------------------------------------------------ the run's loop

    @property
    def micro_batch(self) -> int:
        """Sequences of a micro-batch; a loop that reads it follows each step that changes it."""
        self._reads = True
        return self._given("micro_batch") if self.plan is None else self.plan.strategy.micro_batch

    @property
    def accumulation_steps(self) -> int:
        """Micro-batches of an optimizer step; times micro-batch and data-parallel ranks, always the global batch."""
        return self._given("accumulation_steps") if self.plan is None else self.plan.accumulation_steps

    def _given(self, name: str) -> int:
        """What a run without a plan was told."""
        value: int | None = getattr(self.options, name)
        if value is None:
            raise InputError(name, None, "must be given where there is no plan")
        return value

    @property
    def saved(self) -> SavedPlan | None:
        """The plan in force as :func:`memcalc.export` takes it; None for a run without a plan."""
        return None if self.plan is None or self._ladder is None else self._ladder.as_saved(self.plan)

    def split(self, batch: Any) -> Iterator[Any]:
        """Yield the micro-batches of what one rank is fed in an optimizer step: a tensor, or a table or row of them."""
        micro, count = self.micro_batch, self.accumulation_steps
        size = _length(batch)
        if size != micro * count:
            allowed = f"a rank is fed {micro * count} sequences in each optimizer step of the plan"
            raise InputError("batch", size, allowed)
        for start in range(0, size, micro):
            yield _part(batch, start, start + micro)

    def step_done(self) -> None:
        """Count an optimizer step; all ranks must call this in the same step.

        Raises :class:`memcalc.errors.RestartNeeded` where memory is short and no other step is left, unless
        ``stop="flag"`` was given.
        """
        self.step += 1
        left = -self.step % self.options.every
        if left == 0:
            self._window()
        self._sample(left)

    # --------------------------------------------------------------------------------------------------- start and end

    def __enter__(self) -> Self:
        self.start(self.options.model)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is not None:
                self.failed(error)
        finally:
            self.close()

    def start(self, model: Any = None) -> None:
        """Begin to watch; ``model`` is what recomputation can be switched in."""
        from memcalc.probe.live.guard_torch import (
            Ranks,
            RecomputeTimer,
            Switch,
            device_bytes,
            usual_meter,
            wide_buffer_bytes,
        )

        if self._open:
            return
        self._ranks: Ranks = Ranks()
        self._switch: Switch | None = None
        if self.plan is not None:
            self._ranks.check(self.plan.gpus)
            if self.options.on_pressure == "step":
                self._switch = Switch(model, self.options.blocks, self.plan.strategy)
        else:
            self._limit_to(device_bytes())
        self._buffer_bytes = wide_buffer_bytes(model)
        if self._switch is not None and self._switch.refusal:
            LOG.warning("recomputation stays as it is: %s.", self._switch.refusal)
        self._meter = self.options.meter or usual_meter(resets=self.options.reset_peaks)
        if self._restarts is not None and self._restarts.folder is not None and not self._restarts.options:
            LOG.warning("no restart is ready: %s.", self._restarts.refusal.rstrip("."))
        self._reporter = Reporter(self.options, self._ranks.rank, self._ranks.local_rank, self._ranks.world)
        self._timer: RecomputeTimer = RecomputeTimer()
        self._timer.install()
        self._open = True
        self._meter.reset_peaks()
        self._rule.level(self._meter.read())
        self._sample(-self.step % self.options.every)

    def _limit_to(self, size: int | None) -> None:
        """Without a plan, memory is short where a share of the GPU is reserved, or above the size that was given."""
        if size is not None or isinstance(self.options.threshold, str):
            self.limit = limit_of(self.options.threshold, size or 0)
            self._rule = PressureRule(self.limit, peaks=self.options.reset_peaks)

    def check_sizes(self, **settings: tuple[str, int | None]) -> None:
        """Compare a trainer's own sizes with the plan's, or take them where there is no plan.

        Each is given by its name here, with the trainer's name for it; None is a size that the trainer does not tell.

        Raises :class:`memcalc.errors.CombinationError` where one is not the plan's.
        """
        if self.plan is None:
            sizes: dict[str, Any] = {name: value for name, (_, value) in settings.items() if value is not None}
            self.options = replace(self.options, **sizes)
            return
        planned = {"micro_batch": self.plan.strategy.micro_batch, "accumulation_steps": self.plan.accumulation_steps}
        for name, (field, value) in settings.items():
            if value is not None and value != planned[name]:
                raise CombinationError(field, value, f"the plan has {planned[name]}")

    def close(self) -> None:
        """End the watch; a model whose recomputation was switched keeps it."""
        if self._open:
            self._open = False
            self._timer.remove()
            self._reporter.close()
            self._ranks.close()

    def failed(self, error: BaseException) -> None:
        """Look at an exception that ends the run: out of memory is reported, with the restart made ready."""
        from memcalc.probe.live.guard_torch import is_out_of_memory

        if not self._open or not is_out_of_memory(error):
            return
        values = self._record(self._meter.read(), PressureLevel("out of memory"))
        option = self._next_restart()
        if option is None:
            LOG.error("out of memory in step %d; %s.", self.step + 1, self._nothing_safer())
            return
        self._write(option, values)
        self.restart = RestartNeeded(f"out of memory in step {self.step + 1}", option.command, option.number)
        LOG.error("%s (%s)", self.restart, option.plan.why.rstrip("."))

    # -------------------------------------------------------------------------------------------------------- a window

    def _sample(self, left: int) -> None:
        """Time recomputation in the last step but one of a window, which the device has finished when it is read."""
        interval = self.options.every
        if interval == 1 or left == 2 % interval:
            self._timer.arm()
        elif self._timer.armed:
            self._timer.disarm()

    def _window(self) -> None:
        """Report, and do what the ranks agree on."""
        sample = self._meter.read()
        pressure = self._rule.level(sample)
        values = self._record(sample, pressure)
        facts = [bool(pressure.short), not self._reads, pressure.reserved, bool(values["recompute_over"])]
        short, unread, reserved, slow = self._ranks.largest(facts)
        self._reads = False
        self._warn_of_limits(values)
        if short:
            self._calm = 0
            reason = pressure.short or "low memory on another rank"
            allowed = self._allowed_actions(micro_batch=not unread, recompute=not slow)
            self._act(f"step {self.step}: {reason}", values, allowed, self._settings(sample))
        elif self.options.relax:
            self._relax(reserved, micro_batch=not unread)
        self._meter.reset_peaks()

    def _record(self, sample: Reading | None, pressure: PressureLevel) -> dict[str, Value]:
        """Report the window of this rank."""
        took, limits, plan = self._timer.collect(), self.options, self.plan
        count = plan.accumulation_steps if plan is not None else limits.accumulation_steps
        values = Window(
            name=self.name,
            step=self.step,
            rank=self._ranks.rank,
            plan=plan,
            micro_batch=plan.strategy.micro_batch if plan is not None else limits.micro_batch,
            accumulation_steps=count,
            steps_taken=len(self._before),
            sample=sample,
            retries=pressure.retries,
            recompute_ms=took,
            pressure=bool(pressure.short),
            recompute_over=took is not None and limits.recompute_limit is not None and took > limits.recompute_limit,
            accumulation_over=bool(count and limits.accumulation_limit and count > limits.accumulation_limit),
        ).values()
        self._reporter.report(values)
        return values

    def _warn_of_limits(self, values: dict[str, Value]) -> None:
        """Say once that recomputation or accumulation is above its limit, and again after it was below."""
        limits = self.options
        for name, amount in (
            ("recompute", f"{values['checkpoint_recompute_time_ms']} ms per step, above {limits.recompute_limit} ms"),
            ("accumulation", f"{values['accumulation_steps']} micro-batches, above {limits.accumulation_limit}"),
        ):
            over = bool(values[f"{name}_over"])
            if over and name not in self._over:
                LOG.warning("step %d: %s takes %s.", self.step, name, amount)
            self._over = self._over | {name} if over else self._over - {name}

    def _settings(self, sample: Reading | None) -> str:
        """What could be set in the framework or the allocator, as a sentence's end."""
        strategy = None if self.plan is None else self.plan.strategy
        return "".join(f"; {text}" for text in settings_for(sample, strategy, self._buffer_bytes))

    # ------------------------------------------------------------------------------------------------- memory is short

    def _act(self, reason: str, values: dict[str, Value], allowed: AllowedActions, settings: str) -> None:
        """Take the next step that is wanted: a live one, a restart, or a word of warning."""
        on_pressure = self.options.on_pressure
        if on_pressure == "step" and self._ladder is not None and self.plan is not None:
            plan = self._ladder.live(self.plan, allowed)
            if plan is not None:
                self._before.append(self.plan)
                self._go(plan, reason)
                return
        option = self._next_restart()
        has_folder = self._restarts is not None and self._restarts.folder is not None
        if option is not None and (on_pressure == "restart" or (on_pressure == "step" and has_folder)):
            self._ask(option, reason, values)
        elif not self._warned:
            self._warned = True
            then = self._nothing_safer() if option is None else f"next: {option.plan.why} {option.command}"
            LOG.warning("%s; %s%s.", reason, then, settings)

    def _next_restart(self) -> RestartOption | None:
        """The restart that comes next, if one is ready."""
        if self._restarts is None or self.plan is None:
            return None
        return self._restarts.next(self.plan, self.options.accumulation_limit)

    def _allowed_actions(self, *, micro_batch: bool, recompute: bool) -> AllowedActions:
        """What may change; where recomputation takes too long already, no more of it."""
        switch = self._switch if recompute else None
        limit = self.options.accumulation_limit
        return AllowedActions(micro_batch, lambda policy: switch is not None and switch.can(policy), limit)

    def _go(self, plan: Plan, reason: str) -> None:
        """Go over to another plan in the running job."""
        before = self.plan.strategy.recompute if self.plan is not None else ""
        if self._switch is not None and plan.strategy.recompute != before:
            self._switch.apply(plan.strategy.recompute)
        self.plan = plan
        self._warned = False
        self._meter.release()
        self._rule.level(self._meter.read())
        strategy = plan.strategy
        LOG.warning(
            "%s; now recompute %s, micro-batch %d, %d accumulated: the global batch stays %d.",
            *(reason, strategy.recompute, strategy.micro_batch, plan.accumulation_steps, plan.global_batch),
        )

    def _ask(self, option: RestartOption, reason: str, values: dict[str, Value]) -> None:
        """Ask for a restart."""
        if self.restart is not None:
            return
        if self._ranks.rank == 0:
            self._write(option, values)
        self.restart = RestartNeeded(reason, option.command, option.number)
        LOG.warning("%s (%s)", self.restart, option.plan.why.rstrip("."))
        if self.options.stop == "raise":
            raise self.restart

    def _write(self, option: RestartOption, values: dict[str, Value]) -> None:
        """Write a restart's files; a disk that is full is no reason to hide why they are needed."""
        try:
            if self._restarts is not None:
                self._restarts.write(option, values)
        except MemcalcError as error:
            LOG.error("the restart was not written: %s", error)

    def _nothing_safer(self) -> str:
        """Why there is no safer plan to go on with."""
        if self._restarts is None:
            return "there is no plan to go over to: memcalc plan --save PLAN.json makes one"
        smaller = "no saved plan is clearly smaller than the one in force"
        if self.options.accumulation_limit is not None:
            smaller += f" with at most {self.options.accumulation_limit} micro-batches per step"
        none = self._restarts.refusal or smaller
        return f"no smaller plan left: {none.rstrip('.')}"

    def _relax(self, reserved: int, *, micro_batch: bool) -> None:
        """Take the last step back once several windows in a row had room for it; each only once."""
        if not self._before or self.plan is None:
            return
        last = self._before[-1]
        has_room = self._rule.has_room(reserved, last.peak.reserved - self.plan.peak.reserved)
        follows = micro_batch or last.strategy.micro_batch == self.plan.strategy.micro_batch
        self._calm = self._calm + 1 if has_room and follows and last not in self._not_again else 0
        if self._calm >= WINDOWS:
            self._calm = 0
            self._before.pop()
            self._not_again.append(last)
            self._go(last, f"step {self.step}: there was room in {WINDOWS} windows")


def _length(batch: Any) -> int:
    """Sequences of a batch."""
    if isinstance(batch, Mapping):
        return _length(next(iter(batch.values())))
    if isinstance(batch, list | tuple):
        return _length(batch[0])
    return len(batch)


def _part(batch: Any, start: int, end: int) -> Any:
    """Some sequences of a batch; tensors are views, not copies."""
    if isinstance(batch, Mapping):
        return {name: _part(value, start, end) for name, value in batch.items()}
    if isinstance(batch, list | tuple):
        parts = [_part(value, start, end) for value in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch[start:end]
