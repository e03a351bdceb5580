"""Closed forms: pure functions of one to five lines, numbers or columns in, bytes or seconds out."""
