"""The version, in a module that all may import: the package itself stands above nearly all of them."""

__version__ = "0.1.0"
