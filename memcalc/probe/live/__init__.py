"""Modules that import torch at their top; everything else imports them inside functions."""
