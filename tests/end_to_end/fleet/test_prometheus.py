"""A real Prometheus scrapes a gateway with a scoped token, under the rules of a fleet."""

import json
from collections.abc import AsyncIterator

import pytest

from end_to_end.fleet.fleet_world import GatewayProgram, World
from end_to_end.prometheus import Prometheus, documented, free_port, panels, promtool, rules_of

pytestmark = pytest.mark.needs("prometheus")

SCOPED = '[[rpc.tokens]]\nname = "team"\nfile = "{}"\nrole = "agent"\nagents = ["agent-1"]\n'


@pytest.fixture
async def scraped(
    world: World,
) -> AsyncIterator[tuple[World, GatewayProgram, list[str], Prometheus]]:
    nodes = await world.start_nodes("cuda", "none")
    token, port = world.folder / "token", free_port()
    token.write_text("a-token-for-prometheus\n")
    token.chmod(0o600)
    gateway = world.gateway(
        world.followed(), gateway=f'listen = "127.0.0.1:{port}"\n', rpc=SCOPED.format(token)
    )
    await gateway.until(dict.fromkeys(nodes, "ready"))
    made = Prometheus(world.folder, "agentd-fleet", port, token)
    yield world, gateway, nodes, made
    await made.stop()


def evaluated(prometheus: Prometheus, query: str) -> list[dict[str, object]]:
    found: list[dict[str, object]] = json.loads(
        promtool("query", "instant", "--format=json", prometheus.url, query)
    )
    return found


@pytest.mark.long
async def test_promtool_evaluates_every_rule_and_panel_on_a_fleet(scraped) -> None:
    world, gateway, (cuda, _), prometheus = scraped
    promtool("check", "rules", str(rules_of("agentd-fleet")))
    promtool("check", "metrics", given=(await gateway.call("GET", "/metrics")).content)
    await prometheus.until('agentd_fleet_creates_total{result="UnsupportedResource"} == 0')
    assert (await gateway.create(slots={"no.such": 1})).status == 422
    first = 'increase(agentd_fleet_creates_total{result="UnsupportedResource"}[1m])'
    await prometheus.until(f"{first} > 0")
    assert (await gateway.create(slots={"cuda.device": 4})).status == 201
    await prometheus.until('agentd_fleet_slot_free{slot="cuda.device"} == 0')
    rules = await prometheus.alerts()
    assert len(rules) >= 8
    assert {rule["health"] for rule in rules} <= {"ok", "unknown"}
    empty = [query for query in panels("agentd-fleet") if not evaluated(prometheus, query)]
    assert empty == []
    raised = {rule["name"] for rule in rules if evaluated(prometheus, rule["query"])}
    assert raised == {"AgentdFleetSlotFull"}
    await world.nodes[cuda].stop()
    await prometheus.until('ALERTS{alertname="AgentdFleetDaemonDown"}')
    questions = documented("how-to/run-a-fleet.md")
    assert len(questions) >= 6
    assert [query for query in questions if not evaluated(prometheus, query)] == []


async def test_a_scoped_token_gets_the_series_of_the_whole_fleet(scraped) -> None:
    *_, prometheus = scraped
    await prometheus.until('agentd_fleet_nodes{state="ready"} == 2')
    for query in (
        "agentd_fleet_view_live == 1",
        'agentd_fleet_creates_total{result="placed"} == 0',
        'agentd_fleet_slot_capacity{slot="cuda.device"} == 4',
    ):
        assert evaluated(prometheus, query), query
