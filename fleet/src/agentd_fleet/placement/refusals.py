"""Refusals of the fleet: the nodes' own problem, and the classes of unsuitable agents."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from msgspec.structs import replace

from agentd.core.slots import ResourceSlots, format_amount, readable_amount
from agentd.error_codes import Scope
from agentd.errors import (
    AgentdError,
    Draining,
    InsufficientResource,
    InvalidRequest,
    NodeUnavailable,
    NotReady,
    Problem,
    Unavailable,
    UnknownAgent,
    UnknownDevice,
    UnknownNode,
    UnsupportedResource,
)
from agentd_fleet.placement.choice import (
    MAX_NAMED,
    Constraints,
    NodeCordoned,
    RejectionClass,
    RejectionKind,
    classify_rejections,
)
from agentd_fleet.view.fleet_view import FleetView

_RESOURCES = (InsufficientResource, UnsupportedResource, UnknownAgent, UnknownDevice)
_ABSENT = (NodeUnavailable, NotReady, Draining)
"""Refusals for reasons that are classes of the view as well."""


def _classes_text(classes: Sequence[RejectionClass]) -> str:
    return ", ".join(f"{row.count} {row.reason}" for row in classes)


def refusal_error(
    view: FleetView,
    requested: ResourceSlots,
    constraints: Constraints,
    refused: Sequence[tuple[str, AgentdError]],
) -> AgentdError:
    """Return why the fleet cannot serve a request: the nodes' answers, and the view of others.

    A node's own failure comes before missing resources, and one that passes before one that stays.
    """
    called, uncalled = {node_id for node_id, _ in refused}, constraints
    if called:
        remaining = (constraints.nodes or view.nodes.keys()) - called
        uncalled = replace(constraints, nodes=frozenset(remaining))
    unasked = classify_rejections(view, requested, uncalled)
    classes = [*_called_classes(refused), *unasked]
    if not classes:
        return _unknown_target_error(view, constraints)
    errors = [error for _, error in refused if not _is_absence(error)]
    if own_errors := [error for error in errors if not isinstance(error, _RESOURCES)]:
        error = min(own_errors, key=lambda error: not isinstance(error, Unavailable))
        if sum(row.count for row in classes) > 1:
            error.args = (f"{error} ({_classes_text(classes)})",)
        return _with_classes(error, classes)
    kinds = {row.kind for row in unasked}
    if not errors and not refused and kinds == {RejectionKind.UNFIT}:
        reason = f"no node has the runtime for this request: {_classes_text(classes)}"
        return _with_classes(InvalidRequest([Problem("image", reason)], is_local=True), classes)
    if not errors and RejectionKind.LACKING not in kinds:
        reason = f"no suitable node is available: {_classes_text(classes)}"
        return _with_classes(NodeUnavailable(reason), classes)
    slot, free = _scarcest(view, requested, constraints)
    kind = view.slot_types[slot].kind
    explain = next((e.explain for e in reversed(errors) if isinstance(e, InsufficientResource)), ())
    requested_text = readable_amount(requested[slot], kind)
    insufficient = InsufficientResource(
        slot,
        format_amount(requested[slot], kind),
        format_amount(free, kind),
        explain,
        amounts=f"requested {requested_text}; {_classes_text(classes)}",
    )
    return _with_classes(insufficient, classes)


def _is_absence(error: AgentdError) -> bool:
    """Return whether a node cannot answer now, rather than lacking something of its host."""
    return isinstance(error, _ABSENT) and error.scope is Scope.MOMENT


def _with_classes(error: AgentdError, classes: Sequence[RejectionClass]) -> AgentdError:
    """Return an error with the classes of all agents."""
    rows = [{"reason": c.reason, "count": c.count, "nodes": list(c.nodes)} for c in classes]
    error.content = {**(error.content or error.members()), "classes": rows}
    return error


def _called_classes(refused: Sequence[tuple[str, AgentdError]]) -> list[RejectionClass]:
    """Return the classes of the called nodes."""
    counts = Counter(_class_of_error(error) for _, error in refused)
    return [
        RejectionClass(
            reason, count, tuple(n for n, e in refused if _class_of_error(e) == reason)[:MAX_NAMED]
        )
        for reason, count in counts.most_common()
    ]


def _class_of_error(error: AgentdError) -> str:
    if isinstance(error, NodeCordoned):
        return error.reason
    return "full when asked" if error.code == "InsufficientResource" else f"said {error.code}"


def _unknown_target_error(view: FleetView, constraints: Constraints) -> AgentdError:
    """Return the error of a request without any suitable agent."""
    named = constraints.nodes or frozenset()
    if constraints.agents is None and (unknown := sorted(named - view.nodes.keys())):
        return UnknownNode(f"unknown node {', '.join(unknown)}")
    agents = ", ".join(sorted(constraints.agents or ())) or "any"
    labels = ", ".join(f"{k}={v}" for k, v in constraints.labels.items())
    return UnknownAgent(
        f"no such agent in this fleet: {agents}" + (f" on a node with {labels}" if labels else "")
    )


def _scarcest(
    view: FleetView, requested: ResourceSlots, constraints: Constraints
) -> tuple[str, int]:
    """Return the slot that is furthest from sufficient, and the most that one agent has free."""
    names = list(requested) or ["cpu"]
    max_free = dict.fromkeys(names, 0)
    for node_id in constraints.nodes or view.nodes:
        node = view.nodes.get(node_id)
        for agent, offer in node.offers.items() if node is not None else ():
            if constraints.agents is None or agent in constraints.agents:
                for name in names:
                    max_free[name] = max(max_free[name], offer.free[name])
    slot = min(names, key=lambda name: (max_free[name] / (requested[name] or 1), name))
    return slot, max_free[slot]
