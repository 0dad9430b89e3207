"""The search for an agent: candidates from one view, the next one after each refusal.

The first candidate is called without a question if its node answered this gateway lately. After
the first refusal all others are asked for a decision (a dry run) at once, and only those that agree
are called. Nodes that failed lately, or that this gateway does not reach, are asked when no others
are left. Nodes that turn out to be unavailable hide no other: further ones are drawn meanwhile.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Sequence

import msgspec

from agentd.core.access import Caller
from agentd.core.slots import ResourceSlots
from agentd.error_codes import Scope
from agentd.errors import (
    AgentdError,
    ImageUnavailable,
    InsufficientResource,
    InvalidRequest,
    InvalidSlotAmount,
    InvalidSlotCombination,
    KernelConflict,
    NodeUnavailable,
    Unavailable,
)
from agentd_fleet.nodes.calls import NodeAnswer
from agentd_fleet.placement.attempts import PlacementUnknown, RouteTakenOver, creates_path
from agentd_fleet.placement.backend import FleetBackend
from agentd_fleet.placement.choice import (
    Candidate,
    NodeCordoned,
    PlacementPolicy,
    choose_candidates,
)
from agentd_fleet.placement.requests import PlacementRequest
from agentd_fleet.view.fleet_state import ANSWER_TIMEOUT_S
from agentd_fleet.view.fleet_view import FleetView

MAX_TRIES = 8
"""Maximum agents that refuse a kernel, or were called for it, before the fleet refuses it."""
MAX_REFUSALS = 64
"""Refusals after which unavailable nodes count as tries, too."""
DRAWS = (MAX_TRIES, 64, 256)
"""Agents that are drawn first, and again while the ones before were unavailable."""
FAILED_FOR_S, SUSPECT_FOR_S = 60.0, 3600.0
"""Seconds in which a node that was unavailable is the last choice, and in which one that left a
request unanswered is asked before a create."""


class FailedNodes:
    """The nodes that failed a request, and those that left one unanswered, with the times."""

    def __init__(self) -> None:
        self._failed_at: dict[str, float] = {}
        self._lost_at: dict[str, float] = {}

    def add(self, node_id: str, error: AgentdError) -> None:
        """Note a node that was unavailable."""
        now = asyncio.get_running_loop().time()
        if _is_node_failure(error):
            self._failed_at[node_id] = now
        if isinstance(error, (NodeUnavailable, PlacementUnknown)):
            self._lost_at[node_id] = now

    def add_without_image(self, node_id: str) -> None:
        """Note a node that cannot pull an image which another node had."""
        self._failed_at[node_id] = asyncio.get_running_loop().time()

    def node_ids(self) -> frozenset[str]:
        """Return the nodes that failed within `FAILED_FOR_S`."""
        now = asyncio.get_running_loop().time()
        return frozenset(n for n, at in self._failed_at.items() if now - at < FAILED_FOR_S)

    def is_suspect(self, node_id: str) -> bool:
        """Return whether a request to a node was lost within `SUSPECT_FOR_S`."""
        now = asyncio.get_running_loop().time()
        return now - self._lost_at.get(node_id, -SUSPECT_FOR_S) < SUSPECT_FOR_S


def _is_node_failure(error: AgentdError) -> bool:
    """Return whether a node is unavailable, for whatever request."""
    is_local = error.scope is Scope.NODE  # a group that the host lacks, of one agent
    others = (RouteTakenOver, ImageUnavailable)
    return isinstance(error, Unavailable) and not is_local and not isinstance(error, others)


class AgentQuery(msgspec.Struct, frozen=True):
    """A request for an agent, with the order in which agents are tried.

    For a dry run all candidates are asked for a decision at once.
    """

    caller: Caller
    request: PlacementRequest
    amounts: ResourceSlots
    policy: PlacementPolicy
    generator: random.Random
    is_dry_run: bool = False


class Search:
    """The search of one request; `refused` are the nodes that refused it, with their errors."""

    def __init__(
        self, backend: FleetBackend, failed: FailedNodes, query: AgentQuery, view: FleetView
    ) -> None:
        self._state, self._nodes = backend.state, backend.nodes
        self._failed, self._query, self._view = failed, query, view
        self._sizes, self._tries = deque(DRAWS), MAX_TRIES
        self._drawn: set[Candidate] = set()
        self._queue: deque[Candidate] = deque()
        self.refused: list[tuple[str, AgentdError]] = []
        self.decisions: dict[Candidate, NodeAnswer] = {}
        """The answers of agents that agreed to a dry run."""
        self.final: AgentdError | None = None
        """The refusal that holds at every node."""

    async def next(self) -> Candidate | None:
        """Return the next agent to call, None if there is none."""
        while self.final is None and self._tries and (self._queue or self._draw()):
            first, is_asking = self._queue[0], bool(self.refused) or self._query.is_dry_run
            node = self._state.node(first.node_id)
            if node is not None and node.cordon is not None:  # since the view
                self.refused.append((self._queue.popleft().node_id, NodeCordoned(node)))
                continue
            if first in self.decisions or not (is_asking or self._is_doubtful(first.node_id)):
                return self._queue.popleft()
            await self._ask([*self._queue] if is_asking or not self._sizes else [first])
        return None

    def _is_doubtful(self, node_id: str) -> bool:
        """Return whether a create might get lost, since a network may drop only large requests."""
        return self._failed.is_suspect(node_id) or not self._state.has_answered(node_id)

    def refuse(self, candidate: Candidate, error: AgentdError) -> None:
        """Note that an agent that was called refused, or cannot be called.

        A conflict is about the id. Any other refusal is final unless others have agreed.
        """
        is_free = _is_node_failure(error) and len(self.refused) < MAX_REFUSALS
        self._tries -= not is_free
        self._note_refusal(candidate, error)
        is_alone = self.decisions.keys().isdisjoint(self._queue)
        if isinstance(error, KernelConflict) or (self._is_final(error) and is_alone):
            self.final = error

    def _is_final(self, error: AgentdError) -> bool:
        """Return whether a refusal holds at every node.

        The gateway has validated the body, so a node that finds it invalid may be of another
        version. Only the agent of a claim knows what is left of it.
        """
        if isinstance(error, InsufficientResource):
            return self._query.request.has_claim
        validated = (InvalidRequest, InvalidSlotAmount, InvalidSlotCombination)
        return error.scope is Scope.REQUEST and not isinstance(error, validated)

    def _note_refusal(self, candidate: Candidate, error: AgentdError) -> None:
        """Note a refusal; other agents of the node come last, unless this one is full."""
        self.refused.append((candidate.node_id, error))
        self._failed.add(candidate.node_id, error)
        if not isinstance(error, InsufficientResource):
            is_same = {other: other.node_id == candidate.node_id for other in self._queue}
            self._queue = deque(sorted(self._queue, key=is_same.__getitem__))

    def note_placed(self) -> None:
        """Note that an agent took the kernel that the others refused."""
        for node_id, error in self.refused:
            if isinstance(error, ImageUnavailable):
                self._failed.add_without_image(node_id)

    def _draw(self) -> bool:
        """Queue further candidates; return whether there are any."""
        tries = sum(not _is_node_failure(error) for _, error in self.refused)
        if not self._sizes or tries >= MAX_TRIES:
            return False
        last = self._failed.node_ids() | self._state.unreachable.keys()
        drawn = self._choose(self._sizes.popleft(), last)
        if not drawn and not self._drawn:
            self._view = self._state.without_debits()
            drawn = self._choose(MAX_TRIES, last)
        fresh = [candidate for candidate in drawn if candidate.node_id not in last]
        if drawn and not fresh:
            self._sizes.clear()
            drawn = self._choose(DRAWS[1], last)
        self._queue.extend(fresh or drawn)
        self._drawn.update(self._queue)
        return bool(self._queue)

    def _choose(self, limit: int, last: frozenset[str]) -> list[Candidate]:
        query = self._query
        return choose_candidates(
            self._view,
            query.amounts,
            query.request.constraints,
            query.policy,
            query.generator,
            limit,
            last=last,
            without=self._drawn,
        )

    async def _ask(self, candidates: Sequence[Candidate]) -> None:
        """Ask candidates for a decision, all at once; those that refuse are candidates no more.

        A refusal is final if none of them agrees.
        """
        answers = await asyncio.gather(*map(self._request_decision, candidates))
        errors: list[AgentdError] = []
        for candidate, answer in zip(candidates, answers, strict=True):
            if isinstance(answer, NodeAnswer) and not answer.is_error:
                self.decisions[candidate] = answer
                continue
            self._queue.remove(candidate)
            errors.append(answer.error() if isinstance(answer, NodeAnswer) else answer)
            self._note_refusal(candidate, errors[-1])
        if len(errors) == len(answers):
            self.final = next(filter(self._is_final, errors), None)

    async def _request_decision(self, candidate: Candidate) -> NodeAnswer | NodeUnavailable:
        node = self._state.node(candidate.node_id)
        if node is None:
            return NodeUnavailable(f"node {candidate.node_id} is unavailable")
        query, path = self._query, f"{creates_path(candidate.agent_id)}?dry_run=true"
        try:
            return await self._nodes.call(
                node,
                query.caller,
                "POST",
                path,
                body=query.request.body,
                patience_s=ANSWER_TIMEOUT_S,
            )
        except NodeUnavailable as error:
            return error
