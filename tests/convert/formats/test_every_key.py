"""Every key that a reader knows has an end: it moves the job, is a finding, is refused in words, or is named harmless.

What a format knows is what its reader asks for on the configs of tests/configs, and the lists of its TOML file. Each
key gets other values in a config of that format until one is seen; a key that is listed, or asked for, and whose value
never shows would be taken without a word.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from memcalc.convert.config import Config, ConfigReader, split_key
from memcalc.convert.document import Document
from memcalc.convert.formats.base import get_format, key_table
from memcalc.errors import MemcalcError
from memcalc.preflight.job import read_files

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
FOLDERS = {
    "accelerate": "accelerate", "axolotl": "axolotl", "deepspeed": "deepspeed", "foundry": "foundry",
    "litgpt": "litgpt", "llamafactory": "llamafactory", "swift": "swift",
    "swift_megatron": "swift", "torchtitan": "torchtitan", "torchtune": "torchtune", "trainer": "trainer",
}  # fmt: skip
"""Where the configs of each lie."""
VALUES: tuple[Any, ...] = (True, 2, "17", 0.25, False, "none", ["x"], {"x": 1})
HARMLESS_LISTS = ("harmless", "script")
UNSEEN: dict[str, dict[str, str]] = {
    "accelerate": {
        "fsdp_config.xla": "XLA runs on no GPU that memcalc has; the type of the job says so before",
        "fsdp_config.xla_fsdp_v2": "likewise",
        "fsdp_config.xla_fsdp_grad_ckpt": "likewise",
    },
    "axolotl": {
        "fsdp_final_state_dict_type": "it counts where the save is not the state dict's own",
        "bnb_config_kwargs.bnb_4bit_quant_storage": "FSDP flattens what is stored, of as many bytes",
    },
    "foundry": {
        "model.ffn_config.ffn_act_fn.approximate": "it counts inside of the table of a gelu",
    },
    "swift": {
        "fsdp_config.fsdp_version": "one version is taken",
        "gradient_checkpointing_kwargs": "a table, whose keys are read one by one",
    },
    "swift_megatron": {
        "cuda_graph_modules": "it counts beside cuda_graph_impl",
        "cuda_graph_scope": "likewise",
    },
    "megatron": {"cuda_graph_scope": "the name that cuda_graph_modules had"},
    "trainer": {
        "liger_kernel_config": "a table, whose keys are read one by one",
        "optim_args": "it is said where an optimizer takes it",
        "vllm_max_model_len": "it tells the age of TRL where max_prompt_length does not, whatever its value",
    },
}  # fmt: skip
"""Keys of which no config here shows the end, and why that is right."""


@dataclass
class Watched:
    """What readers asked for, the words that a key may have, and what they named harmless."""

    name: str = ""
    """The format whose reader counts."""
    asked: set[str] = field(default_factory=set)
    words: dict[str, dict[str, None]] = field(default_factory=dict)
    harmless: set[str] = field(default_factory=set)


@cache
def documents(name: str, folder: str = "") -> tuple[Document, ...]:
    """The configs of a format under tests/configs, those that scripts name or hold as flags among them."""
    found = []
    for path in sorted((CONFIGS / (folder or FOLDERS[name])).rglob("*")):
        try:
            configs = read_files([str(path)]) if path.is_file() else []
        except MemcalcError:
            continue
        found += [config.document for config in configs if config.format == name]
    return tuple(found)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    seen = Watched()
    raw, one_of, harmless = ConfigReader.raw, ConfigReader.one_of, ConfigReader.harmless

    def watch_raw(self: ConfigReader, key: str, default: Any = None) -> Any:
        if self.format == seen.name:
            seen.asked.add(key)
        return raw(self, key, default)

    def watch_words(self: ConfigReader, key: str, names: Any, default: Any = None, *, fold: bool = True) -> Any:
        if self.format == seen.name:
            seen.words.setdefault(key, {}).update(dict.fromkeys(names))
        return one_of(self, key, names, default, fold=fold)

    def watch_harmless(self: ConfigReader, *keys: str) -> None:
        if self.format == seen.name:
            seen.harmless.update(keys)
        harmless(self, *keys)

    monkeypatch.setattr(ConfigReader, "raw", watch_raw)
    monkeypatch.setattr(ConfigReader, "one_of", watch_words)
    monkeypatch.setattr(ConfigReader, "harmless", watch_harmless)
    return seen


def said(config: Config) -> set[tuple[str, ...]]:
    """All that a config comes to, but that a key is not known."""
    settings = {(one.name, str(one.value), one.unknown) for one in config.settings}
    findings = {(one.code, one.field, one.message) for one in config.findings if one.code != "MC001"}
    references = {(one.format, one.path, str(one.document and one.document.data)) for one in config.references}
    return settings | findings | references


def with_value(document: Document, key: str, value: Any) -> Document:
    """The document with one value more, or another one."""
    data = table = copy.deepcopy(document.data)
    *tables, last = split_key(key)
    for name in tables:
        inner = table.get(name)
        if not isinstance(inner, dict):
            inner = table[name] = {}
        table = inner
    table[last] = value
    unknown = {place: name for place, name in document.unknown.items() if place != split_key(key)}
    return replace(document, data=data, unknown=unknown)


def states(document: Document, key: str) -> bool:
    data = document.data
    for name in split_key(key):
        if not isinstance(data, dict) or name not in data:
            return False
        data = data[name]
    return True


def is_seen(name: str, bases: list[tuple[Document, set[tuple[str, ...]]]], key: str, words: list[Any]) -> bool:
    """Whether some value of a key changes what is said, or is refused by the key's name."""
    form, last, refused = get_format(name), key.rpartition(".")[2], False
    for document, plain in sorted(bases, key=lambda base: not states(base[0], key)):
        for value in (*words[:8], *VALUES):
            try:
                if said(form.read(with_value(document, key, value))) != plain:
                    return True
            except MemcalcError as error:
                refused = refused or last in str(error)
    return refused


def keys_of(name: str, seen: Watched) -> Iterator[str]:
    """The known keys of a format that are not named harmless and no more."""
    table = key_table(name)
    listed = {key for part in ("read", "of_adapters", "of_lora") for key in table.lists.get(part, ())}
    listed |= {key for part in ("not_counted", "not_modelled") for key in table.tables.get(part, ())}
    harmless = seen.harmless | {key for part in HARMLESS_LISTS for key in table.lists.get(part, ())}
    for key in sorted(seen.asked | listed):
        covered = key in harmless or any(one.endswith(".") and key.startswith(one) for one in harmless)
        if key and not key.endswith(".") and not covered and key not in UNSEEN.get(name, {}):
            yield key


@pytest.mark.slow
@pytest.mark.parametrize("name", FOLDERS)
def test_no_known_key_is_taken_without_a_word(name: str, watched: Watched) -> None:
    watched.name, form = name, get_format(name)
    bases = [(document, said(form.read(document))) for document in documents(name)]
    assert bases
    keys = list(keys_of(name, watched))
    assert len(keys) > 12
    assert [key for key in keys if not is_seen(name, bases, key, list(watched.words.get(key, ())))] == []


MEGATRON_BASES: tuple[dict[str, Any], ...] = (
    {},
    {"transformer_impl": "local", "use_flash_attn": True},
    {"bf16": True, "fp8_format": "hybrid", "disable_bias_linear": True, "optimizer": "sgd"},
    {"bf16": True, "fp8_format": "e4m3", "fp8_recipe": "mxfp8", "fp8_param_gather": True},
    {"bf16": True, "use_precision_aware_optimizer": True, "use_distributed_optimizer": True, "save": "x"},
    {"use_distributed_optimizer": True, "save": "x", "dist_ckpt_optim_fully_reshardable": True, "load": "x"},
    {"num_experts": 8, "moe_grouped_gemm": True, "expert_model_parallel_size": 2, "multi_latent_attention": True},
    {"num_layers": 8, "pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2},
    {"tensor_model_parallel_size": 2, "sequence_parallel": True, "context_parallel_size": 2},
    {"recompute_granularity": "full", "attention_backend": "unfused", "optimizer_cpu_offload": True},
    {"recompute_granularity": "selective", "cuda_graph_impl": "local"},
    {"seq_length": None, "global_batch_size": None, "eval_interval": None},
    {"use_distributed_optimizer": True},
    {"fp16": True},
    {"vocab_size": None, "tokenizer_type": "GPT2BPETokenizer"},
)
"""Jobs on which each flag of Megatron-LM's shows, beside the sizes of a model; None where a flag is left out."""
SIZED = {
    "num_layers": 4, "hidden_size": 1024, "num_attention_heads": 8, "seq_length": 2048, "max_position_embeddings": 2048,
    "vocab_size": 51200, "micro_batch_size": 1, "global_batch_size": 64, "eval_interval": 100,
}  # fmt: skip
SHAPED: dict[str, list[Any]] = {
    "step_batch_size_schedule": ["0:32 1000:128"],
    "cuda_graph_modules": [["full_iteration"]],
}
"""Values of a shape that no other flag has."""


def of_megatron(flags: dict[str, Any]) -> Document:
    data = {name: value for name, value in {**SIZED, **flags}.items() if value is not None}
    return Document(Path("job"), "flags", "", data, dict)


@pytest.mark.slow
def test_no_flag_of_megatron_is_taken_without_a_word(watched: Watched) -> None:
    """Its reader asks for all that it knows; those of its list are said to count, and each must."""
    watched.name, form = "megatron", get_format("megatron")
    bases = [(document, said(form.read(document))) for document in map(of_megatron, MEGATRON_BASES)]
    table = key_table("megatron")
    keys = sorted({*table.lists["flags"], *table.not_counted, *table.not_modelled} - set(UNSEEN["megatron"]))
    words = {key: [*SHAPED.get(key, ()), *watched.words.get(key, ())] for key in keys}
    assert [key for key in keys if not is_seen("megatron", bases, key, words[key])] == []


def test_no_flag_of_megatron_that_is_read_is_named_harmless(watched: Watched) -> None:
    """Its reader hands over every name that it knows, so that its lists alone tell what has an end."""
    watched.name = "megatron"
    assert documents("megatron", "megatron")
    table = key_table("megatron")
    harmless = set(table.lists["harmless"])
    assert {key.rpartition(".")[2] for key in watched.asked} & harmless == set()
    assert {*table.not_counted, *table.not_modelled} & harmless == set()
    assert set(table.lists["flags"]) & harmless == set()
