"""An execution is the same whatever other threads of the process do."""

import sys
import threading
import time
from collections.abc import Iterator

import pytest

import memcalc
from memcalc.trace.template import Template, TraceCache


@pytest.fixture
def sampled() -> Iterator[None]:
    """Let another thread hold every frame of this one for a moment, as sampling profilers do."""
    ended = threading.Event()

    def sample() -> None:
        while not ended.is_set():
            frames = sys._current_frames()
            time.sleep(0.0005)
            del frames
            time.sleep(0.001)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        sys.setswitchinterval(before)


LENGTHS = range(64, 1024, 32)


def _peaks() -> list[object]:
    return [memcalc.estimate(model="gpt2", gpu="a100-40g", gpus=1, seq_len=n, framework="ddp").peak for n in LENGTHS]


def test_a_profilers_thread_changes_no_estimate(request: pytest.FixtureRequest) -> None:
    alone = _peaks()
    request.getfixturevalue("sampled")
    interval = sys.getswitchinterval()
    assert _peaks() == alone
    assert sys.getswitchinterval() == interval  # other threads waited for each execution alone


@pytest.mark.usefixtures("sampled")
def test_an_execution_beside_a_thread_is_repeated_until_two_agree() -> None:
    def made(number: int) -> Template:
        nothing: frozenset[int] = frozenset()
        return Template(
            (), (), (), nothing, nothing, nothing, nothing, keeps_context=False, output=number, incoming=0, outgoing=0
        )

    given = iter([made(1), made(2), made(3), made(3), made(4)])
    assert TraceCache().get(lambda: next(given)) == made(3)


def test_threads_that_trace_at_once_leave_the_interval_as_it_was() -> None:
    """Each run lets the other threads in, as an import does, so that they would read an interval that is changed."""
    nothing: frozenset[int] = frozenset()
    empty = Template(
        (), (), (), nothing, nothing, nothing, nothing, keeps_context=False, output=0, incoming=0, outgoing=0
    )

    def made(seconds: float) -> Template:
        time.sleep(seconds)
        return empty

    before = sys.getswitchinterval()
    # The first to begin is the first to end, so that a later one has the last word
    threads = [threading.Thread(target=TraceCache().get, args=(made, 0.02 * n)) for n in (1, 2, 3, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sys.getswitchinterval() == before
