"""The end of a model: final norm, head and loss, as operators."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.trace import ops
from memcalc.trace.entry import run_tail
from memcalc.trace.layers import WIDE, BlockConfig, gathered, linear, norm
from memcalc.trace.parallel_linear import output_layer
from memcalc.trace.tape import Grads, Leaf, Shard, Size, Tape, Tensor

if TYPE_CHECKING:
    from memcalc.frameworks.losses import Loss
    from memcalc.specs.block import Norm
    from memcalc.specs.model import Tail

SCALAR = Size(0, 4, "once")


def run_head(
    tape: Tape, x: Tensor, final_norm: Norm | None, vocab: int, setting: BlockConfig, loss: Loss, shard: Shard,
    tail: Tail | None = None, *, softcap: bool = False, scaled: bool = False,
) -> Tensor:  # fmt: skip
    """From the last block's output to the loss; a model without a head ends after its norm."""
    if final_norm is not None:
        x = norm(tape, x, final_norm, setting, "final norm")
    if tail is not None:
        x, loss = run_tail(tape, x, tail, setting), own_width(loss, tail, setting)
    if not vocab:
        return x
    x = gathered(tape, x, setting)
    if loss.head_in_turns:
        return _head_in_turns(tape, x, vocab, setting, loss, shard)
    before = [tape.new("logits of the micro-batch before", Size(vocab, 4, "token", shard, "V"))] if loss.again else []
    if loss.head_in_parts:
        return _head_in_parts(tape, x, vocab, setting, loss, shard, before)
    logits = [_logits(tape, x, vocab, setting, shard, softcap=softcap, scaled=scaled)]
    if loss.upcast != "model":
        logits.append(_handed_over(tape, logits.pop()))
    return cross_entropy(tape, logits.pop(), loss, before, widened=loss.widened and setting.autocast)


def _handed_over(tape: Tape, logits: Tensor) -> Tensor:
    """The logits as the loss is given them, noting where they leave the model and where their gradient comes back."""
    tape.crossings.append(len(tape.events))

    def rule(grads: Grads) -> Grads:
        tape.crossings.append(len(tape.events))
        return grads

    return tape.record(Tensor(logits.storage, logits.size), [logits], rule)


def own_width(loss: Loss, tail: Tail, setting: BlockConfig) -> Loss:
    """The loss of a class that leaves 16-bit logits as they are, or casts them to fp32 itself.

    Autocast computes the loss of the former in fp32 all the same.
    """
    if tail.wide_logits:
        return loss._replace(upcast="model")
    if loss.by_class and tail.narrow_before_446:
        return loss._replace(upcast="shifted" if setting.autocast else "none")
    narrow = loss.kernel == "log-softmax" and not tail.wide_loss and not setting.autocast
    return loss._replace(upcast="none") if narrow else loss


def _logits(
    tape: Tape, x: Tensor, vocab: int, setting: BlockConfig, shard: Shard, *, softcap: bool, scaled: bool
) -> Tensor:
    if setting.kernels == "te":
        logits = output_layer(tape, x, setting, vocab)
    else:
        # A rank's own logits and those of all, rank by rank, are there until a copy has them token by token
        parts: tuple[Shard, ...] = (
            ("part if tp", "full if tp") if setting.gathers_logits and shard == "gathered" else ()
        )
        size = x.size._replace(elements=vocab, width=setting.compute, label="V")
        before = [tape.new("logits before their gather", size._replace(shard=part)) for part in parts]
        logits = linear(tape, x, setting, "logits", vocab, "V", shard)
        before.clear()
    if scaled:
        logits = ops.plain(tape, logits, "logits, scaled")
    made = [logits]
    del logits
    return ops.softcap(tape, made, "logits") if softcap else made.pop()


def cross_entropy(
    tape: Tape, logits: Tensor, loss: Loss, before: list[Tensor] | None = None, *, widened: bool = False
) -> Tensor:
    """The loss of the logits; the caller holds them until the loss is known, and ``before`` until it is given them.

    ``widened``: what the model returns beside the loss is copied to fp32, while the 16-bit logits are still there.
    """
    live = [] if loss.upcast == "model" else [logits]
    all_rows = loss.upcast == "model" or (loss.upcast == "loss" and loss.chunks == 1)
    wide = ops.cast(tape, logits, 4, "logits, fp32") if all_rows else logits
    del logits
    if before is not None:
        before.clear()
    live.append(wide)
    if loss.held:
        tape.hold(wide)
    if loss.shifted_copy:
        wide = ops.copy(tape, ops.slice_of(tape, wide, wide.size.elements, "V", "logits"), "logits, shifted")
    if loss.upcast == "shifted":
        live.append(wide)
        wide = ops.cast(tape, wide, 4, "logits, shifted, fp32")
    out = KERNELS[loss.kernel](tape, wide) if loss.chunks == 1 else _in_chunks(tape, wide, loss)
    if loss.observed:
        tape.new("one more generation of logits", wide.size, "observed")
    del wide
    while len(live) > 1:  # fp32 logits are the loss function's own and go with it; the caller's follow
        live.pop()
    if widened and live[0].size.width < WIDE:
        live.insert(0, tape.new("returned logits, fp32", live[0].size.wide(WIDE)))
    while live:
        live.pop()
    return out


def _in_chunks(tape: Tape, logits: Tensor, loss: Loss) -> Tensor:
    """The loss of one part of the rows after another; each keeps its own log-softmax."""
    rows = [logits.size.elements // loss.chunks] * loss.chunks
    return _sum_of_parts(tape, ops.split(tape, logits, rows, ["V / c"] * loss.chunks, "logits"), loss)


def _head_in_parts(
    tape: Tape, x: Tensor, vocab: int, setting: BlockConfig, loss: Loss, shard: Shard, before: list[Tensor]
) -> Tensor:
    """The head on one part of the rows after another; the caller is given the list of their logits."""
    count = loss.chunks
    hidden = ops.split(tape, x, [x.size.elements // count] * count, ["h / c"] * count, "final hidden states")
    del x
    logits = [linear(tape, part, setting, "logits", vocab, "V / c", shard, count) for part in hidden]
    hidden.clear()
    if loss.upcast == "model":
        logits = [ops.cast(tape, part, 4, "logits of a chunk, fp32") for part in logits]
    before.clear()
    if loss.held:
        tape.hold(*logits)
    return _sum_of_parts(tape, logits, loss)


def _head_in_turns(tape: Tape, x: Tensor, vocab: int, setting: BlockConfig, loss: Loss, shard: Shard) -> Tensor:
    """Head, loss and backward of one part after another, on contiguous copies of the parts.

    The hidden states' gradient is collected in fp32 and goes back as one tensor (torchtitan components/loss.py,
    ``ChunkedLossWrapper`` of b5bcd76).
    """
    count, back = loss.chunks, x.size
    part = back._replace(elements=back.elements // count, label="h / c")
    copies = [tape.new("hidden states of a chunk", part) for _ in range(count)]
    collected = tape.new("gradient of hidden states, fp32", back.wide(4))
    weights: dict[str, Tensor] = {}
    with tape.enable_grad():
        for copied in copies:
            leaf = Tensor(copied.storage, part, Leaf("hidden states of a chunk", keep=False))
            out = _loss_of_part(tape, linear(tape, leaf, setting, "logits", vocab, "V / c", shard, count), loss)
            edge, grad = out.edge, [tape.new("gradient of the loss", SCALAR)]
            del out
            tape.backward(edge, grad)
            # Each turn is a backward of its own, whose gradients are added to what is there in place
            weights = weights or dict(tape.gradients)
            tape.gradients.clear()
    tape.gradients.update(weights)
    copies.clear()
    return tape.record(
        tape.new("loss", SCALAR), [x], lambda _: [tape.new("gradient of hidden states", back)], [collected.storage]
    )


def _sum_of_parts(tape: Tape, parts: list[Tensor], loss: Loss) -> Tensor:
    """The losses of parts of the logits, added up; the list of them lives until the last."""
    losses = [_loss_of_part(tape, part, loss) for part in parts]
    total = losses.pop(0)
    while losses:
        total = ops.add(tape, total, losses.pop(0), "sum of chunks")
    return total


def _loss_of_part(tape: Tape, part: Tensor, loss: Loss) -> Tensor:
    wide = part if loss.upcast == "none" else ops.cast(tape, part, 4, "logits of a chunk, fp32")
    return KERNELS[loss.kernel](tape, wide)


def log_softmax(tape: Tape, logits: Tensor) -> Tensor:
    """``F.cross_entropy``: the log-softmax is kept; its backward holds it with two gradients of its size."""
    size = logits.size
    logs = ops.saves_output(tape, logits, "log-softmax")
    out = tape.new("loss", SCALAR)
    return tape.record(out, [logs], lambda _: [tape.new("gradient of log-softmax", size)], [logs.storage])


def in_place(tape: Tape, logits: Tensor) -> Tensor:
    """A kernel that writes the gradient over the logits."""
    storage, size = logits.storage, logits.size

    def rule(_: Grads) -> Grads:
        return [Tensor(storage, size)]

    return tape.record(tape.new("loss", SCALAR), [logits], rule, [storage])


def compiled(tape: Tape, logits: Tensor) -> Tensor:
    """One generated kernel each way: the logits are kept, and their gradient is made from them."""
    size = logits.size
    return tape.record(
        tape.new("loss", SCALAR), [logits], lambda _: [tape.new("gradient of logits", size)], [logits.storage]
    )


def vocab_parallel(tape: Tape, logits: Tensor) -> Tensor:
    """Megatron's own: one fp32 copy, in which exponential and gradient are computed in place."""
    return in_place(tape, logits)


def vocab_parallel_fused(tape: Tape, logits: Tensor) -> Tensor:
    """Megatron's native fusion: compiled, so that fp32 copy and exponential are two tensors."""
    size = logits.size
    wide = tape.new("logits, fp32", size.wide(4))
    exponential = tape.new("exponential of logits", size.wide(4))
    del wide

    def rule(_: Grads) -> Grads:
        gradient = tape.new("gradient of logits, fp32", size.wide(4))
        narrow = tape.new("gradient of logits", size)
        del gradient
        return [narrow]

    return tape.record(tape.new("loss", SCALAR), [logits], rule, [exponential.storage])


def loss_parallel(tape: Tape, logits: Tensor) -> Tensor:
    """DTensor's: log-softmax kept; its backward computes ``(gradient + exp(x)) * outer`` step by step."""
    size = logits.size
    shifted, exponential = tape.new("logits, shifted", size), tape.new("exponential of logits", size)
    del exponential
    logs = tape.new("log-softmax", size)
    del shifted

    def rule(_: Grads) -> Grads:
        gradient, exponential = tape.new("gradient of log-softmax", size), tape.new("exponential of log-softmax", size)
        total = tape.new("sum of both", size)
        del gradient, exponential
        return [total]

    return tape.record(tape.new("loss", SCALAR), [logits], rule, [logs.storage])


KERNELS = {
    "log-softmax": log_softmax,
    "in-place": in_place,
    "compiled": compiled,
    "vocab-parallel": vocab_parallel,
    "vocab-parallel-fused": vocab_parallel_fused,
    "loss-parallel": loss_parallel,
}
