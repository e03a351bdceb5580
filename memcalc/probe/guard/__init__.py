"""The guard: a run is watched against its plan, and moves to the next safer step."""
