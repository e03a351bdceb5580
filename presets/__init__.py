"""Models, GPUs and nodes as data, one TOML file each; read by `memcalc.catalog` alone."""
