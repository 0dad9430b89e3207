"""The policy of allocation, for choices between suitable devices."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Strategy(StrEnum):
    """The division of an amount over equally near devices."""

    FILL = "fill"
    EVENLY = "evenly"


class Affinity(StrEnum):
    """Whether the first step looks for one NUMA node with enough devices."""

    INTERLEAVED = "interleaved"
    PREFER_SINGLE_NODE = "prefer-single-node"


class AllocationPolicy(msgspec.Struct, frozen=True):
    """The operator's policy for choices between suitable devices."""

    strategy: Strategy = Strategy.EVENLY
    affinity: Affinity = Affinity.INTERLEAVED
    allow_fragmentation: bool = False
    is_discreet: bool = False
    """Whether an explanation hides other agents and their devices."""
