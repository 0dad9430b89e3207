"""Tests of runtimes and of exec, on the runtimes that need this machine."""

import os
import re

from node.conftest import LIBRARIES, Node

SITE = "/opt/agentd/lib/python3.11/site-packages"
EXEC = "systemd" if os.environ.get("AGENTD_SOAK") else "systemd and (what_its or goes_away)"
"""All of them take ten minutes; a soak has those."""
CHOSEN = f"(test_runtime and (systemd or process)) or (test_exec and {EXEC})"


def test_units_and_processes_pass_tests_of_every_runtime(node: Node) -> None:
    node.must("cp -r /payload/pyproject.toml /payload/tests /tmp/")
    node.must(f"python3 -m zipfile -e /payload/agentd_plugin_sim-*.whl {SITE}")
    done = node.must(
        f"cd /tmp && {LIBRARIES} /opt/agentd/bin/python -m pytest"
        " tests/contracts tests/end_to_end/test_exec.py tests/end_to_end/test_exec_attacks.py"
        f" -k '{CHOSEN}' -p no:hypothesispytest --timeout 240 2>&1 | tail -60",
        1100,
    )
    node.must(f"rm -r {SITE}/agentd_plugin_sim*")
    passed = re.search(r"\n(\d+) passed", done)
    assert passed, done
    assert int(passed[1]) >= 24, done
