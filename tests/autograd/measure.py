"""Builds a model of the zoo and lists what its forward pass saves for backward."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from autograd import models
from memcalc.probe.live.cuda_like import cuda_like
from memcalc.probe.live.saved import SavedStorage, node_names, recording
from memcalc.probe.live.step_models import wrap_blocks
from memcalc.trace.template import Template


@dataclasses.dataclass
class Saved:
    """Everything that one forward pass saves, parameters and buffers left out, with the model that ran."""

    storages: list[SavedStorage]
    blocks: list[str]
    config: Any
    model: nn.Module

    def at(self, part: str | int) -> list[SavedStorage]:
        """Return what ``part`` keeps: a block's number, its path, ``embedding``, ``between`` or ``head``."""
        name = self.blocks[part] if isinstance(part, int) else part
        return [s for s in self.storages if s.part == name]

    def bytes_at(self, part: str | int, *, weights: bool = False) -> int:
        """Return the bytes saved at ``part``; ``weights`` counts autocast's copies of weights too."""
        return sum(s.nbytes for s in self.at(part) if weights or s.weight is None)

    def total(self, *, weights: bool = False) -> int:
        """Return the bytes saved everywhere."""
        return sum(s.nbytes for s in self.storages if weights or s.weight is None)

    def as_kept(self, template: Template) -> Template:
        """Return a trace without fp32 copies of router weights if the class keeps those in fp32 whatever the rest is.

        Transformers does so from 5.24 on (``_keep_in_fp32_modules_strict``): DeepSeek's, GLM-4.5's, dots.1's, ….
        """
        if "gate.weight" not in (getattr(self.model, "_keep_in_fp32_modules_strict", None) or ()):
            return template
        copies = {i for i in template.kept if template.records[i].name == "router weight, fp32"}
        return dataclasses.replace(template, kept=template.kept - copies)


DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp32+autocast": torch.float32}


def autocast(precision: str) -> contextlib.AbstractContextManager[Any]:
    """Return bf16 autocast where ``precision`` asks for it."""
    return torch.autocast("cpu", torch.bfloat16) if precision == "fp32+autocast" else contextlib.nullcontext()


def build(
    family: str,
    *,
    precision: str,
    attention: str,
    dropout: bool | float | None,
    recompute: str,
    batch: int,
    seq: int,
    layers: int | None,
    adapt: Callable[[nn.Module], nn.Module] | None = None,
    first: bool = False,
    loss: str = "standard",
    **changes: Any,
) -> tuple[nn.Module, Callable[[], torch.Tensor], Any]:
    """Build a model and a function that runs its forward pass and loss. Call it inside :func:`cuda_like`.

    Of every N blocks the last is checkpointed, or the ``first``. ``loss`` is that of the family ``titan`` alone.
    """
    dtype = DTYPES[precision]
    if family == "titan":
        sizes = changes | ({} if layers is None else {"layers": layers})
        model: nn.Module = models.TitanLlama(**sizes, dtype=dtype)
        tokens, labels = (torch.zeros(batch, seq, dtype=torch.long) for _ in range(2))
        wrap_blocks(models.blocks_of(model), recompute, first=first)
        model = adapt(model) if adapt else model

        def titan() -> torch.Tensor:
            with autocast(precision):
                return models.LOSSES[loss](model(tokens), labels)

        return model, titan, sizes
    config = models.hf_config(family, layers=layers, dropout=dropout, **changes)
    model = models.hf_model(family, config, dtype=dtype, eager=attention == "eager")
    inputs = models.hf_inputs(family, config, batch, seq, dtype)
    wrap_blocks(models.blocks_of(model), recompute, first=first)
    model = adapt(model) if adapt else model

    def run() -> torch.Tensor:
        with autocast(precision):
            return model(**inputs).loss

    return model, run, config


def saved_bytes(
    family: str,
    *,
    precision: str = "bf16",
    attention: str = "flash",
    dropout: bool | float | None = None,
    recompute: str = "none",
    batch: int = models.BATCH,
    seq: int = models.SEQ,
    layers: int | None = None,
    adapt: Callable[[nn.Module], nn.Module] | None = None,
    **changes: Any,
) -> Saved:
    """Return what one forward pass of ``family`` saves for backward.

    Parameters
    ----------
    family : str
        A key of :data:`autograd.models.FAMILIES`, or ``titan``.
    precision : str
        ``bf16``, ``fp32`` or ``fp32+autocast``: dtype of the weights, and bf16 autocast or none.
    attention : str
        ``flash`` (what SDPA picks on a GPU), ``efficient``, ``math``, or ``eager`` (Transformers' own matmuls).
    dropout : bool or float or None
        Rates of the config (None), all 0 (False), all 0.1 (True), or all this rate.
    recompute : str
        ``none``, ``full``, ``every-N`` or ``segments-K``.
    adapt : callable
        Changes the model before it runs, for example to add adapters.
    changes : dict
        Fields of the config.
    """
    with cuda_like("auto" if attention == "flash" else attention):
        model, run, config = build(
            family,
            precision=precision,
            attention=attention,
            dropout=dropout,
            recompute=recompute,
            batch=batch,
            seq=seq,
            layers=layers,
            adapt=adapt,
            **changes,
        )
        with recording(model, models.blocks_of(model)) as recorder:
            loss = run()
        return Saved(recorder.result(node_names(loss.grad_fn)), recorder.where.blocks, config, model)
