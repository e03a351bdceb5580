"""``python -m memcalc`` is the command ``memcalc``."""

from memcalc.cli import main

main()
