"""An MLP-Mixer (arXiv:2105.01601): a model that is no transformer, as a module of one's own."""

import torch
from torch import nn


class Mixing(nn.Module):
    """One block: an MLP over the patches, then one over the channels."""

    def __init__(self, patches: int, width: int) -> None:
        super().__init__()
        self.norm_patches, self.norm_channels = nn.LayerNorm(width), nn.LayerNorm(width)
        self.patches = nn.Sequential(nn.Linear(patches, 2 * patches), nn.GELU(), nn.Linear(2 * patches, patches))
        self.channels = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Both MLPs, each with its residual connection."""
        x = x + self.patches(self.norm_patches(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm_channels(x))


class Mixer(nn.Module):
    """Patches of an image, blocks, a classifier; forward returns the loss."""

    def __init__(self, *, blocks: int, size: int, patch: int, width: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, patch, patch)
        self.blocks = nn.ModuleList(Mixing((size // patch) ** 2, width) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """From images to the loss."""
        x = self.stem(images).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(self.norm(x).mean(1)), labels)


def mixer() -> Mixer:
    """About the size of Mixer-B/16."""
    return Mixer(blocks=12, size=224, patch=16, width=768, classes=1000)


def small() -> Mixer:
    """Small enough for a step on a laptop's CPU."""
    return Mixer(blocks=3, size=64, patch=8, width=64, classes=10)


def example_inputs(micro_batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One batch of images for :func:`mixer`."""
    return torch.empty(micro_batch, 3, 224, 224), torch.zeros(micro_batch, dtype=torch.long)


def small_inputs(micro_batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One batch of images for :func:`small`."""
    return torch.zeros(micro_batch, 3, 64, 64), torch.zeros(micro_batch, dtype=torch.long)
