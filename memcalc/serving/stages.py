"""What a GPU of each pipeline stage of an engine holds.

The cache of keys and values: how layers share its blocks, and what a sequence takes of them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from memcalc.errors import InputError
from memcalc.formulas.serving import (
    cached_token_bytes,
    latent_token_bytes,
    padded,
    pool_blocks,
    prefill_bytes,
    request_blocks,
    routed_workspace_bytes,
    sampler_bytes,
    static_pool_bytes,
    windowed_tokens,
)
from memcalc.results.serving import CacheGroup, EngineStage, EngineTerm
from memcalc.serving.engines import LOGS, Engine
from memcalc.specs.block import Attention, Block, MixtureOfExperts, Mlp
from memcalc.terms.overhead import figure_of
from memcalc.terms.parameters import block_count
from memcalc.terms.tensors import elements_of
from memcalc.units import GIB, MIB

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from memcalc.specs.hardware import GPU
    from memcalc.specs.model import Model
    from memcalc.specs.posttraining import EngineInputs


# Weights of one rank of an engine, by pipeline stage and as they are stored.

VOCAB_MULTIPLE = 64
"""What vocabularies are padded to (vLLM ``vocab_parallel_embedding.py``, ``DEFAULT_VOCAB_PADDING_SIZE``)."""
EXPERT_MULTIPLE, HIDDEN_MULTIPLE = 128, 256
"""What the widths of experts in mxfp4 are padded to (vLLM ``layers/quantization/mxfp4.py``, Hopper)."""
WIDTHS = {"fp8": 1.0, "int8": 1.0, "int4": 0.5 + 2 / 128, "mxfp4": 17 / 32}
"""Bytes a quantised weight: int4 with an fp16 scale a group of 128, mxfp4 with a byte a group of 32."""
DTYPES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8": 1}
"""Bytes an element."""


@dataclass(frozen=True, slots=True)
class Shape:
    """How an engine holds a model."""

    tp: int
    pp: int
    width: int
    """Bytes an element that is not quantised."""
    quantization: str
    tower_parameters: int = 0


def stage_layers(layers: int, pp: int) -> tuple[int, ...]:
    """The layers of each stage: what does not divide goes to stages before the last.

    >>> stage_layers(32, 4), stage_layers(62, 4)
    ((8, 8, 8, 8), (15, 16, 16, 15))
    """
    counts = [layers // pp] * pp
    for index in range(layers % pp):
        counts[-2 - index] += 1
    return tuple(counts)


def stage_blocks(model: Model, pp: int) -> Iterator[list[Block]]:
    """The blocks of each stage, in order."""
    begin = 0
    for count in stage_layers(model.num_layers, pp):
        yield [model.groups[index].block for index in model.sequence[begin : begin + count]]
        begin += count


def weight_bytes(model: Model, blocks: list[Block], shape: Shape, *, first: bool, last: bool) -> int:
    """What a rank of a stage holds of weights [bytes]."""
    alike = Counter(map(id, blocks))
    distinct = {id(block): block for block in blocks}
    total: float = sum(count * _block_bytes(distinct[key], shape) for key, count in alike.items())
    total += _table_bytes(model, shape)
    vocab, outside = padded(model.vocab, VOCAB_MULTIPLE), {"first": 0, "last": 0}
    for tensor in model.outside:
        outside[tensor.place] += tensor.parameters
    table = vocab * (model.embedding_dim or model.hidden) / shape.tp
    if first:
        total += (table + outside["first"] + shape.tower_parameters) * shape.width
    if last:
        separate = model.head and (not model.tied or not first)
        total += ((table if separate else 0) + outside["last"] + model.hidden) * shape.width
    return int(total)


def _block_bytes(block: Block, shape: Shape) -> float:
    """A block's matrices as they are stored, and what is not quantised."""
    count = block_count(block)
    divided, undivided, routed = elements_of(block)
    matrices = divided + _repeated_keys(block.own_attention, block.hidden, shape.tp)
    rest = count.total - divided - undivided - routed
    if shape.quantization == "none":
        return (matrices / shape.tp + routed / shape.tp + undivided + rest) * shape.width + _absorbed(block, shape)
    if shape.quantization == "mxfp4":
        dense = (matrices / shape.tp + undivided + rest) * shape.width
        return dense + _padded_experts(block, shape) * WIDTHS["mxfp4"] + _absorbed(block, shape)
    stored = WIDTHS[shape.quantization] * (matrices / shape.tp + routed / shape.tp + undivided)
    return stored + rest * shape.width + _absorbed(block, shape)


def _repeated_keys(attention: Attention, hidden: int, tp: int) -> int:
    """Elements of all ranks' further copies of key and value projections, where there are fewer heads than ranks.

    Where values are keys, the weight of keys is loaded in the place of values too (vLLM ``models/gemma4.py``).
    """
    missing = 0 if attention.latent else max(0, tp - attention.kv_heads)
    return (2 * missing + attention.values_of_keys * attention.kv_heads) * attention.head_dim * hidden


def _absorbed(block: Block, shape: Shape) -> float:
    """The up projection of latents once more, taken apart for decoding (vLLM ``process_weights_after_loading``)."""
    latent = block.own_attention.latent
    if latent is None:
        return 0
    widths = latent.qk_nope_head_dim + latent.v_head_dim
    return block.own_attention.heads / shape.tp * latent.kv_lora_rank * widths * shape.width


def _padded_experts(block: Block, shape: Shape) -> int:
    """Elements of a rank's routed experts whose widths are padded."""
    if not isinstance(block.mlp, MixtureOfExperts):
        return 0
    ffn = padded(-(-block.mlp.ffn // shape.tp), EXPERT_MULTIPLE)
    elements: int = block.mlp.experts * (2 + block.mlp.gated) * ffn * padded(block.hidden, HIDDEN_MULTIPLE)
    return elements


def _table_bytes(model: Model, shape: Shape) -> int:
    """The tables of cosines and sines that all layers read [bytes]."""
    attention = model.main.block.own_attention
    if not attention.rotary or model.positions != "rope":
        return 0
    turned = attention.latent.qk_rope_head_dim if attention.latent else attention.head_dim * attention.rotary_fraction
    widths = attention.rotary_tables * turned + attention.wider_tables
    return int(model.max_positions * widths * shape.width)


TOWER_WORKSPACE = 184 * MIB
"""What a vision tower adds to the profiled step: the median over the vision models of the same logs."""
GRAPHS_BASE, GRAPHS_LAYER = 0.366 * GIB, 0.0161 * GIB
"""CUDA graphs of 51 sizes up to 512, and those of each layer: least squares over the dense models of the same logs."""
WEIGHTS, ACTIVATIONS, NON_TORCH = "weights", "activations", "outside PyTorch"
GRAPHS, CONTEXT, OTHER = "CUDA graphs", "context", "other processes"


@dataclass(frozen=True)
class EngineJob:
    """An engine with every default resolved."""

    model: Model
    gpu: GPU
    engine: Engine
    inputs: EngineInputs
    """With nothing left to a default."""
    tp: int
    pp: int

    @property
    def shape(self) -> Shape:
        """How the engine holds the model."""
        inputs = self.inputs
        return Shape(self.tp, self.pp, DTYPES[inputs.dtype], inputs.quantization, inputs.tower_parameters)

    @property
    def budget(self) -> int:
        """What the engine may take of a GPU [bytes]."""
        return int(self.inputs.utilization * self.gpu.memory_bytes)

    def told(self, **changes: object) -> EngineJob:
        """The same job with other inputs."""
        return replace(self, inputs=self.inputs.model_copy(update=changes))


def stages_of(job: EngineJob) -> tuple[EngineStage, ...]:
    """Each stage, with the pool that its budget leaves."""
    staged = list(stage_blocks(job.model, job.pp))
    return tuple(_stage(job, index, blocks) for index, blocks in enumerate(staged))


def _stage(job: EngineJob, index: int, blocks: list[Block]) -> EngineStage:
    terms = tuple(_terms(job, index, blocks))
    cache = _left(job, terms)
    width = DTYPES[job.inputs.dtype if job.inputs.kv_dtype == "auto" else job.inputs.kv_dtype]
    groups = groups_of(
        blocks,
        tp=job.tp,
        width=width,
        block_tokens=job.engine.block_tokens,
        max_len=job.inputs.max_len,
        batched=job.inputs.max_batched_tokens,
    )
    pool = blocks_of(groups, cache, job.engine.block_tokens)
    return EngineStage(stage=index, layers=len(blocks), terms=terms, cache=cache, blocks=pool, groups=groups)


def _left(job: EngineJob, terms: tuple[EngineTerm, ...]) -> int:
    """What the budget leaves for the cache [bytes]."""
    sizes = {term.name: term.bytes for term in terms}
    if job.engine.budget == "static":
        before = job.gpu.memory_bytes - sizes[CONTEXT] - sizes.get(NON_TORCH, 0) - sizes.get(OTHER, 0)
        return int(static_pool_bytes(before, job.inputs.utilization, sizes[WEIGHTS]))
    within = sum(term.bytes for term in terms if term.within)
    return job.budget - within - (sizes.get(OTHER, 0) + sizes[CONTEXT] if job.engine.counts_others else 0)


def _terms(job: EngineJob, index: int, blocks: list[Block]) -> Iterator[EngineTerm]:
    """What a GPU holds beside the cache; what is 0 is left out."""
    bounds_all, last = job.engine.budget == "whole", index == job.pp - 1
    shape = job.shape
    size = weight_bytes(job.model, blocks, shape, first=index == 0, last=last)
    inputs = {"layers": len(blocks), "tp": shape.tp, "e": shape.width, "quantization": shape.quantization}
    source = "vLLM vllm/model_executor/layers@001cabc1"
    yield EngineTerm(name=WEIGHTS, bytes=size, within=True, formula="P e / tp", inputs=inputs, source=source)
    yield _activations(job, blocks, last=last)
    yield _non_torch(job)
    if not job.inputs.eager:
        size = int(GRAPHS_BASE + GRAPHS_LAYER * len(blocks))
        yield EngineTerm(
            name=GRAPHS, bytes=size, within=bounds_all and job.engine.graphs_within, formula="g + l L",
            inputs={"g": int(GRAPHS_BASE), "l": int(GRAPHS_LAYER), "L": len(blocks)}, source=f"fitted on {LOGS}",
        )  # fmt: skip
    yield _context(job)
    if job.inputs.other:
        yield EngineTerm(
            name=OTHER, bytes=job.inputs.other, within=False, formula="as told", inputs={}, source="--other"
        )


def _activations(job: EngineJob, blocks: list[Block], *, last: bool) -> EngineTerm:
    """The profiled step: the sampler's copies of the logits, or one block's forward where that is more."""
    model, shape, inputs, engine = job.model, job.shape, job.inputs, job.engine
    seqs, tokens = inputs.max_seqs, inputs.max_batched_tokens
    vocab = int(padded(model.vocab, VOCAB_MULTIPLE))
    each = engine.logit_bytes + engine.counts_logit * shape.width
    sampler = sampler_bytes(seqs, vocab, each) + engine.counts_logit * tokens * model.hidden * shape.width
    dense = max((b.mlp.ffn for b in blocks if isinstance(b.mlp, Mlp)), default=0) // shape.tp
    forward = prefill_bytes(tokens, model.hidden, dense, shape.width)
    if job.pp > 1 and not last:
        sampler, forward = 0, forward + 2 * tokens * model.hidden * shape.width
    routed = 0 if shape.quantization == "mxfp4" else max((_routed(block, job) for block in blocks), default=0)
    tower = TOWER_WORKSPACE if inputs.tower_parameters else 0
    peak = int(max(sampler + engine.sampler_rest if sampler else 0, forward) + routed + tower)
    values = {"S": seqs, "V": vocab, "q": each, "B": tokens, "h": model.hidden, "f": dense, "e": shape.width}
    return EngineTerm(
        name=ACTIVATIONS, bytes=peak, within=engine.budget == "whole",
        formula="max(S V q + B h e + rest, B (6 f + 8.5 h) e / 2) + experts",
        inputs=values, source=f"vLLM v1/worker/gpu_model_runner.py@001cabc1; fitted on {LOGS}",
    )  # fmt: skip


def _routed(block: Block, job: EngineJob) -> int:
    if not isinstance(block.mlp, MixtureOfExperts):
        return 0
    width, ffn = job.shape.width, block.mlp.ffn // job.tp
    return int(routed_workspace_bytes(job.inputs.max_batched_tokens, block.mlp.topk, ffn, block.hidden, width))


def _non_torch(job: EngineJob) -> EngineTerm:
    size = max((row for row in job.engine.non_torch if row[0] <= job.tp), key=lambda row: row[0])[1]
    if job.pp > 1 and job.tp == 1:
        size = job.engine.non_torch_staged
    inputs = {"tp": job.tp, "pp": job.pp}
    bounds_all = job.engine.budget == "whole"
    source = f"medians of {LOGS}, on H100"
    return EngineTerm(name=NON_TORCH, bytes=size, within=bounds_all, formula="by tp", inputs=inputs, source=source)


def _context(job: EngineJob) -> EngineTerm:
    figure = figure_of(job.gpu, "context")
    size, source = job.gpu.context_bytes or figure.bytes, figure.source
    if job.gpu.context_bytes:
        source = job.gpu.source.get("context", source)
    return EngineTerm(name=CONTEXT, bytes=size, within=False, formula="of the GPU", inputs={}, source=source)


FEW = 1.5
"""With fewer times the layers of one kind than of another, all are padded to the more (vLLM ``kv_cache_utils.py``)."""
_Kind = tuple[str, int, int]
"""What a layer caches, its window (0 for none), and its bytes a token."""


def kind_of(attention: Attention, tp: int, width: int) -> _Kind:
    """What one layer caches."""
    latent = attention.latent
    if latent is not None:
        return "latent", 0, int(latent_token_bytes(latent.kv_lora_rank, latent.qk_rope_head_dim, width))
    size = int(cached_token_bytes(attention.kv_heads, attention.head_dim, attention.value_dim, tp, width))
    return ("window" if attention.window else "full"), attention.window or 0, size


def groups_of(
    blocks: Iterable[Block], *, tp: int, width: int, block_tokens: int, max_len: int, batched: int
) -> tuple[CacheGroup, ...]:
    """Layers of one kind together, cut into groups of as many as those of the rarer kind.

    Blocks of all groups are as large: of fewer bytes a token they have more tokens (``unify_kv_cache_spec_page_size``).
    """
    kinds = Counter(kind_of(block.own_attention, tp, width) for block in blocks)
    sizes, seen = {size for _, _, size in kinds}, {(kind, window) for kind, window, _ in kinds}
    most = max(sizes)
    if len(sizes) > 1 and (len(seen) == 1 or any(most % size for size in sizes)):
        allowed = "must all cache as many bytes a token, or those of one kind a multiple of the others'"
        raise InputError("model", "its layers", allowed)
    few, many = min(kinds.values()), max(kinds.values())
    layers = many if many < FEW * few else few
    return tuple(
        CacheGroup(
            kind=kind,
            layers=layers,
            window=window,
            token_bytes=size,
            request_blocks=_taken(window, block_tokens * (most // size), max_len, batched),
        )
        for (kind, window, size), count in kinds.items()
        for _ in range(-(-count // layers))
    )


def _taken(window: int, block_tokens: int, max_len: int, batched: int) -> int:
    if not window:
        return int(request_blocks(max_len, block_tokens))
    return int(request_blocks(windowed_tokens(window, batched, max_len), block_tokens, 1))


def blocks_of(groups: Sequence[CacheGroup], available: int, block_tokens: int) -> int:
    """The blocks of the pool: one block is of all layers of a group."""
    return int(pool_blocks(available, block_tokens, groups[0].layers, most_bytes(groups)))


def most_bytes(groups: Sequence[CacheGroup]) -> int:
    """Bytes a token of the layers that set the size of a block."""
    return max(group.token_bytes for group in groups)


def sequence_blocks(groups: Iterable[CacheGroup]) -> int:
    """The blocks that a sequence of the longest length takes of the pool."""
    return sum(group.request_blocks for group in groups)


def logged_tokens(groups: Sequence[CacheGroup], blocks: int, block_tokens: int, max_len: int, logs: str) -> int:
    """The tokens that the engine logs for its pool."""
    if logs == "concurrency":
        return int(blocks / sequence_blocks(groups) * max_len)
    return blocks // len(groups) * block_tokens
