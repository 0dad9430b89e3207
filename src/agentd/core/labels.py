"""Bounds of labels: each object, the objects of an agent, and those of the node.

The size of labels is the bytes of their keys and values in UTF-8. Ended kernels do not count
towards the sums: their own bound is in `services.kernels.retention`.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

MAX_LABELS_BYTES = 8 << 10
"""Maximum bytes of one kernel or claim."""
MAX_AGENT_BYTES = 4 << 20
"""Maximum bytes of an agent's kernels and claims together."""
MAX_NODE_BYTES = 16 << 20
"""Maximum bytes of all kernels and claims of the node together."""


class LabelExcess(msgspec.Struct, frozen=True):
    """Labels that do not fit: their bytes, the bytes that are free, and the bound."""

    size: int
    free: int
    bound: str


def labels_size(labels: Mapping[str, str]) -> int:
    """Return the bytes of labels."""
    words = (*labels, *labels.values())
    return sum(len(word.encode(errors="replace")) for word in words)


def find_label_excess(
    labels: Mapping[str, str],
    agent_id: str,
    *,
    agent_bytes: int,
    node_bytes: int,
    agents: int = 1,
) -> LabelExcess | None:
    """Return how labels exceed a sum that already has `agent_bytes` or `node_bytes`, if they do.

    Each of the node's `agents` has an equal part of its bytes at most.
    """
    size = labels_size(labels)
    for used, maximum, owner in (
        (agent_bytes, min(MAX_AGENT_BYTES, MAX_NODE_BYTES // agents), f"agent {agent_id}"),
        (node_bytes, MAX_NODE_BYTES, "this node"),
    ):
        free = max(0, maximum - used)
        if size > free:
            bound = f"all kernels and claims of {owner} together have at most {maximum} bytes"
            return LabelExcess(size, free, f"{bound} of labels")
    return None
