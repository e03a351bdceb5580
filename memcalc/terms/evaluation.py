"""Evaluation and generation: a forward without gradients, the outputs that are kept, and a cache of keys and values.

What autograd would keep is gone with the layer that made it, so that a block's working set stands where training has
the activations of all blocks. Frameworks' evaluation loops differ in what they keep of the outputs:
Transformers' Trainer keeps the logits of each batch, gathered from all ranks, where it has ``compute_metrics``
(5.23 ``trainer.py``, ``evaluation_loop``), in fp32 where Accelerate casts autocast's outputs back
(1.15 ``utils/operations.py``, ``convert_outputs_to_fp32``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from memcalc.formulas.occasions import joined_outputs_bytes, key_value_bytes, waiting_outputs_bytes
from memcalc.frameworks.habits import EVALUATION_BATCH
from memcalc.ledger import PHASES, Term
from memcalc.terms.activations import groups_of, largest
from memcalc.terms.build import build_ledger
from memcalc.terms.head import loss_of, over_vocabularies
from memcalc.terms.mixers import state_elements
from memcalc.terms.model_on_grid import BlockCache
from memcalc.terms.occasions import Occasion, larger, resident
from memcalc.terms.pipeline import boundary
from memcalc.terms.saved_tensors import INVENTORY

if TYPE_CHECKING:
    from memcalc.formulas.types import Array
    from memcalc.ledger import Ledger
    from memcalc.terms.model_on_grid import ModelOnGrid
    from memcalc.terms.overhead import Workspaces

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
    when = f"evaluation of {size} sequence{'s' * (size > 1)} a rank"
    suffix = f", the logits of {fixed.eval_batches_kept} batches kept" * bool(fixed.eval_batches_kept)
    outputs = int(np.max(outputs_bytes(other)))
    yield Occasion("evaluation", f"{when}{suffix}", tuple(_evaluation(other, ledger)), certain, outputs)
    if fixed.eval_new_tokens and any(attention.causal for attention in census.model.attentions):
        text = f"generation of {fixed.eval_new_tokens} tokens for {size} sequence{'s' * (size > 1)} a rank"
        yield Occasion("generation", text, tuple(_generation(other, ledger)), certain)


def without_gradients(census: ModelOnGrid, size: int) -> ModelOnGrid:
    """The same job with an evaluation's batch, in which a block's forward keeps nothing but its input."""
    grid = census.grid
    at_once = size * int(np.max(grid.degree("dp")))
    fixed = grid.fixed.model_copy(update={"global_batch": at_once, "global_tokens": 0, "longest_first": False})
    if grid.habits.evaluation_logits and fixed.loss == "fused-linear":
        fixed = fixed.model_copy(update={"loss": "standard"})
    passing = replace(grid, fixed=fixed, micro_batches=(size,), recomputes=("full",))
    return replace(census, grid=passing, blocks_cache=BlockCache())


def _evaluation(census: ModelOnGrid, ledger: Ledger) -> list[Term]:
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
    return larger(block, head, [*states, joined])


def _generation(census: ModelOnGrid, ledger: Ledger) -> list[Term]:
    """The prompt's forward, or the last token: its logits, and a layer whose cache is copied to grow by it."""
    grid = census.grid
    states, length = resident(ledger, census), grid.seq_len + grid.fixed.eval_new_tokens
    gathered = _gathered(ledger, "forward-last")
    prompt = [*states, *gathered, _block(census), _cached(census, grid.seq_len)]
    rows = {"b": grid.micro_batch, "V": census.vocab}
    logits = 4 * grid.micro_batch * census.vocab * grid.is_last
    title, copied = "logits of the last token", np.max(_layer_caches(census, length)) * np.int64(1)
    last = Term("activations", title, logits, (), "4 · b · V", "transformers 5.23 generation/utils.py", rows)
    grown = Term("activations", "a layer's cache while it grows", copied, (), "w · T · (d_k + d_v)", CACHE)
    return larger(prompt, [*states, *gathered, last, grown, _cached(census, length)])


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
    width = 2 if narrow and loss_of(grid).upcast != "model" and not model.tail.wide_logits else 4
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
