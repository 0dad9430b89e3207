"""Routes of the node: conditions, checks, metrics, plugins and runtimes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from aiohttp import web

from agentd.core.access import Caller
from agentd.core.conditions import ActiveCondition
from agentd.http.callers import caller_of
from agentd.http.prometheus import CONTENT_TYPE
from agentd.http.queries import query_of
from agentd.http.responses import json_response
from agentd.rpc import rendering
from agentd.rpc.metrics import Metrics
from agentd.rpc.queries import NodeQuery
from agentd.services.access import Access
from agentd.services.conditions import Conditions
from agentd.services.kernels.reconciler import Reconciler
from agentd.services.node import Node
from agentd.services.protocols import Plugins
from agentd.services.selfcheck import SelfCheck
from agentd.views import NodeView, ReloadView


class NodeHandlers:
    """The node: its view with its conditions, self-check, metrics and reload."""

    def __init__(
        self,
        view: Callable[[Sequence[ActiveCondition]], NodeView],
        conditions: Conditions,
        access: Access,
        check: SelfCheck,
        metrics: Metrics,
        reload: Callable[[], Awaitable[list[str]]],
    ) -> None:
        self._view = view
        self._conditions = conditions
        self._access = access
        self._check = check
        self._metrics = metrics
        self._reload = reload

    async def get_node(self, request: web.Request) -> web.Response:
        """Show the node, its parts and its conditions; `check` runs the self-check, too."""
        caller = caller_of(request)
        if not query_of(request, NodeQuery).check:
            return json_response(self._view(self._visible_conditions(caller)))
        self._access.require_all(caller)
        checks = rendering.check_views(await self._check.run())
        await self._conditions.refresh_lookups()
        return json_response({**self._view(self._visible_conditions(caller)), "checks": checks})

    async def get_metrics(self, request: web.Request) -> web.Response:
        """Show the node in the Prometheus exposition format."""
        caller = caller_of(request)
        text = await self._metrics.render(caller, self._visible_conditions(caller))
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE})

    async def reload(self, _: web.Request) -> web.Response:
        """Reload the configuration, or refuse it with all of its problems."""
        view: ReloadView = {"needs_restart": await self._reload()}
        return json_response(view)

    def _visible_conditions(self, caller: Caller) -> list[ActiveCondition]:
        return self._access.visible_conditions(caller, self._conditions.current())


class RuntimeHandlers:
    """The runtimes and plugins of the node."""

    def __init__(self, node: Node, reconciler: Reconciler, plugins: Plugins) -> None:
        self._state, self._devices = node.state, node.devices
        self._reconciler = reconciler
        self._plugins = plugins

    async def list_runtimes(self, _: web.Request) -> web.Response:
        """List the runtimes that may have kernels of this node, with their status."""
        runtimes = self._state.runtimes.values()
        return json_response([rendering.runtime_view(status) for status in runtimes])

    async def forget_runtime(self, request: web.Request) -> web.Response:
        """Permanently forget the kernels of an unavailable runtime."""
        await self._reconciler.forget_runtime(request.match_info["runtime"])
        return web.Response(status=204)

    async def list_plugins(self, _: web.Request) -> web.Response:
        """List the plugins with their status."""
        return json_response([rendering.plugin_view(status) for status in self._plugins.statuses()])

    async def retry_plugin(self, request: web.Request) -> web.Response:
        """Retry a plugin that is not ready, and return its new status."""
        status = await self._plugins.retry(request.match_info["plugin"])
        return json_response(rendering.plugin_view(status))

    async def stop_plugin(self, request: web.Request) -> web.Response:
        """Release a plugin's devices until it is started; survives restarts."""
        name, caller = request.match_info["plugin"], caller_of(request).name
        return json_response(rendering.plugin_view(await self._devices.stop_plugin(name, caller)))

    async def start_plugin(self, request: web.Request) -> web.Response:
        """Start a stopped plugin, and return its new status."""
        status = await self._devices.start_plugin(request.match_info["plugin"])
        return json_response(rendering.plugin_view(status))
