"""Other people's formats: one module each, which reads a config and, where the framework runs it, writes one."""

from __future__ import annotations

from memcalc.convert.formats.base import FORMATS, Format, get_format, recognise, render_config

__all__ = ["FORMATS", "Format", "get_format", "recognise", "render_config"]
