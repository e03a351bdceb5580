"""``memcalc triage``: where the bytes went, from a message or a memory snapshot."""
