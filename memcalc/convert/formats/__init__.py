"""Other people's formats: one module each, which reads a config and, where the framework runs it, writes one."""

from __future__ import annotations

from memcalc.convert.formats.base import FORMATS, FORMATS_OF, Format, get_format, recognise, render_config

__all__ = ["FORMATS", "FORMATS_OF", "Format", "get_format", "recognise", "render_config"]
