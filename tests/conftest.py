"""What holds for every test: none reads the configuration of whoever runs it."""

import os
import tempfile

os.environ["XDG_CONFIG_HOME"] = os.environ["APPDATA"] = tempfile.mkdtemp(prefix="memcalc-tests-")
