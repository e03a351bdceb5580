"""Models in a local cache of the Hub, laid out as huggingface_hub lays it out; none of it needs a network."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from memcalc import api, catalog
from memcalc.convert.named_model import cache_folders, named_model, snapshot_of
from memcalc.errors import FileError, InputError, MemcalcError, MissingError, UnknownNameError
from memcalc.preflight.names import model_named
from memcalc.terms.parameters import model_count

COMMIT, OTHER = "0" * 39 + "1", "f" * 40
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 160,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1000,
    "max_position_embeddings": 128, "tie_word_embeddings": False,
}  # fmt: skip
PARAMETERS = 2 * 1000 * 64 + 64 + 2 * (64 * 64 * 2 + 2 * 64 * 32 + 3 * 64 * 160 + 2 * 64)
BNB = {"load_in_4bit": True, "quant_method": "bitsandbytes", "bnb_4bit_quant_type": "nf4"}


class Cache:
    """One cache folder, filled as downloads would fill it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def repository(self, hub_id: str) -> Path:
        """The folder of one repository."""
        return self.folder / f"models--{hub_id.replace('/', '--')}"

    def snapshot(self, hub_id: str, config: object = None, commit: str = COMMIT, ref: str = "main") -> Path:
        """Add a commit: a blob, a link to it, and the reference, where it has a name."""
        repository = self.repository(hub_id)
        blob = repository / "blobs" / f"blob-{commit}"
        blob.parent.mkdir(parents=True, exist_ok=True)
        text = config if isinstance(config, str) else json.dumps(CONFIG if config is None else config)
        blob.write_text(text, encoding="utf-8")
        file = repository / "snapshots" / commit / "config.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.symlink_to(os.path.relpath(blob, file.parent))
        if ref:
            path = repository / "refs" / ref
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(commit, encoding="utf-8")
        return file


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cache:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    return Cache(tmp_path / "hub")


@pytest.mark.parametrize(
    ("environ", "folders"),
    [
        ({}, ["/home/me/.cache/huggingface/hub"]),
        ({"XDG_CACHE_HOME": "/x"}, ["/x/huggingface/hub"]),
        ({"HF_HOME": "~/hf", "XDG_CACHE_HOME": "/x"}, ["/home/me/hf/hub"]),
        ({"HF_HOME": "$SCRATCH/hf", "SCRATCH": "/s"}, ["/s/hf/hub"]),
        ({"HUGGINGFACE_HUB_CACHE": "/old", "HF_HOME": "/hf"}, ["/old"]),
        ({"HF_HUB_CACHE": "/new", "HUGGINGFACE_HUB_CACHE": "/old", "HF_HOME": "/hf"}, ["/new"]),
        ({"TRANSFORMERS_CACHE": "/tf"}, ["/home/me/.cache/huggingface/hub", "/tf"]),
        ({"HF_HOME": "/hf", "TRANSFORMERS_CACHE": "/hf/hub"}, ["/hf/hub"]),
    ],
)
def test_folders_are_those_of_huggingface_hub(environ: dict[str, str], folders: list[str]) -> None:
    assert [folder.as_posix() for folder in cache_folders({"HOME": "/home/me", **environ})] == folders


@pytest.mark.parametrize("variable", ["HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME"])
def test_the_first_folder_is_the_one_that_the_library_takes(variable: str, tmp_path: Path) -> None:
    """huggingface_hub itself says it, in a process of its own: it reads its variables as it is imported."""
    pytest.importorskip("huggingface_hub")
    import subprocess
    import sys

    environ = {
        name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGINGFACE_", "XDG_"))
    }
    environ[variable] = str(tmp_path / "$PART" / "cache")
    environ["PART"] = "part"
    told = "from huggingface_hub.constants import HF_HUB_CACHE; print(HF_HUB_CACHE)"
    theirs = subprocess.run([sys.executable, "-c", told], env=environ, capture_output=True, text=True, check=True)
    assert str(next(cache_folders(environ))) == theirs.stdout.strip()


def test_a_snapshot_is_where_the_library_finds_it(cache: Cache) -> None:
    hub = pytest.importorskip("huggingface_hub")
    cache.snapshot("someone/model")
    cache.snapshot("someone/model", {**CONFIG, "vocab_size": 2000}, OTHER, "v1.0")
    cache.snapshot("someone/model", {**CONFIG, "vocab_size": 2000}, "a" * 40, "refs/pr/1")
    for revision in ("main", "v1.0", "refs/pr/1", COMMIT, OTHER):
        theirs = hub.try_to_load_from_cache("someone/model", "config.json", cache.folder, revision)
        ours = snapshot_of(f"someone/model@{revision}")
        assert ours is not None
        assert str(ours.config) == theirs


def test_a_downloaded_model_needs_no_preset(cache: Cache) -> None:
    cache.snapshot("someone/model")
    named = named_model("someone/model")
    assert int(model_count(named.model).total) == PARAMETERS
    assert named.model.name == "someone/model"
    assert COMMIT[:7] in named.model.source
    assert "Hub cache" in named.origin
    estimate = api.estimate(model="someone/model", gpu="rtx-4090", seq_len=128)
    assert estimate.assumptions["sizes"] == named.origin
    assert estimate.model.name == "someone/model"
    assert model_named("someone/model") == "someone/model"


def test_a_revision_is_its_own(cache: Cache) -> None:
    cache.snapshot("someone/model")
    cache.snapshot("someone/model", {**CONFIG, "vocab_size": 2000}, OTHER, "v1.0")
    assert named_model("someone/model").model.vocab == named_model("someone/model@main").model.vocab == 1000
    assert named_model("someone/model@v1.0").model.vocab == named_model(f"someone/model@{OTHER}").model.vocab == 2000


def test_a_second_cache_is_looked_at(cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSFORMERS_CACHE", str(tmp_path / "older"))
    Cache(tmp_path / "older").snapshot("someone/model", {**CONFIG, "vocab_size": 3000})
    assert named_model("someone/model").model.vocab == 3000
    (cache.repository("someone/model") / "refs").mkdir(parents=True)
    assert named_model("someone/model").model.vocab == 3000, "a torn one does not hide it"
    cache.snapshot("someone/model")
    assert named_model("someone/model").model.vocab == 1000


def test_a_presets_own_name_and_the_table_stay_what_they_are(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("meta-llama/Llama-2-7b-hf", "Qwen/QwQ-32B"):
        cache.snapshot(name)
    monkeypatch.setattr("memcalc.convert.named_model.snapshot_of", lambda *_: pytest.fail("the cache was read"))
    assert named_model("meta-llama/Llama-2-7b-hf").model.name == "llama-2-7b"
    assert named_model("Qwen/QwQ-32B").model.name == "qwen2.5-32b"
    assert named_model("7b").model.name == "llama-2-7b"


@pytest.mark.parametrize(
    "name", ["someone/llama-2-7b-chat", "codellama/CodeLlama-7b-hf", "mistralai/Mixtral-8x22B-Instruct-v0.1"]
)
def test_the_cache_knows_better_than_the_end_of_a_name(cache: Cache, name: str) -> None:
    cache.snapshot(name)
    assert named_model(name).model.vocab == 1000


def test_a_pinned_revision_is_never_the_presets(cache: Cache) -> None:
    with pytest.raises(InputError, match="does not hold this revision"):
        named_model("meta-llama/Llama-2-7b-hf@v9")
    assert named_model("meta-llama/Llama-2-7b-hf@main").model.name == "llama-2-7b"
    cache.snapshot("meta-llama/Llama-2-7b-hf", None, OTHER, "v9")
    assert named_model("meta-llama/Llama-2-7b-hf@v9").model.vocab == 1000


def test_a_folder_of_that_path_comes_first(cache: Cache) -> None:
    cache.snapshot("someone/model")
    folder = Path("someone/model")
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": 4000}), encoding="utf-8")
    assert named_model("someone/model").model.vocab == 4000


def test_no_folder_is_listed(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.snapshot("someone/model")
    catalog.lookup("7b")
    for name in ("listdir", "scandir", "walk"):
        monkeypatch.setattr(os, name, lambda *_: pytest.fail("a folder was listed"))
    assert snapshot_of("someone/model") is not None
    assert snapshot_of("someone/else") is None


@pytest.mark.parametrize(
    ("torn", "says"),
    [
        (lambda repository: (repository / "refs" / "main").unlink(), "has no revision main"),
        (lambda repository: (repository / "refs" / "main").write_text(""), "holds no commit"),
        (lambda repository: (repository / "refs" / "main").write_text("../../../../etc"), "holds no commit"),
        (lambda repository: (repository / "refs" / "main").write_bytes(b"\xff" * 5000), "holds no commit"),
        (lambda repository: (repository / "refs" / "main").write_text(OTHER), "has no config.json"),
        (lambda repository: (repository / "blobs" / f"blob-{COMMIT}").unlink(), "has no config.json"),
        (lambda repository: (repository / "snapshots" / COMMIT / "config.json").unlink(), "has no config.json"),
    ],
)
def test_a_torn_cache_is_one_sentence(cache: Cache, torn: Any, says: str) -> None:
    cache.snapshot("someone/model")
    torn(cache.repository("someone/model"))
    with pytest.raises(FileError, match=says) as caught:
        named_model("someone/model")
    assert "\n" not in str(caught.value)
    cache.snapshot("someone/llama-2-7b-chat")
    torn(cache.repository("someone/llama-2-7b-chat"))
    assert named_model("someone/llama-2-7b-chat").model.name == "llama-2-7b", "its name says enough"


@pytest.mark.parametrize("revision", ["../../main", "..", "/etc/passwd", "a\nb", "-x", "v" * 500, "é"])
def test_no_revision_leads_out_of_the_cache(cache: Cache, revision: str) -> None:
    cache.snapshot("someone/model")
    with pytest.raises(InputError) as caught:
        named_model(f"someone/model@{revision}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name", ["../model", "someone/..", "someone--x/model", "a/b/c", "someone/model\0", "someone/" + "x" * 300]
)
def test_no_name_leads_out_of_the_cache(cache: Cache, name: str) -> None:
    cache.snapshot("someone/model")
    with pytest.raises(MemcalcError):
        named_model(name)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "must be JSON"),
        ("[1]", "must hold a JSON object"),
        ("[" * 100_000, "nested"),
        ('{"a": ' + "9" * 10_000 + "}", "usual size"),
        (" " * (6 << 20), "at most 5 MiB"),
        ("{}", "no model_type"),
        (json.dumps({**CONFIG, "hidden_size": -1}), "hidden_size"),
        (json.dumps({**CONFIG, "model_type": "unheard_of"}), "someone/model in the Hub cache, commit 0000000"),
        (json.dumps({**CONFIG, "quantization_config": [1]}), "quantization_config"),
    ],
)
def test_its_config_is_read_within_the_same_bounds(cache: Cache, text: str, says: str) -> None:
    cache.snapshot("someone/model", text)
    with pytest.raises(MemcalcError, match=says) as caught:
        named_model("someone/model")
    assert "\n" not in str(caught.value)


def test_a_config_that_is_no_file_is_not_waited_for(cache: Cache) -> None:
    file = cache.snapshot("someone/model")
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(FileError, match=r"has no config\.json"):
        named_model("someone/model")


@pytest.mark.parametrize("method", ["bitsandbytes", "gptq", "awq", "compressed-tensors"])
def test_a_quantised_checkpoint_is_counted_as_the_job_says_and_told(cache: Cache, method: str) -> None:
    cache.snapshot("someone/model", {**CONFIG, "quantization_config": {**BNB, "quant_method": method}})
    named = named_model("someone/model")
    assert int(model_count(named.model).total) == PARAMETERS
    assert named.stored == method
    job = {"model": "someone/model", "gpu": "rtx-4090", "seq_len": 128}
    assert any(f"stored quantized ({method})" in text for text in api.estimate(**job).warnings)
    told = api.estimate(**job, lora="8", quantize="nf4", precision="bf16").warnings
    assert not any("stored quantized" in text for text in told)


@pytest.mark.parametrize("method", ["fp8", "mxfp4"])
def test_what_is_expanded_as_it_is_loaded_is_not_told(cache: Cache, method: str) -> None:
    cache.snapshot("someone/model", {**CONFIG, "quantization_config": {"quant_method": method}})
    assert not named_model("someone/model").stored


def test_quantised_copies_of_presets_are_told() -> None:
    told = api.estimate(model="TheBloke/Llama-2-7B-GPTQ", gpu="a100-80g", gpus=8, zero=3).warnings
    assert any("TheBloke/Llama-2-7B-GPTQ is stored quantized (gptq)" in text for text in told)
    for name in ("Qwen/Qwen3-8B-FP8", "unsloth/gpt-oss-20b-BF16", "unsloth/Qwen3-8B"):
        assert not named_model(name).stored, name
    assert model_named("TheBloke/Llama-2-7B-GPTQ") == "TheBloke/Llama-2-7B-GPTQ"


def test_a_vision_tower_that_is_left_out_is_told() -> None:
    named = named_model("google/gemma-3-4b-it")
    assert named.model.name == "gemma-3-4b"
    plans = api.plan(model="google/gemma-3-4b-it", gpu="a100-80g", gpus=8)
    assert any("its vision tower is left out" in text for text in plans.warnings)
    assert not named_model("gemma-3-4b").missing
    assert not named_model("google/gemma-3-1b-it").missing
    assert model_named("google/gemma-3-4b-it") == "google/gemma-3-4b-it"


def test_a_vision_model_in_the_cache_is_refused_as_its_config_is(cache: Cache) -> None:
    cache.snapshot(
        "someone/seer", {"model_type": "llava", "text_config": CONFIG, "vision_config": {"model_type": "hiera"}}
    )
    with pytest.raises(InputError, match="hiera"):
        named_model("someone/seer")


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/hf/hub/models--meta-llama--Llama-2-7b-hf/snapshots/abc", "llama-2-7b"),
        ("/data/models/Qwen2.5-7B-Instruct/", "qwen2.5-7b"),
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b"),
    ],
)
def test_paths_that_configs_name_lead_to_their_models(path: str, name: str) -> None:
    assert model_named(path) == name


@pytest.mark.parametrize("path", ["teknium/OpenHermes-2.5-Mistral-7B", "/data/OpenHermes-2.5-Mistral-7B"])
def test_a_changed_vocabulary_stays_however_the_model_is_named(path: str) -> None:
    """A preset's own name would be that of another vocabulary."""
    found = named_model(model_named(path)).model
    assert found.vocab == 32002
    assert named_model(found.name).model == found


@pytest.mark.parametrize("name", ["someone/unheard-of", "/data/unheard-of", "mistralai/Mixtral-8x22B-Instruct-v0.1"])
def test_a_model_that_nothing_knows_is_asked_for(name: str) -> None:
    with pytest.raises(MissingError, match="give --model"):
        model_named(name)
    if name.startswith("s"):
        with pytest.raises(UnknownNameError, match=r"give the path of its config\.json"):
            named_model(name)
