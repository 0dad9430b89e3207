"""Query parameters and bodies of the gateway's routes as pydantic models."""

from __future__ import annotations

from pydantic import Field

from agentd.http.bodies import Body, Text
from agentd.http.queries import Label, LabelQuery, Query
from agentd.rpc.queries import DeleteQuery, KernelsQuery, LogsQuery


class CordonRequest(Body):
    """The reason for which new kernels are kept off a node."""

    reason: Text = Field("", max_length=1000, description="Reason, shown with the node.")


class KernelQuery(Query):
    """The query of a call about one kernel."""

    node: str | None = Field(None, description="Node of the kernel, if the fleet did not place it.")


class FleetDeleteQuery(DeleteQuery, KernelQuery):
    """The query of a delete of a kernel."""


class FleetLogsQuery(LogsQuery, KernelQuery):
    """The query of a kernel's log."""


class NodesQuery(Query):
    """The query of a list over nodes."""

    node: list[str] = Field(default_factory=list, description="Only these nodes.")


class FleetKernelsQuery(KernelsQuery, NodesQuery):
    """The query of a list of kernels."""

    after_node: str | None = Field(None, description="Node of the kernel `after`.")


class StatsQuery(NodesQuery, LabelQuery):
    """The query of the sums of slots."""

    agent: list[str] = Field(default_factory=list, description="Only these agents.")
    label: list[Label] = Field(
        default_factory=list, description="Only nodes with all of these labels: KEY=VALUE."
    )
