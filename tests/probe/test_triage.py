"""Triage: messages of public issues read exactly, logs, snapshots of real steps, hostile pickles, changes proved."""

from __future__ import annotations

import contextlib
import json
import pickle
import random
import re
import struct
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import snapshots
from drawing import drawn
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import memcalc
from memcalc.cli.app import app
from memcalc.errors import CombinationError, FileError, MemcalcError, MissingError
from memcalc.probe.triage.frames import Frame, read_stack
from memcalc.probe.triage.logs import read_log
from memcalc.probe.triage.message_causes import CAUSES, causes_of, other_processes, outside_of
from memcalc.probe.triage.plain_pickle import PlainPickleError, load_plain
from memcalc.results.triage import DOUBT, Triage
from memcalc.units import parse_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parents[2]
MIB, GIB = 1 << 20, 1 << 30
MESSAGES = tomllib.loads((ROOT / "tests" / "oom_messages.toml").read_text(encoding="utf-8"))["message"]
SIZES = ("tried", "capacity", "free", "allocated", "private_pools", "limit")
ESTABLISHED = [message for message in MESSAGES if "cause" in message]
NOT_FIRST = {
    "NVIDIA/TransformerEngine#3006": "second: that one tensor is larger than the card stands first",
    "vllm-project/compressed-tensors#587": "possible: 2% of what is reserved is in pieces",
}
MISSED = {
    "zoogzog/chexnet#19": "no traceback, so that nothing says that it was an evaluation",
    "jhc13/taggui#188": "2.35 GiB were free and hardly anything was in pieces",
    "pytorch/pytorch#18313": "the driver's message has no figures, and one message shows no growth",
    "liqunhit/NeuralClassifier#3": "a bus error is told as shared memory",
}
LONG = "Traceback (most recent call last):\n"


def codes(found: Triage) -> list[str]:
    return [one.code for one in found.causes]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message["source"])
def test_messages_of_public_issues_are_read_exactly(message: dict[str, Any]) -> None:
    """Every figure that the line has, and none that it has not; the phase where a stack stands above it."""
    (one,) = read_log(message["text"]).events
    figures = one.figures
    for name in SIZES:
        wanted = parse_bytes(message[name]) if name in message else None
        assert getattr(figures, name) == wanted, name
    for name in ("unallocated", "reserved"):
        assert name not in message or getattr(figures, name) == parse_bytes(message[name])
    if figures.form == "capacity":
        own = message.get("this_process")
        assert figures.this_process == (None if own is None else parse_bytes(own))
        assert figures.reserved == figures.allocated + figures.unallocated
    listed = [f"{pid}: {size}" for pid, size in figures.processes]
    wanted_list = [line.split(": ") for line in message.get("processes", [])]
    assert listed == [f"{pid}: {parse_bytes(size)}" for pid, size in wanted_list]
    assert (figures.form, figures.backend) == (message["form"], message.get("backend", "CUDA"))
    assert (figures.device, one.rank) == (message.get("device"), message.get("rank", ""))
    assert read_stack(one.stack).phase == message.get("phase", "")


def test_established_causes_are_among_the_given_but_for_those_that_are_told() -> None:
    """What docs/triage.md says of it; a cause counts as given wherever it stands."""
    first, among = set(), set()
    for message in ESTABLISHED:
        given_codes = codes(triaged(message["text"]))
        first |= {message["source"]} if given_codes[:1] == [message["cause"]] else set()
        among |= {message["source"]} if message["cause"] in given_codes else set()
    every = {message["source"] for message in ESTABLISHED}
    assert every - among == set(MISSED)
    assert among - first == set(NOT_FIRST)
    page = " ".join((ROOT / "docs" / "triage.md").read_text(encoding="utf-8").split())
    assert f"{len(MESSAGES)} messages" in page
    assert f"Of {len(every)} with an established cause, {len(first)} have it first and {len(among)} among" in page


def triaged(source: Any, **words: Any) -> Triage:
    return memcalc.triage(source, **words)


def stack(*frames: tuple[str, str, str]) -> str:
    return LONG + "".join(f'  File "{file}", line 3, in {name}\n    {code}\n' for file, name, code in frames)


FULL = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB "
    "of which 1.00 GiB is free. Including non-PyTorch memory, this process has 78.10 GiB memory in use. Of the "
    "allocated memory 76.00 GiB is allocated by PyTorch, and 900.00 MiB is reserved by PyTorch but unallocated."
)
FAILS = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate"
LOOP = ("/job/train.py", "main", "loss = model(x)")
TORCH = "/opt/lib/python3.11/site-packages/torch/"


STEP = ("/job/train.py", "main", "optimizer.step()")
BACKWARD = ("/job/train.py", "main", "loss.backward()")
HF = "/opt/site-packages/transformers/"
STACKS = {
    "logits": ("loss", LOOP, (TORCH + "nn/functional.py", "cross_entropy", "return cross_entropy_loss(input)")),
    "first-step": ("optimizer", STEP, (TORCH + "optim/adamw.py", "_init_group", 'state["exp_avg"] = zeros_like(p)')),
    "optimizer-temporaries": ("optimizer", STEP, (TORCH + "optim/adam.py", "_multi_tensor_adam", "_foreach_sqrt(a)")),
    "recompute": (
        "recompute", BACKWARD, (TORCH + "utils/checkpoint.py", "recompute_fn", "fn(*args)"),
        (TORCH + "nn/modules/module.py", "_call_impl", "x"),
    ),
    "gather": ("gather", LOOP, (TORCH + "distributed/fsdp/_runtime_utils.py", "_unshard", "handle.unshard()")),
    "attention-scores": ("", LOOP, (HF + "models/llama.py", "eager_attention_forward", "attn_weights = matmul(q, k)")),
    "evaluation-outputs": ("evaluation", LOOP, (HF + "trainer.py", "evaluation_loop", "preds_host = concat(a, b)")),
    "loading": ("loading", LOOP, (HF + "modeling_utils.py", "from_pretrained", "x.to(device)")),
    "generation": (
        "generation", LOOP, (HF + "cache_utils.py", "update", "cat([self.key_cache])"),
        (HF + "generation/utils.py", "generate", "x"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("code", STACKS)
def test_the_stack_says_what_was_being_made(code: str) -> None:
    phase, *frames = STACKS[code]
    found = triaged(stack(*frames) + FULL)
    assert found.failures[0].phase == phase
    assert codes(found)[0] == code
    assert found.answered


def test_a_closure_inside_of_the_optimizer_is_the_forward_that_it_runs() -> None:
    frames = [Frame(TORCH + "nn/modules/module.py", 1, "_call_impl"), Frame(TORCH + "optim/adamw.py", 1, "step")]
    assert read_stack(frames).phase == "forward"
    assert read_stack(frames[::-1]).phase == "optimizer"


def test_gradients_that_are_off_in_evaluation_are_seen() -> None:
    """A decorator on the stack, or the Trainer's own loop, switches them off; else it is a possibility."""
    inner = (TORCH + "nn/modules/module.py", "_call_impl", "return forward_call(*args)")
    own = ("/job/train.py", "validate", "out = model(x)")
    quiet = (TORCH + "utils/_contextlib.py", "decorate_context", "return func(*args, **kwargs)")
    assert "evaluation-graph" in codes(triaged(stack(own, inner) + FULL))
    assert "evaluation-graph" not in codes(triaged(stack(quiet, own, inner) + FULL))


def test_an_evaluation_is_asked_first_for_gradients_and_for_kept_logits() -> None:
    """Logits of the batch itself are usual there; in training the same line speaks for them."""
    loss = (TORCH + "nn/functional.py", "cross_entropy", "return cross_entropy_loss(input)")
    assert codes(triaged(stack(("/job/train.py", "validate", "out = model(x)"), loss) + FULL))[:2] == [
        "evaluation-graph", "evaluation-outputs",
    ]  # fmt: skip
    assert codes(triaged(stack(LOOP, loss) + FULL))[0] == "logits"


def test_what_an_evaluation_holds_beyond_its_estimate_is_what_it_keeps() -> None:
    frames = ("/job/train.py", "validate", "out = model(x)")
    job = {"model": "gpt2", "gpu": "a100-80g", "framework": "hf", "seq_len": 256, "micro_batch": 1}
    cause = triaged(stack(frames) + FULL, **job).causes[0]
    assert cause.code == "evaluation-outputs"
    assert f"the logits of one batch of all ranks are {8 * 256 * 50257 * 4 / 2**20:.1f} MiB" in cause.evidence[0]


def test_ranks_of_one_log_are_kept_apart() -> None:
    """Lines of ranks that alternate, each with its own stack; a message wrapped over lines; the launcher's signals."""
    lines = [
        "[rank1]: Traceback (most recent call last):",
        "[rank0]: Traceback (most recent call last):",
        '[rank1]:   File "/job/train.py", line 7, in main',
        "[rank1]:     loss.backward()",
        '[rank0]:   File "/job/train.py", line 9, in main',
        "[rank0]:     optimizer.step()",
        '[rank0]:   File "/x/site-packages/torch/optim/adam.py", line 77, in step',
        f"[rank1]: {FAILS} 1.00 GiB. GPU 1 has a total capacity of",
        f"[rank0]: {FAILS} 2.00 GiB. GPU 0 has a total capacity of 10.00 GiB of which 0 bytes is free.",
        "[rank1]: 12.00 GiB of which 512.00 MiB is free.",
        f"[rank1]: {FAILS} 1.00 GiB. GPU 1 has a total capacity of 12.00 GiB",
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: exitcode  : -9 (pid: 7)",
    ]
    found = triaged("\n".join(lines))
    told = {one.rank: (one.tried, one.capacity, one.phase) for one in found.failures}
    assert told == {"1": (GIB, 12 * GIB, "backward"), "0": (2 * GIB, 10 * GIB, "optimizer")}
    assert found.summary.startswith("2 ranks failed; ")


def test_boxes_notebooks_colours_and_steps_are_read() -> None:
    box = (
        "\x1b[31m│ /job/venv/site-packages/torch/nn/functional.py:2996 in cross_entropy │\x1b[0m\n│   2995 │   a │\n"
        "│ ❱ 2996 │   return cross_entropy_loss(input) │\n 3%|3 | 9/352 [40:55<25:10:16, 264.19s/it]\n" + FULL
    )
    first = read_log(box).events[0]
    assert first.stack[0] == Frame(
        "/job/venv/site-packages/torch/nn/functional.py", 2996, "cross_entropy", "return cross_entropy_loss(input)"
    )
    assert first.steps_before == 9
    assert "longer-batch" in codes(triaged(box))
    book = (
        "/usr/lib/transformers/trainer.py in evaluation_loop(self, x)\n   1 \n-> 3140     preds_host = logits\n" + FULL
    )
    assert read_log(book).events[0].stack[0] == Frame(
        "/usr/lib/transformers/trainer.py", 3140, "evaluation_loop", "preds_host = logits"
    )


def test_in_a_container_the_process_that_holds_what_pytorch_reserved_is_this_one() -> None:
    """The driver lists it by the host's number; what is beside PyTorch follows, and another one is another one."""
    text = (
        "CUDA out of memory. Tried to allocate 448.00 MiB. GPU 1 has a total capacty of 79.10 GiB of which 364.31 MiB "
        "is free. Process 175080 has 1.46 GiB memory in use. Process 175356 has 77.26 GiB memory in use. Of the "
        "allocated memory 72.12 GiB is allocated by PyTorch, and 3.78 GiB is reserved by PyTorch but unallocated."
    )
    figures = read_log(text).events[0].figures
    others, own = other_processes(figures)
    assert others == ((175080, parse_bytes("1.46 GiB")),)
    assert own == parse_bytes("77.26 GiB")
    assert outside_of(figures) == parse_bytes("77.26 GiB") - parse_bytes("72.12 GiB") - parse_bytes("3.78 GiB")


def test_expandable_segments_that_are_on_do_not_help_again() -> None:
    holes = FULL.replace("76.00 GiB", "50.00 GiB").replace("900.00 MiB", "26.00 GiB")
    assert triaged(holes).causes[0].code == "fragmentation"
    on = triaged("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True torchrun train.py\n" + holes)
    told = next(one for one in on.causes if one.code == "fragmentation")
    assert told.confidence == "possible"
    assert "on already" in told.evidence[-1]
    advice = holes + " try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
    assert triaged(advice).causes[0].confidence == "likely"


def test_every_cause_can_be_given_and_has_its_line_in_the_documents() -> None:
    page = (ROOT / "docs" / "triage.md").read_text(encoding="utf-8")
    assert [code for code in CAUSES if f"| `{code}` |" not in page] == []


RECORDED: dict[str, dict[str, Any]] = {}
JOBS: dict[str, tuple[Callable[[Any], None], int | None]] = {
    "healthy": (snapshots.healthy, None),
    "leaking": (snapshots.leaking, None),
    "evaluating": (snapshots.evaluating, 60 * MIB),
    "quiet": (snapshots.evaluating_quietly, None),
    "logits": (snapshots.wide_vocabulary, 60 * MIB),
    "fragmenting": (snapshots.fragmenting, 150 * MIB),
    "first step": (snapshots.wide_vocabulary, 50 * MIB),
}


def recorded(name: str) -> dict[str, Any]:
    if name not in RECORDED:
        RECORDED[name] = snapshots.recorded(*JOBS[name])
    return RECORDED[name]


def explained(name: str, **words: Any) -> Triage:
    return triaged(pickle.dumps(recorded(name)), **words)


def share(found: Triage, category: str) -> int:
    return sum(one.bytes for one in found.shares if one.category == category)


def test_torch_itself_reads_the_recorded_snapshots() -> None:
    """Its viewer's parser is the form's definition: summary, trace, plot and flame graph all accept them."""
    from torch.cuda import _memory_viz as viz

    snapshot = recorded("evaluating")
    held = sum(block["size"] for segment in snapshot["segments"] for block in segment["blocks"])
    assert held == sum(segment["total_size"] for segment in snapshot["segments"])
    assert f"segments: {len(snapshot['segments'])}" in viz.segsum(snapshot)
    assert "raise OutOfMemoryError" in viz.trace(snapshot)
    assert "add_local_files" in viz.trace_plot(snapshot)
    assert "evaluate" in viz.memory(snapshot, format_flamegraph=lambda text: text)


def test_bytes_of_a_healthy_step_are_those_of_its_tensors() -> None:
    """Parameters, states and gradients as the model's sizes say; the sum is what was alive."""
    found = explained("healthy")
    width, vocab, layers = 128, 512, 4
    block = 2 * width + (width * 4 * width + 4 * width) + (4 * width * width + width)
    parameters = 4 * (2 * vocab * width + layers * block)
    assert share(found, "parameters") == parameters
    tensors = 2 + 6 * layers
    assert share(found, "optimizer states") == 2 * parameters + 4 * tensors  # a step counter each
    assert sum(one.bytes for one in found.shares) == found.memory.allocated
    assert found.memory.steps == 4
    assert (found.growth, found.failures, found.answered) == ((), (), True)
    logits = 4 * 64 * vocab * 4
    assert logits <= share(found, "logits") <= 3 * logits + 16


def test_a_leak_is_named_with_its_line_and_its_rate() -> None:
    """The penalty's graph keeps the embedding's output: 4 rows of 64 tokens, 128 wide, in fp32, and the tokens."""
    found = explained("leaking")
    line = next(
        number for number, text in enumerate(Path(snapshots.__file__).read_text().splitlines(), 1)
        if "hidden = model.embed(tokens)" in text
    )  # fmt: skip
    first, second = found.growth[:2]
    assert first.site.startswith(f"train.py:{line} in leaking")
    assert first.bytes_per_step == 4 * 64 * 128 * 4
    assert second.bytes_per_step == 4 * 64 * 8
    assert (first.blocks_per_step, first.steps) == (1, 5)
    assert codes(found)[0] == "growth"
    assert "growth" not in codes(explained("healthy"))


def test_an_evaluation_that_records_for_backward_is_told_from_one_that_does_not() -> None:
    found = explained("evaluating")
    assert codes(found)[0] == "evaluation-graph"
    assert found.causes[0].confidence == "likely"
    assert found.failures[0].phase == "evaluation"
    assert "evaluation-graph" not in codes(explained("quiet"))


def test_logits_and_first_step_and_holes_are_told() -> None:
    logits = explained("logits")
    assert codes(logits)[0] == "logits"
    assert share(logits, "logits") >= 2 * 4 * 128 * 8192 * 4
    assert codes(explained("first step"))[0] in {"first-step", "logits"}
    assert explained("first step").failures[0].phase in {"optimizer", "backward", "loss", "forward"}
    holes = explained("fragmenting")
    assert codes(holes)[0] == "fragmentation"
    assert holes.memory.replay_repeats
    assert not holes.memory.replay_serves
    assert "not expandable segments" in holes.causes[0].remedy


def test_forms_of_other_versions_say_the_same() -> None:
    """JSON; segments alone; blocks with a history and no address (2.0); frees that are told once; no times."""
    whole = recorded("logits")
    plain = explained("logits")
    assert triaged(json.dumps(whole).encode()).model_dump(exclude={"source"}) == plain.model_dump(exclude={"source"})
    old = json.loads(json.dumps(whole))
    for segment in old["segments"]:
        for block in segment["blocks"]:
            del block["address"]
            block["history"] = [{"addr": 1, "real_size": block.pop("requested_size"), "frames": block.pop("frames")}]
    for trace in old["device_traces"]:
        trace[:] = [entry for entry in trace if entry["action"] != "free_requested"]
        for entry in trace:
            del entry["time_us"]
    aged = triaged(pickle.dumps(old, protocol=2))
    assert aged.shares == plain.shares
    alone = triaged(json.dumps(whole["segments"]).encode())
    assert alone.memory.end_reserved == plain.memory.end_reserved
    assert not alone.memory.entries
    assert any("no trace" in one for one in alone.unknown)


def test_frames_of_cpp_tell_the_engine_and_a_library() -> None:
    """As stacks="all" records them: backward by the engine's name, a workspace by the call that asks for it."""
    whole = json.loads(json.dumps(recorded("healthy")))
    engine = [{"filename": "??", "line": 0, "name": "torch::autograd::Engine::thread_main(std::shared_ptr<...>)"}]
    asked = [{"filename": "??", "line": 0, "name": "at::cuda::getCurrentCUDABlasHandle()"}]
    (trace,) = whole["device_traces"]
    for part in (trace, *(segment["blocks"] for segment in whole["segments"])):
        for entry in part:
            entry["frames"] = entry["frames"] or engine
    assert triaged(json.dumps(whole).encode()).shares == explained("healthy").shares
    trace.insert(0, {"action": "alloc", "addr": 1 << 46, "size": 4096, "stream": 0, "time_us": 0, "frames": asked})
    assert share(triaged(json.dumps(whole).encode()), "workspaces") == 4096


def test_a_stack_far_above_a_message_is_another_errors() -> None:
    frames = stack(("/job/train.py", "main", "optimizer.step()"), (TORCH + "optim/adam.py", "_init_group", "x"))
    assert triaged(frames + "\n" * 20 + FULL).failures[0].phase == "optimizer"
    assert triaged(frames + "KeyError: 1\n" + "all is well\n" * 60 + FULL).failures[0].phase == ""


def test_long_logs_and_lines_take_no_time_to_speak_of() -> None:
    """A line of blanks or digits, and a message that comes ten thousand times."""
    for text in (" " * 200_000 + "x CUDA out of memory", "CUDA out of memory " + "1" * 200_000, (FULL + "\n") * 10_000):
        assert len(read_log(text).events) <= 1


def test_what_was_made_before_the_recording_is_not_guessed() -> None:
    late = recorded("healthy") | {"device_traces": [recorded("healthy")["device_traces"][0][-336:]]}
    found = triaged(pickle.dumps(late))
    assert found.memory.allocated == explained("healthy").memory.step_peaks[-1]
    unread = json.loads(json.dumps(late))
    for segment in unread["segments"]:
        for block in segment["blocks"]:
            block["frames"] = []
    blind = triaged(json.dumps(unread).encode())
    assert share(blind, "before the recording") > 7 * MIB
    assert any("before the recording began" in one for one in blind.unknown)
    assert not blind.answered
    assert "_record_memory_history" in blind.record[0]


class Call:
    """Pickles as a call."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("executed"),)


def nested(depth: int) -> bytes:
    return b"\x80\x02" + b"]" * depth + b"a" * (depth - 1) + b"."


HOSTILE = {
    "a call": pickle.dumps({"segments": [Call()]}),
    "a global": b"\x80\x02cos\nsystem\n.",
    "a stack global": b"\x80\x04\x8c\x02os\x8c\x06system\x93.",
    "os.system": b"\x80\x02cos\nsystem\nX\x0f\x00\x00\x00touch executed\x0a\x85R.",
    "an instance": b"\x80\x02(ios\nsystem\n.",
    "build": b"\x80\x02}}b.",
    "a persistent id": b"\x80\x02K\x01Q.",
    "an extension code": b"\x80\x02\x82\x01.",
    "a buffer": b"\x80\x05\x97.",
    "a byte array of 2^60": b"\x80\x05\x96" + struct.pack("<Q", 1 << 60) + b".",
    "a memo place of 2^31": b"\x80\x02Nr\xff\xff\xff\x7f.",
    "a frame of 2^60": b"\x80\x04\x95" + struct.pack("<Q", 1 << 60) + b"}.",
    "an integer of 2^31 digits": b"\x80\x02\x8b\xff\xff\xff\x7f.",
    "a text of 2^32": b"\x80\x02X\xff\xff\xff\xff.",
    "a decimal integer": b"\x80\x02I99999999999\n.",
    "cut off": pickle.dumps({"segments": [], "device_traces": []})[:-4],
    "two pickles": pickle.dumps({"segments": []}) * 2,
    "an empty stack": b"\x80\x02.",
    "deep": nested(200_000),
    "not a snapshot": pickle.dumps([1, 2]),
    "a loop": b"\x80\x02}q\x00X\x08\x00\x00\x00segments]q\x01h\x01as.",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_pickles_are_refused_and_nothing_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.pickle").write_bytes(HOSTILE[name])
    result = CliRunner().invoke(app, ["triage", "x.pickle"])
    assert result.exit_code == 2
    assert result.stderr.startswith("memcalc: file 'x.pickle': ")
    assert result.stderr.count("\n") == 1
    assert not Path("executed").exists()


def test_one_object_named_again_and_again_is_refused() -> None:
    """A kilobyte that stands for a billion blocks."""
    block = {"size": 1, "state": "inactive"}
    segment = {"address": 0, "total_size": 1, "blocks": [block] * 3000}
    with pytest.raises(FileError, match="again and again"):
        triaged(pickle.dumps({"segments": [segment] * 3000}))


def test_json_bombs_are_refused() -> None:
    for text in (
        '{"segments": ' + "[" * 100_000,
        '{"segments": [{"address": ' + "9" * 5000 + "}]}",
        '{"segments": [1]}',
    ):
        with pytest.raises(FileError):
            triaged(text.encode())


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_data_of_every_protocol_is_loaded_as_it_is(protocol: int) -> None:
    """All that a snapshot can hold, with strings of every length class, addresses, and many memo places."""
    data = {
        "texts": ["x" * size for size in (0, 1, 255, 256, 70_000)] + ["é", "a\nb"],
        "numbers": [0, 255, 256, 65535, 65536, -1, -(1 << 40), 1 << 31, 0x7F2000000000, (1 << 63) - 1, -(1 << 63), 0.5],
        "others": [None, True, False, (), (1,), (0, 0), (1, 2, 3), {}, []],
        "many": [[str(number)] for number in range(70_000 if protocol == 2 else 300)],
    }
    assert load_plain(pickle.dumps(data, protocol=protocol)) == data
    with pytest.raises(PlainPickleError):
        load_plain(pickle.dumps({"a set": {1}}, protocol=max(protocol, 4)))


@drawn(60)
@given(st.binary(max_size=200), st.integers(0, 10_000), st.integers(0, 2**32))
def test_no_bytes_get_past_a_sentence(noise: bytes, at: int, seed: int) -> None:
    """Noise, and a real snapshot with some bytes changed: an answer or an error of memcalc's, nothing else."""
    real = bytearray(pickle.dumps(recorded("fragmenting")))
    draw = random.Random(seed)  # noqa: S311  # no secret
    for _ in range(3):
        real[(at + draw.randrange(len(real))) % len(real)] = draw.randrange(256)
    for content in (bytes(real), b"\x80\x04" + noise, b'{"segments": ' + noise):
        with contextlib.suppress(MemcalcError):
            triaged(content)


WORDS = {"model": "llama-3-8b", "gpu": "h100", "gpus": 8, "zero": 3, "seq_len": 8192, "micro_batch": 2}


def test_changes_are_proved_by_the_estimate_that_they_name() -> None:
    """Each change, typed as an estimate, comes to the bytes that are said; enough means that it fits.

    2 × 8192 tokens, 128,256 words, 4 bytes are 7.83 GiB as PyTorch prints them: the request is of the logits' size.
    """
    size = f"{2 * 8192 * 128256 * 4 / GIB:.2f} GiB"
    assert size == "7.83 GiB"
    found = triaged(FULL.replace("2.00 GiB", size), **WORDS)
    assert any(
        "the request of 7.83 GiB equals" in line
        for one in found.causes
        if one.code == "logits"
        for line in one.evidence
    )
    assert found.estimate.startswith("the estimate does not fit")
    assert found.changes[0].enough
    before = memcalc.estimate(**WORDS)
    for change in found.changes:
        name, value = change.change.removeprefix("--").split(" ")
        after = memcalc.estimate(
            **{**WORDS, "global_batch": before.workload.global_batch, name.replace("-", "_"): value}
        )
        assert (after.peak.device, after.verdict) == (change.device, change.verdict)
        assert change.saves == before.peak.device - after.peak.device > 0
    compared = {one.name: one for one in found.comparison}
    assert compared["allocated"].measured == parse_bytes("76 GiB") + parse_bytes("7.83 GiB")
    assert compared["reserved"].estimated == before.peak.reserved


def test_a_change_that_the_framework_cannot_be_told_says_so_and_comes_last() -> None:
    """PyTorch has no optimizer that keeps its states in host memory (pytorch#120256)."""
    job = {"model": "qwen3-8b", "gpu": "a100-80g", "gpus": 4, "framework": "hf", "zero": 3, "recompute": "full"}
    found = triaged(FULL, **job, micro_batch=4)
    named = {change.change: change.own_code for change in found.changes}
    assert named["--offload optimizer"]
    assert not named["--micro-batch 2"]
    enough = [change.own_code for change in found.changes if change.enough]
    assert enough == sorted(enough)


def test_a_job_that_does_not_explain_what_is_held_says_so() -> None:
    small = {**WORDS, "micro_batch": 1, "recompute": "full"}
    found = codes(triaged(FULL, **small))
    assert "unexplained" in found
    assert "logits" not in found


def test_a_job_that_would_not_have_come_as_far_is_doubted() -> None:
    """8.03 billion fp32 parameters are 29.9 GiB on each rank unless something shards them, and the loss comes after."""
    frames = 'File "loss_utils.py", line 36, in ForCausalLMLoss', "    logits = logits.float()"
    log = "\n".join((LONG.strip(), *frames, FULL.replace("76.00 GiB", "20.00 GiB")))  # with 2.00 GiB requested
    job = {**WORDS, "framework": "hf", "micro_batch": 1, "recompute": "full"}
    whole, sharded = (triaged(log, **{**job, "zero": zero}) for zero in (0, 3))
    assert any(line.startswith(DOUBT) and "parameters and activations" in line for line in whole.unknown)
    assert not any(line.startswith(DOUBT) for line in sharded.unknown)
    assert not any(line.startswith(DOUBT) for line in triaged(FULL, **{**job, "zero": 0}).unknown)


def test_a_snapshot_is_compared_by_component() -> None:
    found = explained("healthy", model="gpt2", gpu="a100-40g", gpus=1, seq_len=64, micro_batch=4)
    compared = {one.name: one for one in found.comparison}
    assert compared["parameters"].measured == share(found, "parameters")
    assert compared["optimizer"].estimated == 2 * compared["parameters"].estimated > 0


def test_a_job_from_its_files_has_the_edit_that_check_proves(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "examples" / "ds_config.json").read_text()
    (tmp_path / "ds_config.json").write_text(page)
    words = {"model": "llama-3-8b", "gpu": "a100-80g", "gpus": 8, "seq_len": 32768, "micro_batch": 8}
    path = str(tmp_path / "ds_config.json")
    wanted = memcalc.check([path], **words)
    found = triaged(FULL, config=[path], **words)
    assert found.estimate.startswith("the estimate does not fit") == (wanted.verdict == "does-not-fit")
    assert found.command == wanted.command


def test_a_saved_plan_is_a_job() -> None:
    path = str(ROOT / "docs" / "examples" / "plan.json")
    found = triaged(FULL, plan=path)
    assert found.command
    assert "allocated" in {one.name for one in found.comparison}


def test_what_must_be_told_is_asked_for() -> None:
    with pytest.raises(MissingError, match="--gpu"):
        triaged(FULL, model="llama-3-8b")
    with pytest.raises(CombinationError, match="whole job"):
        triaged(FULL, plan=str(ROOT / "docs" / "examples" / "plan.json"), gpus=8)
    with pytest.raises(MissingError, match="no out-of-memory message"):
        triaged("epoch 1 done\nmemory is fine\n")
    with pytest.raises(FileError):
        triaged(ROOT / "no such file")
    with pytest.raises(FileError, match="is a folder: give a file of it"):
        triaged(ROOT)


def test_the_command_line_answers_in_all_formats(tmp_path: Path) -> None:
    (tmp_path / "job.log").write_text(FULL)
    (tmp_path / "s.pickle").write_bytes(pickle.dumps(recorded("logits")))
    run = CliRunner().invoke
    for name in ("job.log", "s.pickle"):
        for form in ("rich", "markdown", "csv", "json", "latex", "html"):
            result = run(app, ["triage", str(tmp_path / name), "--format", form])
            assert result.exit_code == 0, result.output
            assert (
                "logits" in result.stdout
                if name == "s.pickle"
                else "more memory than the GPU has" in " ".join(result.stdout.split())
            )
    answer = json.loads(run(app, ["triage", "-", "--format", "json"], input=FULL).stdout)
    assert (answer["schema"], answer["source"]) == ("memcalc.triage/1", "standard input")
    assert Triage.model_validate(answer).failures[0].tried == 2 * GIB
    vague = run(app, ["triage", "-"], input="RuntimeError: CUDA error: out of memory\n")
    assert vague.exit_code == 3
    assert "_record_memory_history" in vague.stdout
    assert run(app, ["triage", "-"], input="all is well").exit_code == 3
    assert run(app, ["triage", str(tmp_path)]).exit_code == 2


def test_steps_are_found_without_an_optimizer_that_allocates() -> None:
    """The training loop's own line goes back once a turn."""
    whole = json.loads(json.dumps(recorded("leaking")))
    (trace,) = whole["device_traces"]
    optimizer = {"step", "_init_group", "zero_grad", "_multi_tensor_adam"}
    by_it = [bool({frame["name"] for frame in entry["frames"]} & optimizer) for entry in trace]
    trace[:] = [
        entry | {"frames": [] if apart else entry["frames"]}  # what it frees was allocated by backward
        for entry, apart in zip(trace, by_it, strict=True)
        if not apart or entry["action"] != "alloc"
    ]
    found = triaged(json.dumps(whole).encode())
    assert found.memory.steps_by == "turns of the innermost common loop"
    assert found.growth[0].bytes_per_step == 4 * 64 * 128 * 4


def test_peaks_of_steps_are_sums_over_the_trace() -> None:
    """Against a plain walk of the recorded entries."""
    (trace,) = recorded("healthy")["device_traces"]
    alive, running = 0, []
    for entry in trace:
        alive += {"alloc": 1, "free_completed": -1}.get(entry["action"], 0) * entry["size"]
        running.append(alive)
    assert max(running) == max(explained("healthy").memory.step_peaks) == explained("healthy").memory.allocated
    assert np.argmax(running) > 0
    assert causes_of(read_log(FULL).events[0])


def test_the_page_calls_causes_as_the_program_does() -> None:
    """The first table of docs/triage.md's causes: each code with its title."""
    page = (ROOT / "docs" / "triage.md").read_text(encoding="utf-8")
    told = dict(re.findall(r"^\| `([a-z-]+)` \| ([^|]*) \|", page, flags=re.MULTILINE))
    titles = {code: cause.title for code, cause in CAUSES.items()}
    assert {code: told.get(code) for code in titles} == titles
