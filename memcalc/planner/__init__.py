"""The planner: a checked request, its grid, the search over it, and the answer."""
