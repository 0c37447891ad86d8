"""Makes the packages of this repository importable by its scripts where they are not installed.

Imported first, for its effect: `python scripts/check_device.py` then needs no installation on a
machine that has the dependencies, and always runs the code that lies beside it.
"""

import sys
from pathlib import Path

ROOT = str(Path(__file__).resolve().parent.parent)
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)
