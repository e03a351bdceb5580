"""The images of a job: what the model's tower sees of them, and the places that they take in the text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.errors import CombinationError, InputError, MissingError
from memcalc.formulas import images as seen
from memcalc.formulas.optimizer import OPTIMIZERS
from memcalc.planner.as_is import check_framework, refuse_told
from memcalc.planner.optimizers import named_in
from memcalc.units import parse_count

if TYPE_CHECKING:
    from memcalc.formulas.images import Seen
    from memcalc.planner.request import Request
    from memcalc.specs.model import Images, Model

WHOLE = {
    "tp": "tensor parallelism is not modelled for a vision tower",
    "pp": "pipeline stages are not modelled with a vision tower",
    "cp": "context parallelism is not modelled for sequences with images",
    "ep": "expert parallelism is not modelled with a vision tower",
}
LEFT_OUT = {
    "kernels": "kernels of a framework's own are not modelled for a vision tower",
    "compile": "torch.compile is not modelled for a vision tower",
    "lengths": "sequences of several lengths are not modelled with images",
}
LARGEST_SIDE = 100_000
MOST_RATIO = 200


def with_images(request: Request, model: Model) -> Model:
    """Return the model with the views and tokens of the images that are asked for."""
    given, pixels = request.given, request.given["fields"].get("image_pixels")
    vision = given.get("vision", "trained")
    if model.images is None:
        stated = {"images": given.get("images"), "image-size": given.get("image_size"), "workload.image_pixels": pixels}
        for name, value in {**stated, "vision": vision if vision != "trained" else None}.items():
            if not value:
                continue
            raise CombinationError(name, value, f"{model.name} has no vision tower")
        return model
    count = int(request.get("images", 1))
    if not count:
        return _text_alone(request, model)
    if model.images.rule == "unknown":
        allowed = "how the image processor of this model makes tokens of an image is not modelled"
        raise InputError("model", model.name, f"{allowed}; for text alone give --images 0")
    _check_job(request)
    image = _seen(request, model, model.images, pixels)
    tower = model.ends_of("vision")
    ends = tower.model_copy(update={"pixels": image.patches * tower.patch})
    request.assumptions["image tokens"] = f"{image.tokens} an image"
    update = {
        "ends": (ends, *model.ends[1:]),
        "views": count * image.views,
        "image_tokens": count * image.tokens,
        "fixed_tokens": {**model.fixed_tokens, "vision": image.patches + model.images.class_tokens},
    }
    return model.model_copy(update=update)


def _text_alone(request: Request, model: Model) -> Model:
    """Return the model with a tower that is held and never run: it gets no gradients."""
    given, pixels = request.given, request.given["fields"].get("image_pixels")
    for name, value in {"image-size": given.get("image_size"), "workload.image_pixels": pixels}.items():
        if value:
            raise CombinationError(name, value, "--images 0 is a job without an image")
    if given.get("vision", "frozen") != "frozen":
        raise CombinationError("vision", given["vision"], "with --images 0 the tower never runs: frozen")
    given["vision"] = request.get("vision", "frozen")
    _check_job(request)
    return model.model_copy(update={"views": 0, "fixed_tokens": {**model.fixed_tokens, "vision": 0}})


def check_length(model: Model, length: int) -> None:
    """Refuse a sequence that is shorter than what its images take of it."""
    if length < model.image_tokens:
        allowed = f"its images take {model.image_tokens} tokens: give a longer sequence, or smaller or fewer images"
        raise CombinationError("seq-len", length, allowed)


def _check_job(request: Request) -> None:
    """Refuse what is not modelled beside a vision tower, and pin what is therefore not searched."""
    refuse_told(request, {**WHOLE, **LEFT_OUT})
    check_framework(request, "hf", "a model with a vision tower")
    request.given.update(dict.fromkeys(WHOLE, 1))
    if request.given.get("vision", "trained") != "trained":
        for name in named_in(request, "optimizer"):
            if OPTIMIZERS[name].states is not None:
                allowed = "its states are not modelled where a vision tower is frozen"
                raise CombinationError("optimizer", name, allowed)


def _seen(request: Request, model: Model, images: Images, most_pixels: int | None) -> Seen:
    """What the model sees of one image of the job."""
    text = request.given.get("image_size")
    if most_pixels is not None and images.rule != "scaled":
        raise CombinationError("workload.image_pixels", most_pixels, f"the processor of {model.name} has no such limit")
    if not text and images.depends_on_size:
        raise MissingError(
            f"How many tokens an image is for {model.name} depends on its size: give --image-size WIDTHxHEIGHT "
            "(the images' own, before any resizing), or --images 0 for text alone."
        )
    return _by_rule(images, *(parse_size(text) if text else (images.side, images.side)), most_pixels)


def sides_of(images: Images, width: int, height: int, most_pixels: int | None = None) -> tuple[int, int]:
    """Width and height to which a processor resizes an image [px]; 0 where all come to one size."""
    step = images.patch * images.merge
    if images.rule == "bounded":
        return seen.bounded_sides(width, height, step, images.longest)
    limit = images.most_pixels if most_pixels is None else most_pixels
    scaled = images.rule == "scaled"
    return seen.scaled_sides(width, height, step, min(images.least_pixels, limit), limit) if scaled else (0, 0)


def seen_by(model: Model, width: int, height: int, most_pixels: int | None = None) -> Seen:
    """What a model sees of an image of a size [px]."""
    if model.images is None:
        raise InputError("model", model.name, "it has no vision tower")
    return _by_rule(model.images, width, height, most_pixels)


def parse_size(text: object) -> tuple[int, int]:
    """Return width and height [px].

    >>> parse_size("1024x768")
    (1024, 768)
    """
    sides = str(text).lower().replace("×", "x").split("x")
    try:
        width, height = (parse_count(side, "image-size") for side in sides)
    except (InputError, ValueError):
        width = height = 0
    if not (0 < width <= LARGEST_SIDE and 0 < height <= LARGEST_SIDE):
        raise InputError("image-size", text, "must be WIDTHxHEIGHT in pixels, such as 1024x768")
    if max(width, height) > MOST_RATIO * min(width, height):
        raise InputError("image-size", text, f"one side must be at most {MOST_RATIO} times the other")
    return width, height


def _by_rule(images: Images, width: int, height: int, most: int | None) -> Seen:
    patch, merge = images.patch, images.merge
    if images.rule == "scaled":
        limit = images.most_pixels if most is None else most
        return seen.scaled_image(width, height, patch, merge, min(images.least_pixels, limit), limit)
    if images.rule == "bounded":
        return seen.bounded_image(width, height, patch, merge, images.longest)
    if images.rule == "tiled":
        return seen.tiled_image(width, height, images.side, patch, merge, images.most_tiles)
    if images.rule == "canvas":
        return seen.canvas_image(width, height, images.side, patch, merge, images.most_tiles)
    if images.rule == "split":
        return seen.split_image(width, height, images.side, patch, merge, images.longest)
    return seen.square_image(images.side, patch, merge)
