"""``memcalc probe``: the suite of steps and rates, each measured in a process of its own."""
