"""An answer's job: a record from which its command line is rendered, and which no text is read back into."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
from command_lines import keywords
from drawing import drawn
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from typer.testing import CliRunner

import memcalc
from memcalc.cli.app import app
from memcalc.errors import MemcalcError, MissingError
from memcalc.planner.job import as_option
from memcalc.specs.job import JobRecord, command_line, render

PACKAGE = Path(memcalc.__file__).parent

OPTIONS: dict[str, list[Any]] = {
    "gpus": [1, "8"],
    "seq_len": [512, "1k"],
    "micro_batch": [1, 2],
    "global_batch": [16, "16k tokens"],
    "framework": ["fsdp2", "deepspeed", "megatron", "hf"],
    "precision": ["bf16", "bf16-mixed", "fp32"],
    "zero": [0, "2", 3],
    "tp": [1, 2],
    "sp": [True, False, "false"],
    "recompute": ["none", "full", "modules:mlp,core_attn"],
    "offload": ["none", ("optimizer",), ["optimizer", "params"], ()],
    "optimizer": ["adamw", "sgd"],
    "optimizer_in_backward": [True, False],
    "lora": ["8:q,v"],
    "autocast": [True, False],
    "also_train": [("embedding", "head")],
    "calibration": ["none"],
}
SETTINGS: dict[str, list[Any]] = {
    "strategy.reduce_dtype": ["bf16"],
    "strategy.expandable_segments": [True, "false"],
    "strategy.tp": [1, "2"],
    "workload.lora_dropout": [0.1],
}
OPEN: dict[str, list[Any]] = {"tp": [[1, 2], "1/2"], "micro_batch": ["1..2"], "recompute": [["none", "full"]]}


def some(values: dict[str, list[Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional={name: st.sampled_from(each) for name, each in values.items()})


def typed_again(answer: Any) -> dict[str, Any]:
    """The answer to an answer's own line, in the program."""
    command = answer.command.removeprefix("memcalc ")
    shown = CliRunner().invoke(app, f"{command} --format json")
    assert shown.stdout, shown.output
    parsed: dict[str, Any] = json.loads(shown.stdout)
    return parsed


def figures(answer: Any) -> dict[str, Any]:
    """An answer as it is written."""
    parsed: dict[str, Any] = json.loads(answer.model_dump_json(by_alias=True))
    return parsed


def without_jobs(value: Any) -> Any:
    """Without records and lines: typed options are texts, and stand in the order of the program's options."""
    if isinstance(value, dict):
        return {name: without_jobs(part) for name, part in value.items() if name not in {"job", "command"}}
    return [without_jobs(part) for part in value] if isinstance(value, list) else value


@drawn(25, phases=(Phase.explicit, Phase.generate))
@given(options=some(OPTIONS), fields=some(SETTINGS))
def test_a_rendered_record_gives_the_same_answer_in_the_program(
    options: dict[str, Any], fields: dict[str, Any]
) -> None:
    """Whatever Python was given: the line typed into the program, and the record given to the library."""
    try:
        answer = memcalc.estimate(model="gpt2", gpu="a100-40g", settings=fields, **options)
    except MemcalcError:
        return
    again = memcalc.estimate(**answer.job.keywords())
    assert again == answer
    assert without_jobs(typed_again(answer)) == without_jobs(figures(answer))


@settings(max_examples=4, deadline=None, phases=(Phase.explicit, Phase.generate))
@given(options=some(OPEN), objective=st.sampled_from(["throughput", "memory"]), recipe=st.booleans())
def test_a_search_is_its_record(options: dict[str, Any], objective: str, recipe: bool) -> None:
    query = {"objective": objective, "recipe": recipe, "top": 3}
    answer = memcalc.plan(model="gpt2", gpu="a100-40g", gpus=2, seq_len=512, zero=2, cp=1, pp=1, **options, **query)
    assert without_jobs(typed_again(answer)) == without_jobs(figures(answer))
    again = memcalc.plan(**answer.job.keywords())
    assert again.model_copy(update={"elapsed": answer.elapsed}) == answer
    for plan in answer.plans:
        estimate = memcalc.estimate(**plan.job.keywords())
        assert (estimate.strategy, estimate.peak.device) == (plan.strategy, plan.peak.device)
        assert (estimate.job, estimate.command) == (plan.job, plan.command)


def test_a_field_that_is_an_option_is_recorded_as_the_option() -> None:
    """So a plan's own job never has the field's several values beside the one that was chosen."""
    answer = memcalc.plan(model="gpt2", gpu="a100-40g", gpus=2, settings={"strategy.tp": "1/2"}, top=1, advice=False)
    assert (answer.job.options["tp"], answer.job.settings) == ("1/2", {})
    assert memcalc.estimate(**answer.plans[0].job.keywords()).strategy == answer.plans[0].strategy


def test_limits_and_ladders_are_their_records() -> None:
    longest = memcalc.largest("seq-len", model="gpt2", gpu="a100-40g", gpus=1, step=128, tight=True, zero=2)
    again = memcalc.largest(longest.job.what, **longest.job.keywords())
    assert again.model_copy(update={"elapsed": longest.elapsed}) == longest
    assert without_jobs(typed_again(longest)) == without_jobs(figures(longest))
    ladder = memcalc.ladder(model="gpt2", gpu="a100-40g", gpus=1, stages=["recompute=full", "micro-batch=1"])
    assert memcalc.ladder(**ladder.job.keywords()) == ladder
    assert without_jobs(typed_again(ladder)) == without_jobs(figures(ladder))
    for stage in ladder.readings[0].stages:
        assert memcalc.estimate(**stage.job.keywords()).peak == stage.peak


def test_the_largest_model_names_none() -> None:
    answer = memcalc.largest("model", gpu="a100-40g", gpus=1, zero=2, family="gpt2")
    assert (answer.job.model, answer.best and answer.best.job.model) == (None, answer.answer)
    assert answer.command == "memcalc max model --gpu a100-40g --gpus 1 --zero 2 --family gpt2"


def test_own_presets_are_in_the_line(tmp_path: Path) -> None:
    shipped = (PACKAGE.parent / "presets" / "gpus" / "a100-40g.toml").read_text(encoding="utf-8")
    folder = tmp_path / "my presets" / "gpus"
    folder.mkdir(parents=True)
    (folder / "mine.toml").write_text(shipped.replace('"a100-40g"', '"mine"', 1), encoding="utf-8")
    dirs = [str(folder.parent)]
    answer = memcalc.estimate(model="gpt2", gpu="a100-40g", preset_dirs=dirs)
    assert answer.command.endswith(f"--preset-dir '{folder.parent}'")
    assert memcalc.estimate(**answer.job.keywords()) == answer


@given(
    options=st.dictionaries(
        st.sampled_from(["tp", "recompute", "lora", "seq_len"]),
        st.text("abc-:/,= '\"$\n", max_size=6).filter(str.strip),
        max_size=4,
    ),
    fields=st.dictionaries(
        st.sampled_from(["strategy.reshard", "workload.x"]),
        st.text("ab =", max_size=4).filter(lambda text: text == text.strip()),
        max_size=2,
    ),
    dirs=st.lists(st.text("ab '", min_size=1, max_size=3), max_size=2),
)
def test_the_program_reads_every_value_as_it_is(
    options: dict[str, str], fields: dict[str, str], dirs: list[str]
) -> None:
    line = render("estimate", options={"model": "m", "gpu": "g", **options}, settings=fields, dirs=dirs)
    assert keywords(line) == {"model": "m", "gpu": "g", **options, "settings": fields, "preset_dirs": tuple(dirs)}


@pytest.mark.parametrize(
    ("name", "value", "option"),
    [
        ("tp", (1, 2), "1/2"), ("offload", (), "none"), ("offload", ("optimizer", "params"), "optimizer,params"),
        ("sp", "false", False), ("zero", 3, 3),
        ("zero", "3", 3), ("seq_len", "4k", "4k"), ("lora", "8", "8"),
        ("lora_dropout", 0.5, 0.5), ("calibration", Path("a/b"), "a/b"),
    ],
)  # fmt: skip
def test_values_of_python_become_options(name: str, value: Any, option: Any) -> None:
    assert as_option(name, value) == option


def test_a_job_names_its_model() -> None:
    with pytest.raises(ValidationError, match="must name its model"):
        JobRecord(command="plan", model=None, gpu="h100")
    module = JobRecord(command="plan", model=None, gpu="h100", module={"module": "a:b", "loss_fn": "a:loss"})
    assert command_line(module) == "memcalc plan --module a:b --loss-fn a:loss --gpu h100"
    with pytest.raises(MissingError, match="recorded from it"):
        module.keywords()


RENDERED = {"command", "asked", "closest"}
"""Fields of the answers that hold a rendered line."""
TEXT_METHODS = {"replace", "split", "partition", "removeprefix", "removesuffix", "strip", "startswith", "find", "index"}


def _edits(tree: ast.AST) -> list[str]:
    """Where a rendered line is edited or taken apart."""
    wrong = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        function = node.func
        if isinstance(function, ast.Attribute) and function.attr in TEXT_METHODS:
            parts = {part.attr for part in ast.walk(function.value) if isinstance(part, ast.Attribute)}
            names = {part.id for part in ast.walk(function.value) if isinstance(part, ast.Name)}
            if parts & RENDERED or "command_line" in names:
                wrong.append(ast.unparse(node))
        called = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        if called in {"split", "shlex", "findall", "search", "sub", "fullmatch"}:
            parts = {
                part.attr for argument in node.args for part in ast.walk(argument) if isinstance(part, ast.Attribute)
            }
            if parts & RENDERED:
                wrong.append(ast.unparse(node))
    return wrong


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_rendered_line_is_edited_or_taken_apart(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert not _edits(tree)
    calls = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    assert "shlex.split" not in calls, "a command line of memcalc is rendered from a record and never read"


def test_the_guard_of_rendered_lines_sees_an_edit() -> None:
    for source in ('plan.command.replace("plan", "x")', "shlex.split(saved.asked)", 'command_line(job).partition(" ")'):
        assert _edits(ast.parse(source)), source
