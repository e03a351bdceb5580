"""The ends of a tower: from its inputs to the first block, and from the last block to what reads the tower.

Source: the embeddings and stacks of Transformers 5.23 ``models/*/modeling_*.py``; PyTorch 2.13
``tools/autograd/derivatives.yaml``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.trace import ops
from memcalc.trace.activation_steps import activation
from memcalc.trace.layers import WIDE, BlockConfig, linear, norm
from memcalc.trace.scores import kernel
from memcalc.trace.tape import Grads, Leaf, Size, Tape, Tensor, Unit

if TYPE_CHECKING:
    from memcalc.specs.block import Attention, Block
    from memcalc.specs.model import Lookup, Projector, Tail, TowerEnds

INDEX = 8
"""Bytes of a token's number or position: 64-bit integers."""
MASK = "attention mask"
"""What the mask is called that blocks under checkpoints have among their inputs."""
POSITION_UNITS: dict[str, Unit] = {"token": "token", "row": "row"}


def run_entry(tape: Tape, ends: TowerEnds, block: Block, setting: BlockConfig, policy: str) -> Tensor:
    """From a tower's inputs to its first block, and what all its blocks share under a policy of recomputation."""
    hidden, token = block.hidden, None
    setting = setting._replace(embedding_leaf=setting.embedding_leaf and policy == "full")
    if ends.mel_bins:
        x = convolutions(tape, ends, hidden, setting)
    elif ends.pixels:
        x = patches(tape, ends, hidden, setting)
    elif ends.lookups:
        x = token = lookup(tape, ends.lookups[0], ends.embedding_dim or hidden, setting)
        x = after_lookup(tape, x, ends, hidden, setting)
    else:
        x = tape.leaf("tower's input", Size(hidden, setting.residual, "token", "sp", "h"))
    if ends.norm is not None:
        x = norm(tape, x, ends.norm, setting, "embedding norm")
    x = ops.dropout(tape, x, "embedding dropout", active=bool(ends.dropout) and setting.dropout)
    leaf = [token] if token is not None and setting.embedding_leaf and token.storage is not x.storage else []
    del token
    shared = [
        *leaf,
        *(tables(tape, block.attention, setting) if block.attention else []),
        *(biases(tape, block, block.attention, setting, checkpointed=policy == "full") if block.attention else []),
    ]
    readers = Leaf("adapters of the blocks", keep=False) if setting.lora is not None else None
    return tape.record(Tensor(x.storage, x.size), [x, readers], lambda g: [g[0], None], [t.storage for t in shared])


def run_exit(tape: Tape, x: Tensor, ends: TowerEnds, setting: BlockConfig, *, read: bool) -> Tensor:
    """From the last block of a tower that is not the last to its output; ``read``: a block of the next one keeps it."""
    if ends.end_norm is not None:
        x = norm(tape, x, ends.end_norm, setting, "tower's final norm")
    x = ops.dropout(tape, x, "tower's final dropout", active=bool(ends.end_dropout) and setting.dropout)
    if ends.projector is not None:
        x = project_rows(tape, x, ends.projector, setting)
    return tape.record(Tensor(x.storage, x.size), [x], lambda grads: grads, [x.storage if read else None])


def project_rows(tape: Tape, x: Tensor, spec: Projector, setting: BlockConfig) -> Tensor:
    """From the rows of a vision tower to tokens of the text; further projectors (DeepStack) keep what this one does."""
    deep = replace_norm(spec)
    outputs = [projected(tape, x, deep, setting, f"further projector {n + 1}") for n in range(spec.deep)]
    out = projected(tape, x, spec, setting, "projector")
    for output in outputs:
        out = ops.add(tape, out, output, "sum of projectors")
    return out


def replace_norm(spec: Projector) -> Projector:
    """The same with its norm over merged rows, as those of DeepStack have it."""
    return spec.model_copy(update={"norm_merged": True})


def projected(tape: Tape, x: Tensor, spec: Projector, setting: BlockConfig, name: str) -> Tensor:
    """One projector: its norm over rows or over what is merged of them, then its linear layers."""
    width = x.size.elements
    if spec.pool > 1:
        x = ops.saves_input(tape, ops.copy(tape, x, f"{name} input, contiguous"), f"{name} mean")
        x = of_image(tape, x, width)
    if spec.norm is not None and not spec.norm_merged:
        x = norm(tape, x, spec.norm, setting, f"{name} norm")
    merged = x.size._replace(elements=width * spec.merge, unit="image", label=str(width * spec.merge))
    x = copied_rows(tape, x, merged, f"{name} input") if spec.copied else of_image(tape, x, width * spec.merge)
    if spec.norm is not None and spec.norm_merged:
        x = norm(tape, x, spec.norm, setting, f"{name} norm")
    for number, outputs in enumerate(spec.linears, 1):
        if spec.activation is not None and (number == len(spec.linears) or (spec.activated and number > 1)):
            x = activation(tape, x, spec.activation, setting, name)
        x = linear(tape, x, setting, f"{name} layer {number}", outputs, "h")
    return x


def copied_rows(tape: Tape, x: Tensor, size: Size, name: str) -> Tensor:
    """Rows copied side by side (pixel shuffle), or without the class token's."""
    back = x.size
    return tape.record(tape.new(name, size), [x], lambda _: [tape.new(f"gradient before {name}", back)])


def of_image(tape: Tape, x: Tensor, elements: int) -> Tensor:
    """A view of a tower's rows as tokens of the text."""
    back = x.size
    if back.unit == "image":
        return x.view(elements, "h")
    out = Tensor(x.storage, back._replace(elements=elements, unit="image", label=f"{elements}"))
    return tape.record(out, [x], lambda grads: [Tensor(grads[0].storage, back) if grads[0] else None])


def window_masked(attention: Attention, setting: BlockConfig) -> bool:
    """Whether PyTorch's attention is given the mask of a window, and of nothing else."""
    bounded = attention.window is not None and setting.windowed and setting.sdpa
    return bounded and not attention.explicit_mask and kernel(attention, setting) != "eager"


def run_tail(tape: Tape, x: Tensor, tail: Tail, setting: BlockConfig) -> Tensor:
    """What stands between the final norm and the logits."""
    x = ops.dropout(tape, x, "final dropout", active=bool(tail.dropout) and setting.dropout)
    if tail.transform is not None:
        x = linear(tape, x, setting, "head transform", x.size.elements, "h")
        x = activation(tape, x, tail.transform, setting, "head transform")
        x = norm(tape, x, tail.transform_norm, setting, "head transform norm")
    if not tail.pooled:
        return x
    size = x.size
    first = Tensor(x.storage, size._replace(unit="sample"))
    return tape.record(first, [x], lambda _: [tape.new("gradient of the first token", size)])


def after_lookup(tape: Tape, x: Tensor, ends: TowerEnds, hidden: int, setting: BlockConfig) -> Tensor:
    """From the rows of the first table to the sum with those of the others."""
    if ends.scaled:
        x = ops.plain(tape, x, "scaled embedding")
    if x.size.elements != hidden:
        x = linear(tape, x, setting, "embedding projection", hidden, "h")
    for table in ends.lookups[1:]:
        x = ops.add(tape, x, lookup(tape, table, hidden, setting), "sum of embeddings")
    return x


def lookup(tape: Tape, table: Lookup, width: int, setting: BlockConfig) -> Tensor:
    """One table, whose backward keeps the numbers that were looked up; a buffer's are not kept for this pass alone."""
    index = None
    if table.index != "buffer":
        index = tape.new(f"{table.name}, numbers", Size(1, INDEX, POSITION_UNITS[table.index], "none", "1"))
    leaf = Leaf(f"{table.name} table", keep=True) if setting.trainable else None

    def rule(_: Grads) -> Grads:
        return [tape.new(f"gradient of {table.name} table", Size(table.parameters, 1, "once"), "gradient")]

    unit: Unit = "token" if table.index == "token" else "row"
    out = tape.new(f"{table.name} embedding", Size(width, setting.embedding, unit, "sp", "h"))
    if setting.embedding_leaf and table.name == "token":
        out.edge = Leaf("token embedding", keep=False)
        return out
    return tape.record(out, [leaf], rule, [index.storage if index else None])


def patches(tape: Tape, ends: TowerEnds, hidden: int, setting: BlockConfig) -> Tensor:
    """A convolution that cuts an image into patches, with a class token before them and positions added."""
    image = ops.cast(
        tape, tape.leaf("image", Size(ends.pixels, setting.residual, "sample", "none", "pixels"), requires_grad=False),
        setting.compute, "image, 16-bit copy",
    )  # fmt: skip
    x = convolution(
        tape, image, Size(hidden, setting.compute, "token", "none", "h"), ends.patch * hidden, setting, "patches"
    )
    if ends.position_taps:
        x = placed(tape, x, ends.position_taps)
    size = x.size.wide(setting.residual)
    x = tape.record(tape.new("patches with class token", size), [x], lambda _: [tape.new("gradient of patches", size)])
    return ops.shifted(tape, x, "patches with positions")


def placed(tape: Tape, x: Tensor, taps: int) -> Tensor:
    """Learned positions that patches look up: their numbers are kept, and the fp32 weights of several."""
    numbers = [tape.new("numbers of positions", Size(taps, INDEX, "token", "none", "1"))]
    if taps > 1:
        numbers.append(tape.new("weights of positions", Size(taps, WIDE, "token", "none", "1")))
    return tape.record(Tensor(x.storage, x.size), [x], lambda grads: [grads[0]], [t.storage for t in numbers])


def convolutions(tape: Tape, ends: TowerEnds, hidden: int, setting: BlockConfig) -> Tensor:
    """Two convolutions with GELU over the frames of a spectrogram, the second of which halves them (Whisper)."""
    frames = tape.leaf(
        "frames", Size(2 * ends.mel_bins, setting.residual, "token", "none", "2·mel"), requires_grad=False
    )
    x = ops.cast(tape, frames, setting.compute, "frames, 16-bit copy")
    del frames
    first, second = (Size(n * hidden, setting.compute, "token", "none", f"{n}·h") for n in (2, 1))
    x = convolution(tape, x, first, 3 * ends.mel_bins * hidden, setting, "first convolution")
    x = ops.saves_input(tape, x, "first convolution's activation")
    x = convolution(tape, x, second, 3 * hidden * hidden, setting, "second convolution")
    x = ops.saves_input(tape, x, "second convolution's activation")
    return ops.scaled(tape, x, setting.residual, "frames with positions")


def convolution(tape: Tape, x: Tensor, out: Size, weights: int, setting: BlockConfig, name: str) -> Tensor:
    """A convolution keeps its input."""
    size, wanted = x.size, x.requires_grad
    leaf = Leaf(f"{name} weight", keep=True) if setting.trainable else None

    def rule(_: Grads) -> Grads:
        grad = tape.new(f"gradient of {name} input", size) if wanted else None
        return [grad, tape.new(f"gradient of {name} weight", Size(weights, 1, "once"), "gradient") if leaf else None]

    return tape.record(tape.new(f"{name} output", out), [x, leaf], rule, [x.storage if leaf else None])


def tables(tape: Tape, spec: Attention, setting: BlockConfig) -> list[Tensor]:
    """Cosine and sine of the rotary embedding, which each block's products keep; one complex table in fp32."""
    if not spec.rotary or setting.kernels != "model":
        return []
    latent = spec.latent
    if spec.complex_rotary:
        size = Size(spec.head_dim, WIDE, "row", "none", "d")
        return [tape.new("rotary table, complex", size) for _ in range(spec.rotary_tables)]
    if latent is not None and latent.rotation == "complex":
        return [tape.new("rotary table, complex", Size(latent.qk_rope_head_dim, 4, "row", "none", "d_r"))]
    turned = latent.qk_rope_head_dim if latent else round(spec.head_dim * spec.rotary_fraction)
    unit: Unit = "token" if spec.joins_images else "row"  # each image has positions of its own
    size = Size(turned // (1 + spec.half_rotary), 4 if spec.wide_rotary else setting.residual, unit, "none", "d")
    sizes = [*[size] * spec.rotary_tables, *[size._replace(elements=spec.wider_tables)] * bool(spec.wider_tables)]
    return [tape.new(f"rotary table, {name}", each) for name in ("cosine", "sine") for each in sizes]


def biases(tape: Tape, block: Block, attention: Attention, setting: BlockConfig, *, checkpointed: bool) -> list[Tensor]:
    """What the blocks share of masks and position biases.

    Where blocks are checkpointed, the causal mask of written-out attention, the position bias and the zeros of cross
    attention are among their inputs. Else the first block looks the bias up, and keeps the numbers of relative
    positions, and the zeros are one mask for all blocks if the kernel need not fill them up.
    """
    cross, out = block.cross_attention, list[Tensor]()
    if checkpointed and attention.causal and kernel(attention, setting) == "eager":
        out.append(tape.new(MASK, Size(1, setting.residual, "pair", "none", "s")))
    if checkpointed and window_masked(attention, setting):
        # Truth values, of which each kernel makes numbers; sequences share those of a sliding window
        out.append(tape.new(MASK, Size(1, 1, "pair" if attention.chunked else "square", "none", "s")))
    if attention.chunk is not None:  # squares of the image are put in order, and back at the end
        out.append(tape.new("order of squares", Size(2, INDEX, "image", "none", "2")))
    if attention.joins_batch and setting.kernels == "model":
        out.append(tape.new(MASK, Size(1, setting.residual, "pair", "none", "s")))
    if attention.scores_bias == "relative":
        looked_up = Size(1, INDEX, "square", "none", "1")
        bias = Size(attention.heads, setting.residual, "square", "tp", "a·s")
        out.append(
            tape.new("position bias" if checkpointed else "relative positions", bias if checkpointed else looked_up)
        )
    if cross is not None and cross.scores_bias == "zeros" and (checkpointed or kernel(cross, setting) == "efficient"):
        unit: Unit = "square" if checkpointed else "even_cross"
        out.append(tape.new("zero bias of cross attention", Size(cross.heads, setting.compute, unit, "tp", "a·s")))
    return out
