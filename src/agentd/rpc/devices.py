"""Routes of devices and of the agents that own them."""

from __future__ import annotations

from aiohttp import web

from agentd.core.conditions import Condition
from agentd.http.bodies import read_body
from agentd.http.callers import caller_of
from agentd.http.queries import receive_body
from agentd.http.responses import json_response
from agentd.rpc import rendering
from agentd.rpc.requests import EngineRequest
from agentd.rpc.visibility import Visibility
from agentd.services.access import Access
from agentd.services.engines import AwaitedEngines
from agentd.services.node import Node


class DeviceHandlers:
    """Agents and their partitions; slots; devices, their drains and missing devices."""

    def __init__(
        self,
        node: Node,
        access: Access,
        visibility: Visibility,
        engines: AwaitedEngines,
    ) -> None:
        self._state, self._devices = node.state, node.devices
        self._access = access
        self._visibility = visibility
        self._engines = engines

    async def list_engines(self, _: web.Request) -> web.Response:
        """List the engines that devices wait for after a boot."""
        return json_response([rendering.engine_view(status) for status in self._engines.statuses()])

    async def put_engine(self, request: web.Request) -> web.Response:
        """Set whether an engine has compared its devices, and the conditions that it reports."""
        body = read_body(EngineRequest, await receive_body(request))
        engine, conditions = request.match_info["engine"], None
        if body.conditions is not None:
            conditions = [
                Condition(f"engine/{engine}", given.reason, given.remedy)
                for given in body.conditions
            ]
        status = self._engines.report(engine, is_ready=body.ready, conditions=conditions)
        return json_response(rendering.engine_view(status))

    async def list_agents(self, request: web.Request) -> web.Response:
        """List the agents with their partitions and slots."""
        split, ledger = self._devices.split, self._state.ledger
        agents = self._access.agents(caller_of(request))
        return json_response([rendering.agent_view(agent, split, ledger) for agent in agents])

    async def get_agent(self, request: web.Request) -> web.Response:
        """Show one agent."""
        agent = self._devices.partition(request.match_info["agent"]).agent_id
        return json_response(rendering.agent_view(agent, self._devices.split, self._state.ledger))

    async def list_devices(self, request: web.Request) -> web.Response:
        """List every device with its holders."""
        caller = caller_of(request)
        return json_response(
            [self._visibility.visible_device(d, caller) for d in self._access.devices(caller)]
        )

    async def list_slot_types(self, _: web.Request) -> web.Response:
        """List the known slot types."""
        types = self._devices.inventory.slot_types.values()
        return json_response([rendering.slot_type_view(slot) for slot in types])

    async def drain_device(self, request: web.Request) -> web.Response:
        """Stop allocating a device to new kernels; survives restarts."""
        return self._set_drained(request, drained=True)

    async def undrain_device(self, request: web.Request) -> web.Response:
        """Undo a drain."""
        return self._set_drained(request, drained=False)

    def _set_drained(self, request: web.Request, *, drained: bool) -> web.Response:
        match = request.match_info
        devices = self._devices
        device = devices.set_drained(match["device_name"], match["id"], drained=drained)
        return json_response(rendering.device_view(device, devices.split, self._state.ledger))

    async def clear_device(self, request: web.Request) -> web.Response:
        """Clear what waits for an operator about an unhealthy device."""
        match, devices = request.match_info, self._devices
        device = await devices.clear(match["device_name"], match["id"])
        return json_response(rendering.device_view(device, devices.split, self._state.ledger))

    async def forget_device(self, request: web.Request) -> web.Response:
        """Forget a missing device; its id is free again after the next start."""
        match, devices = request.match_info, self._devices
        device = devices.find(match["device_name"], match["id"])
        holders = self._state.ledger.holders(device.device_id)
        devices.forget(match["device_name"], match["id"], holders=holders)
        return web.Response(status=204)
