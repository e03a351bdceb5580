"""The error tree: one sentence each, the nearest right name, the exit code."""

from __future__ import annotations

import pytest

import memcalc
from memcalc import errors
from memcalc.errors import (
    CombinationError,
    FileError,
    InputError,
    MemcalcError,
    MissingError,
    UnknownNameError,
    nearest,
    shown,
)

NAMES = ["a10", "a100-40g", "a100-pcie-40g", "adamw", "adamw-8bit", "llama-2-7b", "llama-3-70b", "sgd"]


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        ("adamww", "adamw"),
        ("ADAMW", "adamw"),
        ("a100", "a100-40g"),
        ("lama-2-7b", "llama-2-7b"),
        ("70b", "llama-3-70b"),
        ("zebra", None),
        ("", None),
        ("x" * 100_000, None),
    ],
)
def test_nearest(typed: str, found: str | None) -> None:
    """The beginning of a name wins over a likeness, a likeness over a part."""
    assert nearest(typed, NAMES) == found


def test_nearest_keeps_the_spelling_of_the_candidate() -> None:
    assert nearest("swiglu", ["SwiGLU"]) == "SwiGLU"


@pytest.mark.parametrize("kind", [InputError, UnknownNameError, CombinationError, FileError])
def test_the_sentence_names_field_value_and_what_is_allowed(kind: type[InputError]) -> None:
    said = str(kind("optimizer", "adamww", "must be one of adamw, sgd", NAMES))
    assert "optimizer 'adamww': " in said
    assert said.endswith("must be one of adamw, sgd; did you mean 'adamw'?")


def test_without_a_near_name_the_sentence_ends_with_a_full_stop() -> None:
    assert str(InputError("tp", 3, "must divide the 32 heads.")) == "tp 3: must divide the 32 heads."


def test_nothing_is_suggested_for_what_is_not_text() -> None:
    assert InputError("tp", 3, "must be 1 or 2", ["3d"]).suggestion is None


@pytest.mark.parametrize(
    "value",
    ["\x1b[31mred\x1b[0m", "a\nb", "x" * 10_000, 10**5000, ["y" * 5000], "\ud800", None, object(), b"\x00" * 999],
    ids=["escape", "newline", "long", "huge int", "long list", "surrogate", "none", "object", "bytes"],
)
def test_any_value_is_shown_on_one_short_printable_line(value: object) -> None:
    """Nothing that a user typed can move the cursor, fill the screen, or break the encoding."""
    text = shown(value)
    assert len(text) <= 200
    assert text.isprintable()
    text.encode()


def test_exit_codes() -> None:
    assert MemcalcError.exit_code == InputError.exit_code == FileError.exit_code == 2
    assert MissingError.exit_code == 3


def test_the_whole_tree_is_drawn() -> None:
    """A new error class must appear in the module's docstring."""
    classes = [name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)]
    assert all(name in (errors.__doc__ or "") for name in classes)


def test_context_is_added_in_front_and_the_suggestion_kept() -> None:
    inner = UnknownNameError("key", "hiden", "must be one of hidden, heads", ["hidden", "heads"])
    said = "model preset mine: unknown key 'hiden': must be one of hidden, heads; did you mean 'hidden'?"
    assert str(inner.within("model preset mine")) == said
    assert type(inner.within("x")) is UnknownNameError


def test_a_typed_option_is_called_as_it_was_typed() -> None:
    error = InputError("global_batch", 100, "must be a multiple of 8")
    assert error.sentence({"--global-batch"}) == "--global-batch 100: must be a multiple of 8."
    assert error.within("sweep.toml").sentence({"--global-batch"}).startswith("sweep.toml: global_batch 100: ")
    assert InputError("ffn", None, "must be given: a width").sentence() == "ffn is missing: a width."


def test_an_at_without_an_era_is_refused() -> None:
    for name in ("fsdp2@", "hf@"):
        with pytest.raises(InputError, match="must name a version or a month after its @"):
            memcalc.estimate(model="gpt2", gpu="h100", framework=name)


def test_a_gpu_whose_rates_leave_no_wide_precision_computes_in_bf16() -> None:
    """Three stages of one rank each: torchtitan mixes precisions by FSDP, and no rate of Gaudi 2 in fp32 is known."""
    found = memcalc.estimate(model="gpt2", gpu="gaudi2", framework="torchtitan", pp=3)
    assert found.strategy.precision == "bf16"
