"""The optimizers that the Trainer knows by name, as memcalc's.

Names: transformers 5.23 ``training_args.py`` (``OptimizerNames``); what each builds: ``trainer_optimizer.py``. That of
bitsandbytes and of torchao steps one parameter after another, that of ``torch.optim`` groups of them, or all at once
where it is told to be fused.
"""

from __future__ import annotations

from typing import NamedTuple

from memcalc.convert.config import Reading

__all__ = ["ANY_FORM", "OPTIMIZERS", "Optimizer", "say_optimizer"]


class Optimizer(NamedTuple):
    """An optimizer in memcalc's words."""

    name: str
    impl: str
    missing: str = ""
    """What it keeps that is not modelled."""
    wide_embeddings: bool = False
    """The Trainer has it keep 32-bit moments for embedding tables (trainer.py, create_optimizer)."""


_GALORE = "gradients and moments are projected to a low rank (GaLore); counted whole"
_APOLLO = "moments are projected to a low rank (APOLLO); counted whole"
_PAGED = "its state is paged, outside of the allocator; counted inside"
_THREE = "a third moment is kept (AdEMAMix)"
_FREE = "schedule-free optimizers keep a second copy of the weights in place of a moment"
_STEPS_EARLY = "each gradient is used up in backward (LOMO)"
OPTIMIZERS: dict[str, Optimizer] = {
    "adamw_torch": Optimizer("adamw", "foreach"),
    "adamw_torch_fused": Optimizer("adamw", "fused"),
    "adamw_torch_xla": Optimizer("adamw", "loop", "it runs on XLA devices"),
    "adamw_torch_npu_fused": Optimizer("adamw", "fused", "it runs on Ascend NPUs"),
    "adamw_apex_fused": Optimizer("adamw", "fused"),
    "adamw_hf": Optimizer("adamw", "loop"),
    "adafactor": Optimizer("adafactor", "loop"),
    "adamw_anyprecision": Optimizer("adamw", "loop", "moments may be 16-bit, with a compensation of their own"),
    "adamw_torch_4bit": Optimizer("adamw-8bit", "loop", "moments take 4 bits (torchao); counted with 8"),
    "adamw_torch_8bit": Optimizer("adamw-8bit", "loop"),
    "ademamix": Optimizer("adamw", "loop", _THREE),
    "ademamix_8bit": Optimizer("adamw-8bit", "loop", _THREE, wide_embeddings=True),
    "paged_ademamix_32bit": Optimizer("paged-adamw", "loop"),
    "paged_ademamix_8bit": Optimizer("paged-adamw-8bit", "loop", wide_embeddings=True),
    "sgd": Optimizer("sgd", "foreach"),
    "adagrad": Optimizer("sgd-momentum", "foreach"),
    "rmsprop": Optimizer("sgd-momentum", "foreach"),
    "adamw_bnb_8bit": Optimizer("adamw-8bit", "loop", wide_embeddings=True),
    "adamw_8bit": Optimizer("adamw-8bit", "loop", wide_embeddings=True),
    "lion_8bit": Optimizer("lion-8bit", "loop", wide_embeddings=True),
    "lion_32bit": Optimizer("lion", "loop"),
    "paged_adamw_32bit": Optimizer("paged-adamw", "loop"),
    "paged_adamw_8bit": Optimizer("paged-adamw-8bit", "loop", wide_embeddings=True),
    "paged_lion_32bit": Optimizer("lion", "loop", _PAGED),
    "paged_lion_8bit": Optimizer("lion-8bit", "loop", _PAGED, wide_embeddings=True),
    "rmsprop_bnb": Optimizer("sgd-momentum", "loop"),
    "rmsprop_bnb_8bit": Optimizer("lion-8bit", "loop", wide_embeddings=True),
    "rmsprop_bnb_32bit": Optimizer("sgd-momentum", "loop"),
    "galore_adamw": Optimizer("adamw", "loop", _GALORE),
    "galore_adamw_8bit": Optimizer("adamw-8bit", "loop", _GALORE),
    "galore_adafactor": Optimizer("adafactor", "loop", _GALORE),
    "galore_adamw_layerwise": Optimizer("adamw", "loop", _GALORE),
    "galore_adamw_8bit_layerwise": Optimizer("adamw-8bit", "loop", _GALORE),
    "galore_adafactor_layerwise": Optimizer("adafactor", "loop", _GALORE),
    "lomo": Optimizer("sgd", "loop", _STEPS_EARLY),
    "adalomo": Optimizer("adafactor", "loop", _STEPS_EARLY),
    "grokadamw": Optimizer("adamw", "loop", "slow gradients are kept besides (GrokAdamW)"),
    "schedule_free_radam": Optimizer("adamw", "foreach", _FREE),
    "schedule_free_adamw": Optimizer("adamw", "foreach", _FREE),
    "schedule_free_sgd": Optimizer("sgd-momentum", "foreach", _FREE),
    "apollo_adamw": Optimizer("adamw", "loop", _APOLLO),
    "apollo_adamw_layerwise": Optimizer("adamw", "loop", _APOLLO),
    "stable_adamw": Optimizer("adamw", "loop"),
}
"""Each name of ``OptimizerNames``, and two of releases before 5.0.

RMSProp and Adagrad keep one state an element and count as SGD with momentum; 8-bit RMSProp counts as 8-bit Lion."""


ANY_FORM = {
    "adamw-8bit": "adamw_bnb_8bit",
    "paged-adamw": "paged_adamw_32bit",
    "paged-adamw-8bit": "paged_adamw_8bit",
    "lion": "lion_32bit",
    "lion-8bit": "lion_8bit",
}
"""Those of bitsandbytes, which needs no temporaries in whatever form it steps, and their names."""


def say_optimizer(
    reading: Reading,
    key: str,
    default: str,
    further: dict[str, Optimizer] | None = None,
    *,
    momentum: bool = False,
    every_form: bool = True,
) -> None:
    """Say which optimizer a key names, with a warning for what it keeps and is not modelled.

    With ``momentum``, SGD has it; without ``every_form``, nothing is said of a form that changes no byte.
    """
    known = {**OPTIMIZERS, **(further or {})}
    found: Optimizer = reading.one_of(key, known, known[default])
    reading.say("optimizer", "sgd-momentum" if momentum and found.name == "sgd" else found.name, key)
    if every_form or found.name not in ANY_FORM:
        reading.say("optimizer_impl", found.impl, key)
    if found.wide_embeddings:
        reading.say("strategy.wide_embedding_moments", True, key)
    if found.missing:
        reading.not_modelled({key: found.missing})
