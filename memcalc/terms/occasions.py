"""What a rank holds beside its steps: what always stays there, and what evaluation, loading and saving add to it.

Evaluation and generation: a forward without gradients, the outputs that are kept, and a cache of keys and values.

What autograd would keep is gone with the layer that made it, so that a block's working set stands where training has
the activations of all blocks. Frameworks' evaluation loops differ in what they keep of the outputs:
Transformers' Trainer keeps the logits of each batch, gathered from all ranks, where it has ``compute_metrics``
(5.23 ``trainer.py``, ``evaluation_loop``), in fp32 where Accelerate casts autocast's outputs back
(1.15 ``utils/operations.py``, ``convert_outputs_to_fp32``).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from memcalc.formulas.activations import joined_outputs_bytes, key_value_bytes, waiting_outputs_bytes
from memcalc.formulas.optimizer_states import shard
from memcalc.frameworks.habits import EVALUATION_BATCH, READS, WRITES
from memcalc.ledger import PHASES, Ledger, Term, add_up
from memcalc.terms.activations import full, groups_of, largest
from memcalc.terms.adapters import ADAPTERS
from memcalc.terms.build import build_ledger
from memcalc.terms.every_k_blocks import INVENTORY
from memcalc.terms.head import loss_of, over_vocabularies
from memcalc.terms.host import off_gpu_terms
from memcalc.terms.model_on_grid import BlockCache
from memcalc.terms.parameters import state_elements
from memcalc.terms.pipeline import boundary
from memcalc.terms.settings import in_tiles
from memcalc.terms.states import in_one_buffer

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from memcalc.formulas import Array
    from memcalc.terms.model_on_grid import ModelOnGrid
    from memcalc.terms.overhead import Workspaces


class Occasion(NamedTuple):
    """One thing that a job does beside its steps, on a grid of one strategy."""

    name: str
    """loading, resuming, evaluation, generation or saving."""
    when: str
    """What it is, in a few words."""
    terms: tuple[Term, ...]
    """On the GPU by rank and stage, on the host by node (``tier``); all of one moment."""
    certain: bool
    """Whether the job was told to do it; else it is what its framework does by default."""
    outputs: int = 0
    """Of an evaluation: the outputs of one batch of all ranks [bytes]."""


def resident(ledger: Ledger, census: ModelOnGrid, components: Iterable[str] = ()) -> list[Term]:
    """What stays on the GPU between steps; of some components alone where they are named.

    One buffer of all gradients stays too, or of a rank's share of them, which the ledger has by the moments of a step.
    """
    names = set(components)
    terms = [term for term in ledger.terms if set(term.phases) >= set(PHASES)]
    if census.grid.persistent_gradients or np.all(in_one_buffer(census.grid)):
        terms += [t for t in ledger.terms if t.component == "gradients" and "step" in t.phases and t not in terms]
    return [replace(term, phases=()) for term in terms if not names or term.component in names]


def on_gpu(terms: Iterable[Term]) -> Array:
    """The sum of what lies on the GPU, by stage [bytes]."""
    return add_up([term.bytes for term in terms if term.tier == "gpu"])


def larger(first: list[Term], *others: list[Term]) -> list[Term]:
    """Of the moments of an occasion the one with the largest stage."""
    return max([first, *others], key=lambda terms: int(np.max(on_gpu(terms))))


def whole_weights(census: ModelOnGrid, ledger: Ledger, away: Iterable[Term]) -> Array:
    """All weights of a stage, put together from the shards of its ranks, wherever these lie [bytes]."""
    grid = census.grid
    shards = [term.bytes for term in resident(ledger, census, ["parameters"])]
    shards += [term.bytes for term in away if term.component == "parameters"]
    sharded = grid.zero_from(2 if grid.habits.full_shard else 3)
    return add_up(shards) * np.where(sharded, grid.ranks, 1)


def weights_are_sharded(census: ModelOnGrid) -> bool:
    """Whether data-parallel ranks share the weights."""
    grid = census.grid
    stage = 2 if grid.habits.full_shard else 3
    return bool(np.any(grid.zero_from(stage) & (grid.ranks > 1)))


def writes_together(census: ModelOnGrid) -> bool:
    """Whether ranks share what a checkpoint has: weights, or the states of Megatron-LM's distributed optimizer."""
    grid = census.grid
    states = grid.habits.name == "megatron" and bool(np.any(grid.zero_from(1) & (grid.ranks > 1)))
    return states or weights_are_sharded(census)


def largest_unit(census: ModelOnGrid) -> Array:
    """Elements of what FSDP 1 gathers at once: a block, or embedding and head together."""
    return np.maximum(census.largest_block, census.root)


QUANTISED = "transformers 5.23 core_model_loading.py; bitsandbytes nn/modules.py: Params4bit._quantize on the GPU"
CAST = "axolotl 067b021c8 loaders/model.py: _configure_embedding_dtypes, to fp32 and back"
FSDP1 = "torch 2.13 distributed/fsdp/_state_dict_utils.py: _full_pre_state_dict_hook, _full_post_state_dict_hook"
FSDP2 = "torch 2.13 distributed/_state_dict_utils.py: _gather_state_dict, tensor by tensor"
SENT = "Accelerate 1.15 utils/fsdp_utils.py: fsdp2_load_full_state_dict, tensor by tensor"
ENGINE = (
    "DeepSpeed 0.19.6 runtime/engine.py: _zero3_consolidated_16bit_state_dict, _get_all_zero_checkpoint_state_dicts"
)
STAGE3 = "DeepSpeed 0.19.6 runtime/zero/stage3.py: initialize_optimizer_states, _rigid_load_state_dict"
ZERO_STEP = "torch 2.13 distributed/checkpoint/state_dict.py: _init_optim_state steps once with gradients of zero"
MEGATRON = "Megatron-LM d98e8a64 core/optimizer/distrib_optimizer.py: get_parameter_state_dp_zero"
MEGATRON_STATES = {"adamw": 2, "sgd-momentum": 1, "sgd": 0}
"""By optimizer the states that are gathered beside the weights; of others nobody here knows which [1]."""
TRAINER = "transformers 5.23 trainer.py: _load_optimizer_and_scheduler"


def checkpoints(census: ModelOnGrid, ledger: Ledger, ranks: int) -> Iterator[Occasion]:
    """Loading, resuming and saving as the framework does them; ``ranks`` are those of one host [ranks]."""
    if census.model.recording is None:
        for occasion in (
            _loading(census, ledger, ranks),
            _resuming(census, ledger, ranks),
            _saving(census, ledger, ranks),
        ):
            if occasion is not None:
                yield occasion


def _loading(census: ModelOnGrid, ledger: Ledger, ranks: int) -> Occasion | None:
    grid, name, reader = census.grid, census.grid.habits.name, census.grid.fixed.loading
    if (name not in READS and not reader) or (grid.fixed.quantize != "none" and weights_are_sharded(census)):
        return None
    weights = resident(ledger, census, ["parameters"])
    total = np.sum(whole_weights(census, ledger, off_gpu_terms(census)))
    source, sharded = READS.get(name, READS["hf"]), weights_are_sharded(census)
    if grid.fixed.quantize != "none":
        return _loading_narrow(census, weights)
    alone = reader == "rank-0" or (name == "deepspeed" and sharded and not reader)
    copies = 1 if alone else ranks
    title = "weights as they are read, a copy of each rank" if copies > 1 else "weights as they are read"
    inputs = {"P": total, "n": copies}
    host = Term("parameters", title, total * copies, (), "n · w · P", source, inputs, tier="host")
    if not sharded:
        return Occasion("loading", "weights loaded on the host", (*weights, host), certain=bool(reader))
    if name == "deepspeed":
        width = census.width("compute")
        unit = Term("buffers", "one whole tensor", width * census.largest_tensor, (), "w · P_tensor", source)
        return Occasion("loading", "weights loaded under zero.Init", (*weights, unit, host), certain=bool(reader))
    width = census.width("parameter")
    if alone and not grid.habits.flat_units:
        unit = Term("buffers", "one whole tensor", width * census.count.largest_tensor, (), "w · P_tensor", SENT)
        return Occasion("loading", "weights sent by rank 0 and sharded", (*weights, unit, host), certain=bool(reader))
    unit = Term("buffers", "one whole unit before it is sharded", width * largest_unit(census), (), "w · P_unit", FSDP1)
    return Occasion("loading", "weights loaded on the host and sharded", (*weights, unit, host), certain=bool(reader))


def _loading_narrow(census: ModelOnGrid, weights: list[Term]) -> Occasion:
    """Weights quantised as they come, then cast: each tensor lies in 16 bits beside what is made of it."""
    fixed, inputs = census.grid.fixed, {"P_root": census.root}
    base = [term for term in weights if term.source != ADAPTERS]  # these are added to what is prepared
    passing = fixed.kbit_passing and not fixed.kbit_ends
    title = "one 16-bit tensor before it is quantised"
    if passing:
        title += " or cast"
        base.append(Term("parameters", "embedding and head, in fp32", 2 * census.root, (), "2 · P_root", CAST, inputs))
    base.append(Term("parameters", title, 2 * census.largest_tensor, (), "2 · P_tensor", QUANTISED))
    certain = bool(fixed.loading) or passing
    return Occasion("loading", "weights quantised as they are loaded", tuple(base), certain=certain)


def _resuming(census: ModelOnGrid, ledger: Ledger, ranks: int) -> Occasion | None:
    """States read anew: into those that an engine has already made, or in place of none."""
    grid, name, certain = census.grid, census.grid.habits.name, census.grid.fixed.resumes
    states = resident(ledger, census, ["parameters", "optimizer", "gradients"])
    moments = [term for term in states if term.component == "optimizer"]
    read = sum((term.bytes for term in moments), np.int64(0))
    inputs = {"n": ranks}
    if name == "deepspeed":
        title = "states as they are read, of each rank"
        host = Term("optimizer", title, np.max(read) * ranks, (), "n · B_states", ENGINE, inputs, tier="host")
        again = [replace(t, name=f"{t.name}, read anew", source=STAGE3) for t in moments if "moment" in t.name]
        in_place = not weights_are_sharded(census) or grid.offloaded("optimizer").any()
        terms = [*states, host] if in_place else [*states, *again, host]
        return Occasion("resuming", "DeepSpeed's shards read on the host", tuple(terms), certain=certain)
    if name == "hf" and not weights_are_sharded(census):
        on_host = read if int(np.max(grid.degree("gpus"))) == 1 else np.int64(0)
        title = "states as they are read"
        host = Term("optimizer", title, on_host, (), "B_states", TRAINER, {}, tier="host")
        return Occasion("resuming", "optimizer states read by each rank", (*states, host), certain=certain)
    if name in {"fsdp2", "torchtitan"} and weights_are_sharded(census):
        made = [t for t in ledger.terms if "step" in t.phases and t.component in {"gradients", "optimizer", "buffers"}]
        step = [replace(t, phases=(), source=ZERO_STEP) for t in made if t.name not in {s.name for s in states}]
        return Occasion(
            "resuming", "a first step with zero gradients makes the states", (*states, *step), certain=certain
        )
    return None


def _saving(census: ModelOnGrid, ledger: Ledger, ranks: int) -> Occasion | None:
    grid, name, form = census.grid, census.grid.habits.name, census.grid.fixed.state_dict
    usual, source = WRITES.get(name, ("", ""))
    if not writes_together(census) or not (form or usual):
        return None
    if name == "megatron":
        return _saving_of_megatron(census, ledger, ranks)
    chosen, states = form or usual, resident(ledger, census)
    total = whole_weights(census, ledger, off_gpu_terms(census))
    if chosen == "sharded":
        return Occasion("saving", "each rank writes its shards", tuple(states), certain=bool(form))
    if name == "deepspeed":
        unit, formula, source = census.width("compute") * census.largest_tensor, "w · P_tensor", ENGINE
    elif grid.habits.flat_units:
        unit, formula, source = census.width("parameter") * largest_unit(census), "w · P_unit", FSDP1
    else:
        unit, formula, source = census.width("parameter") * census.count.largest_tensor, "w · P_tensor", FSDP2
        total = total * grid.degree("tp")  # a DTensor is gathered over both of its dimensions
    inputs = {"P": census.parameters}
    at_once = Term("buffers", "weights that are gathered at once", np.asarray(unit), (), formula, source, inputs)
    if chosen == "full-on-gpu":
        copy = Term("buffers", "all weights, gathered", total, (), "w · P", source, inputs)
        # The root's unit stays whole while those of its blocks are cloned
        root = replace(at_once, bytes=census.width("parameter") * (census.root + census.largest_block))
        parts = (*states, copy, root) if grid.habits.flat_units else (*states, copy)
        return Occasion("saving", "all weights gathered on every GPU", parts, certain=bool(form))
    host = Term("parameters", "all weights on rank 0", np.sum(total) * np.int64(1), (), "w · P", source, tier="host")
    return Occasion("saving", "all weights gathered on rank 0's host", (*states, at_once, host), certain=bool(form))


def _saving_of_megatron(census: ModelOnGrid, ledger: Ledger, ranks: int) -> Occasion | None:
    """The distributed optimizer's states; weights are whole on each data-parallel rank, and are written as they are.

    Whole states go bucket by bucket, in fp32: over gloo to the host of one rank, or over NCCL through the GPU to the
    hosts of all. Without ``--overlap-grad-reduce`` a bucket is a whole buffer: one of the experts, one of the rest.
    """
    grid, form, states = census.grid, census.grid.fixed.state_dict, resident(ledger, census)
    if form in {"", "sharded"}:
        return Occasion("saving", "each rank writes its shards", tuple(states), certain=bool(form))
    if grid.fixed.optimizer not in MEGATRON_STATES:
        return None
    dense, experts = census.blocks + census.root, census.experts_or_none
    width = 4 * (1 + MEGATRON_STATES[grid.fixed.optimizer])
    through_gpu = form == "full-on-gpu"
    copies = np.int64(ranks) if through_gpu else grid.degree("tp")  # ranks of a host that hold the states of a stage
    inputs = {"w": width, "P": dense + experts, "n": copies}
    size = width * (dense + experts) * copies
    host = Term("optimizer", "whole states in fp32", size, (), "n · w · P", MEGATRON, inputs, tier="host")
    if not through_gpu:
        return Occasion("saving", "states gathered on the host of a rank", (*states, host), certain=True)
    shares = 4 * shard(dense, grid.ranks), 4 * shard(experts, grid.expert_ranks)
    gathered = np.maximum(4 * dense + shares[0], 4 * experts + shares[1])
    formula = "4 · (P_buffer + ⌈P_buffer / N⌉)"
    bucket = Term("buffers", "one state of a whole buffer, gathered", gathered, (), formula, MEGATRON, inputs)
    return Occasion("saving", "states gathered through each GPU", (*states, bucket, host), certain=True)


LOOP = "transformers 5.23 trainer.py: evaluation_loop; trainer_pt_utils.py: EvalLoopContainer"
CACHE = "transformers 5.23 cache_utils.py: DynamicLayer.update"


def evaluation_batch(census: ModelOnGrid) -> int:
    """Sequences that a rank evaluates at a time; those of training where neither job nor framework says it."""
    grid = census.grid
    usual = EVALUATION_BATCH.get(grid.habits.name, grid.micro_batches[0])
    return usual if grid.fixed.eval_micro_batch is None else grid.fixed.eval_micro_batch


def evaluations(census: ModelOnGrid, workspaces: Workspaces) -> Iterator[Occasion]:
    """Evaluation and, where it is asked for, generation; neither of a recorded module, whose forward is not known."""
    fixed, size = census.grid.fixed, evaluation_batch(census)
    if not size or census.model.recording is not None:
        return
    other = without_gradients(census, size)
    ledger, certain = build_ledger(other, workspaces), fixed.eval_micro_batch is not None
    when = f"evaluation of {size} sequence{'s' * (size > 1)} per rank"
    suffix = f", the logits of {fixed.eval_batches_kept} batches kept" * bool(fixed.eval_batches_kept)
    outputs = int(np.max(outputs_bytes(other)))
    yield Occasion("evaluation", f"{when}{suffix}", tuple(larger(*_evaluation(other, ledger))), certain, outputs)
    if moments := _generation(other, ledger):
        text = f"generation of {fixed.eval_new_tokens} tokens for {size} sequence{'s' * (size > 1)} per rank"
        yield Occasion("generation", text, tuple(larger(*moments)), certain)


def without_gradients(census: ModelOnGrid, size: int) -> ModelOnGrid:
    """The same job with an evaluation's batch, in which a block's forward keeps nothing but its input."""
    grid = census.grid
    fixed = grid.fixed.model_copy(update={"global_batch": 0, "global_tokens": 0, "longest_first": False})
    if grid.habits.evaluation_logits and fixed.loss == "fused-linear" and not in_tiles(grid):
        fixed = fixed.model_copy(update={"loss": "standard"})
    passing = replace(grid, fixed=fixed, micro_batches=(size,) * len(grid.lengths), recomputes=("full",))
    return replace(census, grid=passing, blocks_cache=BlockCache())


def evaluation_bytes(census: ModelOnGrid, workspaces: Workspaces) -> Array:
    """What evaluation and generation need on the GPU, of no strategy more than on a grid of its own [bytes]."""
    other = without_gradients(census, evaluation_batch(census))
    ledger = build_ledger(other, workspaces, detail=False)
    moments = [on_gpu(terms) for terms in (*_evaluation(other, ledger), *_generation(other, ledger))]
    return np.asarray(np.max(full(largest(moments)), axis=1, keepdims=True))


def _evaluation(census: ModelOnGrid, ledger: Ledger) -> tuple[list[Term], ...]:
    """Its moments: a block's forward, the head's, and where outputs are joined."""
    grid = census.grid
    states, outputs, batches = resident(ledger, census), outputs_bytes(census), grid.fixed.eval_batches_kept
    cache = [_cached(census, grid.seq_len)] if grid.habits.evaluation_cache else []
    inputs = {"o": outputs, "k": batches}
    title, formula = "logits of earlier batches, of all ranks", "(k - 1) · o, or k · o from the third batch on"
    earlier = np.asarray(waiting_outputs_bytes(outputs, batches)) if batches else np.int64(0)
    waiting = Term("activations", title, earlier, (), formula, LOOP, inputs)
    title, formula = "logits of all kept batches, old and joined", "2 · k · o"
    joined = Term("activations", title, np.asarray(joined_outputs_bytes(outputs, batches)), (), formula, LOOP, inputs)
    block = [*states, *_gathered(ledger, "forward-last"), _block(census), *cache, waiting]
    head = [*states, *_gathered(ledger, "forward"), *_head(census), *cache, waiting]
    return block, head, [*states, joined]


def _generation(census: ModelOnGrid, ledger: Ledger) -> tuple[list[Term], ...]:
    """Its moments, if any: the prompt's forward, or the last token: its logits, and a layer whose cache is copied."""
    grid = census.grid
    if not grid.fixed.eval_new_tokens or not any(attention.causal for attention in census.model.attentions):
        return ()
    states, length = resident(ledger, census), grid.seq_len + grid.fixed.eval_new_tokens
    gathered = _gathered(ledger, "forward-last")
    prompt = [*states, *gathered, _block(census), _cached(census, grid.seq_len)]
    rows = {"b": grid.micro_batch, "V": census.vocab}
    logits = 4 * grid.micro_batch * census.vocab * grid.is_last
    title, copied = "logits of the last token", np.max(_layer_caches(census, length)) * np.int64(1)
    last = Term("activations", title, logits, (), "4 · b · V", "transformers 5.23 generation/utils.py", rows)
    grown = Term("activations", "a layer's cache while it grows", copied, (), "w · T · (d_k + d_v)", CACHE)
    return prompt, [*states, *gathered, last, grown, _cached(census, length)]


def _gathered(ledger: Ledger, phase: str) -> list[Term]:
    """Weights that a forward gathers, and copies of them that autocast makes, beside what stays all the time."""
    kinds, always = ("parameters", "buffers"), set(PHASES)
    terms = [t for t in ledger.terms if t.component in kinds and phase in t.phases and not set(t.phases) >= always]
    return [replace(term, phases=()) for term in terms]


def _block(census: ModelOnGrid) -> Term:
    groups = groups_of(census)
    bytes_ = largest([group.over("forward_peaks") * group.exists for group in groups])
    formula, inputs = "largest sum alive in one block", {"T": groups[-1].tokens}
    return Term("activations", "working set of a block's forward", bytes_, (), formula, INVENTORY, inputs)


def _head(census: ModelOnGrid) -> list[Term]:
    bytes_, inputs = over_vocabularies(census, "forward_peaks"), {"T": groups_of(census)[-1].tokens, "V": census.vocab}
    formula = "largest sum alive in the head"
    hidden = Term("activations", "hidden states", boundary(census), (), "w · T · h / t", INVENTORY)
    return [Term("activations", "final norm, logits and loss", bytes_, (), formula, INVENTORY, inputs), hidden]


def outputs_bytes(census: ModelOnGrid) -> Array:
    """The outputs that an evaluation keeps of one batch, gathered from all data-parallel ranks [bytes]."""
    grid, model = census.grid, census.model
    a_sequence = grid.seq_len * model.vocab if model.head else model.tail.classes * np.int64(1)
    narrow = all(name in {"bf16", "fp16"} for name in grid.precisions) or grid.habits.zero_optimizer is not None
    loss = loss_of(grid)
    cast = loss.upcast == "model" and not (loss.by_class and model.tail.narrow_before_446)
    width = 2 if narrow and not cast and not model.tail.wide_logits else 4
    return width * grid.micro_batch * grid.degree("dp") * a_sequence * grid.is_last


def _layer_caches(census: ModelOnGrid, length: Array) -> list[Array]:
    """Cached keys and values of one block of each group [bytes]; latent attention caches what it expanded.

    A block whose tokens see all others caches nothing: an encoder's. A mixer caches its states, whatever the length.
    """
    grid, tp = census.grid, census.grid.degree("tp")
    width = np.where(grid.width("compute") == 4, 4, 2)
    sizes = []
    for group in census.model.groups:
        attention = group.block.attention
        if attention is None:
            states = state_elements(group.block.mixer, group.block.hidden) if group.block.mixer else 0
            sizes.append(grid.micro_batch * states * width)
            continue
        latent, tokens = attention.latent, grid.micro_batch * length
        keys, values = attention.kv_dim, attention.kv_dim
        if latent is not None:
            keys = attention.heads * (latent.qk_nope_head_dim + latent.qk_rope_head_dim)
            values = attention.heads * latent.v_head_dim
        if attention.window is not None:
            tokens = grid.micro_batch * np.minimum(length, attention.window)
        sizes.append(np.asarray(-(-key_value_bytes(keys, values, tokens, width) // tp)) * attention.causal)
    return sizes


def _cached(census: ModelOnGrid, length: Array) -> Term:
    sizes = [n * size for n, size in zip(census.layers, _layer_caches(census, length), strict=True)]
    bytes_ = sum(sizes, np.int64(0))
    return Term("activations", "cached keys and values", bytes_, (), "L · w · T · (d_k + d_v)", CACHE, {"T": length})
