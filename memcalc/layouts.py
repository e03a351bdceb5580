"""Which parallel layouts are legal for a model, and all of them for a number of GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from memcalc.errors import CombinationError, InputError
from memcalc.grid import Layout

if TYPE_CHECKING:
    from memcalc.grid import Fixed
    from memcalc.specs.model import Model


def check_layout(model: Model, layout: Layout, seq_len: int, expert_tp: int = 0) -> None:
    """Raise the error that says why a layout is impossible for a model."""
    for group in model.groups:
        _check_tp(group.block.attention.heads, "attention heads", model, layout.tp)
        _check_tp(group.block.attention.kv_heads, "key-value heads", model, layout.tp)
    if layout.pp > model.num_layers:
        raise CombinationError("pp", layout.pp, f"must be at most the {model.num_layers} blocks of {model.name}")
    if layout.ep > 1 and not model.is_moe:
        raise CombinationError("ep", layout.ep, f"must be 1, because {model.name} has no experts")
    for group in model.groups:
        experts = getattr(group.block.mlp, "experts", layout.ep)
        if experts % layout.ep:
            raise CombinationError("ep", layout.ep, f"must be a divisor of the {experts} experts of {model.name}")
    if expert_tp and (layout.dp * layout.cp * layout.tp) % (layout.ep * expert_tp):
        ranks = layout.dp * layout.cp * layout.tp
        raise CombinationError("ep", layout.ep, f"ep x etp must be a divisor of dp x cp x tp = {ranks}")
    if not expert_tp and (layout.dp * layout.cp) % layout.ep:
        raise CombinationError("ep", layout.ep, f"must be a divisor of dp x cp = {layout.dp * layout.cp}")
    if layout.cp > seq_len:
        raise CombinationError("cp", layout.cp, f"must be at most the sequence length {seq_len}")


def check_split(model: Model, fixed: Fixed, stages: int) -> None:
    """Raise the error that says why blocks cannot be shared out over stages as asked."""
    for name in ("first_stage_layers", "last_stage_layers"):
        own = getattr(fixed, name)
        if own and stages < 2:
            raise CombinationError(f"strategy.{name}", own, "needs pp above 1")
        most = model.num_layers - fixed.mtp - (stages - 1)
        if own > most:
            raise CombinationError(
                f"strategy.{name}", own, f"must be at most {most}, so that {stages} stages have blocks"
            )


def _check_tp(heads: int, what: str, model: Model, tp: int) -> None:
    if heads % tp:
        raise CombinationError("tp", tp, f"must be a divisor of the {heads} {what} of {model.name}")


def layouts_for(
    model: Model,
    gpus: int,
    degrees: Sequence[Sequence[int]],
    seq_len: int,
    *,
    sp: bool | None,
    pipelines: Sequence[tuple[str, int]] = (("1f1b", 1),),
) -> list[Layout]:
    """All legal layouts of a number of GPUs over the wanted tp, pp, cp and ep degrees, schedules and chunks.

    Sequence parallelism is on wherever TP is, unless ``sp`` says otherwise: it divides activations for no extra volume.
    """
    legal = []
    for tp in degrees[0]:
        for pp in degrees[1]:
            for cp in degrees[2]:
                for ep in degrees[3]:
                    if gpus % (tp * pp * cp):
                        continue
                    layout = Layout(gpus // (tp * pp * cp), tp, tp > 1 if sp is None else sp, pp, cp, ep)
                    if _is_legal(model, layout, seq_len):
                        runs = pipelines if pp > 1 else (("1f1b", 1),)
                        legal += [replace(layout, schedule=name, vpp=chunks) for name, chunks in runs]
    return legal


def _is_legal(model: Model, layout: Layout, seq_len: int) -> bool:
    try:
        check_layout(model, layout, seq_len)
    except InputError:
        return False
    return True
