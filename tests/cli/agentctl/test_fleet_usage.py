"""The usage of all nodes of a fleet, and the nodes that do not answer."""

from typing import Any

import pytest

from agentd.cli.agentctl.fleet import _FleetUsage
from agentd.client.calls import Call
from agentd.errors import NodeUnavailable


class Gateway:
    """A gateway whose nodes answer or do not."""

    def __init__(self) -> None:
        self.silent: set[str] = set()

    def execute(self, call: Call[Any]) -> Any:
        if call.path == "/v1/nodes":
            return [{"id": name, "state": "ready"} for name in ("n1", "n2")]
        node = call.path.split("/")[3]
        if node in self.silent:
            raise NodeUnavailable(node)
        return [{"kernel_id": "k1"}]


def test_node_that_does_not_answer_is_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    gateway: Any = Gateway()
    usage = _FleetUsage(gateway)
    for silent, kernels, told in (
        (set(), ["n1/k1", "n2/k1"], ""),
        ({"n2"}, ["n1/k1"], "agentctl: no answer from n2\n"),
        ({"n2"}, ["n1/k1"], ""),
        ({"n1", "n2"}, [], "agentctl: no answer from n1, n2\n"),
        (set(), ["n1/k1", "n2/k1"], ""),
        ({"n2"}, ["n1/k1"], "agentctl: no answer from n2\n"),
    ):
        gateway.silent = silent
        assert [row["kernel_id"] for row in usage.read()] == kernels
        assert capsys.readouterr().err == told
