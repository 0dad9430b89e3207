"""The promises of `conftest.py` and of the options of pytest to every test."""

import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILES = ("fleet/test_slot_types.py", "test_rpc.py", "fleet/test_tokens.py")
"""Of tests/end_to_end: two of a folder with fixtures of its own, and one of the folder above."""


def test_timeout_of_test_repeats() -> None:
    assert signal.getitimer(signal.ITIMER_REAL)[1] > 0


def test_files_given_in_any_order_find_their_fixtures() -> None:
    paths = [f"tests/end_to_end/{name}" for name in FILES]
    command = [sys.executable, "-m", "pytest", "--setup-plan", *paths]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
