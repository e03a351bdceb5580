"""Multi-head latent attention as Megatron-LM writes it with TransformerEngine's modules.

Sources: Megatron-LM 23e00ed ``core/transformer/multi_latent_attention.py`` and
``core/fusions/fused_mla_yarn_rope_apply.py``: the queries are rotated in place; keys and values are new, and the packed
projection they come from is freed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from memcalc.trace import ops
from memcalc.trace.checkpoint import discarding
from memcalc.trace.layers import norm
from memcalc.trace.parallel_linear import column_parallel, normalised_linear, row_parallel
from memcalc.trace.tape import Grads, Tape, Tensor
from memcalc.trace.without_output import WithoutOutput

if TYPE_CHECKING:
    from memcalc.specs.model import Attention, Block, LatentAttention
    from memcalc.trace.layers import Setting

Core = Callable[[Tape, Tensor, Tensor, Tensor, "Attention", "Setting"], Tensor]


def latent_attention(tape: Tape, x: Tensor, block: Block, setting: Setting, core: Core) -> Tensor:
    """From the block's input to the output projection; the input's norm stands alone here."""
    spec, latent = block.attention, block.attention.latent
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
    out = row_parallel(tape, out, setting, "attention projection", block.hidden)
    return discarding(tape, y, out) if "layernorm" in setting.checkpointed else out


def projected_down(tape: Tape, y: Tensor, latent: LatentAttention, setting: Setting) -> list[Tensor]:
    """What queries, keys and values are made from: latent vectors, and the keys' rotary part, shared by all heads."""
    rank, turned = latent.q_lora_rank, latent.qk_rope_head_dim
    query = y if rank is None else column_parallel(tape, y, setting, "query down projection", rank, "r_q", "sp")
    both = latent.kv_lora_rank + turned
    down = column_parallel(tape, y, setting, "key-value down projection", both, "r_kv + d_r", "sp")
    return [query, *ops.split(tape, down, [latent.kv_lora_rank, turned], ["r_kv", "d_r"], "key-value down projection")]


def projected_up(
    tape: Tape, query: Tensor, key: Tensor, turned: Tensor, block: Block, latent: LatentAttention, setting: Setting
) -> list[Tensor]:
    """Queries, keys and values of all heads, rotated."""
    spec, name = block.attention, "query projection" if latent.q_lora_rank is None else "query up projection"
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
