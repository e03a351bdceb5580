"""Other people's formats: one module each, which reads a config and, where the framework runs it, writes one."""

from __future__ import annotations

from memcalc.convert.formats.base import FORMATS, Format, format_named, recognised, written

__all__ = ["FORMATS", "Format", "format_named", "recognised", "written"]
