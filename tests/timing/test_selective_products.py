"""Products that selective recomputation of operators runs again: against what PyTorch counts of real classes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from memcalc import api
from memcalc.convert.huggingface import from_huggingface
from memcalc.terms.activations import groups_of
from memcalc.timing.blocks import BlockWork

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

BATCH, SEQ = 2, 64


def operators_kept(saved: set[Any], left: tuple[int, int] | None = None) -> Any:
    """Return a policy as torchtitan's ``_get_custom_policy``, for a set of operators, of which every second ``mm``.

    A weight of the shape that is ``left`` (its inputs and outputs) is neither kept nor counted.
    """
    from torch.utils.checkpoint import CheckpointPolicy

    counts = Counter[bool]()

    def policy(context: Any, operator: Any, *args: Any, **_: Any) -> CheckpointPolicy:
        product = operator is torch.ops.aten.mm.default
        if product and tuple(args[1].shape) == left:
            return CheckpointPolicy.PREFER_RECOMPUTE
        counts[context.is_recompute] += product
        again = product and counts[context.is_recompute] % 2 == 0
        return CheckpointPolicy.MUST_SAVE if operator in saved and not again else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


def products_of(family: str, saved: set[Any] | None, left: tuple[int, int] | None = None) -> int:
    """Return the operations [FLOP] of all products with 16-bit weights in a step of a class's middle block."""
    from autograd import models
    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
    from torch.utils.flop_counter import FlopCounterMode

    config = models.hf_config(family)
    model = models.hf_model(family, config, dtype=torch.bfloat16, eager=False)
    block: Any = list(models.blocks_of(model).values())[1]
    if saved is not None:
        contexts = lambda: create_selective_checkpoint_contexts(operators_kept(saved, left))  # noqa: E731
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, context_fn=contexts)
    inputs = models.hf_inputs(family, config, BATCH, SEQ, torch.bfloat16)
    with FlopCounterMode(display=False) as counter:
        model(**inputs).loss.backward()
    counted = counter.get_flop_counts()["Global"]
    return sum(flops for operator, flops in counted.items() if str(operator) in PRODUCTS)


def counted_again(family: str, **habits: bool) -> int:
    """Return the same of products that run again in a block, without the grouped ones, which torch does not count."""
    from autograd import models

    model = from_huggingface(models.hf_config(family).to_dict())
    one = api.single(
        model=model, gpu="h100", framework="fsdp2", seq_len=SEQ, micro_batch=BATCH, recompute="selective-ops"
    )
    vars(one.grid)["habits"] = replace(one.grid.habits, **habits)
    work = BlockWork(groups_of(one.census)[0])
    again, _ = work.again(one.grid.policies[0])
    return sum(int(np.max(work.flops_of(matrix))) for matrix in again if not matrix.routed)


MM, ADDMM = torch.ops.aten.mm.default, torch.ops.aten.addmm.default
PRODUCTS = {"aten.mm", "aten.addmm"}


def test_the_newest_list_of_operators_has_layers_with_a_bias() -> None:
    """Its list in torchtitan 114151ad4, ``_get_save_ops``: ``get_default_op_list().compute_intensive_ops``."""
    from torch._functorch.partitioners import get_default_op_list

    assert {operator.default for operator in get_default_op_list().compute_intensive_ops} >= {MM, ADDMM}


@pytest.mark.parametrize("keeps_biased", [False, True])
@pytest.mark.parametrize("family", ["llama-3", "qwen2", "starcoder2", "gpt-neox", "olmo2"])
def test_products_that_run_again(family: str, keeps_biased: bool) -> None:
    """Qwen2's queries, keys and values and all layers of StarCoder2 and GPT-NeoX have a bias."""
    saved = {MM, ADDMM} if keeps_biased else {MM}
    again = products_of(family, saved) - products_of(family, None)
    assert counted_again(family, keeps_biased=keeps_biased) == again


@pytest.mark.parametrize("leaves_router", [False, True])
def test_routers_and_grouped_products(leaves_router: bool) -> None:
    """By torchtitan 9a8cb98f1 no ``mm`` of the shape of ``moe.router.gate`` is kept or counted."""
    from autograd import models

    config = models.hf_config("qwen3-moe")
    left = (config.hidden_size, config.num_experts) if leaves_router else None
    again = products_of("qwen3-moe", {MM}, left) - products_of("qwen3-moe", None)
    assert counted_again("qwen3-moe", leaves_router=leaves_router) == again
