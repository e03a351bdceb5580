"""``memcalc calibrate``: figures of one GPU, fitted on measured runs."""
