"""Routes: each name in a path has a pattern, in the document and where it is read."""

import re
from typing import Any

import pytest

from agentd.errors import RequestError
from agentd.http.openapi import build_document
from agentd.http.problem_responses import STATUSES
from agentd.http.route import REST, parameter_schema, require_names
from agentd.rpc.routes import ROUTES
from agentd_fleet.gateway.routes import ROUTES as FLEET_ROUTES

PARAMETERS = sorted(
    {name for route in (*ROUTES, *FLEET_ROUTES) for name in re.findall(r"{(\w+)}", route.path)}
)
GOOD = {"slot": "cuda.device:1g.10gb+me", "id": "GPU-8f1c:0.1"}
BAD = ["..", ".", "", "../../PWNED", "a/b", "a\n", "a\0", "-a", "x" * 200, "\u00e9", "a b"]


@pytest.mark.parametrize("name", PARAMETERS)
def test_every_parameter_of_a_path_has_a_pattern(name: str) -> None:
    require_names({name: GOOD.get(name, "name-1")})
    if name == REST:
        return
    assert re.fullmatch(parameter_schema(name)["pattern"], GOOD.get(name, "name-1"))
    for value in BAD:
        if name == "slot" and value == "x" * 200:
            continue
        with pytest.raises(RequestError) as caught:
            require_names({name: value})
        assert STATUSES[caught.value.code] == 404
        assert len(str(caught.value)) < 160


@pytest.mark.parametrize("routes", [ROUTES, FLEET_ROUTES])
def test_the_document_says_which_names_there_can_be(routes: Any) -> None:
    for path, calls in build_document("x", routes)["paths"].items():
        for call in calls.values():
            for parameter in call["parameters"]:
                if parameter["in"] == "path":
                    assert parameter["schema"]["pattern"].startswith("^["), path
