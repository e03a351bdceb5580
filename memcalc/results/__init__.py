"""What the library answers: typed records whose ``model_dump(mode="json")`` is the published JSON.

Bytes are integers, times are seconds. Field names are fixed (``memcalc.estimate/1``, ``memcalc.plan/1``).
"""
