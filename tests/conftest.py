"""What holds for every test: none reads what its user has configured or downloaded, or leaves attention off."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings

os.environ["XDG_CONFIG_HOME"] = os.environ["APPDATA"] = tempfile.mkdtemp(prefix="memcalc-tests-")
os.environ["HF_HUB_CACHE"] = os.environ["XDG_CONFIG_HOME"]
os.environ.pop("TRANSFORMERS_CACHE", None)

settings.register_profile("seeded", derandomize=True)
settings.load_profile("seeded")

KERNELS = ("flash", "mem_efficient", "math", "cudnn")
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
QUIET = [
    "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-background-networking",
]  # fmt: skip


@pytest.fixture(autouse=True)
def kernels_of_attention_as_before() -> Iterator[None]:
    """Switch PyTorch's kernels on again: a row of a probe leaves one alone, for what should be a process of its own."""
    yield
    if "torch" in sys.modules:
        import torch

        for name in KERNELS:
            getattr(torch.backends.cuda, f"enable_{name}_sdp")(enabled=True)


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
