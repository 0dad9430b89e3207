"""The contract of runtimes, on the runtimes that need this machine."""

import re

from node.conftest import LIBRARIES, Node


def test_every_runtime_keeps_the_one_contract(node: Node) -> None:
    node.must("cp /payload/pyproject.toml /payload/tests -r /tmp/ && cd /tmp")
    done = node.must(
        f"cd /tmp && {LIBRARIES} /opt/agentd/bin/python -m pytest tests/contracts"
        " -k 'systemd or process' -p no:hypothesispytest --timeout 120 2>&1 | tail -20",
        600,
    )
    assert re.search(r"\n2[2-9] passed", done), done
