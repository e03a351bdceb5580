"""Frozen descriptions of what is computed with: model, workload, hardware, strategy."""
