"""Views, rows and tokens of an image: what an image processor makes of its size.

Source: Transformers 5.23, ``models/*/image_processing_*.py``.
"""

from __future__ import annotations

import math
from typing import NamedTuple


class Seen(NamedTuple):
    """What a model sees of one image."""

    views: int
    """Pictures that the tower sees: the image, or its tiles [-]."""
    patches: int
    """Patches of one view [-]."""
    tokens: int
    """Places that all its views take in the text [tokens]."""


def scaled_sides(width: int, height: int, step: int, least: int, most: int) -> tuple[int, int]:
    """Return both sides as multiples of a step, the area between ``least`` and ``most`` (``smart_resize``) [px].

    Parameters
    ----------
    width : width of the image [px]
    height : height of the image [px]
    step : side of what becomes one token [px]
    least : fewest pixels [px]
    most : most pixels [px]

    Returns
    -------
    width and height [px]

    Examples
    --------
    >>> scaled_sides(640, 480, 28, 3136, 12845056)
    (644, 476)

    """
    wide, high = (round(side / step) * step for side in (width, height))
    if wide * high > most:
        shrink = math.sqrt(width * height / most)
        return max(step, math.floor(width / shrink / step) * step), max(step, math.floor(height / shrink / step) * step)
    if wide * high < least:
        grow = math.sqrt(least / (width * height))
        return math.ceil(width * grow / step) * step, math.ceil(height * grow / step) * step
    return wide, high


def scaled_image(width: int, height: int, patch: int, merge: int, least: int, most: int) -> Seen:
    """Return what Qwen2-VL and kin see: the image in its own proportions, in squares of merged patches.

    Parameters
    ----------
    width : width of the image [px]
    height : height of the image [px]
    patch : side of a patch [px]
    merge : patches along a side that become one token [1]
    least : fewest pixels [px]
    most : most pixels [px]

    Returns
    -------
    views, patches of each, tokens [1]

    Examples
    --------
    >>> scaled_image(1920, 1080, 14, 2, 3136, 12845056).tokens
    2691

    """
    wide, high = scaled_sides(width, height, patch * merge, least, most)
    patches = (wide // patch) * (high // patch)
    return Seen(1, patches, patches // merge**2)


def bounded_sides(width: int, height: int, step: int, longest: int) -> tuple[int, int]:
    """Return both sides, the longest bounded, filled up to multiples of a step [px].

    Parameters
    ----------
    width : width of the image [px]
    height : height of the image [px]
    step : side of what becomes one token [px]
    longest : longest side [px]

    Returns
    -------
    width and height [px]

    Examples
    --------
    >>> bounded_sides(1920, 1080, 16, 1024)
    (1024, 576)

    """
    ratio = max(width, height) / longest
    if ratio > 1:
        width, height = math.floor(width / ratio), math.floor(height / ratio)
    wide, high = ((max(0, side - 1) // step + 1) * step for side in (width, height))
    return wide, high


def bounded_image(width: int, height: int, patch: int, merge: int, longest: int) -> Seen:
    """Return what Pixtral and Mistral 3 see: the image as it is, its longest side bounded, filled up to whole tokens.

    Parameters
    ----------
    width : width of the image [px]
    height : height of the image [px]
    patch : side of a patch [px]
    merge : patches along a side that become one token [1]
    longest : longest side [px]

    Returns
    -------
    views, patches of each, tokens [1]

    Examples
    --------
    >>> bounded_image(1920, 1080, 16, 1, 1024).tokens
    2304

    """
    wide, high = bounded_sides(width, height, patch * merge, longest)
    tokens = (wide // (patch * merge)) * (high // (patch * merge))
    return Seen(1, tokens * merge**2, tokens)


def tiled_canvas(width: int, height: int, tile: int, most: int) -> tuple[int, int]:
    """Return columns and rows of tiles whose proportions are nearest to the image's (``get_optimal_tiled_canvas``).

    Parameters
    ----------
    width : width of the image [px]
    height : height of the image [px]
    tile : side of a tile [px]
    most : most tiles [1]

    Returns
    -------
    columns and rows [1]

    Examples
    --------
    >>> tiled_canvas(1920, 1080, 448, 12)
    (4, 2)

    """
    grids = [(w, h) for w in range(1, most + 1) for h in range(1, most + 1) if w * h <= most]
    best, nearest = (1, 1), math.inf
    for wide, high in sorted(grids, key=lambda grid: grid[0] * grid[1]):
        away = abs(width / height - wide / high)
        if away < nearest:
            nearest, best = away, (wide, high)
        elif away == nearest and width * height > 0.5 * tile**2 * wide * high:
            best = (wide, high)
    return best


def tiled_image(width: int, height: int, tile: int, patch: int, merge: int, most: int) -> Seen:
    """Return what InternVL sees: tiles, and a thumbnail where there are several.

    Parameters
    ----------
    width : width of the image [px]
    height : height of the image [px]
    tile : side of a tile [px]
    patch : side of a patch [px]
    merge : patches along a side that become one token [1]
    most : most tiles [1]

    Returns
    -------
    views, patches of each, tokens [1]

    Examples
    --------
    >>> tiled_image(640, 480, 448, 14, 2, 12)
    Seen(views=13, patches=1024, tokens=3328)

    """
    columns, rows = tiled_canvas(width, height, tile, most)
    views = columns * rows + (columns * rows > 1)
    return _equal_views(views, tile, patch, merge)


def fitting_canvas(width: int, height: int, tile: int, most: int) -> tuple[int, int]:
    """Return the tiles of the canvas on which an image is enlarged least, or shrunk least where none is large enough.

    Parameters
    ----------
    width : width of the image [px]
    height : height of the image [px]
    tile : side of a tile [px]
    most : most tiles [1]

    Returns
    -------
    columns and rows [1]

    Examples
    --------
    >>> fitting_canvas(300, 200, 224, 3), fitting_canvas(1920, 1080, 336, 16)
    ((2, 1), (5, 3))

    """
    grids = [(w, h) for w in range(1, most + 1) for h in range(1, most // w + 1)]
    scales = {(w, h): min(w * tile / width, h * tile / height) for w, h in grids}
    larger = [scale for scale in scales.values() if scale >= 1]
    chosen = min(larger) if larger else max(scales.values())
    return min((grid for grid in grids if scales[grid] == chosen), key=lambda grid: grid[0] * grid[1])


def canvas_image(width: int, height: int, tile: int, patch: int, merge: int, most: int) -> Seen:
    """Return what Llama 4 sees: the tiles of a canvas, and the whole image where there are several.

    Parameters
    ----------
    width : width of the image [px]
    height : height of the image [px]
    tile : side of a tile [px]
    patch : side of a patch [px]
    merge : patches along a side that become one token [1]
    most : most tiles [1]

    Returns
    -------
    views, patches of each, tokens [1]

    Examples
    --------
    >>> canvas_image(1920, 1080, 336, 14, 2, 16)
    Seen(views=16, patches=576, tokens=2304)

    """
    columns, rows = fitting_canvas(width, height, tile, most)
    return _equal_views(columns * rows + (columns * rows > 1), tile, patch, merge)


def split_image(width: int, height: int, tile: int, patch: int, merge: int, longest: int) -> Seen:
    """Return what Idefics 3 and SmolVLM see: the image scaled to its longest side, cut into tiles, and the whole.

    Parameters
    ----------
    width : width of the image [px]
    height : height of the image [px]
    tile : side of a tile [px]
    patch : side of a patch [px]
    merge : patches along a side that become one token [1]
    longest : the longest side after scaling [px]

    Returns
    -------
    views, patches of each, tokens [1]

    Examples
    --------
    >>> split_image(1024, 768, 512, 16, 4, 2048)
    Seen(views=13, patches=1024, tokens=832)

    """
    long, short = max(width, height), min(width, height)
    scaled = int(longest / (long / short))
    scaled += scaled % 2
    along = -(-longest // tile)
    across = -(-max(1, int(along * tile / (longest / max(scaled, 1)))) // tile)
    tiles = along * across
    return _equal_views(tiles + 1 if tiles > 1 else 1, tile, patch, merge)


def square_image(side: int, patch: int, merge: int) -> Seen:
    """Return what a tower with one size of image sees, whatever the image.

    Parameters
    ----------
    side : side of the image after resizing [px]
    patch : side of a patch [px]
    merge : patches along a side that become one token [1]

    Returns
    -------
    views, patches of each, tokens [1]

    Examples
    --------
    >>> square_image(896, 14, 4)
    Seen(views=1, patches=4096, tokens=256)

    """
    return _equal_views(1, side, patch, merge)


def _equal_views(views: int, side: int, patch: int, merge: int) -> Seen:
    along = side // patch
    return Seen(views, along**2, views * (along // merge) ** 2)
