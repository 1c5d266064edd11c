"""Lets these tests import merge_runs.py, whichever way pytest imports the tests themselves."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
