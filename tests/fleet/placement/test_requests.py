"""An order carries amounts to the node as they were written, also where they can be no amounts."""

import json

import pytest

from agentd.core.access import Caller, Role
from agentd.http.bodies import read_body
from agentd_fleet.placement.requests import FleetKernelRequest, order_of


@pytest.mark.parametrize(
    ("written", "sent"),
    [("1.50", "1.50"), ("[1.5]", ["1.5"]), ('{"b": [0.10]}', {"b": ["0.10"]}), ("2", 2)],
)
def test_a_fraction_is_sent_as_it_was_written(written: str, sent: object) -> None:
    request = read_body(FleetKernelRequest, f'{{"command": ["x"], "slots": {{"a": {written}}}}}')
    order = order_of(request, Caller("me", Role.ADMIN))
    assert json.loads(order.body)["slots"] == {"a": sent}
