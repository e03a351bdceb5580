"""The guard as a callback of Lightning.

Lightning reads ``accumulate_grad_batches`` anew at every batch, but the batches come from the user's own data loader,
which is made before the first of them: one without the other would change the global batch. So a micro-batch needs a
restart.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import Callback

from memcalc.probe.guard.ladder import Given
from memcalc.probe.guard.options import Options
from memcalc.probe.guard.watch import Watch

CHECKPOINT = "restart.ckpt"


class GuardCallback(Callback):
    """Watches each optimizer step."""

    def __init__(self, plan: Given | None, options: Options) -> None:
        self.watch = Watch(plan, options)
        self._seen = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Compare the trainer with the plan, and begin."""
        loader = getattr(trainer.train_dataloader, "batch_size", None)
        self.watch.check_sizes(
            accumulation_steps=("accumulate_grad_batches", trainer.accumulate_grad_batches),
            micro_batch=("batch_size", loader or None),
        )
        self.watch.step = self._seen = trainer.global_step
        self.watch.start(self.watch.options.model or pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Count a step where the batch ended one; where a restart is needed, save and stop."""
        del pl_module, outputs, batch, batch_idx
        if trainer.global_step == self._seen or self.watch.restart is not None:
            return
        self._seen = trainer.global_step
        self.watch.step_done()
        if self.watch.restart is not None:
            if self.watch.options.restart_dir is not None:
                trainer.save_checkpoint(Path(self.watch.options.restart_dir) / CHECKPOINT)
            trainer.should_stop = True

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Look at what ends the run."""
        del trainer, pl_module
        self.watch.failed(exception)
        self.watch.close()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """End the watch."""
        del trainer, pl_module
        self.watch.close()
