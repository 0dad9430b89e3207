"""Tests of runtimes, of exec and of claims, with what this machine alone has: systemd."""

import os
import re

from node.conftest import Node

IS_SOAK = "AGENTD_SOAK" in os.environ
FILES = (
    "tests/contracts",
    "tests/end_to_end/test_exec.py",
    "tests/end_to_end/test_exec_attacks.py",
    *(["tests/end_to_end/test_holders_together.py"] if IS_SOAK else []),
)
"""The last has its notebook in a scope here, and takes minutes."""
EXEC = "systemd" if IS_SOAK else "systemd and (what_its or goes_away)"
"""All of them take ten minutes."""
CHOSEN = (
    f"(test_runtime and (systemd or process)) or (test_exec and {EXEC}) or test_holders_together"
)


SILENT = "tests/host/field/test_silent_host.py -k systemd"
"""Tests without a runtime run elsewhere."""


def test_silent_host_holds_up_no_unit(node: Node) -> None:
    done = node.passed(f"-s {SILENT} --timeout 600", 1100)
    print(done)
    assert int(re.search(r"(\d+) passed", done.splitlines()[-1])[1]) == 3, done


def test_systemd_passes_the_tests_that_others_pass(node: Node) -> None:
    done = node.passed(f"-s {' '.join(FILES)} -k '{CHOSEN}' --timeout 400", 1100)
    print(done)
    assert int(re.search(r"(\d+) passed", done.splitlines()[-1])[1]) >= 24, done
