"""Loading, resuming and saving: whole weights and states on their way between files, the host and the GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from memcalc.formulas.optimizer_states import shard
from memcalc.frameworks.state_dicts import READS, WRITES
from memcalc.ledger import Term
from memcalc.terms.host import off_gpu_terms
from memcalc.terms.occasions import (
    Occasion,
    largest_unit,
    resident,
    weights_are_sharded,
    whole_weights,
    writes_together,
)

if TYPE_CHECKING:
    from memcalc.ledger import Ledger
    from memcalc.terms.model_on_grid import ModelOnGrid

QUANTISED = "transformers 5.23 core_model_loading.py; bitsandbytes nn/modules.py: Params4bit._quantize on the GPU"
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
        title, tensor = "one 16-bit tensor before it is quantised", 2 * census.largest_tensor
        terms = [*weights, Term("parameters", title, tensor, (), "2 · P_tensor", QUANTISED)]
        return Occasion("loading", "weights quantised as they are loaded", tuple(terms), certain=bool(reader))
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


def _resuming(census: ModelOnGrid, ledger: Ledger, ranks: int) -> Occasion | None:
    """States read anew: into those that an engine has already made, or in place of none."""
    grid, name, certain = census.grid, census.grid.habits.name, census.grid.fixed.resumes
    states = resident(ledger, census, ["parameters", "optimizer"])
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
        return Occasion("resuming", "a step with gradients of zero makes the states", (*states, *step), certain=certain)
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
        return Occasion("saving", "all weights gathered on each GPU", parts, certain=bool(form))
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
