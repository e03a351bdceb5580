"""What holds for every test: none reads the configuration of whoever runs it, or leaves attention switched off."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator

import pytest

os.environ["XDG_CONFIG_HOME"] = os.environ["APPDATA"] = tempfile.mkdtemp(prefix="memcalc-tests-")

KERNELS = ("flash", "mem_efficient", "math", "cudnn")


@pytest.fixture(autouse=True)
def kernels_of_attention_as_before() -> Iterator[None]:
    """Switch PyTorch's kernels on again: a row of a probe leaves one alone, for what should be a process of its own."""
    yield
    if "torch" in sys.modules:
        import torch

        for name in KERNELS:
            getattr(torch.backends.cuda, f"enable_{name}_sdp")(enabled=True)
