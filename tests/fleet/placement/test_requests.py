"""An order carries amounts to the node as they were written, also where they can be no amounts."""

import json

import pytest

from agentd.core.access import Caller, Role
from agentd.errors import Forbidden
from agentd.http.bodies import read_body
from agentd_fleet.placement.requests import FleetKernelRequest, to_placement_request


@pytest.mark.parametrize(
    ("written", "sent"),
    [("1.50", "1.50"), ("[1.5]", ["1.5"]), ('{"b": [0.10]}', {"b": ["0.10"]}), ("2", 2)],
)
def test_a_fraction_is_sent_as_it_was_written(written: str, sent: object) -> None:
    request = read_body(FleetKernelRequest, f'{{"command": ["x"], "slots": {{"a": {written}}}}}')
    order = to_placement_request(request, Caller("me", Role.ADMIN))
    assert json.loads(order.body)["slots"] == {"a": sent}


def test_id_of_an_engine_is_refused_before_a_route_is_written() -> None:
    request = read_body(FleetKernelRequest, '{"command": ["x"], "kernel_id": "slurm-7"}')
    to_placement_request(request, Caller("me", Role.ADMIN))
    with pytest.raises(Forbidden):
        to_placement_request(request, Caller("me", Role.AGENT, frozenset({"a"})))
