"""The torch side: measure a machine, calibrate to it, guard a run, and explain one that ran out of memory."""
