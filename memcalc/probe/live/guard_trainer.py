"""The guard as a callback of Transformers' Trainer.

The Trainer makes its data loader with a fixed batch size before the first step, and counts its steps with it
(``Trainer.get_train_dataloader``, ``set_initial_training_values``). Accumulation alone is read anew at every step, but
without the batch size it would change the global batch. So a micro-batch needs a restart; resuming from a checkpoint
then skips as many sequences as were seen, since the product is the same.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

from transformers import TrainerCallback

from memcalc.errors import CombinationError
from memcalc.probe.guard.ladder import Given
from memcalc.probe.guard.options import Options
from memcalc.probe.guard.watch import Watch


class GuardCallback(TrainerCallback):
    """Watches each optimizer step; as a context manager around ``train`` it also reports out of memory."""

    def __init__(self, plan: Given | None, options: Options) -> None:
        self.watch = Watch(plan, options)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.watch.__exit__(kind, error, trace)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Compare the arguments with the plan, and begin."""
        del control
        if args.auto_find_batch_size:
            allowed = "it halves the batch size and not the accumulation, and so the global batch"
            raise CombinationError("auto_find_batch_size", args.auto_find_batch_size, allowed)
        self.watch.check_sizes(
            micro_batch=("per_device_train_batch_size", args.train_batch_size),
            accumulation_steps=("gradient_accumulation_steps", args.gradient_accumulation_steps),
        )
        self.watch.step = state.global_step
        self.watch.start(self.watch.options.model or kwargs.get("model"))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Count a step; where a restart is needed, save and stop."""
        del args, state, kwargs
        if self.watch.restart is None:
            self.watch.step_done()
            if self.watch.restart is not None:
                control.should_save = control.should_training_stop = True
        return control

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the watch."""
        del args, state, control, kwargs
        self.watch.close()
