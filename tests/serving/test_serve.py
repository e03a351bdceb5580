"""An engine's memory against what engines logged, what their sources do, and what was published."""

from __future__ import annotations

import json
from statistics import median
from typing import Any

import pytest
from engines import PAGE, crossed, elsewhere, filled, logs, quantile, token_errors, with_cache
from typer.testing import CliRunner

import memcalc
from memcalc import catalog
from memcalc.api import load_model
from memcalc.cli.app import app
from memcalc.errors import InputError, MissingError
from memcalc.formulas import serving as f
from memcalc.serving.stages import groups_of, stage_layers
from memcalc.specs.block import Attention, Block, Mlp
from memcalc.terms.parameters import model_count
from memcalc.units import GIB

LLAMA: dict[str, Any] = {"model": "llama-3.1-8b", "gpu": "h100", "max_len": 8192, "engine": "vllm@0.19"}
UNEXPLAINED = {"log087"}
"""An engine of 0.8.5 that found no block for an 8B model at 0.4 of 80 GB, where the engine before it served it: the
source does not say what else was on the card."""


def test_tokens_follow_from_the_logged_cache() -> None:
    errors = [abs(error) for error in token_errors().values()]
    assert len(errors) > 50
    assert median(errors) < 0.001
    assert quantile(errors, 0.95) < 0.002


def test_the_cache_follows_from_what_the_engine_was_told() -> None:
    rows = with_cache()
    assert median(abs(log.error / log.logged["cache"]) for log in rows) < 0.005
    assert quantile([abs(log.error) for log in rows], 0.95) < 1


def test_it_does_so_with_constants_of_other_families() -> None:
    errors = crossed()
    shares = [abs(errors[log.id] / log.logged["cache"]) for log in with_cache()]
    assert median(shares) < 0.005
    assert quantile([abs(error) for error in errors.values()], 0.95) < 1


def test_logs_of_others_than_the_campaign_lie_within_a_gib() -> None:
    assert {log.id: abs(log.error) < 1 for log in elsewhere()} == {"log081": True, "log129": True}


def test_what_did_not_start_or_ran_out_is_not_said_to_fit() -> None:
    failed = {log.id for log in logs() if log.outcome != "served" and log.answer.verdict == "fits"}
    refused = {log.id for log in logs() if log.outcome == "served" and log.answer.verdict == "does-not-fit"}
    assert (failed, refused) == (UNEXPLAINED, set())


def test_a_log_has_its_source() -> None:
    assert all(log.source and catalog.gpu(log.gpu) for log in logs())


def test_the_page_of_logs_is_current() -> None:
    """`python tests/engines.py` writes it."""
    page = PAGE.read_text(encoding="utf-8")
    assert filled(page) == page


# --------------------------------------------------------------------------------------------------------- the formulas


def test_published_bytes_of_a_token() -> None:
    """OPT-13B: 800 KB (Kwon et al. 2023, arXiv:2309.06180, section 3); DeepSeek-V2: 576 elements a layer of 60."""
    assert 40 * f.cached_token_bytes(40, 128, 128, 1, 2) == 800 * 1024
    assert 60 * f.latent_token_bytes(512, 64, 2) == 60 * 576 * 2


def block(window: int | None) -> Block:
    attention = Attention(heads=8, kv_heads=8, head_dim=64, window=window)
    return Block(hidden=512, attention=attention, mlp=Mlp(ffn=1024))


@pytest.mark.parametrize(
    ("full", "windowed", "layers", "groups"),
    [(10, 20, 10, 3), (13, 12, 13, 2), (32, 0, 32, 1), (10, 52, 10, 7), (5, 29, 5, 7)],
)
def test_layers_are_grouped_as_the_source_says(full: int, windowed: int, layers: int, groups: int) -> None:
    """The examples in the comments of vLLM's `kv_cache_utils.py`, and Gemma 3 27B and 4B."""
    blocks = [block(None)] * full + [block(1024)] * windowed
    listed = groups_of(blocks, tp=1, width=2, block_tokens=16, max_len=8192, batched=8192)
    assert (len(listed), {group.layers for group in listed}) == (groups, {layers})


@pytest.mark.parametrize(
    ("model", "tp", "full", "windowed"), [("gemma-4-31b", 1, 2, 1), ("gemma-4-12b", 1, 4, 1), ("gemma-4-12b", 8, 1, 2)]
)
def test_blocks_of_fewer_bytes_a_token_have_more_tokens(model: str, tp: int, full: int, windowed: int) -> None:
    """VLLM 001cabc1 `unify_kv_cache_spec_page_size`; 12B's layers have a key-value head of 512 or 8 of 256 elements."""
    (stage,) = memcalc.serve(model=model, gpu="h200", tp=tp, max_len=32768, max_batched_tokens=8192).stages
    taken = {group.kind: group.request_blocks for group in stage.groups}
    assert taken == {"full": 32768 // (16 * full), "window": -(-(1023 + 8192) // (16 * windowed)) + 1}
    sizes = {group.kind: group.token_bytes * {"full": full, "window": windowed}[group.kind] for group in stage.groups}
    layers = stage.groups[0].layers
    assert set(sizes.values()) == {max(sizes.values())}
    assert stage.blocks == stage.cache // (16 * layers * max(group.token_bytes for group in stage.groups))


def test_layers_whose_blocks_cannot_be_as_large_are_refused() -> None:
    narrow, wide = (
        Block(hidden=512, attention=Attention(heads=8, kv_heads=8, head_dim=dim, window=window), mlp=Mlp(ffn=1024))
        for dim, window in ((48, None), (64, 1024))
    )
    for blocks in ([narrow, wide], [narrow, block(None)]):
        with pytest.raises(InputError, match="must all cache as many bytes a token"):
            groups_of(blocks, tp=1, width=2, block_tokens=16, max_len=8192, batched=8192)


def test_keys_that_are_values_are_weights_twice() -> None:
    """VLLM 001cabc1 `models/gemma4.py`: `qkv_proj` has a part for values, into which the keys' weight is loaded."""
    model = load_model("gemma-4-31b")
    tables = 262144 * (256 + 512) * 2
    stage = memcalc.serve(model="gemma-4-31b", gpu="h200", max_len=8192).stages[0]
    keys = 10 * 5376 * 4 * 512 * 2
    assert stage.size("weights") == 2 * model_count(model).total + keys + tables


def test_stages_as_the_engine_cuts_them() -> None:
    """VLLM `distributed/utils.py`, get_pp_indices: what is left goes to the stages before the last."""
    assert stage_layers(32, 2) == (16, 16)
    assert stage_layers(62, 4) == (15, 16, 16, 15)
    assert stage_layers(30, 4) == (7, 8, 8, 7)


def test_latents_are_not_divided() -> None:
    one, two = (memcalc.serve(model="deepseek-v2-lite", gpu="h100", tp=tp, max_len=8192) for tp in (1, 2))
    assert one.stages[0].groups == two.stages[0].groups
    assert one.stages[0].groups[0].kind == "latent"


def test_fewer_heads_than_ranks_are_repeated() -> None:
    """Qwen2.5 7B has 4 key-value heads and 28 heads: on 4 ranks one each; 72B on 16 ranks still one of its 8."""
    four = memcalc.serve(model="qwen2.5-7b", gpu="h100", tp=4, max_len=8192)
    assert four.stages[0].groups[0].token_bytes == 2 * 128 * 2
    sixteen = memcalc.serve(model="qwen2.5-72b", gpu="h100", tp=16, max_len=8192)
    assert sixteen.stages[0].groups[0].token_bytes == 2 * 128 * 2


# ------------------------------------------------------------------------------------------------- verdict and limits


def test_a_share_above_what_is_free_is_refused() -> None:
    """The engine asks for its share to be free when it starts."""
    assert memcalc.serve(**LLAMA, utilization=1).verdict == "does-not-fit"
    beside = memcalc.serve(**LLAMA, utilization=0.5, other="60 GiB")
    assert beside.verdict == "does-not-fit"
    assert "free" in beside.reason


def test_the_first_releases_take_others_for_their_own() -> None:
    """What a trainer holds came off the cache, and later only has to leave the share free."""
    old = {**LLAMA, "engine": "vllm@0.8", "utilization": 0.6}
    sizes = [memcalc.serve(**old, other=size).stages[0].cache for size in ("0", "4 GiB")]
    assert sizes[0] - sizes[1] == 4 * GIB
    new = {**old, "engine": "vllm@0.19"}
    assert len({memcalc.serve(**new, other=size).stages[0].cache for size in ("0", "4 GiB")}) == 1


def test_the_sampler_rules_the_step() -> None:
    """A quarter of the sequences gives three quarters of their logits to the cache: 16 bits and 12 bytes each."""
    many, few = (memcalc.serve(**LLAMA, max_seqs=n).stages[0].cache for n in (1024, 512))
    assert few - many == 512 * 128256 * 14


@pytest.mark.parametrize("engine", ["vllm@0.19", "vllm", "vllm@0.8", "sglang"])
@pytest.mark.parametrize(("model", "tp"), [("llama-3.1-8b", 1), ("gemma-3-27b", 2), ("deepseek-v2-lite", 1)])
def test_limits_are_where_the_verdict_changes(model: str, tp: int, engine: str) -> None:
    words: dict[str, Any] = {"model": model, "gpu": "h100", "tp": tp, "engine": engine, "max_seqs": 64}
    words |= {"utilization": 0.9, "max_len": 16384}
    limits = memcalc.serve(**words).limits
    assert limits.smallest_utilization is not None
    assert limits.largest_utilization is not None
    least, most = limits.smallest_utilization, limits.largest_utilization
    assert memcalc.serve(**{**words, "utilization": least}).verdict != "does-not-fit"
    assert memcalc.serve(**{**words, "utilization": round(least - 0.01, 2)}).verdict == "does-not-fit"
    assert memcalc.serve(**{**words, "utilization": most}).verdict == "fits"
    assert memcalc.serve(**{**words, "utilization": round(min(1, most + 0.01), 2)}).verdict != "fits"
    longest = limits.largest_max_len
    assert (
        longest == catalog.model(model).max_positions
        or memcalc.serve(**{**words, "max_len": (longest or 0) + 1}).verdict == "does-not-fit"
    )
    most_seqs = limits.largest_max_seqs
    assert most_seqs is not None
    held = memcalc.serve(**{**words, "max_seqs": most_seqs})
    assert held.concurrency >= most_seqs
    assert memcalc.serve(**{**words, "max_seqs": most_seqs + 1}).concurrency < most_seqs + 1


# ------------------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ({"utilization": 1.2}, "utilization 1.2: must be a share of the GPU"),
        ({"utilization": "nan"}, "utilization 'nan':"),
        ({"tp": 3}, "tp 3: must divide the 32 attention heads"),
        ({"gpus": 3, "tp": 2}, "gpus 3: must be a multiple of the 2 GPUs"),
        ({"pp": 64}, "pp 64: must be at most the 32 layers"),
        ({"engine": "vllm@0.5"}, "the oldest release modelled is vllm@0.8"),
        ({"engine": "vllm@7.0"}, "the newest release that was read is vllm@"),
        ({"engine": "vllm@new"}, "a release has the form of vllm@0.19"),
        ({"engine": "vlm"}, "did you mean 'vllm'?"),
        ({"max_seqs": 4096, "max_batched_tokens": 2048}, "max-seqs 4096:"),
        ({"quantization": "awq"}, "quantization 'awq': must be one of none, fp8"),
        ({"max_lenn": 3}, "unknown word 'max_lenn'"),
        ({"gpu": "t4"}, "t4 has no bf16 arithmetic: give --dtype fp16"),
        ({"model": "bert-base"}, "decoder-only"),
        ({"model": "whisper-tiny"}, "decoder-only"),
    ],
)
def test_bad_input_is_one_sentence(words: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError) as raised:
        memcalc.serve(**{**LLAMA, **words})
    assert says in str(raised.value)


def test_a_share_that_the_engine_computes_is_asked_for() -> None:
    with pytest.raises(MissingError, match="give --utilization"):
        memcalc.serve(**{**LLAMA, "engine": "sglang"})


def run(*words: str) -> Any:
    return CliRunner().invoke(app, ["serve", "--model", "llama-3.1-8b", "--gpu", "h100", *words])


def test_exit_codes() -> None:
    assert run("--max-len", "8k").exit_code == 0
    assert run("--utilization", "0.15").exit_code == 1
    assert run("--utilization", "1.5").exit_code == 2
    assert run("--engine", "sglang").exit_code == 3


def test_json_says_what_the_library_says_and_how_to_ask_again() -> None:
    text = run("--max-len", "8k", "--engine", "vllm@0.19", "--format", "json").stdout
    answer = memcalc.serve(**LLAMA)
    assert json.loads(text) == answer.model_dump(mode="json", by_alias=True)
    assert answer.schema_ == "memcalc.serve/1"
    words = answer.command.split()[2:]
    again = CliRunner().invoke(app, ["serve", *words, "--format", "json"]).stdout
    assert json.loads(again)["stages"] == json.loads(text)["stages"]


@pytest.mark.parametrize("form", ["markdown", "csv", "plain"])
def test_every_format_shows_the_cache(form: str) -> None:
    assert "KV cache" in run("--max-len", "8k", "--format", form).stdout
