"""Routes of claims: create, list, renew, release, and edits of several."""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from agentd.core.access import Caller, Role, require_admin, require_unreserved_id
from agentd.core.claim.claim import (
    ClaimHolder,
    ClaimStatus,
    EditsTarget,
    NameHolder,
    TimeHolder,
)
from agentd.errors import InvalidRequest, Problem
from agentd.host.claim_holders import HolderObserver, NoSuchHolder
from agentd.http.bodies import read_body
from agentd.http.callers import attach_id, caller_of, peer_of
from agentd.http.queries import query_of, receive_body
from agentd.http.responses import json_response
from agentd.rpc import rendering
from agentd.rpc.pages import page_response
from agentd.rpc.queries import ClaimsQuery
from agentd.rpc.requests import (
    CreateClaimRequest,
    EditsRequest,
    HolderRequest,
    RenewRequest,
)
from agentd.services.claims.claim_service import ClaimService
from agentd.services.node import Node
from agentd.views import ClaimView


class ClaimHandlers:
    """Claims of the node. No claim ends with a cgroup of a kernel."""

    def __init__(self, node: Node, service: ClaimService, holders: HolderObserver) -> None:
        self._state, self._devices = node.state, node.devices
        self._service = service
        self._holders = holders

    async def create_claim(self, request: web.Request) -> web.Response:
        """Take devices for work of an engine, or return the claim that the same request made."""
        agent_id = self._devices.partition(request.match_info["agent"]).agent_id
        body = read_body(CreateClaimRequest, await receive_body(request))
        caller = caller_of(request)
        if body.claim_id is not None:
            attach_id(request, "claim", body.claim_id)
        require_unreserved_id(caller, body.claim_id)
        _require_admin_for(body, caller)
        spec = body.to_spec(agent_id, caller, self._verify_holder(request, body.holder, caller))
        attach_id(request, "claim", spec.claim_id)
        status, is_new = await self._service.create(spec)
        headers = {"Location": f"/v1/claims/{spec.claim_id}"}
        return json_response(self._view(status), 201 if is_new else 200, headers)

    def _view(self, status: ClaimStatus) -> ClaimView:
        return rendering.claim_view(status, self._devices.inventory)

    def _verify_holder(
        self, request: web.Request, requested: HolderRequest, caller: Caller
    ) -> ClaimHolder:
        """Verify the holder that a caller names.

        Raises:
            InvalidRequest: it is not there, not the caller's, or cannot be named over TCP.
        """
        if requested.ttl is not None:
            return TimeHolder(requested.ttl)
        if requested.name is not None:
            return NameHolder(requested.name, requested.survives_reboot)
        member = "pid" if requested.pid is not None else "cgroup"
        peer = peer_of(request)
        if peer is None:
            reason = "expected a caller on a unix socket of this node; over TCP: ttl or name"
            raise InvalidRequest([Problem(f"holder.{member}", reason)])
        try:
            if requested.cgroup is not None:
                pids = [kernel.pid for kernel in self._state if kernel.pid is not None]
                containers = [k.handle for k in self._state if k.runtime == "docker" and k.handle]
                return self._holders.find_cgroup(requested.cgroup, pids, containers)
            return self._holders.find_process(
                requested.pid or 0,
                requested.start_time,
                caller_pid=peer.pid,
                caller_uid=None if caller.role is Role.ADMIN else peer.uid,
            )
        except NoSuchHolder as error:
            raise InvalidRequest([Problem(f"holder.{member}", str(error))]) from None

    async def list_claims(self, request: web.Request) -> web.Response:
        """List the claims that hold devices, the oldest first."""
        caller, agent = caller_of(request), query_of(request, ClaimsQuery).agent
        claims = [
            claim
            for claim in self._service.recorded_claims()
            if caller.sees(claim.agent_id) and agent in (None, claim.agent_id)
        ]
        return page_response(
            request,
            claims,
            lambda claim: msgspec.json.encode(self._view(self._service.status(claim))),
        )

    async def get_claim(self, request: web.Request) -> web.Response:
        """Show one claim."""
        return json_response(self._view(self._service.get(request.match_info["claim"])))

    async def renew_claim(self, request: web.Request) -> web.Response:
        """Restart the time limit of a claim."""
        body = read_body(RenewRequest, await receive_body(request))
        claim_id = request.match_info["claim"]
        status = self._service.renew(claim_id, body.ttl, caller_of(request))
        return json_response(self._view(status))

    async def delete_claim(self, request: web.Request) -> web.Response:
        """Release a claim."""
        self._service.release(request.match_info["claim"], caller_of(request))
        return web.Response(status=204)

    async def get_edits(self, request: web.Request) -> web.Response:
        """Return the edits for the devices of several claims together."""
        body = read_body(EditsRequest, await receive_body(request))
        edits_for = EditsTarget(body.edits_for)
        edits = await self._service.edits_of(body.claims, edits_for, caller_of(request))
        return json_response(rendering.edits_view(edits))


def _require_admin_for(body: CreateClaimRequest, caller: Caller) -> None:
    """Refuse members that only an admin may set.

    Raises:
        Forbidden: the caller is not an admin.
    """
    admin_members: dict[str, Any] = {
        "name a cgroup": body.holder.cgroup,
        "set owner_uid": body.owner_uid,
        "make observed claims": body.observed or None,
    }
    for right, value in admin_members.items():
        if value is not None:
            require_admin(caller, right)
