"""What follows from a job's model once it is known: what its files say of images, layers and sizes; and its name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.errors import MissingError
from memcalc.preflight.names import model_named

if TYPE_CHECKING:
    from memcalc.preflight.job import MergedJob
    from memcalc.specs.model import Model


def keep_images(job: MergedJob, dirs: tuple[str, ...]) -> None:
    """Drop what says nothing: for a model that reads no images, or whose processor has no limit of pixels."""
    names = [name for name in ("vision", "workload.image_pixels") if job.value(name) is not None]
    model = job.facts.get("model")
    if not names or model is None:
        return
    images = _loaded(model, dirs).images
    for name in names:
        if images is None or (name == "workload.image_pixels" and images.rule != "scaled"):
            job.origins.pop(name, None)
            del job.table(name)[name]


def keep_targets(job: MergedJob, dirs: tuple[str, ...]) -> None:
    """Drop the gate from the layers that get adapters where the MLP has none: litgpt adapts the layers that there are.

    litgpt 26857050, lora.py: ``lora_mlp`` counts for fc and proj of GptNeoxMLP as for the three of LLaMAMLP.
    """
    rank, _, targets = str(job.options.get("lora") or "").partition(":")
    named = targets.split(",")
    if not job.facts.get("adapts_what_is_there") or "gate" not in named or job.facts.get("model") is None:
        return
    groups = _loaded(job.facts["model"], dirs).groups
    if not any(getattr(group.block.mlp, "gated", True) for group in groups):
        job.options["lora"] = f"{rank}:{','.join(name for name in named if name != 'gate')}"


def fill_in(job: MergedJob, dirs: tuple[str, ...]) -> None:
    """Sizes that are `auto`: from the model's width (Accelerate 1.15, accelerator.py, hidden_size_based_keys)."""
    fields = job.facts.get("filled_in")
    if not fields or job.facts.get("model") is None:
        return
    hidden = _loaded(job.facts["model"], dirs).hidden
    sizes = {
        "strategy.reduce_bucket_size": hidden * hidden,
        "strategy.zero_prefetch_bucket": int(0.9 * hidden * hidden),
        "strategy.persistence_threshold": 10 * hidden,
    }
    for field in fields:
        if field in sizes and (field == "strategy.reduce_bucket_size" or int(job.options.get("zero", 0)) == 3):
            job.settings.setdefault(field, sizes[field])


def unnamed(job: MergedJob, folder: str, dirs: tuple[str, ...]) -> str:
    """Why the model that the files name has to be given, as it stands behind the option; empty where it is known."""
    model = job.facts.get("model")
    if not isinstance(model, str) or "model" not in job.origins:
        return ""
    try:
        model_named(model, folder, dirs)
    except MissingError as error:
        return f" ({str(error).removeprefix('the files name ').rpartition('; give --model')[0]})"
    return ""


def _loaded(model: str | Model, dirs: tuple[str, ...]) -> Model:
    from memcalc.api import load_model

    return load_model(model, dirs) if isinstance(model, str) else model
