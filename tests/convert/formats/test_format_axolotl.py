"""axolotl's YAML: what is read from configs in the shape of its examples, what is written, and its own schema.

Expected words are derived from axolotl 0.18.0 (067b021c8), named at each: utils/schemas, utils/config/__init__.py,
loaders and core/builders.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import finetuning
import pytest
import yaml
from drawing import drawn
from hypothesis import given
from hypothesis import strategies as st

from memcalc.convert.formats import get_format, render_config
from memcalc.convert.formats.axolotl import KEYS, KNOWN
from memcalc.convert.formats.base import ConfigJob
from memcalc.errors import CombinationError, InputError, MissingError
from memcalc.results.estimates import Estimate

HERE = finetuning.CONFIGS / "axolotl"
LORA = {"strategy.lora_kernels": "fused", "workload.lora_dropout": 0.05}
PLAIN = {"mixed": "bf16", "weights": "bf16", "attention": "flash", "kernels": "model", "loss": "standard"}
FSDP = {"zero": 3, "offload": ("params",), "checkpoints_wrapped": True}
EIGHT = {"optimizer": "adamw-8bit", "optimizer_impl": "loop"}
FUSED = {"optimizer": "adamw", "optimizer_impl": "fused"}
SHARDED = {"fsdp1", "trainer"}

EXPECTED: dict[str, tuple[dict[str, Any], set[str], list[tuple[str, str]]]] = {
    # adapter qlora: nf4 with double quantisation (loaders/model.py); kernels are turned on, reentrant by default
    "qlora-llama3-8b": (
        {**PLAIN, **LORA, "lora": "32:all-linear", "quantize": "nf4-dq", "optimizer": "paged-adamw",
         "recompute": "full", "strategy.checkpoint": "reentrant", "seq_len": 4096, "micro_batch": 2, "accumulation": 4,
         "varying_lengths": False, "evaluates": False, "zero": 0},
        {"trainer"}, [],
    ),
    # no packing and no padding: lengths vary; FSDP 1 has no adapter kernels
    "qlora-fsdp-70b": (
        {**PLAIN, **FSDP, "lora": "8:all-linear", "quantize": "nf4-dq", "strategy.lora_kernels": "model",
         "recompute": "full", "strategy.checkpoint": "reentrant", "varying_lengths": True, "seq_len": 512,
         "micro_batch": 1, "evaluates": True, **FUSED},
        SHARDED, [],
    ),
    "fft-8b-liger-fsdp": (
        {**PLAIN, **FSDP, "kernels": "fused", "loss": "fused-linear", "recompute": "full",
         "strategy.checkpoint": "non-reentrant", "micro_batch": 2, "eval_micro_batch": 2, **FUSED},
        SHARDED, [],
    ),
    # load_in_8bit with adapter lora; the kernels are not turned on beside 8 bits
    "lora-8bit-llama3": (
        {**PLAIN, **EIGHT, "lora": "32:all-linear", "quantize": "int8", "also_train": ("embedding", "head"),
         "strategy.lora_kernels": "model", "strategy.wide_embedding_moments": True},
        {"trainer"}, [],
    ),
    "fft-8b": (
        {**PLAIN, "optimizer": "paged-adamw-8bit", "seq_len": 8192, "strategy.checkpoint": "non-reentrant"},
        {"trainer"}, [],
    ),
    "fp8-fsdp2-3b": (
        {"weights": "bf16", "mixed": "bf16", "zero": 3, "recompute": "none", "compile": "model", "kernels": "fused",
         "loss": "fused-linear", "micro_batch": 16, **FUSED},
        {"fsdp2", "trainer"},
        [("MC002", "flex_attn_compile_kwargs"), ("MC002", "fp8"), ("MC002", "fp8_enable_fsdp_float8_all_gather")],
    ),
    # float16 without fp16: weights in 16 bits, no autocast; adam_eps is not a field of axolotl's
    "gptq-lora": (
        {"weights": "fp16", "mixed": "no", "lora": "8:k,o,q,v", "strategy.lora_kernels": "fused",
         "varying_lengths": True, **FUSED},
        {"trainer"}, [("MC001", "adam_eps")],
    ),
    "lisa": (
        {**PLAIN, **EIGHT, "accumulation": 2},
        {"trainer"}, [("MC002", "flash_attn_fuse_mlp"), ("MC002", "lisa_n_layers")],
    ),
    # activation_offloading without an adapter: blocks are wrapped again, with checkpoints that are not reentrant
    "alst-deepspeed": (
        {**PLAIN, **EIGHT, "loss": "fused-linear", "cp": 8, "seq_len": 500_000, "recompute": "full",
         "offload": ("activations",), "strategy.checkpoint": "non-reentrant"},
        {"trainer"}, [("MC002", "tiled_mlp")],
    ),
    # gradient_checkpointing: offload is activation_offloading: true, which with an adapter stands for recomputation
    "qwen3-32b-qlora": (
        {**PLAIN, "loss": "fused-linear", "lora": "16:q,k,v,o,down,up", "recompute": "none", "optimizer": "adamw-8bit",
         "offload": ("activations",), "workload.lora_dropout": 0.0, "strategy.lora_kernels": "fused"},
        {"trainer"}, [("MC002", "optimizer")],
    ),
    # trust_remote_code keeps the adapters' kernels off
    "mixtral-qlora": (
        {**PLAIN, **EIGHT, "lora": "32:all-linear", "strategy.lora_kernels": "model", "quantize": "nf4-dq"},
        {"trainer"}, [("MC002", "model_config")],
    ),
    "fsdp2-tp-cp": (
        {**PLAIN, "loss": "fused-linear", "zero": 3, "tp": 2, "cp": 2, "recompute": "none", **FUSED},
        {"fsdp2", "trainer"}, [],
    ),
    "lora-ray": (
        {**PLAIN, **EIGHT, **LORA, "lora": "16:gate,down,up,q,v,k,o", "gpus": 4, "micro_batch": 2}, {"trainer"}, [],
    ),
    # experts are quantised as they are loaded, and have adapters (monkeypatch/moe_quant.py, lora_target_parameters)
    "glm47-flash-qlora": (
        {**PLAIN, "loss": "fused-linear", "lora": "32:o,experts_gate_up,experts_down", "quantize": "nf4-dq",
         "strategy.quantize_experts": True, "strategy.lora_kernels": "model", "optimizer": "adamw-8bit"},
        {"trainer"}, [],
    ),
    "phi3-fsdp": (
        {**PLAIN, **FSDP, "micro_batch": 12, "strategy.checkpoint": "reentrant", **FUSED},
        SHARDED, [("MC002", "resize_token_embeddings_to_32x")],
    ),
}  # fmt: skip


def test_every_example_has_its_expectation() -> None:
    assert {path.stem for path in HERE.glob("*.yaml")} == set(EXPECTED)


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_examples_are_read_as_axolotl_reads_them(name: str) -> None:
    words, engines, findings = EXPECTED[name]
    config = finetuning.read(HERE / f"{name}.yaml")
    found = finetuning.said(config)
    assert {word: found.get(word) for word in words} == words
    assert finetuning.engines(config) == engines
    assert finetuning.codes(config) == findings
    assert found["strategy.expandable_segments"] is True  # utils/__init__.py, set_pytorch_cuda_alloc_conf


def test_defaults_are_the_schemas_and_shown() -> None:
    """utils/schemas: sequence_len 512, micro_batch_size 1, adamw_torch_fused, no checkpointing, bf16 where there is."""
    config = finetuning.read_text("base_model: NousResearch/Llama-3.2-1B\ndatasets: []\n")
    found = finetuning.said(config)
    expected = {
        "seq_len": 512, "micro_batch": 1, "accumulation": 1, "optimizer": "adamw", "optimizer_impl": "fused",
        "recompute": "none", "weights": "bf16", "mixed": "bf16", "varying_lengths": True, "zero": 0,
    }  # fmt: skip
    assert {word: found[word] for word in expected} == expected
    assert finetuning.defaults(config) >= set(expected)


def test_without_flash_attention_full_training_keeps_parts_in_fp32() -> None:
    """_configure_embedding_dtypes casts embedding, head and norms up, and back only for adapters or flash attention."""
    text = "base_model: meta-llama/Llama-3.2-1B\nmicro_batch_size: 1\n"
    assert finetuning.codes(finetuning.read_text(text)) == [("MC002", "adapter")]
    assert not finetuning.read_text(text + "flash_attention: true\n").findings
    part = (
        "flash_attention: true\nplugins: [axolotl.integrations.spectrum.SpectrumPlugin]\nspectrum_top_fraction: 0.3\n"
    )
    assert finetuning.codes(finetuning.read_text(text + part)) == [("MC002", "spectrum_top_fraction")]
    assert not finetuning.read_text(text + "adapter: lora\nlora_r: 8\nlora_target_linear: true\n").findings


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("bf16: false\nfp16: true", {"weights": "fp16", "mixed": "fp16"}),
        ("fp16: true", {"weights": "fp16", "mixed": "fp16"}),  # bf16: auto gives way
        ("bf16: false", {"weights": "fp32", "mixed": "no"}),
        ("bf16: false\nbfloat16: true", {"weights": "bf16", "mixed": "bf16"}),
        ("bf16: true\nfp16: true", {"weights": "bf16", "mixed": "bf16"}),
        ("sdp_attention: true", {"attention": None}),
        ("xformers_attention: true", {"attention": "efficient"}),
        ("attn_implementation: flash_attention_3", {"attention": "flash", "strategy.flash_version": 3}),
        ("sequence_parallel_degree: 4", {"cp": 4}),
        ("fsdp: [shard_grad_op, auto_wrap]", {"zero": 2}),
        ("fsdp: [full_shard, offload]", {"zero": 3, "offload": ("params",)}),
        ("fsdp_config: {reshard_after_forward: false}\nfsdp_version: 2", {"zero": 2}),
        ("fsdp_config: {activation_checkpointing: true}", {"recompute": "full", "checkpoints_wrapped": None}),
        ("sample_packing: true", {"varying_lengths": False}),
        ("sample_packing: true\npad_to_sequence_len: false", {"varying_lengths": True}),
        ("test_datasets: [{path: a}]", {"evaluates": True}),
        ("torch_compile: auto", {"compile": "model"}),
        ("gradient_checkpointing: true\nactivation_offloading: hidden_states",
         {"recompute": "full", "offload": ("activations",), "strategy.checkpoint": "non-reentrant"}),
        ("plugins: [axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin]\ncut_cross_entropy: false",
         {"loss": "standard"}),
        ("liger_fused_linear_cross_entropy: true", {"loss": "standard"}),  # without the plugin it is dropped
        ("chunked_cross_entropy: true", {"loss": "chunked"}),
        ("accelerator_config: {gradient_accumulation_kwargs: {sync_each_batch: true}}", {"sync_each_batch": True}),
    ],
)  # fmt: skip
def test_settings_one_by_one(lines: str, words: dict[str, Any]) -> None:
    config = finetuning.read_text(f"base_model: x\ndatasets: []\n{lines}\n")
    found = finetuning.said(config)
    assert {word: found.get(word) for word in words} == words


@pytest.mark.parametrize(
    ("lines", "named"),
    [
        ("sequence_len: long", "sequence_len"),
        ("micro_batch_size: 0", "micro_batch_size"),
        ("bf16: full", "bf16"),  # not in the schema any more
        ("optimizer: adamw_bnb_8bits", "adamw_bnb_8bit"),
        ("attn_implementation: flash_attention_4", "flash_attention_2"),
        ("attn_implementation: flash_Attention_2", "flash_attention_2"),
        ("adapter: mora", "adapter"),
        ("load_in_4bit: true", "load_in_4bit"),
        ("adapter: qlora\nlora_r: 8", "load_in_4bit"),
        ("adapter: lora", "lora_r"),
        ("adapter: lora\nlora_r: 8\nquantize_moe_experts: true", "load_in_4bit or load_in_8bit true"),
        (
            "adapter: qlora\nload_in_4bit: true\nlora_r: 8\nlora_target_linear: true\nquantize_moe_experts: true",
            "lora_target_linear false",
        ),
        ("fsdp_config: {version: 3}", "fsdp_config.version"),
        ("gradient_checkpointing: unsloth", "gradient_checkpointing"),
    ],
)
def test_wrong_values_are_refused_by_name(lines: str, named: str) -> None:
    with pytest.raises(InputError, match=named):
        finetuning.read_text(f"base_model: x\ndatasets: []\n{lines}\n")


@pytest.mark.parametrize(
    ("lines", "experts", "passing"),
    [
        ("adapter: qlora\nload_in_4bit: true", True, True),
        ("adapter: lora\nload_in_8bit: true", True, True),
        ("adapter: lora", False, False),
        ("adapter: qlora\nload_in_4bit: true\nembeddings_skip_upcast: true", True, False),
        ("adapter: lora\nload_in_8bit: true\nembeddings_skip_upcast: true", True, True),
        ("adapter: qlora\nload_in_4bit: true\nquantize_moe_experts: true", False, True),
        ("adapter: qlora\nload_in_4bit: true\ntrust_remote_code: true", False, True),
        ("adapter: qlora\nload_in_4bit: true\nfsdp_config: {reshard_after_forward: true}", False, False),
    ],
)
def test_what_is_cast_as_a_quantised_base_is_prepared(lines: str, experts: bool, passing: bool) -> None:
    """loaders/model.py at 067b021c8: _configure_embedding_dtypes and _prepare_model_for_quantization."""
    found = finetuning.said(finetuning.read_text(f"base_model: x\ndatasets: []\nlora_r: 8\n{lines}\n"))
    assert bool(found.get("strategy.kbit_experts")) == experts
    assert bool(found.get("strategy.kbit_passing")) == passing


def test_stacked_experts_are_quantised_or_fp32(tmp_path: Path) -> None:
    """docs/expert_quantization.qmd: GLM-4.7-Flash reserves about 127 GiB, and 23 with quantize_moe_experts.

    It does so as Transformers 5.2 loads it, which has 16-bit tensors waiting on the GPU; fp32 experts are 103.5 GiB.
    """
    text = (HERE / "glm47-flash-qlora.yaml").read_text()
    path = tmp_path / "a.yaml"
    path.write_text(text.replace("quantize_moe_experts: true", "").replace("[mlp.experts", "[] # ["))
    wide = finetuning.checked([path], gpu="h200", gpus=1)
    experts = 46 * 64 * 3 * 2048 * 1536
    assert 4 * experts < wide.peak.reserved < 127 * 2**30


def test_patterns_of_layers_and_gpus_are_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(
        "base_model: meta-llama/Llama-3.2-1B\ndatasets: []\nadapter: lora\nlora_r: 8\n"
        "lora_target_modules: 'layers.[0-9]+.q_proj'\n"
    )
    with pytest.raises(MissingError, match=r"--lora .*layers.*--gpus"):
        finetuning.checked([path], gpu="h100")
    assert finetuning.checked([path], gpu="h100", gpus=1, lora="8:q").strategy.lora == "8:q"


def test_deepspeed_beside_it_is_read_and_offloads_add_up() -> None:
    estimate = finetuning.checked([HERE / "alst-deepspeed.yaml"], gpu="h100", gpus=8, cp=1, seq_len=8192)
    assert (estimate.strategy.framework, estimate.strategy.zero) == ("deepspeed", 3)
    assert estimate.strategy.precision == "bf16-mixed"
    assert set(estimate.strategy.offload) == {"params", "optimizer", "activations"}


def test_deepspeed_within_it_is_read() -> None:
    text = (
        "base_model: meta-llama/Llama-3.2-1B\nmicro_batch_size: 4\nattn_implementation: flash_attention_2\ndeepspeed:\n"
        "  zero_optimization: {stage: 1}\n  bf16: {enabled: true}\n"
    )
    config = finetuning.read_text(text)
    (inner,) = config.references
    assert inner.document is not None
    found = finetuning.said(get_format("deepspeed").read(inner.document))
    assert (found["zero"], found["mixed"]) == (1, "bf16")
    assert inner.document.line(("zero_optimization", "stage")) == 5


# ------------------------------------------------------------------------------------------------------- public runs

LIGER = """
base_model: meta-llama/Meta-Llama-3-8B
plugins: [axolotl.integrations.liger.LigerPlugin]
liger_rope: true
liger_rms_norm: true
liger_fused_linear_cross_entropy: true
attn_implementation: flash_attention_2
adapter: {adapter}
load_in_4bit: {four}
lora_r: 16
lora_dropout: 0.1
lora_target_modules: [q_proj, k_proj, v_proj, o_proj]
lora_qkv_kernel: {fused}
sequence_len: 4096
micro_batch_size: {micro}
gradient_accumulation_steps: 1
gradient_checkpointing: true
optimizer: adamw_torch
bf16: true
"""
ERA = {"framework": "hf@4.45", "settings": {"strategy.peft": "0.13", "strategy.expandable_segments": "false"}}


@pytest.mark.parametrize(
    ("run_id", "adapter", "micro", "more"),
    [("fmsliger-006", "lora", 4, {}), ("fmsliger-012", "qlora", 8, {"strategy.bnb": "0.43"})],
)
def test_public_runs_in_axolotls_form(
    run_id: str, adapter: str, micro: int, more: dict[str, str], tmp_path: Path
) -> None:
    """Runs of the Hugging Face Trainer, for none of axolotl's own is published with its memory."""
    path = tmp_path / "run.yaml"
    narrow = adapter == "qlora"
    flag = str(narrow).lower()
    if narrow:  # axolotl prepares the base, which the script of these runs did not
        more = {**more, "strategy.kbit_experts": "false", "strategy.kbit_passing": "false"}
    path.write_text(LIGER.format(adapter=adapter, four=flag, fused=flag, micro=micro))
    finetuning.same_as_run(run_id, path, **{**ERA, "settings": {**ERA["settings"], **more}})


# --------------------------------------------------------------------------------------------------------- its writer

OPTIMIZERS = [("adamw", "fused"), ("adamw", "foreach"), ("adafactor", "loop"), ("adamw-8bit", "loop"),
              ("paged-adamw", "loop"), ("lion", "loop"), ("sgd", "foreach"), ("muon", "loop"),
              ("galore-adamw", "loop")]  # fmt: skip


@st.composite
def plans(draw: st.DrawFn) -> dict[str, Any]:
    """Words of a strategy that axolotl's YAML can say, with what stands beside the file."""
    framework = draw(st.sampled_from(["hf", "fsdp2"]))
    gpus = draw(st.sampled_from([1, 4] if framework == "hf" else [2, 8]))
    zero = draw(st.sampled_from([2, 3])) if framework == "fsdp2" or gpus > 1 else 0
    optimizer, impl = draw(st.sampled_from(OPTIMIZERS))
    micro, steps = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 8]))
    fields: dict[str, Any] = {"strategy.expandable_segments": True}
    words: dict[str, Any] = {
        "framework": framework, "gpus": gpus, "zero": zero, "optimizer": optimizer, "optimizer_impl": impl,
        "micro_batch": micro, "global_batch": micro * steps * gpus, "seq_len": draw(st.sampled_from([512, 2048])),
        "attention": draw(st.sampled_from(["flash", "eager", "efficient"])), "settings": fields,
        "loss": draw(st.sampled_from(["standard", "chunked", "fused-linear", "fused-kernel"])),
        "kernels": draw(st.sampled_from(["model", "fused"])), "compile": draw(st.sampled_from(["none", "model"])),
        "recompute": draw(st.sampled_from(["none", "full"])),
    }  # fmt: skip
    if words["recompute"] == "full":
        fields |= draw(st.sampled_from([{}, {"strategy.checkpoint": "reentrant"}]))
    if optimizer == "adamw-8bit":
        fields["strategy.wide_embedding_moments"] = True
    lora = draw(st.booleans())
    if zero:
        words["precision"] = "bf16" if lora or framework == "fsdp2" else "bf16-mixed"
        fields["strategy.reduce_dtype"] = "bf16"
        words["offload"] = draw(st.sampled_from(["none", "params"]))
        if steps > 1 and draw(st.booleans()):  # FSDP 1 is counted with no_sync by itself, FSDP 2 without
            fields["strategy.whole_accumulation"] = framework == "fsdp2"
    else:
        words["precision"] = "bf16"
    words["autocast"] = True
    if lora:
        words |= _adapters(draw, fields, bool(zero))
    return words


def _adapters(draw: st.DrawFn, fields: dict[str, Any], sharded: bool) -> dict[str, Any]:
    fields["workload.lora_dropout"] = draw(st.sampled_from([0.0, 0.05]))
    fields["strategy.lora_kernels"] = "model" if sharded else draw(st.sampled_from(["model", "fused"]))
    found = {
        "lora": draw(st.sampled_from(["8:q,v", "16:q,k,v,o,gate,up,down"])),
        "quantize": draw(st.sampled_from(["none", "nf4", "nf4-dq", "int8"])),
        "adapter_dtype": draw(st.sampled_from(["fp32", "bf16"])),
    }
    if found["quantize"] != "none" and not sharded:
        fields["strategy.kbit_passing"] = True
    also = draw(st.sampled_from(["", "embedding"]))
    return {**found, "also_train": also} if also else found


@given(plans())
@drawn(30)
def test_what_is_written_reads_back_as_the_same_job(words: dict[str, Any]) -> None:
    try:
        before = finetuning.resolved(**words)
    except CombinationError:
        return
    text = render_config(get_format("axolotl"), ConfigJob.of(before))
    config = finetuning.read_text(text)
    assert not [one for one in config.findings if one.severity == "error" or one.code == "MC001"]
    after = _again(text, {"gpu": "h100", "gpus": words["gpus"], "framework": words["framework"]})
    assert after.strategy == before.strategy
    assert after.workload == before.workload
    assert after.peak == before.peak


def _again(text: str, given: dict[str, Any]) -> Estimate:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(text)
        return finetuning.checked([path], **given)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ({"framework": "megatron"}, "framework"),
        ({"framework": "hf", "precision": "fp32", "recompute": "attention"}, "recompute"),
        ({"framework": "hf", "precision": "bf16"}, "precision"),  # 16-bit weights without autocast
        ({"framework": "hf", "precision": "bf16-autocast"}, "precision"),  # fp32 weights under autocast
        ({"framework": "fsdp2", "gpus": 4, "offload": "optimizer"}, "offload"),
        (
            {"framework": "hf", "precision": "fp32", "global_batch": 1, "optimizer_in_backward": True},
            "optimizer-in-backward",
        ),
    ],
)
def test_what_it_cannot_say_is_refused_by_name(words: dict[str, Any], named: str) -> None:
    estimate = finetuning.resolved(**{"gpus": 1, **words})
    with pytest.raises(CombinationError, match=named):
        render_config(get_format("axolotl"), ConfigJob.of(estimate))


# --------------------------------------------------------------------------------------------------------- its schema

NOT_FIELDS = {
    "model_type", "model_config", "model_revision", "model_kwargs.",  # aliases: deprecated.py
    "gptq_disable_exllama",  # read in loaders/model.py without a field
    "debug", "eval_table_max_new_tokens",  # of releases of 2024, whose examples have them
}  # fmt: skip


def _schema() -> Any:
    pytest.importorskip("axolotl", reason="pip install --no-deps axolotl pillow")
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from axolotl.utils.schemas import config
    return config


PLUGINS = ("liger_", "swanlab_", "kd_", "lm_eval_", "spectrum_")
PLUGIN_FIELDS = {"cut_cross_entropy", "use_swanlab", "expert_parallel_size"}
"""Of integrations/*/args.py, which cannot be imported without the Trainer's own dependencies."""


@pytest.mark.parser
def test_keys_are_the_schemas() -> None:
    """Each key that we know is a field of axolotl's, and each field of axolotl's is one that we know."""
    fields = set(_schema().AxolotlInputConfig.model_fields)
    known = {key.rstrip(".").partition(".")[0] for key in KEYS.names(*KNOWN)}
    unknown = {key for key in known - fields - PLUGIN_FIELDS if not key.startswith(PLUGINS)}
    assert unknown <= {key.rstrip(".") for key in NOT_FIELDS}
    other = {"overrides_of_model_kwargs", "type_of_model", "base_model", "datasets"}
    removed = {"s2_attention", "flash_attn_rms_norm", "max_packed_sequence_len"}  # refused by deprecated.py
    lines = [f"{name}: null\n" for name in sorted(fields - other - removed)]
    config = finetuning.read_text(
        "base_model: x\ndatasets: []\nattn_implementation: flex_attention\n"
        + "".join(line for line in lines if not line.startswith("attn_implementation"))
    )
    assert not config.findings


@pytest.mark.parser
def test_its_schema_takes_what_is_written() -> None:
    schema = _schema()
    jobs: list[dict[str, Any]] = [
        {"framework": "hf", "precision": "bf16", "autocast": True, "lora": "8:q,v", "quantize": "nf4-dq", "gpus": 1},
        {"framework": "fsdp2", "precision": "bf16", "autocast": True, "gpus": 8, "recompute": "full",
         "loss": "fused-linear", "kernels": "fused", "offload": "params,optimizer"},
        {"framework": "hf", "gpus": 1, "precision": "bf16", "autocast": True, "recompute": "full"},
    ]  # fmt: skip
    for words in jobs:
        data = yaml.safe_load(render_config(get_format("axolotl"), ConfigJob.of(finetuning.resolved(**words))))
        theirs = _validated(schema, data)
        assert theirs["micro_batch_size"] == 1
        assert theirs["optimizer"] == data["optimizer"]


def _validated(schema: Any, data: dict[str, Any]) -> dict[str, Any]:
    able = {"bf16": True, "fp8": False, "tf32": True, "n_gpu": 1, "n_node": 1, "compute_capability": "sm_90"}
    found = schema.AxolotlConfigWCapabilities(**data, capabilities=able, env_capabilities={"torch_version": "2.10.0"})
    return dict(found.model_dump(exclude_none=True))


@pytest.mark.parser
@pytest.mark.parametrize("name", ["qlora-llama3-8b", "fft-8b", "lora-8bit-llama3", "qwen3-32b-qlora", "qlora-fsdp-70b"])
def test_its_schema_resolves_defaults_as_we_do(name: str) -> None:
    schema = _schema()
    data = yaml.safe_load((HERE / f"{name}.yaml").read_text())
    theirs, ours = _validated(schema, data), finetuning.said(finetuning.read(HERE / f"{name}.yaml"))
    assert theirs["sequence_len"] == ours["seq_len"]
    assert theirs["micro_batch_size"] == ours["micro_batch"]
    assert theirs["gradient_accumulation_steps"] == ours["accumulation"]
    assert theirs.get("pad_to_sequence_len", False) is not ours["varying_lengths"]
    if data.get("adapter"):
        assert bool(theirs.get("lora_qkv_kernel")) == (ours["strategy.lora_kernels"] == "fused") or "fsdp" in name
        assert theirs["lora_dropout"] == ours["workload.lora_dropout"]
    moved = theirs["activation_offloading"] not in (False, None)
    assert moved == (ours.get("offload") == ("activations",))
