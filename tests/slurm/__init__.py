"""A Slurm controller and a node of our own, and the plugin's files put in place."""
