"""Standard output and error of a command line: what becomes of a write that fails or waits."""

import os
import subprocess
import sys

PREPARED = """
import sys, threading, time
from agentd.program.standard_streams import *
prepare_streams()
"""
WAITING = """
threading.Thread(target=write_output, args=(bytes(1 << 20),), daemon=True).start()
print("begun", file=sys.stderr)
time.sleep(1)
sys.exit(5)
"""
FAILING = """
for _ in range(2):
    try:
        print("x")
        flush_output()
    except OutputFailed as error:
        print(error, error.has_no_reader, file=sys.stderr)
"""


def run(code: str, stdout: int) -> tuple[int, str]:
    """Run code with an output, and return its status and what it told."""
    command = [sys.executable, "-c", PREPARED + code]
    process = subprocess.Popen(command, stdout=stdout, stderr=subprocess.PIPE, text=True)
    _, told = process.communicate(timeout=20)
    return process.returncode, told


def test_thread_that_waits_for_a_reader_does_not_hold_up_the_end() -> None:
    reader, writer = os.pipe()
    assert run(WAITING, writer) == (5, "begun\n")
    os.close(reader)
    os.close(writer)


def test_output_that_failed_stays_failed() -> None:
    with open("/dev/full", "wb") as full:  # noqa: PTH123 - a descriptor
        status, told = run(FAILING, full.fileno())
    line = "the output cannot be written: No space left on device False\n"
    assert (status, told) == (0, line * 2)
