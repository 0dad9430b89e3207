"""Calls of a fleet's gateway that nodes do not have; the others are in `calls`."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

from agentd.client.calls import Call
from agentd.client.paths import at
from agentd.views import KernelUseView


def nodes() -> Call[list[dict[str, Any]]]:
    """`GET /v1/nodes`."""
    return Call("GET", at("nodes"))


def forget_node(node_id: str) -> Call[None]:
    """`DELETE /v1/nodes/{node}`."""
    return Call("DELETE", at("nodes", node_id))


def forget_slot_type(name: str) -> Call[None]:
    """`DELETE /v1/slot-types/{slot}`."""
    return Call("DELETE", at("slot-types", name))


def stats() -> Call[dict[str, Any]]:
    """`GET /v1/stats`."""
    return Call("GET", at("stats"))


def uses(node_id: str) -> Call[list[KernelUseView]]:
    """`GET /v1/nodes/{node}/stats`."""
    return Call("GET", at("nodes", node_id, "stats"))


def kernels(node: tuple[str, ...] = (), **filters: object) -> Call[list[dict[str, Any]]]:
    """`GET /v1/kernels`."""
    return Call("GET", at("kernels", node=node, **filters), is_paged=True)


def devices(node: tuple[str, ...] = ()) -> Call[list[dict[str, Any]]]:
    """`GET /v1/devices`."""
    return Call("GET", at("devices", node=node))


def create_kernel(
    request: Mapping[str, Any], *, wait: bool = True, dry_run: bool = False
) -> Call[dict[str, Any]]:
    """`POST /v1/kernels`; a request without `kernel_id` gets one, so that it can be repeated."""
    body = {"kernel_id": f"k-{uuid.uuid4().hex[:12]}", **request}
    headers = {} if wait else {"Prefer": "respond-async"}
    return Call("POST", at("kernels", dry_run=dry_run or None), body, headers)


def delete_kernel(kernel_id: str, node: str | None, timeout: float | None) -> Call[None]:
    """`DELETE /v1/kernels/{kernel}`."""
    return Call("DELETE", at("kernels", kernel_id, node=node, timeout=timeout))


def logs(kernel_id: str, node: str | None, **options: object) -> Call[bytes]:
    """`GET /v1/kernels/{kernel}/logs`."""
    return Call("GET", at("kernels", kernel_id, "logs", node=node, **options))
