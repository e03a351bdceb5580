"""A block as Megatron-LM writes it with TransformerEngine's modules: attention and the dense MLP.

What matters for memory: the norm is fused into the projection after it, which keeps both its input and the normalised
tensor; under sequence parallelism both are kept sharded and gathered again in backward; activation functions are one
kernel; queries, keys and values leave the packed projection as tensors of their own. Apex's modules of 2021 keep the
same tensors.

Sources: NVIDIA/Megatron-LM 23e00ed (core 0.14) ``core/transformer``; TransformerEngine c188b533 (2.11)
``pytorch/module/layernorm_linear.py``, ``linear.py`` and ``pytorch/attention/dot_product_attention``.

Multi-head latent attention as Megatron-LM writes it with TransformerEngine's modules.

Sources: Megatron-LM 23e00ed ``core/transformer/multi_latent_attention.py`` and
``core/fusions/fused_mla_yarn_rope_apply.py``: the queries are rotated in place; keys and values are new, and the packed
projection they come from is freed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from memcalc.specs.block import MixtureOfExperts
from memcalc.trace import ops
from memcalc.trace.checkpoint import WithoutOutput, checkpoint, discarding
from memcalc.trace.layers import norm
from memcalc.trace.parallel_linear import column_parallel, normalised_linear, row_parallel
from memcalc.trace.stacked_experts import experts
from memcalc.trace.tape import Grads, Kind, Shard, Size, Tape, Tensor

if TYPE_CHECKING:
    from memcalc.specs.block import Attention, Block, LatentAttention, Mlp
    from memcalc.trace.layers import BlockConfig, Narrow


MATERIALISED = ("eager", "math")
EXCHANGED: dict[str, Shard] = {"a2a": "tp if cp"}
"""Where context parallelism keeps the attention output twice, before and after its all-to-all."""


def is_written(block: Block, setting: BlockConfig) -> bool:
    """Whether Megatron-LM has such a block."""
    adapted = setting.lora is not None and not setting.lora.classes
    plain = not adapted and setting.quantize == "none" and block.cross_attention is None
    return plain and block.norm_place == "pre" and not block.parallel and block.norms == 2


def run(tape: Tape, x: Tensor, block: Block, setting: BlockConfig) -> Tensor:
    """The block's output from its input."""
    x = summed(tape, x, attention_branch(tape, x, block, setting), block, setting, "attention")
    return summed(tape, x, mlp_branch(tape, x, block, setting), block, setting, "MLP")


def summed(tape: Tape, x: Tensor, y: Tensor, block: Block, setting: BlockConfig, name: str) -> Tensor:
    """``bias_dropout_add``, one kernel: keeps the dropout's mask alone."""
    active, size = bool(block.dropout) and setting.dropout, x.size
    mask = [tape.new(f"{name} dropout mask", size.wide(1)).storage] if active else []

    def rule(grads: Grads) -> Grads:
        passed = [Tensor(g.storage, size) for g in grads if g is not None]
        return [*passed, tape.new(f"gradient before {name} dropout", size) if active else passed[0]]

    return tape.record(tape.new(f"{name} residual sum", size), [x, y], rule, mask)


def again(tape: Tape, setting: BlockConfig, name: str, function: Callable[..., Tensor], inputs: list[Tensor]) -> Tensor:
    """A part of the block, under Megatron's own checkpoint where the policy names it."""
    if name in setting.checkpointed:
        return checkpoint(tape, function, inputs, setting.rerun)
    return function(*inputs)


def attention_branch(tape: Tape, x: Tensor, block: Block, setting: BlockConfig) -> Tensor:
    """Norm, projections, attention and its output projection."""

    def part(y: Tensor) -> Tensor:
        if block.own_attention.latent is not None:
            return latent_attention(tape, y, block, setting, attend)
        return grouped_query(tape, y, block, setting)

    return again(tape, setting, "attention", part, [x])


def mlp_branch(tape: Tape, x: Tensor, block: Block, setting: BlockConfig) -> Tensor:
    """Norm and MLP; the norm stands outside a checkpoint of the experts, and inside one of the dense MLP."""
    spec = block.mlp
    if isinstance(spec, MixtureOfExperts):
        y = norm(tape, x, block.norm, setting, "MLP norm")
        out = again(tape, setting, "moe", lambda z: experts(tape, z, spec, setting, block.hidden), [y])
        return discarded(tape, setting, y, out)
    return again(tape, setting, "mlp", lambda z: dense(tape, z, block.own_mlp, block, setting), [x])


def discarded(tape: Tape, setting: BlockConfig, normalised: Tensor, out: Tensor) -> Tensor:
    """Drop the output of a norm that stands alone, where the policy says ``layernorm``."""
    return discarding(tape, normalised, out) if "layernorm" in setting.checkpointed else out


def grouped_query(tape: Tape, x: Tensor, block: Block, setting: BlockConfig) -> Tensor:
    """Attention from the block's input to its output projection."""
    spec = block.own_attention
    width = spec.q_dim + 2 * spec.kv_dim
    packed = normalised_linear(tape, x, block.norm, setting, "query-key-value projection", width, "q + 2·k")
    sizes, labels = [spec.q_dim, spec.kv_dim, spec.kv_dim], ["q", "k", "k"]
    q, k, v = ops.split(tape, packed, sizes, labels, "query-key-value projection")
    del packed
    if spec.rotary or spec.qk_norm != "none" or spec.kv_heads < spec.heads:
        # views whose layout the kernel does not know are copied
        q, k = (ops.plain(tape, part, name) for part, name in ((q, "queries"), (k, "keys")))
        v = ops.copy(tape, v, "values")
    if spec.qk_norm != "none":
        q, k = (normalised(tape, part, spec, setting, name) for part, name in ((q, "queries"), (k, "keys")))
    out = attend(tape, q, k, v, spec, setting)
    del q, k, v
    return attention_projection(tape, out, setting, block.hidden)


def normalised(tape: Tape, x: Tensor, spec: Attention, setting: BlockConfig, name: str) -> Tensor:
    """Queries or keys after a norm of their own, which keeps its input, and the rotary embedding, which keeps nothing.

    Source: TransformerEngine 02dc7709 ``pytorch/ops/basic/rmsnorm.py``: input and statistics are saved.
    """
    heads = x.size.elements // spec.head_dim
    x = norm(tape, x, spec.qk_norm_kind, setting, f"norm of {name}", groups=heads if spec.qk_norm == "head" else 1)
    return ops.plain(tape, x, f"{name}, rotated") if spec.rotary else x


def attention_projection(tape: Tape, x: Tensor, setting: BlockConfig, hidden: int) -> Tensor:
    """The output projection, which may keep what attention keeps in place of a quantised copy."""
    original = setting.narrow is not None and setting.narrow.keeps_original
    return row_parallel(tape, x, setting, "attention projection", hidden, original=original)


def attend(tape: Tape, q: Tensor, k: Tensor, v: Tensor, spec: Attention, setting: BlockConfig) -> Tensor:
    """Core attention, under a checkpoint of its own where the policy says so."""

    def part(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return core(tape, q, k, v, spec, setting)

    return again(tape, setting, "core_attn", part, [q, k, v])


def core(tape: Tape, q: Tensor, k: Tensor, v: Tensor, spec: Attention, setting: BlockConfig) -> Tensor:
    """Fused attention keeps q, k, v, its output and the logsumexp; else the scores are materialised."""
    values = q.size._replace(elements=spec.heads * spec.value_dim, label="a·d")
    if setting.attention in MATERIALISED:
        return scores(tape, q, k, v, spec, setting, values)
    sizes, exchanges = (q.size, k.size, v.size), setting.cp_kind in EXCHANGED
    read = in_eight_bits(tape, setting, q, k, v)
    if exchanges:
        exchanged(tape, *read)
    # The maximum and the sum of each row are kept apart where they are made in 8 bits
    rows = Size((1 + setting.float8_attention) * spec.heads, 4, q.size.unit, "tp", "a")
    out = tape.operator("sdpa", lambda: tape.new("attention output", values))
    lse = tape.operator("sdpa", lambda: tape.new("attention logsumexp", rows))
    saved = [*read, *in_eight_bits(tape, setting, out), lse]

    def rule(_: Grads) -> Grads:
        kind: Kind = "exchanged" if exchanges else "activation"
        return [tape.new("gradient of attention input", size, kind) for size in sizes]

    out = tape.record(out, [q, k, v], rule, [t.storage for t in saved])
    del read, saved
    if setting.attention == "flash":
        # FlashAttention wants the batch first: for one sequence that is the same memory
        out = beside(tape, out, "attention output, sequence first", "tp if batched")
    if exchanges:
        out = beside(tape, out, "attention output, exchanged", EXCHANGED[setting.cp_kind], "exchanged")
    return out


def in_eight_bits(tape: Tape, setting: BlockConfig, *tensors: Tensor) -> list[Tensor]:
    """Copies in 8 bits, which are what attention in 8 bits keeps; else the tensors themselves.

    Source: TransformerEngine v2.9 ``dot_product_attention/{backends,context_parallel}.py``, ``q_save`` and ``out_save``
    with ``NVTE_FP8_DPA_BWD``, which is on unless it is told.
    """
    if not setting.float8_attention:
        return list(tensors)
    return [tape.new("attention operand, 8-bit", tensor.size.wide(1)) for tensor in tensors]


def exchanged(tape: Tape, *tensors: Tensor) -> None:
    """Queries, keys and values as they come out of the all-to-all, whose last copy another stream makes.

    Source: TransformerEngine c188b533 ``dot_product_attention/context_parallel.py``, flash_attn_a2a_communicate.
    """
    for tensor in tensors:
        index = tensor.storage.index
        tape.records[index] = tape.records[index]._replace(kind="exchanged")


def beside(tape: Tape, x: Tensor, name: str, shard: Shard, kind: Kind = "activation") -> Tensor:
    """A copy that exists under a condition; else it is x, which is kept all the same."""
    size = x.size
    made = tape.new(name, size._replace(shard=shard), kind)

    def rule(_: Grads) -> Grads:
        return [tape.new(f"gradient before {name}", size, kind)]

    return tape.record(Tensor(made.storage, size), [x], rule)


def scores(tape: Tape, q: Tensor, k: Tensor, v: Tensor, spec: Attention, setting: BlockConfig, values: Size) -> Tensor:
    """Materialised scores: the masked softmax is one kernel that keeps its output (``fused_softmax.py``)."""
    square = Size(spec.heads, setting.compute, "pair", "tp", "a·s")
    if spec.kv_heads < spec.heads:
        k, v = (ops.copy(tape, t, f"{n}, repeated", q.size) for t, n in ((k, "keys"), (v, "values")))
    product = ops.matmul(tape, q, k, square, "attention scores")
    del q, k
    weights = masked_softmax(tape, product)
    del product
    weights = ops.dropout(tape, weights, "attention dropout", active=bool(spec.dropout) and setting.dropout)
    out = ops.matmul(tape, weights, v, values, "attention output")
    del weights, v
    return ops.copy(tape, out, "attention output, sequence first")


def masked_softmax(tape: Tape, x: Tensor) -> Tensor:
    """``scaled_upper_triang_masked_softmax_cuda``: keeps its output; backward writes over its gradient."""
    size = x.size
    out = tape.new("attention softmax", size)

    def rule(grads: Grads) -> Grads:
        return [None if g is None else Tensor(g.storage, size) for g in grads]

    return tape.record(out, [x], rule, [out.storage])


def dense(tape: Tape, x: Tensor, spec: Mlp, block: Block, setting: BlockConfig) -> Tensor:
    """A dense MLP with its norm."""
    width, label = (2 * spec.ffn, "2·f") if spec.gated else (spec.ffn, "f")
    up = normalised_linear(tape, x, block.norm, setting, "MLP up projection", width, label)
    quantised = setting.narrow_once if setting.fuses_mlp else None
    inner = activated(
        tape, up, spec.ffn, "MLP activation", narrow=setting.float8_activation and spec.gated, quantised=quantised
    )
    del up
    return row_parallel(tape, inner, setting, "MLP down projection", block.hidden)


def activated(
    tape: Tape, x: Tensor, elements: int, name: str, *, narrow: bool = False, quantised: Narrow | None = None
) -> Tensor:
    """``bias_swiglu`` or ``bias_gelu``, one kernel each way: keeps its input, of 8 bits where it is ``narrow``.

    Where operators are fused it writes its output, and backward its gradient, as the products read them, ``quantised``.
    Sources: Megatron-LM d98e8a64 ``core/fusions/fused_bias_swiglu.py``, ``fp8_input_store``; TransformerEngine d0067d0d
    ``pytorch/ops/basic/swiglu.py``.
    """
    size, out_size = x.size, x.size._replace(elements=elements, label="f")
    saved = tape.new(f"{name} input, 8-bit", size.wide(1)) if narrow else x

    def made(name: str, of: Size) -> Tensor:
        return Tensor(tape.new(name, quantised.size(of) if quantised else of).storage, of)

    out = made(name, out_size)

    def rule(_: Grads) -> Grads:
        wide = [tape.new(f"{name} input, widened", size)] * narrow
        grad = made(f"gradient before {name}", size)
        wide.clear()
        return [grad]

    return tape.record(out, [x], rule, [saved.storage])


Core = Callable[[Tape, Tensor, Tensor, Tensor, "Attention", "BlockConfig"], Tensor]


def latent_attention(tape: Tape, x: Tensor, block: Block, setting: BlockConfig, core: Core) -> Tensor:
    """From the block's input to the output projection; the input's norm stands alone here."""
    spec, latent = block.own_attention, block.own_attention.latent
    if latent is None:
        raise ValueError("latent_attention needs an attention with a latent space")
    y = norm(tape, x, block.norm, setting, "attention norm")

    def up(query: Tensor, key: Tensor, turned: Tensor) -> list[Tensor]:
        return projected_up(tape, query, key, turned, block, latent, setting)

    again = WithoutOutput(tape, up) if "mla_up_proj" in setting.checkpointed else None
    downs = projected_down(tape, y, latent, setting)
    q, k, v = again.run(downs) if again else up(*downs)
    del downs
    out = core(tape, q, k, v, spec, setting)
    del q, k, v
    if again:
        out = again.discard(out)
    out = attention_projection(tape, out, setting, block.hidden)
    return discarding(tape, y, out) if "layernorm" in setting.checkpointed else out


def projected_down(tape: Tape, y: Tensor, latent: LatentAttention, setting: BlockConfig) -> list[Tensor]:
    """What queries, keys and values are made from: latent vectors, and the keys' rotary part, shared by all heads."""
    rank, turned = latent.q_lora_rank, latent.qk_rope_head_dim
    project = partial(column_parallel, original="layernorm" in setting.checkpointed)
    query = y if rank is None else project(tape, y, setting, "query down projection", rank, "r_q", "sp")
    both = latent.kv_lora_rank + turned
    down = project(tape, y, setting, "key-value down projection", both, "r_kv + d_r", "sp")
    return [query, *ops.split(tape, down, [latent.kv_lora_rank, turned], ["r_kv", "d_r"], "key-value down projection")]


def projected_up(
    tape: Tape, query: Tensor, key: Tensor, turned: Tensor, block: Block, latent: LatentAttention, setting: BlockConfig
) -> list[Tensor]:
    """Queries, keys and values of all heads, rotated."""
    spec, name = block.own_attention, "query projection" if latent.q_lora_rank is None else "query up projection"
    if latent.q_lora_rank is None:
        q = column_parallel(tape, query, setting, name, spec.q_dim, "q")
    else:
        q = normalised_linear(tape, query, block.norm, setting, name, spec.q_dim, "q")
    width = spec.heads * (latent.qk_nope_head_dim + latent.v_head_dim)
    up = normalised_linear(tape, key, block.norm, setting, "key-value up projection", width, "a·(d_n + d_v)")
    return [q, *rotated(tape, up, turned, spec, latent)]


def rotated(tape: Tape, up: Tensor, shared: Tensor, spec: Attention, latent: LatentAttention) -> tuple[Tensor, Tensor]:
    """Keys and values as new tensors: keeps nothing but cosine and sine."""
    sizes = (up.size, shared.size)
    keys = tape.new("keys", up.size._replace(elements=spec.q_dim, label="a·(d_n + d_r)"))
    values = tape.new("values", up.size._replace(elements=spec.heads * latent.v_head_dim, label="a·d_v"))

    def rule(_: Grads) -> Grads:
        return [tape.new("gradient before rotated keys and values", size) for size in sizes]

    k, v = tape.record_many([keys, values], [up, shared], rule)
    return k, v
