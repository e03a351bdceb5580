"""Linear layers and norms, as the models and the fused kernels write them."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING, NamedTuple

from memcalc.formulas.quantization import narrow_bytes
from memcalc.trace import ops
from memcalc.trace.adapters import Lora, Product, Quantised, adapted, project, project_quantised, target_of
from memcalc.trace.checkpoint import Rerun
from memcalc.trace.tape import Grads, Leaf, Shard, Size, Tape, Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from memcalc.specs.block import Norm


# Operands that TransformerEngine quantises for its products, as tensors of their own.
#
# Each linear layer quantises its own input. Of an operand that forward and backward read along different directions
# there are two copies, the second of which goes with the product; the GPU's matrix units may need only one. What is
# kept for the gradient of the weight is one direction.
#
# Source: TransformerEngine d0067d0d ``pytorch/module/linear.py``, ``layernorm_linear.py`` and ``grouped_linear.py``.


class Narrow(NamedTuple):
    """How operands are quantised."""

    width: Fraction
    """Bytes an element along one direction."""
    copies: int
    """Copies of an operand that is read along both."""
    gathers_rows: bool
    """Messages carry row-wise data alone, which is transposed after it has arrived (one scale a tensor)."""
    keeps_original: bool
    """The attention projection keeps its input as attention does."""

    def size(self, size: Size, copies: int = 1, shard: Shard | None = None) -> Size:
        """The extent of so many quantised copies."""
        each = narrow_bytes(size.elements, self.width.numerator, self.width.denominator)
        return size._replace(elements=copies * each, width=1, shard=size.shard if shard is None else shard)


def kept_input(
    tape: Tape, x: Tensor, name: str, narrow: Narrow | None, *, original: bool = False
) -> tuple[Tensor, list[Tensor]]:
    """What a linear layer keeps of its input, and what goes with its product.

    Nothing is quantised without ``narrow``; with ``original`` the input itself is kept all the same.
    """
    if narrow is None:
        return x, []
    copies = [tape.new(f"{name} input, quantised", narrow.size(x.size))]
    if original:
        return x, copies
    if narrow.copies > 1:
        copies.append(tape.new(f"{name} input, quantised the other way", narrow.size(x.size)))
    return copies.pop(0), copies


def input_again(tape: Tape, size: Size, name: str, narrow: Narrow | None, *, original: bool) -> list[Tensor]:
    """The input of ``size`` for the gradient of the weight, where it was kept as it was: quantised anew."""
    if narrow is None or not original:
        return []
    copies = narrow.copies if narrow.gathers_rows else 1
    return [tape.new(f"{name} input, quantised again", narrow.size(size, copies))]


def operands(tape: Tape, size: Size, name: str, narrow: Narrow | None) -> list[Tensor]:
    """A gradient of ``size``, quantised along both directions for the two products of backward."""
    if narrow is None:
        return []
    return [tape.new(f"gradient of {name} output, quantised", narrow.size(size, narrow.copies))]


def frozen_operands(tape: Tape, setting: BlockConfig, name: str, made: Size, weight: Size) -> list[Tensor]:
    """What the one product of a frozen layer's backward reads: a gradient of size ``made``, quantised, and the weight.

    The weight is transposed first where TransformerEngine 1 keeps no transpose (1.11 ``float8_tensor.py``,
    ``transpose_2d`` without ``fill_cache``).
    """
    anew = [tape.new(f"{name} weight, transposed", weight)] if setting.transposes_weights else []
    return [*operands(tape, made, name, setting.narrow_once), *anew]


def gathered_input(tape: Tape, size: Size, name: str, narrow: Narrow | None, *, again: bool = False) -> list[Tensor]:
    """A column-parallel layer's input from all ranks; ``again`` for backward, which reads it along the other way."""
    full = size._replace(shard="full if sp")
    if narrow is None:
        return [tape.new(f"{name} input, gathered", full)]
    copies = narrow.copies if again and narrow.gathers_rows else 1
    return [tape.new(f"{name} input, gathered", narrow.size(full, copies))]


def weight_of(elements: int, size: Size, shard: Shard) -> Size:
    """The gradient of a weight that turns a tensor of ``size`` into one of ``elements``."""
    return Size(elements * size.elements, 1, "once", shard if shard == "tp" or size.shard != "tp" else "tp")


def product(
    tape: Tape, size: Size, name: str, elements: int, label: str, shard: Shard, narrow: Narrow | None = None, *,
    gathers: bool = True,
) -> Tensor:  # fmt: skip
    """The output of a column-parallel product, with its input gathered as long as it runs."""
    inputs = gathered_input(tape, size, name, narrow) if gathers and shard == "tp" else []
    out_size = size._replace(elements=elements, label=label, shard=shard)
    out = tape.operator("mm", lambda: tape.new(f"{name} output", out_size))
    inputs.clear()
    return out


WIDE = 4
"""Bytes of a number in fp32."""


class BlockConfig(NamedTuple):
    """How a block is run: what decides which operators there are and in which width."""

    weight: int = 2
    """Bytes of a parameter that takes part in compute."""
    residual: int = 2
    """Bytes of the residual stream."""
    autocast: bool = False
    """fp32 tensors become 16-bit ones at each matmul."""
    kernels: str = "model"
    """model: as the model writes its operators; fused: norms and rotary in one kernel each."""
    attention: str = "flash"
    dropout: bool = True
    reentrant: bool = True
    """Checkpoints run as ``torch.autograd.Function`` (the recomputed output lives through the backward)."""
    stops_early: bool = False
    """Other checkpoints end with the last tensor that backward reads (``set_checkpoint_early_stop``)."""
    partitioned: bool = False
    """A block that is computed again keeps its input in parts, one on each tensor-parallel rank."""
    grouped_kernel: bool = True
    """Fused attention takes fewer key-value heads than query heads; else they are repeated before it."""
    sdpa: bool = False
    """Fused attention is called as Transformers calls PyTorch's SDPA: windows and explicit masks come as tensors."""
    windowed: bool = False
    """Sequences are at least as long as the window, if there is one."""
    rotary: str = ""
    """`fused`: the rotary embedding in one step whatever ``kernels`` says."""
    compiled: bool = False
    """Blocks are compiled: norms, rotary and activations are kernels, and :mod:`memcalc.trace.partition` cuts."""
    compiled_parts: bool = False
    """Modules of blocks with experts are, each inside of the checkpoint, whose policy sees none of their matmuls."""
    compressed: int = 0
    """Bits an element of what hooks pack of the saved tensors; 0 where these stay as they are."""
    keeps_attention: bool = True
    """Selective recomputation of operators keeps the attention kernel's output."""
    keeps_every_matmul: bool = False
    """The same keeps the output of every matmul, not of every second one."""
    keeps_biased: bool = False
    """And of layers with a bias, ``addmm``, which a policy for ``mm`` alone neither keeps nor counts."""
    operators: tuple[tuple[str, str], ...] = ()
    """Layers whose product is no ``mm`` to the policy, and what it is."""
    keeps_exchange: bool = False
    """The same keeps what all-to-all exchanges bring: tokens to their experts, and outputs back."""
    exchanges_rows: bool = False
    """Rows of experts are exchanged and sorted once more, as torchtitan does it."""
    gathered_input_saved: bool = False
    """Under sequence parallelism a column-parallel matmul keeps its gathered input (DTensor; Megatron does not)."""
    gathers_logits: bool = False
    """Whole logits under TP are put together from the ranks' parts of the vocabulary (DTensor)."""
    cp_kind: str = "ring"
    adds_gradients: bool = False
    """Weight gradients are added to a buffer as soon as they are made."""
    trainable: bool = True
    """False for a frozen base under adapters."""
    checkpointed: frozenset[str] = frozenset()
    """Parts of the block that are computed again: attention, core_attn, mlp, moe, layernorm, moe_act."""
    lora: Lora | None = None
    also_train: frozenset[str] = frozenset()
    """Layers that are trained in full beside adapters: head."""
    quantize: str = "none"
    """How the frozen weights of the linear layers are stored."""
    quantised_experts: bool = False
    """So are stacked experts, whose weights are made anew in each forward."""
    quantised_head: bool = False
    quantised_input_kept: bool = False
    """The product with a quantised weight keeps its input (bitsandbytes until 0.42; int8 always)."""
    quantised_copy_kept: bool = False
    """It keeps an 8-bit copy of its input (int8, bitsandbytes until 0.44)."""
    quantised_from_half: bool = False
    """The weight was quantised from fp16, so that the product casts what it makes of it to its input's dtype."""
    norm_weight: int = 0
    """Bytes of a norm's weight; those of other weights where 0."""
    end_weight: int = 0
    """Bytes of an element of embedding and head; those of other weights where 0."""
    casts_input: bool = False
    """A block's fp32 input is cast to the width of its weights before anything else (FSDP 2)."""
    embedding_leaf: bool = False
    """The token embedding's output is a leaf, held by its node (Transformers ``enable_input_require_grads``)."""
    expert_loop: bool = False
    """Routed experts run one after another."""
    narrow: Narrow | None = None
    """How TransformerEngine quantises the operands of linear layers; None where products are in 16 or 32 bits."""
    float8_attention: bool = False
    """Fused attention runs in 8 bits, and keeps what it reads and makes so."""
    float8_activation: bool = False
    """A gated activation keeps its input in 8 bits."""
    transposes_weights: bool = False
    """An 8-bit weight is transposed for each backward anew."""
    in_place: tuple[str, ...] = ()
    """Fused kernels that write over their input's memory, as :attr:`memcalc.frameworks.Habits.in_place_kernels`."""

    @property
    def fuses_mlp(self) -> bool:
        """A frozen dense MLP's activation reads and writes what its products are given and give, quantised."""
        lora = self.lora
        return lora is not None and bool(lora.classes) and lora.kernels == "fused" and self.narrow is not None

    def gate_kernel(self, activation: str) -> Callable[[Tape, Tensor, Tensor, str], Tensor] | None:
        """The one function of a gated MLP's activation and product, where they are no operators of their own."""
        fused = self.kernels == "fused" and "mlp" in self.in_place and activation in ("silu", "gelu", "gelu_tanh")
        return ops.recomputed_product if self.compiled else ops.gated_in_place if fused else None

    @property
    def narrow_once(self) -> Narrow | None:
        """How operands are quantised where the weight is frozen: along the direction of one product."""
        return self.narrow and self.narrow._replace(copies=1)

    @property
    def rerun(self) -> Rerun:
        """How checkpoints run what they wrap again."""
        return Rerun(self.reentrant, not (self.reentrant or self.compiled), self.stops_early)

    @property
    def branch_output(self) -> Shard:
        """What divides a branch's output: where the gathers are written out, it is whole until it is scattered."""
        return "none" if self.gathered_input_saved else "sp"

    @property
    def compute(self) -> int:
        """Bytes of a matmul's inputs and output."""
        return 2 if self.autocast else self.weight

    @property
    def embedding(self) -> int:
        """Bytes of what the embedding gives to the first block, which nothing has widened yet."""
        return min(self.end_weight or self.weight, self.residual)

    def quantises(self, target: str) -> bool:
        """Whether the weight of a linear layer, by the interface's word, is quantised; GPTQ leaves routers alone."""
        if self.quantize == "none" or not target or (target == "head" and not self.quantised_head):
            return False
        return not (target == "router" and self.quantize.startswith("gptq"))


def linear(
    tape: Tape,
    x: Tensor,
    setting: BlockConfig,
    name: str,
    elements: int,
    label: str,
    shard: Shard = "none",
    parts: int = 1,
) -> Tensor:
    """``x @ W.T``: keeps x where W is trained; backward makes the input's and the weight's gradient.

    ``elements`` of the output a token; ``shard`` is the output's. x may be one of ``parts`` equal parts of the rows.
    """
    quantised = setting.quantises(target := target_of(name))
    to = Product(name, setting.compute, elements, label, shard, parts, dict(setting.operators).get(target, "mm"))

    def base() -> Tensor:
        if quantised:
            keeps = setting.quantised_input_kept, setting.quantised_copy_kept
            return project_quantised(tape, x, to, Quantised(setting.quantize, *keeps, setting.quantised_from_half))
        trained = setting.trainable or target in setting.also_train
        return project(tape, x, to, trained=trained, autocast=setting.compute != setting.weight)

    if setting.lora is None or target not in setting.lora.targets:
        return base()
    return adapted(tape, x, setting.lora, to, base, quantised=quantised, autocast=setting.autocast)


def norm(tape: Tape, x: Tensor, spec: Norm, setting: BlockConfig, name: str, groups: int = 1) -> Tensor:
    """A norm over the last dimension, or over each of ``groups`` parts of it (heads)."""
    as_written = setting.kernels == "model" and not setting.compiled
    if spec.kind == "layernorm" and spec.written_out and as_written:
        return _centred(tape, x, spec, setting, name, groups)
    if spec.kind == "layernorm":
        return _one_kernel(tape, x, spec, setting, name, statistics=2 * groups)
    if not as_written:
        return _one_kernel(tape, x, spec, setting, name, statistics=groups)
    return _written_out(tape, x, spec, setting, name, groups)


def _one_kernel(tape: Tape, x: Tensor, spec: Norm, setting: BlockConfig, name: str, statistics: int) -> Tensor:
    """``native_layer_norm`` or a fused RMSNorm: keeps its input and one or two fp32 numbers a token."""
    wide, narrow = spec.kind == "layernorm" and spec.scale == "wide" and not setting.compiled, x.size.width
    if wide or (setting.autocast and not ("norms" in setting.in_place and spec.kind == "rmsnorm")):
        x = ops.cast(tape, x, 4, f"{name} input, fp32")
    size, in_place = x.size, "norms" in setting.in_place and spec.kind == "rmsnorm"
    stats = tape.new(f"{name} statistics", size._replace(elements=statistics, width=4, label=str(statistics)))
    weights = Size(x.size.elements * spec.vectors, 1, "once")
    leaf = Leaf(f"{name} weight", keep=True) if setting.trainable and spec.vectors else None

    def rule(grads: Grads) -> Grads:
        given = grads[0] if in_place else None
        grad = Tensor(given.storage, size) if given else tape.new(f"gradient before {name}", size)
        return [grad, tape.new(f"gradient of {name} weight", weights, "gradient") if leaf else None]

    shifted = spec.kind == "layernorm" and spec.scale == "plus-one" and not setting.compiled
    scale = tape.new(f"{name} scale", Size(x.size.elements, setting.norm_weight or setting.weight, "once"))
    saved = [x.storage, stats.storage, scale.storage if shifted else None]
    out = tape.record(tape.new(f"{name} output", size), [x, leaf], rule, saved)
    return ops.cast(tape, out, narrow, f"{name} output, cast") if wide else out


def _centred(tape: Tape, x: Tensor, spec: Norm, setting: BlockConfig, name: str, groups: int) -> Tensor:
    """A LayerNorm op by op, in fp32, which subtracts the mean twice (Transformers ``CohereLayerNorm``)."""
    width = x.size.width
    wide = ops.cast(tape, x, 4, f"{name} fp32 copy")
    mean = ops.mean(tape, wide, f"{name} mean", groups)
    spread = ops.add(tape, wide, mean, f"{name} deviation")
    variance = ops.mean(
        tape, ops.saves_input(tape, spread, f"{name} square", temporaries=2), f"{name} variance", groups
    )
    del spread
    rstd = ops.saves_output(tape, variance, f"{name} rstd")
    normalised = ops.mul(tape, ops.add(tape, wide, mean, f"{name} deviation"), rstd, f"{name} normalised")
    del wide, mean, rstd, variance
    return ops.cast(tape, weighted(tape, normalised, spec, setting, name, groups), width, f"{name} output, cast")


def _written_out(tape: Tape, x: Tensor, spec: Norm, setting: BlockConfig, name: str, groups: int) -> Tensor:
    """An RMSNorm op by op, in fp32 (Transformers ``LlamaRMSNorm``)."""
    width = x.size.width
    wide = ops.cast(tape, x, 4, f"{name} fp32 copy")
    square = ops.saves_input(tape, wide, f"{name} square", temporaries=2)
    variance = ops.mean(tape, square, f"{name} variance", groups)
    del square
    rstd = powered(tape, variance, name) if spec.powered else ops.saves_output(tape, variance, f"{name} rstd")
    normalised = ops.mul(tape, x if spec.rescales_input else wide, rstd, f"{name} normalised")
    del wide, rstd, variance
    if spec.scale == "narrow":
        return weighted(tape, ops.cast(tape, normalised, width, f"{name} normalised, cast"), spec, setting, name)
    return ops.cast(tape, weighted(tape, normalised, spec, setting, name, groups), width, f"{name} output, cast")


def powered(tape: Tape, variance: Tensor, name: str) -> Tensor:
    """``(variance + eps) ** -0.5``: a power saves what it is of, where a root saves its result (``Gemma4RMSNorm``)."""
    return ops.saves_input(tape, ops.shifted(tape, variance, f"{name} mean of squares"), f"{name} rstd", temporaries=2)


def weighted(tape: Tape, x: Tensor, spec: Norm, setting: BlockConfig, name: str, groups: int = 1) -> Tensor:
    """The product with the learned scale, its fp32 copy, or 1 + w: keeps x where it is trained, and what was made."""
    if not spec.weight:
        return x
    size = x.size.wide(max(x.size.width, setting.norm_weight or setting.weight))
    back, vectors = x.size, Size(x.size.elements // groups, 1, "once")
    leaf = Leaf(f"{name} weight", keep=True) if setting.trainable else None
    made = spec.scale == "plus-one" or (spec.written_out and setting.weight < WIDE)
    scale = tape.new(f"{name} scale", vectors.wide(WIDE)) if made else None

    def rule(_: Grads) -> Grads:
        grad = tape.new(f"gradient of {name} normalised", back)
        if leaf is None:
            return [grad, None]
        product = tape.new(f"gradient of {name} weight, before its sum", back)
        del product
        return [grad, tape.new(f"gradient of {name} weight", vectors, "gradient")]

    saved = [x.storage if leaf else None, scale.storage if scale and x.requires_grad else None]
    return tape.record(tape.new(f"{name} output", size), [x, leaf], rule, saved, reads=True)


# Sequence parallelism as DTensor runs it: gathers before a branch, reduce-scatters after it.
#
# Source: ``torch/distributed/tensor/parallel/style.py`` (PrepareModuleInput, RowwiseParallel) of PyTorch 2.13, with the
# plan of torchtitan ``parallelize_llama.py`` (9dec370): each branch of a block gathers its input once, and its matmuls
# keep that.


def gathered(tape: Tape, x: Tensor, setting: BlockConfig) -> Tensor:
    """The whole sequence on each rank; x itself without sequence parallelism."""
    if not setting.gathered_input_saved:
        return x
    back = x.size
    out = tape.new("gathered sequence", back._replace(shard="none"))
    return tape.record(out, [x], lambda _: [tape.new("gradient before the gather", back)])


def scattered(tape: Tape, x: Tensor, size: Size, setting: BlockConfig, *, last: bool = False) -> Tensor:
    """The sum over ranks of partial outputs, each rank its part of the sequence, of ``size``.

    ``last``: it ends the block.
    """
    if not setting.gathered_input_saved:
        return x
    back = x.size
    with tape.unread(active=last and setting.compiled):
        out = tape.operator("reduce-scatter", lambda: tape.new("reduced branch output", size))
    return tape.record(out, [x], lambda _: [tape.new("gradient of the branch output, gathered", back)])
