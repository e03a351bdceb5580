"""Blocks written as the operators that a framework runs, executed symbolically under autograd's own rules."""
