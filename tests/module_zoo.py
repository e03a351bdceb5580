"""Factories of modules, as users write them: transformers, convolutions, and some that cannot be used."""

from __future__ import annotations

from typing import Any

import torch
from autograd import models
from torch import nn

LAYERS = 2


def _made(family: str) -> nn.Module:
    return models.hf_model(family, models.hf_config(family, layers=LAYERS), dtype=torch.float32, eager=False)


def llama() -> nn.Module:
    return _made("llama-3")


def tied() -> nn.Module:
    return _made("smollm2")


def gpt2() -> nn.Module:
    return _made("gpt2")


def qwen3() -> nn.Module:
    return _made("qwen3")


def experts() -> nn.Module:
    return _made("qwen3-moe")


def example_inputs(micro_batch: int, seq_len: int) -> dict[str, torch.Tensor]:
    tokens = torch.zeros(micro_batch, seq_len, dtype=torch.long)
    return {"input_ids": tokens, "labels": tokens.clone()}


class Down(nn.Module):
    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.wide = nn.Conv2d(before, after, 3, padding=1)
        self.norm = nn.GroupNorm(4, after)
        self.fewer = nn.Conv2d(after, after, 3, padding=1, stride=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fewer(nn.functional.silu(self.norm(self.wide(x))))


class Up(nn.Module):
    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(4, after)

    def forward(self, x: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
        both = torch.cat([nn.functional.interpolate(x, scale_factor=2.0), skip], 1)
        return nn.functional.silu(self.norm(self.conv(both)))


class UNet(nn.Module):
    """Blocks of which no two are alike, joined past each other; forward returns an image."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.down = nn.ModuleList([Down(16, 32), Down(32, 48)])
        self.up = nn.ModuleList([Up(80, 32), Up(48, 16)])
        self.out = nn.Conv2d(16, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        x = self.stem(x)
        for block in self.down:
            skips.append(x)
            x = block(x)
        for block in self.up:
            x = block(x, skips.pop())
        return self.out(x)


def unet() -> nn.Module:
    return UNet()


def image(micro_batch: int) -> torch.Tensor:
    return torch.zeros(micro_batch, 3, 32, 32)


def distance(out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(out, x)


class Residual(nn.Module):
    """A block whose last operator keeps its own output, as the next block's first does."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.norm(self.conv(x)))


def convnet() -> nn.Module:
    blocks = [Residual() for _ in range(3)]
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Sequential(*blocks), nn.Flatten(), nn.Linear(8 * 32 * 32, 4))


def with_values() -> nn.Module:
    """It asks tensors for values while it is built."""
    rates = [rate.item() for rate in torch.linspace(0.1, 0.2, 2)]
    return nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Dropout(rate)) for rate in rates))


def row(micro_batch: int) -> torch.Tensor:
    return torch.zeros(micro_batch, 6)


# ------------------------------------------------------------------------------------------------- what cannot be used


def raises() -> nn.Module:
    raise RuntimeError("no such\nweights")


def no_module() -> int:
    return 3


def frozen() -> nn.Module:
    return nn.Linear(6, 6).requires_grad_(requires_grad=False)


class Stopped(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).detach()


def no_gradient() -> nn.Module:
    return Stopped(6, 6)


class Text(nn.Linear):
    def forward(self, _: torch.Tensor) -> Any:  # type: ignore[override]
        return "text"


def no_tensor() -> nn.Module:
    return Text(6, 6)


def too_narrow() -> nn.Module:
    return nn.Linear(5, 6)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(6, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(self.block(x))


def twice() -> nn.Module:
    return Twice()


def line() -> nn.Module:
    return nn.Linear(6, 6)


def bad_inputs(_: int) -> torch.Tensor:
    raise ValueError("no data")


def many_losses(out: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return out
