"""How devices are chosen where there is a choice."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Strategy(StrEnum):
    """How an amount is divided over equally near devices."""

    FILL = "fill"
    EVENLY = "evenly"


class Affinity(StrEnum):
    """Whether the first step looks for one NUMA node that holds it all."""

    INTERLEAVED = "interleaved"
    PREFER_SINGLE_NODE = "prefer-single-node"


class AllocationPolicy(msgspec.Struct, frozen=True):
    """How devices are chosen where there is a choice."""

    strategy: Strategy = Strategy.EVENLY
    affinity: Affinity = Affinity.INTERLEAVED
    allow_fragmentation: bool = False
    is_discreet: bool = False
    """Whether an explanation names nobody but the agent's own, and none of others' devices."""
