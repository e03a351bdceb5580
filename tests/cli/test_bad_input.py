"""Wrong command lines: each is answered by one sentence on stderr and exit code 2, never by a traceback."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from drawing import drawn
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from typer.testing import CliRunner

from memcalc.cli.app import app


class Case(NamedTuple):
    """What is typed after a right beginning, and what the sentence must say."""

    typed: tuple[str, ...]
    says: tuple[str, ...]
    command: str = "estimate"
    model: str = "llama-2-7b"
    gpu: str = "a100-80g"

    @property
    def line(self) -> list[str]:
        """The whole command line."""
        return [self.command, "--model", self.model, "--gpu", self.gpu, *self.typed]


def one(option: str, value: str, *says: str, **rest: str) -> Case:
    """Return a case of one option: the sentence names it, and `says`."""
    return Case((f"--{option}", value), (option, *says), **rest)


NUMBERS = [
    one(option, value, value)
    for option, value in (
        ("gpus", "eight"), ("gpus", "0"), ("gpus", "-8"), ("gpus", "1.5"), ("gpus", "99999999999999999999"),
        ("gpus", "1e9999"), ("gpus", "nan"), ("seq-len", "long"), ("seq-len", "0"), ("seq-len", "4096 bananas"),
        ("micro-batch", "0"), ("micro-batch", "-1"), ("micro-batch", "two"), ("global-batch", "0"),
        ("global-batch", "4M potatoes"), ("tp", "0"), ("tp", "x"), ("pp", "-2"), ("cp", "0"), ("ep", "none"),
        ("vpp", "0"), ("zero", "4"), ("zero", "-1"), ("zero", "three"), ("lora", "0"), ("lora", "many"),
    )
]  # fmt: skip
NAMES = [
    one(option, value, right)
    for option, value, right in (
        ("framework", "fsdp3", "fsdp2"), ("framework", "megatorn", "megatron"),
        ("precision", "bf16-mixd", "bf16-mixed"),
        ("precision", "int2", "fp32"), ("optimizer", "adamww", "adamw"), ("optimizer-impl", "fuse", "fused"),
        ("recompute", "ful", "full"), ("recompute", "every-0", "every"), ("recompute", "modules:", "core_attn"),
        ("offload", "optimiser", "optimizer"), ("offload", "params,disk", "activations"),
        ("offload-to", "nvem", "nvme"),
        ("attention", "flahs", "flash"), ("loss", "chunk", "chunked"), ("kernels", "fussed", "fused"),
        ("pp-schedule", "1f2b", "1f1b"), ("compile", "everything", "blocks"), ("cp-kind", "rng", "ring"),
        ("quantize", "nf5", "nf4"), ("compress-activations", "int9", "int8"), ("node", "hgx-h10", "hgx-h100"),
        ("format", "jsn", "json"), ("set", "strategy.zeero=3", "zero"), ("set", "no-equals-sign", "key=value"),
        ("calibration", "/no/such/file.toml", "regular file"), ("preset-dir", "/no/such/folder", "directory"),
        ("output", "/no/such/folder/plan.md", "directory"),
    )
]  # fmt: skip
COMBINATIONS = [
    Case(("--gpus", "8", "--tp", "3"), ("tp", "3")),
    Case(("--gpus", "64", "--tp", "64"), ("tp", "64", "32")),
    Case(("--gpus", "16", "--tp", "16"), ("tp", "16", "key-value"), model="llama-2-70b"),
    Case(("--gpus", "64", "--pp", "64"), ("pp", "64", "32")),
    Case(("--gpus", "8", "--ep", "8"), ("ep", "8")),
    Case(("--gpus", "8", "--global-batch", "12", "--micro-batch", "1"), ("global-batch", "12")),
    Case(("--gpus", "8", "--global-batch", "4"), ("global-batch", "4")),
    Case(("--gpus", "2", "--tp", "4"), ("tp", "4", "gpus")),
    Case(("--precision", "bf16-mixed"), ("precision", "bf16-mixed", "v100"), gpu="v100-32g"),
    Case(("--precision", "fp8-mixed"), ("precision", "fp8-mixed", "a100")),
    Case(("--precision", "fp16-mixed", "--attention", "flash"), ("attention", "flash", "v100"), gpu="v100-32g"),
    Case(("--node", "hgx-h100"), ("node", "hgx-h100", "a100-80g")),
]
PRESETS = [
    Case((), ("model", "lama-2-7b", "llama-2-7b"), model="lama-2-7b"),
    Case((), ("model", "is missing"), model=""),
    Case((), ("gpu", "a100-80gg", "a100-80g"), gpu="a100-80gg"),
    Case((), ("gpu", "is missing"), gpu=""),
    Case((), ("/no/such/config.json",), model="/no/such/config.json"),
    Case((), ("model", "x\\x1b[31m"), model="x\x1b[31m"),
    Case((), ("model", "\\ud800"), model="\ud800"),
]
PLANS = [case._replace(command=command) for case in NUMBERS[:4] + PRESETS[:3] for command in ("plan", "explain")]
CASES = [*NUMBERS, *NAMES, *COMBINATIONS, *PRESETS, *PLANS, one("top", "0", "0", command="plan"),
         one("top", "ten", "ten", command="plan")]  # fmt: skip
USAGE = [
    (["plann"], ("plann", "plan")),
    (["estimate", "--gpu", "a100-80g"], ("--model", "--module")),
    (["estimate", "--model", "llama-2-7b"], ("--gpu",)),
    (["estimate", "--model"], ("--model", "argument")),
    (["estimate", "--modell", "x"], ("--modell", "--model")),
    (["estimate", "--model", "x", "--gpu", "y", "stray"], ("stray",)),
    (["gpus", "a100-80g", "b200"], ("b200",)),
    (["gpus", "a100-80g", "--search", "a"], ("search",)),
    (["gpus", "--search", "\x1b[2J" * 30], ("search",)),
    (["gpus", "--output", ""], ("output",)),
    (["gpus", "--output", "-"], ("--output '-'", "path of a file")),
    (["estimate", "--model", "gpt2", "--gpu", "h100", "--node", ""], ("--node", "leave the option out")),
    (["rl", "--model", "gpt2", "--gpu", "h100", "--critic-model", " "], ("--critic-model", "leave the option out")),
    (["report", "--model", "gpt2", "--gpu", "h100", "--output", ""], ("--output",)),
    (["plan", "--model", "gpt2", "--gpu", "h100", "--save", "/no/such/folder/x.json"], ("--save", "directory")),
    (["plan", "--model", "gpt2", "--gpu", "h100", "--write", ""], ("--write",)),
    (["gpus", "--output", "x" * 5000], ("output",)),
    (["models", "nothing-like-this"], ("model", "nothing-like-this")),
    (["nodes", "hgx-h10"], ("node", "hgx-h10", "hgx-h100")),
    (["--verison"], ("--verison", "--version")),
]


def run(line: list[str]) -> Any:
    return CliRunner().invoke(app, line, prog_name="memcalc")


def refused(line: list[str], *says: str, code: int = 2) -> None:
    """Assert that `line` gets exit `code` and one line that names everything in `says`."""
    result = run(line)
    assert result.exit_code == code, (result.exit_code, result.stderr, result.exception)
    assert result.stdout == ""
    assert result.stderr.startswith("memcalc: ")
    assert result.stderr.count("\n") == 1
    assert "Traceback" not in result.stderr
    assert [word for word in says if word.lower() not in result.stderr.lower()] == [], result.stderr


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in an empty directory, so that names are short."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(case.line[1:])[11:70])
def test_wrong_value(case: Case) -> None:
    refused(case.line, *case.says)


@pytest.mark.usefixtures("folder")
def test_a_link_that_leads_to_itself_is_no_place_to_write() -> None:
    Path("loop.md").symlink_to("loop.md")
    refused(["gpus", "--output", "loop.md", "--force"], "--output 'loop.md'", "symbolic links")


@pytest.mark.parametrize(("line", "says"), USAGE, ids=lambda value: " ".join(value)[:40])
def test_wrong_usage(line: list[str], says: tuple[str, ...]) -> None:
    refused(line, *says)


# ------------------------------------------------------------------------------------------------------------ files

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32000,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "hidden_act": "silu",
}  # fmt: skip
FILES = {
    "empty": b"",
    "binary": bytes(range(256)) * 8,
    "truncated": json.dumps(CONFIG)[:-20].encode(),
    "not-an-object": b"[1, 2, 3]",
    "null": b"null",
    "nested": b"[" * 100_000,
    "long-number": b'{"model_type": "llama", "hidden_size": ' + b"9" * 5000 + b"}",
    "no-type": b'{"hidden_size": 4096}',
    "unknown-type": b'{"model_type": "quantum-net", "hidden_size": 4096}',
    "too-large": b" " * (70 << 20),
    "utf-16": json.dumps(CONFIG).encode("utf-16"),
    **{
        f"{key}={value!r}"[:40]: json.dumps({**CONFIG, key: value}).encode()
        for key, value in (
            ("hidden_size", -1), ("hidden_size", 0), ("hidden_size", "4096; rm"), ("hidden_size", None),
            ("hidden_size", 10**30), ("hidden_size", float("nan")), ("hidden_size", 1.5), ("hidden_size", [4096]),
            ("num_hidden_layers", 0), ("num_hidden_layers", True), ("num_hidden_layers", 10**12),
            ("num_attention_heads", 0), ("num_attention_heads", 33), ("num_key_value_heads", 5), ("vocab_size", -5),
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
@pytest.mark.usefixtures("folder")
def test_wrong_config(name: str) -> None:
    Path("config.json").write_bytes(FILES[name])
    refused(["estimate", "--model", "config.json", "--gpu", "a100-80g"], code=3 if name == "no-type" else 2)


def test_directory_without_config(tmp_path: Path) -> None:
    refused(["estimate", "--model", str(tmp_path), "--gpu", "a100-80g"], "config.json")


@pytest.mark.parametrize("text", ["", "[", "name = 1", 'name = "x"\nzzz = 1', "\0", "a = " + "[" * 5000])
@pytest.mark.usefixtures("folder")
def test_wrong_toml_model(text: str) -> None:
    Path("mine.toml").write_text(text)
    refused(["estimate", "--model", "mine.toml", "--gpu", "a100-80g"], "mine")


LONG = "a" * 3000
"""More than a file system has for a name."""


@pytest.mark.parametrize(
    "line",
    [
        ["check", LONG], ["check", f"{LONG}/config.yml"], ["check", "--survey", LONG], ["sweep", LONG],
        ["estimate", "--model", f"{LONG}/x", "--gpu", "a30"], ["estimate", "--model", f"{LONG}.toml", "--gpu", "a30"],
        ["estimate", "--model", "gpt2", "--gpu", "a30", "--preset-dir", LONG],
    ],
    ids=lambda line: " ".join(line)[:40],
)  # fmt: skip
def test_a_name_too_long_for_a_file_is_refused(line: list[str]) -> None:
    refused(line, "…aaa")


@pytest.mark.parametrize("name", [LONG, f"{LONG}/x"])
def test_a_folder_that_cannot_be_is_refused_after_the_plans(name: str) -> None:
    result = run(["plan", "--model", "gpt2", "--gpu", "a30", "--gpus", "1", "--write", name])
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert result.stderr.startswith("memcalc: --write '…aaa")


@pytest.mark.usefixtures("folder")
def test_output_is_not_overwritten() -> None:
    Path("plan.md").write_text("mine")
    refused(["gpus", "--output", "plan.md"], "output", "plan.md", "--force")
    refused(["gpus", "--output", ".", "--force"], "output", "regular file")
    assert Path("plan.md").read_text() == "mine"


# ------------------------------------------------------------------------------------------------------------- fuzz

_ANY = st.one_of(
    st.text(max_size=12),
    st.integers().map(str),
    st.floats().map(str),
    st.sampled_from(
        ["", "0", "-1", "1e400", "full", "every-", "modules:,", "none,none", "=", "@", "a=b=c", "٣", "1_0"]
    ),
)
_FUZZED = (
    "model gpu gpus node seq-len micro-batch global-batch framework precision optimizer optimizer-impl zero tp pp "
    "pp-schedule vpp cp cp-kind ep recompute offload offload-to compress-activations attention loss lora adapter-dtype "
    "also-train quantize kernels compile calibration set format"
)


@drawn(60, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from(_FUZZED.split()), _ANY, min_size=1, max_size=3))
def test_any_text_is_answered(options: dict[str, str]) -> None:
    words = {"model": "llama-2-7b", "gpu": "a100-80g", **options}
    result = run(["estimate", *(f"--{name}={value}" for name, value in words.items())])
    assert result.exit_code in {0, 1, 2, 3}, (words, result.exception)
    assert result.exception is None or isinstance(result.exception, SystemExit), words
    assert result.stderr.count("\n") == (1 if result.exit_code > 1 else 0)
