"""What holds for every test: none reads what its user has configured or downloaded, or leaves attention off."""

from __future__ import annotations

import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from _pytest.doctest import DoctestModule
from hypothesis import settings

os.environ["XDG_CONFIG_HOME"] = os.environ["APPDATA"] = tempfile.mkdtemp(prefix="memcalc-tests-")
os.environ["HF_HUB_CACHE"] = os.environ["XDG_CONFIG_HOME"]
os.environ.pop("TRANSFORMERS_CACHE", None)

settings.register_profile("seeded", derandomize=True)
settings.load_profile("seeded")

SLOW = "slow"
KERNELS = ("flash", "mem_efficient", "math", "cudnn")
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
QUIET = [
    "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-background-networking",
]  # fmt: skip

LONGEST = (
    "test_invariants", "test_fsdp2_script", "test_family_steps", "test_everyday", "test_differential", "test_growth",
    "test_crashes", "test_step_peaks", "test_round_trip", "test_step_time", "test_adapted_steps", "test_planner",
    "test_told", "test_browser",
)  # fmt: skip
"""Files whose slow tests begin first, so that no process waits for one of them at the end."""


class Doctests:
    """Modules without an example are not imported in search of one: what many of them import takes a second."""

    @staticmethod
    @pytest.hookimpl(wrapper=True)
    def pytest_collect_file(file_path: Path) -> Iterator[None]:
        """Leave out what would find nothing."""
        found: Any = yield
        shown = file_path.suffix == ".py" and ">>>" in file_path.read_text(encoding="utf-8")
        return [one for one in found if shown or not isinstance(one, DoctestModule)]


def pytest_configure(config: pytest.Config) -> None:
    """Make each replay and each template once (`replays`)."""
    from drawing import draw_all
    from replays import remember

    remember()
    if config.option.markexpr == SLOW:
        draw_all()
    config.pluginmanager.register(Doctests())


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """In some files each job makes its own."""
    from replays import for_test_in

    for_test_in(item.path)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put files that take minutes before all others; with the slow tests run those whose examples are drawn."""
    for item in items if config.option.markexpr == SLOW else ():
        if item.get_closest_marker("drawn"):
            item.add_marker(SLOW)
    places = {stem: place for place, stem in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(LONGEST)))


def pytest_collection_finish() -> None:
    """Leave what is loaded for good out of each search for garbage, which would take a tenth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.fixture(autouse=True)
def kernels_of_attention_as_before() -> Iterator[None]:
    """Switch PyTorch's kernels on again: a row of a probe leaves one alone, for what should be a process of its own."""
    yield
    if "torch" in sys.modules:
        import torch

        for name in KERNELS:
            getattr(torch.backends.cuda, f"enable_{name}_sdp")(enabled=True)


@pytest.fixture(scope="module")
def answers_once() -> Iterator[None]:
    """A question that a test of the module has asked before has the answer of then, a frozen record."""
    import memcalc
    from memcalc import api

    known: dict[tuple[str, ...], Any] = {}

    def once(call: Callable[..., Any]) -> Callable[..., Any]:
        def answer(*words: Any, **options: Any) -> Any:
            told = {name: value for name, value in options.items() if not callable(value)}  # progress is no question
            asked = call.__name__, str(Path.cwd()), repr(words), repr(sorted(told.items()))
            if asked not in known:
                known[asked] = call(*words, **options)
            return known[asked]

        return answer

    with pytest.MonkeyPatch.context() as patch:
        for name in ("estimate", "plan", "largest", "smallest", "ladder", "ladder_rl", "plan_rl", "rl", "diff"):
            answer = once(getattr(memcalc, name))
            patch.setattr(memcalc, name, answer)
            if hasattr(api, name):  # what the package itself asks, as for an export
                patch.setattr(api, name, answer)
        yield


@pytest.fixture(scope="module")
def predictions_once() -> Iterator[None]:
    """A run that a test of the module has predicted before, with the shipped presets, has the prediction of then."""
    from memcalc import validation

    predict, known = validation.predict, dict[str, Any]()

    def once(run: Any, presets: Any = None) -> Any:
        if presets is not None and (presets.dirs or presets.given is not None or presets.look):
            return predict(run, presets)
        asked = run.model_dump_json()
        if asked not in known:
            known[asked] = predict(run, presets)
        return known[asked]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(validation, "predict", once)
        yield


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless browser, where there is one."""
    path = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)}")
    api = pytest.importorskip("playwright.sync_api")
    with api.sync_playwright() as running:
        opened = running.chromium.launch(executable_path=path, args=QUIET)
        yield opened
        opened.close()
