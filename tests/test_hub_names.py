"""Names on the Hub: each leads to the preset whose sizes it has, or nowhere; never to another size or version.

tests/hub_names.csv lists repositories that public training configs, examples and papers name, with what each is: the
`same` sizes as a preset; a preset that is `part` of it, less what the note says; a preset with what the note says
`changed`; one that `differs` in what the note says; one of which it is `unsure`; or none, an architecture without a
preset. It was collected and checked by hand.
"""

from __future__ import annotations

import csv
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from memcalc import catalog
from memcalc.errors import InputError, UnknownNameError
from memcalc.preset_names import by_form, key, mistyped, stored_as
from memcalc.terms.parameters import model_count

ROOT = Path(__file__).resolve().parents[1]
with (ROOT / "tests" / "hub_names.csv").open(encoding="utf-8", newline="") as _stream:
    ROWS = list(csv.DictReader(_stream))
TABLE = catalog.read_toml(ROOT / "presets" / "hub.toml")
ALIASES = catalog.read_toml(ROOT / "presets" / "models" / "aliases.toml")
PRESETS = catalog.names("model")
KNOWN, BY_ALIAS = set(PRESETS), {key(alias): name for alias, name in ALIASES.items()}
LISTED = [
    name
    for row in (*TABLE["preset"].values(), *TABLE["unlike"])
    for name in (*row.get("names", ()), *row.get("parts", ()))
]
LISTED += [name for row in TABLE["resized"] for name in row["names"]]
STANDING = {*PRESETS, *map(key, ALIASES), *map(key, LISTED)}
NAMES = sorted(STANDING)

ENDINGS = (
    "instruct", "chat", "hf", "it", "pt", "base", "sft", "dpo", "bnb-4bit", "unsloth-bnb-4bit", "awq", "gptq-int4",
    "fp8-dynamic", "nvfp4", "bf16", "v0.1", "v0.2", "v0.3", "v2", "v3", "2", "3.1", "2407", "2507", "08-2024", "1b",
    "70b", "8x7b", "a3b", "large", "mini", "plus", "lite", "turbo", "coder", "math", "vl", "vision", "omni", "audio",
    "reward", "embedding", "reranker", "moe", "32k", "lora", "gguf", "pruned", "distill", "r1", "draft", "thinking",
)  # fmt: skip
"""Of forms, storage, versions, dates, sizes, lines and parts; the last kinds may lead nowhere, but never elsewhere."""


@cache
def parameters(name: str) -> int:
    return int(model_count(catalog.model(name)).total)


def preset_of(name: str) -> str:
    """The preset of a name as the catalog finds it, whose lists are made once for all names here."""
    for form in (key(name), BY_ALIAS.get(key(name), "")):
        if form in KNOWN:
            return form
    lead = by_form(name, KNOWN, BY_ALIAS, catalog.hub_table())
    return "" if lead is None else lead.preset


def explicit(name: str) -> bool:
    """Whether a name stands somewhere as it is, with its owner or without."""
    return not STANDING.isdisjoint((key(name), key(name.rpartition("/")[2])))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["hub_id"])
def test_a_repository_leads_to_its_own_sizes_or_nowhere(row: dict[str, str]) -> None:
    lead = catalog.lookup(row["hub_id"])
    preset = "" if lead is None else lead.preset
    assert preset == preset_of(row["hub_id"])
    if row["is"] == "same":
        assert preset == row["preset"]
        assert lead is not None
        assert not lead.entry.missing
        assert not lead.entry.changes
    elif row["is"] == "part":
        assert preset == row["preset"]
        assert lead is not None
        assert lead.entry.missing == (row["note"] or "its vision tower")
    elif row["is"] == "changed":
        assert_changed(row)
    elif row["is"] == "unsure":
        assert preset in {"", row["preset"]}
    else:
        assert not preset


def assert_changed(row: dict[str, str]) -> None:
    model, base = catalog.model(row["hub_id"]), catalog.model(row["preset"])
    vocabulary = re.search(r"vocabulary (\d+)", row["note"])
    assert model.vocab == (int(vocabulary[1]) if vocabulary else base.vocab)
    assert model.num_layers == base.num_layers
    assert model.hidden == base.hidden
    if "one score" in row["note"]:
        tokens = (model.vocab - base.vocab) * score(row["preset"])
        whole = model_count(base)
        assert model_count(model).total == whole.total - whole.head + score(row["preset"]) + tokens
    assert not model.hf_config


def score(preset: str) -> int:
    """Weights from what a block keeps for a token to its one score."""
    model = catalog.model(preset)
    return model.embedding_dim or model.hidden


@pytest.mark.parametrize("name", NAMES)
def test_no_ending_leads_to_another_size_or_version(name: str) -> None:
    """What is appended either stands somewhere by itself, or changes nothing, or leads nowhere."""
    plain = preset_of(name)
    bare = name.rpartition("/")[2]
    for ending in ENDINGS:
        for longer in (f"{name}-{ending}", f"someone/{bare}-{ending}", f"someone/{bare}_{ending.upper()}-Instruct"):
            preset = preset_of(longer)
            if preset and preset != plain:
                known = explicit(longer) or any(explicit(form) for form in forms_by_hand(longer))
                assert known or parameters(preset) == parameters(plain), longer


def forms_by_hand(name: str) -> list[str]:
    """The name without what its end says of training and storage, told apart from memcalc's own rules."""
    ends = ("-instruct", "-chat", "-hf", "-it", "-pt", "-base", "-sft", "-dpo", "-unsloth-bnb-4bit", "-bnb-4bit",
            "-awq", "-gptq-int4", "-fp8-dynamic", "-nvfp4", "-bf16")  # fmt: skip
    shorter = [key(name)]
    while end := next((end for end in ends if shorter[-1].endswith(end)), None):
        shorter.append(shorter[-1].removesuffix(end))
    within = re.sub(r"-(hf|chat|instruct|base|it|pt|sft|dpo)(?=-|$)", "", shorter[-1])
    return [form.replace("meta-llama-3", "llama-3") for form in (*shorter, within)]


@pytest.mark.parametrize("name", [name for name in PRESETS if re.search(r"\d[bm](-|$)", name)])
def test_no_other_size_leads_to_a_preset(name: str) -> None:
    for size in ("0.4b", "9.5b", "37b", "777m", "5x9b"):
        other = re.sub(r"(?<![\d.x])(\d+x)?[\d.]+[bm](?=-|$)", size, name, count=1)
        assert not preset_of(f"someone/{other}"), other
        assert not preset_of(f"{other}-instruct"), other


def test_a_size_alone_is_a_model_only_as_it_is_typed() -> None:
    assert preset_of("7b") == "llama-2-7b"
    assert not preset_of("someone/7b")
    assert not preset_of("7b-instruct")


@pytest.mark.parametrize("name", ["someone/mistral-7b", "someone/Mistral-7B-Instruct-bnb-4bit", "mistral-chat"])
def test_a_name_without_its_version_is_not_guessed(name: str) -> None:
    """Mistral 7B has 32,000 tokens as v0.1 and 32,768 as v0.3."""
    assert not preset_of(name)


@pytest.mark.parametrize("name", ["mistral-7b-instruct-v0.3-bnb-4bit", "Mistral-7B-Instruct-v0.3", "mistral-7b-v0.3"])
def test_a_version_stays(name: str) -> None:
    assert catalog.model(f"unsloth/{name}").vocab == 32768


def test_the_table_names_presets_and_sources() -> None:
    for preset, row in TABLE["preset"].items():
        assert preset in PRESETS
        assert set(row["source"].split(", ")) <= set(TABLE["sources"])
        assert ("parts" in row) == ("missing" in row)
    for row in (*TABLE["resized"], *TABLE["unlike"]):
        assert row["like"] in PRESETS
        assert set(row["source"].split(", ")) <= set(TABLE["sources"])


@pytest.mark.parametrize("row", TABLE["resized"], ids=lambda row: str(row["names"][0]))
def test_what_is_changed_stands_in_the_table_of_its_preset(row: dict[str, Any]) -> None:
    """Only a table of plain sizes can be changed by a key: in one of groups its embedding would stay as it was."""
    table = catalog.read_toml(ROOT / "presets" / "models" / f"{row['like']}.toml")
    assert "n_layers" in table
    assert all(table.get(key) != value for key, value in row["with"].items())


def test_the_table_contradicts_no_alias() -> None:
    listed = {key(name): preset for preset, row in TABLE["preset"].items() for name in row.get("names", ())}
    assert {name: listed[name] for name in listed if ALIASES.get(name, listed[name]) != listed[name]} == {}
    assert not [name for name in listed if name in PRESETS]
    assert len({key(name) for name in LISTED}) == len(LISTED)


@pytest.mark.parametrize(
    "name",
    ["stabilityai/stablelm-2-3_6b", "state-spaces/mamba-2.9b", "arcee-ai/AFM-5.5B", "llava-hf/llava-1.5-9b-hf",
     "google/gemma-4-32B", "google/gemma-3-270m-pruned", "Qwen/Qwen2.5-VL-9B-Instruct", "qwen2.5-8b"],
)  # fmt: skip
def test_nothing_of_another_family_or_size_is_offered(name: str) -> None:
    with pytest.raises(UnknownNameError) as caught:
        catalog.model(name)
    assert caught.value.suggestion is None


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("lama-2-7b", "llama-2-7b"), ("meta-llama/Lama-2-7b-hf", "llama-2-7b"), ("mistal-7b-v0.1", "mistral-7b-v0.1"),
     ("qewn2.5-7b", "qwen2.5-7b"), ("pythia-1.4bb", None)],
)  # fmt: skip
def test_a_slip_of_the_same_size_is_told(typed: str, meant: str | None) -> None:
    assert mistyped(typed, PRESETS) == meant


@pytest.mark.parametrize(
    ("name", "rest", "form"),
    [("a-7b-unsloth-bnb-4bit", "a-7b", "bnb"), ("a-7b-bnb-nf4-bf16", "a-7b", "bnb"), ("a-7b-gptq-int4", "a-7b", "gptq"),
     ("a-7b-awq", "a-7b", "awq"), ("a-7b-aqlm-2bit-1x16", "a-7b", "aqlm"), ("a-7b-nvfp4", "a-7b", "nvfp4"),
     ("a-7b-quantized.w4a16", "a-7b", "int"), ("a-7b-fp8-block", "a-7b", ""), ("a-7b-bf16", "a-7b", ""),
     ("a-7b-8bit", "a-7b", "int"), ("a-7b-gguf", "a-7b-gguf", ""), ("a-7b-2of4", "a-7b-2of4", "")],
)  # fmt: skip
def test_how_weights_are_stored_is_read_from_the_end(name: str, rest: str, form: str) -> None:
    assert stored_as(name) == (rest, form)


def test_a_repository_unlike_its_base_says_in_what() -> None:
    with pytest.raises(InputError, match=r"it is mixtral-8x22b but for a vocabulary of 32768"):
        catalog.model("mistralai/Mixtral-8x22B-Instruct-v0.1")


@pytest.mark.parametrize("name", ["", "/", "-", "a/-", "@", "someone/" + "7b-" * 30])
def test_what_is_no_name_is_refused_in_a_sentence(name: str) -> None:
    with pytest.raises(InputError):
        catalog.model(name)
