"""How a loss is computed from the logits: what decides the generations of logits that are alive together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from memcalc.errors import CombinationError

MOST_PARTS = 1024
"""Parts of the rows that are told apart: beyond them parts are taken to be larger, by less than a 200th of all logits.

litgpt's have 128 rows, so that a sequence of 128k tokens is still exact.
"""


class Linear(NamedTuple):
    """Liger's cross entropy with the head in it: what it makes of the logits of one chunk of rows after another."""

    steps: tuple[tuple[str, int], ...] = (("logits", 0),)
    """A chunk's tensors in turn, by the names that are bound to them, each with its bytes: 0 for those of a product."""
    lets_go: bool = False
    """They are gone before the next chunk's product is made."""
    sums_apart: bool = False
    """The head's gradient of a chunk, and its fp32 copy, are tensors before they are added to that of all."""
    source: str = ""
    """The code that was read, with its version."""

    def bindings(self, width: int) -> list[tuple[str, int]]:
        """The tensors whose bytes are known, for a product of ``width`` bytes; a cast to the same width makes none.

        >>> LIGER_03.bindings(2), LIGER_03.bindings(4)
        ([('logits', 2), ('logits', 4), ('logits', 2), ('scaled', 2)], [('logits', 4), ('scaled', 4)])
        """
        known = [(name, size or width) for name, size in self.steps]
        return [step for before, step in zip([None, *known], known, strict=False) if step != before]

    def logit_bytes(self, width: int) -> int:
        """Bytes that are held at most for each logit of a chunk, from the second chunk on.

        >>> LIGER_03.logit_bytes(2), LIGER_05.logit_bytes(2), LIGER.logit_bytes(2)
        (8, 4, 2)
        """
        alive, most = dict[str, int](), 0
        for _ in range(2):
            for name, size in self.bindings(width):
                most = max(most, sum(alive.values()) + size)
                alive[name] = size
            alive = {} if self.lets_go else alive
        return most


_LINEAR = "Liger-Kernel ops/fused_linear_cross_entropy.py"
LIGER_03 = Linear(
    (("logits", 0), ("logits", 4), ("logits", 0), ("scaled", 0)),
    source=f"{_LINEAR} v0.3.1: float(), to(dtype), and a scaled copy of the gradient",
)
LIGER_05 = Linear(source=f"{_LINEAR} v0.5.10: in place, beside the logits of the chunk before")
LIGER_06 = Linear(
    sums_apart=True, source=f"{_LINEAR} v0.6.3 to v0.8.2: grad_weight += torch.mm(...).float(); Liger-Kernel#1232"
)
LIGER = Linear(lets_go=True, source=f"{_LINEAR} v0.8.3: one buffer of logits, gradients added by addmm in place")


class Loss(NamedTuple):
    """One way to compute the cross entropy of a head's logits."""

    kernel: Literal["log-softmax", "in-place", "compiled", "vocab-parallel", "vocab-parallel-fused", "loss-parallel"]
    """What turns logits into a loss; see :mod:`memcalc.trace.head`."""
    upcast: Literal["model", "loss", "shifted", "none"] = "loss"
    """Who casts 16-bit logits to fp32: the model (the 16-bit ones are then gone), the loss, autocast, or nobody.

    The loss casts the logits that it is given, autocast their shifted copy.
    """
    shifted_copy: bool = False
    """The logits are shifted, as a contiguous copy, instead of the labels."""
    by_class: bool = False
    """Each class has its own code for it, and some leave 16-bit logits as they are."""
    widened: bool = False
    """Under autocast 16-bit logits are copied to fp32 once more, as the model returns them beside the loss."""
    chunks: int = 1
    """Parts of the rows that go through the loss one after another."""
    rows: int = 0
    """Positions of a sequence in one part, where that is fixed instead of the number of parts."""
    head_in_parts: bool = False
    """The head, too, runs on one part of the hidden states after another."""
    head_in_turns: bool = False
    """Head, loss and their backward run on one part of the hidden states before the next begins."""
    held: bool = False
    """The training script holds the logits until the step ends."""
    compiles: bool = True
    """Whether compiling the loss takes effect."""
    again: bool = False
    """It holds those of the micro-batch before, until it is given the new ones."""
    observed: bool = False
    """Measured runs reserve one more fp32 generation of logits than tensors explain; the cause is not known."""
    linear: Linear = LIGER
    """What Liger of the same time puts in the place of this loss and the head."""
    frozen: Loss | None = None
    """How it is computed where the base is frozen, if otherwise."""
    source: str = ""
    """The code that was read, with its version."""

    def uncast(self) -> Loss:
        """The same where a script gives 16-bit logits to ``cross_entropy`` as they are, and unshifted.

        >>> HF_445.uncast().upcast, HF_445.uncast().shifted_copy
        ('none', False)
        """
        return Loss(self.kernel, upcast="none", held=self.held, linear=self.linear, source=_UNCAST)

    def of(self, seq_len: int, *, trainable: bool, compiled: bool = False, again: bool = False) -> Loss:
        """The loss of sequences of a length [tokens], with its number of parts; a compiled one casts inside its kernel.

        ``again`` says that a micro-batch of the same length came before.
        """
        loss = self if trainable or self.frozen is None else self.frozen
        parts = min(-(-seq_len // loss.rows), MOST_PARTS) if loss.rows else loss.chunks
        loss = loss._replace(frozen=None, again=again and loss.held, chunks=parts)
        if not (compiled and loss.compiles) or loss.kernel != "log-softmax":
            return loss
        return loss._replace(kernel="compiled", upcast="none" if loss.upcast == "loss" else loss.upcast)


_UNCAST = "lightning-thunder 9580411e1 thunder/benchmarks/benchmark_litgpt.py: cross_entropy(logits.reshape(...))"
_OLD = "Transformers 4.45, modeling_llama.py: logits.float(), shift_logits.contiguous(); modeling_gpt2.py: no float()"
_MIDDLE = "Transformers 4.46 to 4.48, loss/loss_utils.py: ForCausalLMLoss shifts the logits"
_NEW = "Transformers 5.23, loss/loss_utils.py: ForCausalLMLoss shifts the labels"
_TITAN = "torchtitan components/loss.py"
_MEGATRON = "Megatron-LM core/tensor_parallel/cross_entropy.py"

HF_445 = Loss("log-softmax", upcast="model", shifted_copy=True, by_class=True, linear=LIGER_03, source=_OLD)
HF_446 = Loss("log-softmax", shifted_copy=True, linear=LIGER_03, source=_MIDDLE)
_CUSTOM = "fms-acceleration fused-ops-and-kernels, cross_entropy_loss.py: in place on the shifted fp32 copy"
HF_445_IN_PLACE = Loss("in-place", upcast="model", shifted_copy=True, observed=True, source=_CUSTOM)
HF_446_IN_PLACE = Loss("in-place", shifted_copy=True, observed=True, source=_CUSTOM)
HF_NEW = Loss("log-softmax", source=_NEW)
_LIGER = "Liger-Kernel ops/cross_entropy.py: the gradient overwrites the logits"
IN_PLACE = Loss("in-place", upcast="none", source=_LIGER)
_CAST = "Transformers 5.23, loss/loss_utils.py: logits.float() before Liger-Kernel's cross entropy, which is in place"
HF_IN_PLACE = Loss("in-place", source=_CAST)
CHUNKED = Loss("log-softmax", chunks=8, source="torchtitan e23bb707d: eight chunks of the logits")
TITAN = Loss("log-softmax", source=_TITAN)
TITAN_2024_03 = Loss(
    "log-softmax",
    upcast="model",
    held=True,
    source="torchtitan until e29b6b4d4 (2024-06-12): output.float() in the model, logits held by train.py",
)
CHUNKED_HIDDEN = Loss(
    "log-softmax",
    chunks=8,
    head_in_turns=True,
    source="torchtitan 786e26f8e: ChunkedCELoss, eight chunks of hidden states",
)
LOSS_PARALLEL = Loss("loss-parallel", source="torch/distributed/tensor/parallel/loss.py")
LOSS_PARALLEL_2024_03 = LOSS_PARALLEL._replace(
    upcast="model",
    held=True,
    source="torchtitan ed04380aa (2024-03-05) to e29b6b4d4 (2024-06-12): loss_parallel of output.float(), which "
    "train.py holds through backward",
)
MEGATRON = Loss("vocab-parallel", source=_MEGATRON)
_PIPE = "Megatron-DeepSpeed 541b967 model/gpt_model.py: float16_to_fp32 is a layer of the pipeline"
MEGATRON_PIPE = Loss("vocab-parallel", upcast="model", source=_PIPE)
_FUSED = "Megatron-LM core/fusions/fused_cross_entropy.py: compiled out of place"
MEGATRON_FUSED = Loss("vocab-parallel-fused", upcast="none", source=_FUSED)
TRITON = Loss("in-place", upcast="none", source="TransformerEngine pytorch/cross_entropy.py: gradient in the logits")

HUGGING_FACE = {"standard": HF_NEW, "fused-kernel": HF_IN_PLACE, "chunked": CHUNKED}
"""Losses of the Transformers library's newest release, by the interface's names."""
_RETURNED = "; Accelerate 1.15, utils/operations.py: ConvertOutputsToFp32, where accelerator.py has native_amp"
TRAINER = {
    **HUGGING_FACE,
    "standard": HF_NEW._replace(widened=True),
    "fused-kernel": HF_IN_PLACE._replace(widened=True, source=_CAST + _RETURNED),
}
"""The same under Accelerate's autocast, which DeepSpeed does without. The standard loss has room for the copy."""
TRAINER_449 = {**TRAINER, "standard": TRAINER["standard"]._replace(linear=LIGER_05)}
TRAINER_50 = {**TRAINER, "standard": TRAINER["standard"]._replace(linear=LIGER_06)}


def check_uncast(given: Mapping[str, Any], losses: Mapping[str, Loss], usual: str) -> None:
    """Refuse a loss of 16-bit logits where something else computes it, or casts them."""
    if not given["fields"].get("uncast_loss"):
        return
    loss = given.get("loss") or usual
    if loss != "standard" or losses["standard"].kernel != "log-softmax":
        raise CombinationError("strategy.uncast_loss", True, f"is a loop's own cross entropy, not --loss {loss}")
    if given["fields"].get("autocast") or str(given.get("precision", "")).endswith("-autocast"):
        allowed = "autocast casts what a cross entropy is given to fp32: leave it out"
        raise CombinationError("strategy.uncast_loss", True, allowed)
