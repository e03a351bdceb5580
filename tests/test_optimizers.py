"""Optimizers whose states follow from shapes: their bytes are those of the real classes, of every parameter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import memcalc
from memcalc.convert.huggingface import from_huggingface
from memcalc.errors import CombinationError, InputError
from memcalc.formulas.optimizer import MEGATRON_SOAP, OPTIMIZERS
from memcalc.formulas.optimizer_states import Weight
from memcalc.results.estimates import Estimate
from memcalc.specs.model import Model

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 112,
}
LATENT = {
    **SMALL,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "q_lora_rank": 16,
    "first_k_dense_replace": 1,
}
BERT = {name: size for name, size in SMALL.items() if name != "num_key_value_heads"}
OPT = {
    **{name: size for name, size in BERT.items() if name != "intermediate_size"},
    "ffn_dim": 96,
    "max_position_embeddings": 128,
    "word_embed_proj_dim": 32,
}
CLASSES = [
    ("LlamaForCausalLM", {**SMALL, "attention_bias": True, "tie_word_embeddings": False}),
    ("Qwen3ForCausalLM", {**SMALL, "head_dim": 32, "tie_word_embeddings": True}),
    ("Phi3ForCausalLM", {**SMALL, "pad_token_id": None}),
    ("Qwen2MoeForCausalLM", {**SMALL, "num_experts": 4, "moe_intermediate_size": 40}),
    ("GptOssForCausalLM", {**SMALL, "num_local_experts": 4, "head_dim": 16}),
    ("DeepseekV3ForCausalLM", LATENT),
    ("GPT2LMHeadModel", {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 112, "n_positions": 128}),
    ("OPTForCausalLM", OPT),
    ("BertForMaskedLM", BERT),
]
NAMES = [name for name, _ in CLASSES]


def real(name: str, keys: dict[str, Any]) -> tuple[Any, Model]:
    """Return the real class with every gradient, and the model that its config describes."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    kind = getattr(transformers, name)
    config = kind.config_class(**keys)
    module = kind(config)
    for parameter in module.parameters():
        parameter.grad = torch.randn_like(parameter)
    return module, from_huggingface({**config.to_dict(), "architectures": [name]})


def bytes_of(chosen: Any) -> int:
    """Return the bytes of the storages that an optimizer keeps, single numbers left out."""
    import torch
    from torch.utils._pytree import tree_leaves

    states = [value for state in chosen.state.values() for value in tree_leaves(list(state.values()))]
    held = [value.untyped_storage() for value in states if isinstance(value, torch.Tensor) and value.ndim]
    return sum({storage.data_ptr(): storage.nbytes() for storage in held}.values())


def moments(model: Model, optimizer: str, **words: Any) -> int:
    """Return memcalc's bytes of the moments, of fp32 weights on one GPU where nothing else is said."""
    words = {"framework": "hf", "precision": "fp32", "optimizer_impl": "loop", "seq_len": 32, **words}
    found: Estimate = memcalc.estimate(model=model, gpu="a100-80g", optimizer=optimizer, **words)
    return sum(term.bytes for term in found.terms if term.name == f"{optimizer} moments")


@pytest.mark.parametrize(("name", "keys"), CLASSES, ids=NAMES)
def test_adafactor_is_that_of_transformers(name: str, keys: dict[str, Any]) -> None:
    module, model = real(name, keys)
    from transformers.optimization import Adafactor

    chosen = Adafactor(module.parameters(), scale_parameter=False, relative_step=False, lr=1e-3)
    chosen.step()
    assert moments(model, "adafactor") == bytes_of(chosen)


@pytest.mark.parametrize("narrow", [False, True])
def test_adafactor_of_torch_follows_the_gradients_and_that_of_transformers_does_not(*, narrow: bool) -> None:
    import torch
    from transformers.optimization import Adafactor

    module, model = real(*CLASSES[0])
    if narrow:
        module.bfloat16()
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter)
    precision = "bf16" if narrow else "fp32"
    own, theirs = torch.optim.Adafactor(module.parameters()), Adafactor(module.parameters())
    own.step()
    theirs.step()
    assert moments(model, "adafactor", optimizer_impl="foreach", precision=precision) == bytes_of(own)
    assert moments(model, "adafactor", precision=precision) == bytes_of(theirs)


@pytest.mark.parametrize(("name", "keys"), CLASSES[:6], ids=NAMES[:6])
def test_muon_takes_matrices_and_adamw_the_rest(name: str, keys: dict[str, Any]) -> None:
    """By LLaMA-Factory's rule (train/trainer_utils.py, _create_muon_optimizer), with the classes of torch."""
    import torch

    module, model = real(name, keys)
    listed = dict(module.named_parameters())
    inner = {n for n, p in listed.items() if p.ndim == 2 and "embed" not in n and "lm_head" not in n}
    biases = {n for n in inner if n.endswith("_bias")}  # gpt-oss has one vector an expert
    muon = torch.optim.Muon([listed[n] for n in inner])
    rest = torch.optim.AdamW([p for n, p in listed.items() if n not in inner])
    muon.step()
    rest.step()
    assert moments(model, "muon") == bytes_of(muon) + bytes_of(rest)
    assert bool(biases) == (name == "GptOssForCausalLM")


def dimensions(module: Any) -> list[tuple[str, tuple[int, ...], bool]]:
    """Return name and shape of each parameter, and whether it is the weight of an nn.Linear."""
    import torch

    linear = {name for name, part in module.named_modules() if isinstance(part, torch.nn.Linear)}
    named = module.named_parameters()
    return [(name, tuple(p.shape), name.removesuffix(".weight") in linear and p.ndim == 2) for name, p in named]


@pytest.mark.parametrize(("name", "keys"), CLASSES, ids=NAMES)
def test_soap_as_its_source_allocates(name: str, keys: dict[str, Any]) -> None:
    """By nikhilvyas/SOAP soap.py@a1e5535, init_preconditioner: none for vectors, one for each dimension of others."""
    module, model = real(name, {**keys, "vocab_size": 10_016})
    count = 0
    for _, shape, _ in dimensions(module):
        count += 2 * int(np.prod(shape))
        if len(shape) > 1:
            count += sum(2 * size**2 for size in shape if size <= 10_000)
    assert moments(model, "soap") == 4 * count


GALORE = [(name, keys) for name, keys in CLASSES if name != "GPT2LMHeadModel"]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("name", "keys"), GALORE[:6], ids=[name for name, _ in GALORE[:6]])
def test_galore_as_its_source_allocates(name: str, keys: dict[str, Any], precision: str) -> None:
    """galore_torch/adamw.py@2cc66f8 under the Trainer's rule: nn.Linear by the names of ``optim_target_modules``."""
    module, model = real(name, keys)
    width, rank, count = (4 if precision == "fp32" else 2), 48, 0
    for own, shape, linear in dimensions(module):
        if linear and ("attn" in own or "mlp" in own):
            short, long = sorted(shape)
            # get_orthogonal_matrix: Vh[:rank, :] is a view where the gradient is fp32, a cast copy else
            projector = short * (short if width == 4 else min(rank, short))
            count += 2 * min(rank, short) * long + projector
        else:
            count += 2 * int(np.prod(shape))
    words = {"settings": {"strategy.galore_rank": rank}, "precision": precision}
    assert moments(model, "galore-adamw", **words) == width * count


def test_galore_of_named_layers_and_of_the_head() -> None:
    _, model = real(*CLASSES[0])
    plain, rank = moments(model, "adamw"), 16

    def less(targets: str) -> int:
        return plain - moments(
            model, "galore-adamw", settings={"strategy.galore_rank": rank, "strategy.galore_targets": targets}
        )

    # queries 64 x 64 of three blocks; the head 112 x 64
    assert less("q") == 3 * 4 * (2 * 64 * 64 - (2 * rank * 64 + 64 * 64))
    assert less("all") - less("all-linear") == 4 * (2 * 112 * 64 - (2 * rank * 112 + 64 * 64))


SOAP_MEASURED = {
    (16, 16): (1536, 3120), (32, 16): (3584, 7008), (16, 32): (3584, 8288), (64, 16): (10752, 21952),
    (16, 64): (10752, 26304), (4, 32, 16): (6688, 15888), (2, 32, 32): (8200, 17508),
    (8,): (16, 16),
}  # fmt: skip
"""Elements of the real class after ten steps, and of what the eleventh allocates beside them: SOAP@a1e5535, torch 2.13,
CPU. Its eigenvalues and reflectors of QR, three numbers a row, are in the second."""


@pytest.mark.parametrize("shape", SOAP_MEASURED)
def test_soap_as_measured(shape: tuple[int, ...]) -> None:
    kind, (states, temporary) = OPTIMIZERS["soap"], SOAP_MEASURED[shape]
    assert kind.states is not None
    assert kind.temporary is not None
    if len(shape) > 1:
        assert kind.states(Weight("q", shape)) == states
        assert temporary - 3 * max(shape) <= kind.temporary(Weight("q", shape)) <= temporary


@pytest.mark.parametrize(
    ("shape", "temporary"),
    [((400, 16), 38_912), ((16, 400), 38_912), ((64, 16), 6656), ((64, 48), 6144), ((40, 30), 10_500)],
)
def test_soap_of_long_dimensions(shape: tuple[int, int], temporary: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured as above with ``max_precond_dim=32``, less the numbers of QR."""
    monkeypatch.setattr("memcalc.formulas.optimizer.SOAP_LIMIT", 32)
    kind = OPTIMIZERS["soap"]
    assert kind.temporary is not None
    assert kind.temporary(Weight("q", shape)) == temporary


MEGATRON_MEASURED = {(16, 16): 1568, (32, 16): 3632, (64, 16): 10_832, (8, 64): 9416}
"""State elements of emerging_optimizers v0.4.0's SOAP."""


@pytest.mark.parametrize("shape", MEGATRON_MEASURED)
def test_soap_of_megatron_as_measured(shape: tuple[int, int]) -> None:
    assert MEGATRON_SOAP.states is not None
    assert MEGATRON_SOAP.states(Weight("qkv", shape)) == MEGATRON_MEASURED[shape]
    assert MEGATRON_SOAP.states(Weight("embedding", shape)) == 2 * shape[0] * shape[1]


GALORE_MEASURED = [
    *((shape, rank, 4, states, temporary) for shape, rank, states, temporary in (
        ((64, 16), 4, 768, 3072), ((16, 64), 128, 2304, 5376), ((32, 32), 4, 1280, 3456))),
    *((shape, rank, 2, states, None) for shape, rank, states in (
        ((64, 16), 4, 576), ((16, 64), 128, 2304), ((32, 32), 4, 384))),
]  # fmt: skip
"""Shape, rank, width, state elements, and elements that the step with a new projector allocates beside them: the class
of galore-torch 1.0, torch 2.13, CPU. Of 16-bit gradients cuSOLVER's copy comes on top there."""


@pytest.mark.parametrize(("shape", "rank", "width", "states", "temporary"), GALORE_MEASURED)
def test_galore_as_measured(
    *, shape: tuple[int, int], rank: int, width: int, states: int, temporary: int | None
) -> None:
    kind, weight = OPTIMIZERS["galore-adamw"], Weight("q", shape, True, width, rank, ("q",))
    assert kind.states is not None
    assert kind.temporary is not None
    assert kind.states(weight) == states
    assert temporary is None or kind.temporary(weight) == temporary


def test_galore_of_rows_as_measured() -> None:
    """FSDP 2 over two gloo ranks, torch 2.13: of a tall matrix the moments are cut; all else is whole."""
    states = OPTIMIZERS["galore-adamw"].states
    assert states is not None
    tall, wide = (Weight("q", shape, True, 4, 4, ("q",), 2) for shape in ((24, 8), (10, 24)))
    assert states(tall) == 2 * 12 * 4 + 8 * 8
    assert states(wide) == 2 * 4 * 24 + 10 * 10


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"optimizer": "soap", "framework": "fsdp2"}, "DTensors"),
        ({"optimizer": "soap", "framework": "deepspeed", "zero": 1}, "vectors"),
        ({"optimizer": "soap", "framework": "hf", "zero": 3}, "vectors"),
        ({"optimizer": "soap", "framework": "hf", "precision": "bf16"}, "bf16-autocast or fp32"),
        ({"optimizer": "adafactor", "framework": "fsdp2"}, "--framework ddp"),
        ({"optimizer": "muon", "framework": "fsdp1"}, "2-D"),
        ({"optimizer": "galore-adamw", "framework": "fsdp1"}, "vectors"),
        ({"optimizer": "galore-adamw", "framework": "deepspeed", "zero": 2}, "vectors"),
        ({"optimizer": "galore-adamw", "framework": "megatron", "zero": 0}, "soap"),
        ({"optimizer": "galore-adamw", "framework": "hf", "lora": "8"}, "--lora"),
        ({"optimizer": "galore-adamw", "framework": "fsdp2", "tp": 2, "gpus": 2}, "tensor parallelism"),
        ({"optimizer": "adamw", "settings": {"strategy.galore_rank": 8}}, "needs --optimizer galore-adamw"),
    ],
)
def test_what_does_not_run_is_refused_by_name(words: dict[str, Any], said: str) -> None:
    with pytest.raises(CombinationError, match=said):
        memcalc.estimate(model="llama-2-7b", gpu="a100-80g", **words)


def test_layers_that_galore_cannot_project() -> None:
    words: dict[str, Any] = {"gpu": "a100-80g", "framework": "hf", "optimizer": "galore-adamw"}
    with pytest.raises(CombinationError, match="Conv1D"):
        memcalc.estimate(model="gpt2", **words)
    with pytest.raises(CombinationError, match="q, k, v, o, gate, up, down"):
        memcalc.estimate(model="llama-2-7b", settings={"strategy.galore_targets": "qkv"}, **words)
    with pytest.raises(InputError, match="and 'attn' is none"):
        memcalc.estimate(model="llama-2-7b", settings={"strategy.galore_targets": "attn"}, **words)


def test_flat_shards_are_vectors_to_adafactor() -> None:
    """Four bytes for each element of the rank's share: no factor is left (FSDP 1 and ZeRO hand it 1-D tensors)."""
    from memcalc import catalog
    from memcalc.terms.parameters import model_count

    model = catalog.model("llama-2-7b")
    share = -(-model_count(model).total // 8)
    for framework, zero in (("fsdp1", 3), ("deepspeed", 1)):
        assert moments(model, "adafactor", framework=framework, zero=zero, gpus=8, precision="bf16-mixed") == 4 * share


def test_a_search_leaves_out_what_does_not_run() -> None:
    plan = memcalc.plan(
        model="gpt2", gpu="a100-80g", gpus=2, framework="fsdp2", optimizer="any", micro_batch=1, advice=False
    )
    found = {line.strategy.optimizer for line in plan.plans}
    assert not found & {"soap", "adafactor"}
