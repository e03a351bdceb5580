"""One space under memcalc, Calculon and llm-analysis, on one core: strategies a second, and the fastest of each.

The space is what all three can say: GPT-3 175B of 2,048 tokens on 1,536 A100 80 GB, 3,072 sequences a step, tensor
parallelism within a node, pipelines without interleaving, no, selective or full recomputation, optimizer states sharded
or not, micro-batches of 1 to 32. The others are called strategy by strategy, as their own searchers and commands do,
but that Calculon makes no debug messages (with them it takes seven times as long). ::

    git clone https://github.com/calculon-ai/calculon && git clone https://github.com/cli99/llm-analysis
    pip install fire pandas psutil
    python tests/benchmarks/side_by_side.py --calculon calculon --llm-analysis llm-analysis
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

for _threads in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_threads, "1")

from memcalc import catalog
from memcalc.grid import Grid, Layout
from memcalc.planner.pipelines import layouts_for
from memcalc.planner.search import search
from memcalc.specs.options import SharedSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MODEL, GPU, GPUS, SEQ_LEN, BATCH = "gpt3-175b", "a100-80g", 1536, 2048, 3072
PIPELINES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 96)
RECOMPUTES = ("none", "selective-core-attn", "full")
MICRO_BATCHES = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True)
class Case:
    """One strategy of the space."""

    layout: Layout
    recompute: str
    zero: int
    micro_batch: int

    def __str__(self) -> str:
        degrees = f"dp{self.layout.dp} tp{self.layout.tp} pp{self.layout.pp}"
        return f"{degrees} zero-{self.zero} recompute {self.recompute} micro-batch {self.micro_batch}"


def layouts() -> list[Layout]:
    """Return the parallel layouts of the space, each with a replica to shard over."""
    degrees = ([1, 2, 4, 8], PIPELINES, [1], [1])
    return [one for one in layouts_for(catalog.model(MODEL), GPUS, degrees, SEQ_LEN, sp=None) if one.dp > 1]


def cases() -> Iterator[Case]:
    """Yield every strategy of the space."""
    for layout in layouts():
        for recompute in RECOMPUTES:
            for zero in (0, 1):
                fed = (micro for micro in MICRO_BATCHES if BATCH // layout.dp % micro == 0)
                yield from (Case(layout, recompute, zero, micro) for micro in fed)


def of_memcalc(runs: int) -> None:
    """Print memcalc's rate over the whole space at once, as ``plan`` searches it."""
    model, gpu = catalog.model(MODEL), catalog.gpu(GPU)
    settings = SharedSettings(framework="megatron", seq_len=SEQ_LEN, global_batch=BATCH)
    grid = Grid(settings, tuple(layouts()), ("bf16-mixed",), RECOMPUTES, (0, 1), ((),), MICRO_BATCHES)
    seconds, found = [], {}
    for _ in range(runs):
        started = time.process_time()
        found = search(model, (grid,), gpu, catalog.node_for(gpu))
        seconds.append(time.process_time() - started)
    best = found[GPUS].best[0]
    layout, _, _, recompute, zero, _, micro = best.index
    case = Case(grid.layouts[layout], RECOMPUTES[recompute], grid.zeros[zero], MICRO_BATCHES[micro])
    shown("memcalc", len(list(cases())), min(seconds), found[GPUS].feasible, case)


def of_calculon(folder: Path) -> Callable[[Case], float | None]:
    """Return Calculon's samples a second of a strategy; none where it does not fit."""
    sys.path.insert(0, str(folder))
    import calculon.io  # type: ignore[import-not-found]
    from calculon.llm import Llm  # type: ignore[import-not-found]
    from calculon.system import System  # type: ignore[import-not-found]

    application = Llm.Application(calculon.io.read_json_file(str(folder / "models/gpt3-175B.json")))
    system = System(calculon.io.read_json_file(str(folder / "systems/a100_80g.json")))
    policies = dict(zip(RECOMPUTES, ("none", "attn_only", "full"), strict=True))

    def rate(case: Case) -> float | None:
        at = case.layout
        words = {
            "num_procs": GPUS, "tensor_par": at.tp, "pipeline_par": at.pp, "data_par": at.dp, "tensor_par_net": 0,
            "pipeline_par_net": 1, "data_par_net": 1, "batch_size": BATCH, "microbatch_size": case.micro_batch,
            "datatype": "float16", "fused_activation": True, "attention_type": "multihead",
            "activation_recompute": policies[case.recompute], "pipeline_interleaving": 1,
            "optimizer_sharding": case.zero == 1, "tensor_par_comm_type": "rs_ag" if at.tp > 1 else "ar",
            "tensor_par_overlap": "none", "seq_par_ag_redo": False, "data_par_overlap": True,
            "weight_offload": False, "activations_offload": False, "optimizer_offload": False, "training": True,
        }  # fmt: skip
        model = Llm(application, logging.getLogger("calculon"))
        try:
            model.compile(system, Llm.Execution.from_json(words))
            model.run(system)
        except Llm.Error:
            return None
        return float(model.get_stats_json(False)["sample_rate"])

    return rate


def of_llm_analysis(folder: Path) -> Callable[[Case], float | None]:
    """Return llm-analysis's samples a second of a strategy; none where it does not fit."""
    sys.path.insert(0, str(folder))
    from llm_analysis import analysis, config  # type: ignore[import-not-found]

    logging.disable(logging.CRITICAL)
    spec = catalog.model(MODEL)
    (blocks,) = spec.groups
    heads, ffn = blocks.block.attention.heads, blocks.block.mlp.ffn
    model = config.ModelConfig(MODEL, spec.num_layers, heads, spec.hidden, spec.vocab, SEQ_LEN, ffn_embed_dim=ffn)
    gpu, dtype = config.get_gpu_config_by_name("a100-sxm-80gb"), config.get_dtype_config_by_name("w16a16e16")
    policies = dict(zip(RECOMPUTES, (0, 1, 4), strict=True))

    def rate(case: Case) -> float | None:
        at = case.layout
        ranks = config.ParallelismConfig(tp_size=at.tp, pp_size=at.pp, dp_size=at.dp, sp_size=at.tp)
        job = analysis.LLMAnalysis(model, gpu, dtype, ranks)
        said = job.training(
            batch_size_per_gpu=case.micro_batch, global_batch_size=BATCH, seq_len=SEQ_LEN,
            activation_recomputation=analysis.ActivationRecomputation(policies[case.recompute]),
            ds_zero=analysis.DSZeRO(case.zero),
        )  # fmt: skip
        if said["estimated_peak_memory_per_gpu"] > gpu.mem_per_GPU_in_GB * 2**30:
            return None
        return BATCH / float(said["latency_per_iter"])

    return rate


def one_by_one(name: str, rate: Callable[[Case], float | None]) -> None:
    """Print the rate of a tool that takes one strategy at a time."""
    all_cases = list(cases())
    started = time.process_time()
    rates = [rate(case) for case in all_cases]
    seconds = time.process_time() - started
    fits = [(one, case) for one, case in zip(rates, all_cases, strict=True) if one is not None]
    shown(name, len(all_cases), seconds, len(fits), max(fits, key=lambda one: one[0])[1] if fits else None)


def shown(name: str, count: int, seconds: float, fits: int, best: Case | None) -> None:
    """Print a line."""
    rate = f"{count:,} strategies in {seconds:.4f} s, {count / seconds:>9,.0f}/s"
    print(f"{name:>12}: {rate}; {fits} fit; fastest: {best}")


def main() -> None:
    """Time memcalc, and what a checkout is given of."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calculon", type=Path, metavar="DIR", help="a checkout")
    parser.add_argument("--llm-analysis", type=Path, metavar="DIR", help="a checkout")
    parser.add_argument("--runs", type=int, default=5, help="of memcalc, the best counts")
    options = parser.parse_args()
    of_memcalc(options.runs)
    if options.calculon is not None:
        one_by_one("Calculon", of_calculon(options.calculon))
    if options.llm_analysis is not None:
        one_by_one("llm-analysis", of_llm_analysis(options.llm_analysis))


if __name__ == "__main__":
    main()
