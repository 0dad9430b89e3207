"""The daemon's side of the routes for devices."""

from __future__ import annotations

from aiohttp import web

from agentd.http.answers import answer
from agentd.http.callers import caller_of
from agentd.rpc import rendering
from agentd.rpc.visibility import Visibility
from agentd.services.access import Access
from agentd.services.devices import NodeDevices
from agentd.services.state import NodeState


class DeviceHandlers:
    """Shows devices, and takes them out of use and back."""

    def __init__(
        self, state: NodeState, devices: NodeDevices, access: Access, visible: Visibility
    ) -> None:
        self._state = state
        self._devices = devices
        self._access = access
        self._visible = visible

    async def list_devices(self, request: web.Request) -> web.Response:
        """List every device with its holders."""
        caller = caller_of(request)
        return answer([self._visible.device(d, caller) for d in self._access.devices(caller)])

    async def drain_device(self, request: web.Request) -> web.Response:
        """Give nothing new from a device; survives restarts."""
        return self._set_drained(request, drained=True)

    async def undrain_device(self, request: web.Request) -> web.Response:
        """Give from a device again."""
        return self._set_drained(request, drained=False)

    def _set_drained(self, request: web.Request, *, drained: bool) -> web.Response:
        match = request.match_info
        devices = self._devices
        device = devices.set_drained(match["device_name"], match["id"], drained=drained)
        return answer(rendering.device_view(device, devices.split, self._state.ledger))

    async def forget_device(self, request: web.Request) -> web.Response:
        """Forget a device that is gone, and its place at the next start."""
        match, devices = request.match_info, self._devices
        device = devices.find(match["device_name"], match["id"])
        holders = self._state.ledger.holders(device.device_id)
        devices.forget(match["device_name"], match["id"], holders=holders)
        return web.Response(status=204)
