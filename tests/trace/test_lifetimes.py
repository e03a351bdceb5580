"""What the tape rests on: an object goes with its last reference, under each interpreter that the package names."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

from memcalc.trace import counts_references
from memcalc.trace.tape import Size, Tape, Tensor

ROOT = Path(__file__).resolve().parents[2]
SIZE = Size(1, 2)


def test_this_interpreter_counts_references() -> None:
    """The condition under which the package can be imported."""
    assert counts_references()


def test_a_storage_goes_with_its_last_reference() -> None:
    """A view keeps it; the second ``del`` frees it at once, with no collector between."""
    tape = Tape()
    x = tape.new("x", SIZE)
    view = x.view()
    del x
    assert tape.events == [0]
    del view
    assert tape.events == [0, ~0]


def test_a_call_hands_its_argument_over() -> None:
    """A function can free what its caller has no name for, and not what the caller still names."""
    tape = Tape()

    def let_go(x: Tensor) -> list[int]:
        del x
        return list(tape.events)

    # not within an assert: pytest writes one so that it names each part
    unnamed = let_go(tape.new("without a name", SIZE))
    x = tape.new("with a name", SIZE)
    named = let_go(x)
    waiting = [x]
    del x
    popped = let_go(waiting.pop())
    assert (unnamed, named, popped) == ([0, ~0], [0, ~0, 1], [0, ~0, 1, ~1])


def test_a_variable_bound_anew_frees_what_it_held_after_the_new_one_is_made() -> None:
    """``x = f(x)`` has both alive while f runs, as in PyTorch."""
    tape = Tape()
    x = tape.new("x", SIZE)
    x = tape.new("next x", SIZE)
    assert tape.events == [0, 1, ~0]
    del x


def test_a_gradient_that_only_one_tensor_holds_is_added_to_in_place() -> None:
    """Two gradients that others hold as well are summed in a new storage."""
    tape = Tape()
    alone, other = tape.new("alone", SIZE), tape.new("other", SIZE)
    assert tape._sum(alone, other) is alone
    held = [alone.view(), other.view()]
    assert tape._sum(alone, other).storage.index == len(held)


def test_an_interpreter_that_keeps_objects_longer_is_refused() -> None:
    """The import says why, instead of giving figures that are wrong."""
    code = "import sys; real = sys.getrefcount; sys.getrefcount = lambda x: real(x) + 8; import memcalc.trace.tape"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert run.stderr.splitlines()[-1].startswith("ImportError: memcalc reads the lifetimes of tensors off")


def test_each_version_that_the_package_names_is_tested() -> None:
    """``requires-python``, the classifiers and ``.ci/run`` name the same versions."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    versions = [line.rpartition(" ")[2] for line in project["classifiers"] if re.search(r"Python :: 3\.\d+$", line)]
    first, last = versions[0], versions[-1]
    assert project["requires-python"] == f">={first},<3.{int(last.removeprefix('3.')) + 1}"
    assert f"for version in {' '.join(versions)}; do" in (ROOT / ".ci/run").read_text("utf-8")
