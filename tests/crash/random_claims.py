"""Two teams that claim, use, renew and release at random, and a model of what they were answered.

Each operation knows which statuses it may have. `Driver.verify` compares the model with the answers
of the daemon, the records on disk, and the devices. An operation without an answer, as the daemon
died over it, is resolved after the next start.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any

from crash.claim_model import (
    KERNEL,
    NODE,
    SHORT_TTL_S,
    SLOTS,
    STRANGER,
    TEAMS,
    Amounts,
    ModelClaim,
    ModelKernel,
    Team,
    amounts_of,
    recorded_amounts,
    writable_cgroups,
)
from support.checked_node import NO_ANSWER, CheckedNode, units
from support.daemon import TEAM_SOCKETS, Answer
from support.waiting import until

MAX_CLAIMS, MAX_KERNELS = 10, 10
SETTLED = {"running", "terminated", "lost"}
"""States that follow an interrupted operation; `lost`: its bundle was removed, its record not."""


class Driver:
    """The operations, and the model of a node."""

    def __init__(self, node: CheckedNode, chance: random.Random) -> None:
        self.node = node
        self.chance = chance
        self.claims: dict[str, ModelClaim] = {}
        self.kernels: dict[str, ModelKernel] = {}
        self.unresolved: list[ModelKernel] = []
        """Kernels whose create, stop or delete was not answered."""
        self.drained: set[str] = set()
        self.answers: Counter[str] = Counter()
        self._is_dying = False
        self._number = 0
        self._holders: list[ModelClaim] = []
        self._cgroups = writable_cgroups()
        self._has_label_patch = False

    async def start(self) -> None:
        assert await self.node.start(
            text=NODE + TEAM_SOCKETS.format(folder=self.node.daemon.folder)
        )
        absent = await self.node.daemon.call("PATCH", "/v1/claims/none", {"labels": {}})
        self._has_label_patch = absent.status == 404

    def close(self) -> None:
        """End every process and cgroup that it made."""
        for claim in self._holders:
            claim.end_holder()

    # Operations of a team. Several teams may run one at the same time, since each knows its own.

    async def run_operation(self, team: Team) -> None:
        """Run one operation of a team, chosen at random among those that make sense."""
        claims = [c for c in self.claims.values() if c.team is team]
        kernels = [k for k in self.kernels.values() if k.team is team]
        choices: list[tuple[int, Callable[[Team], Awaitable[None]]]] = []
        if len(self.claims) < MAX_CLAIMS:
            choices += [(8, self._claim)]
        if len(self.kernels) < MAX_KERNELS:
            choices += [(3, self._create)]
        if claims:
            choices += [(3, self._repeat_claim), (2, self._renew), (5, self._release)]
            choices += [(2, self._end_holder), (2, self._trespass), (1, self._race_for_claim)]
            choices += [(1, self._race_for_id)]
            if len(self.kernels) < MAX_KERNELS:
                choices += [(7, self._create_from_claim)]
            if self._has_label_patch:
                choices += [(2, self._patch_labels)]
        if kernels:
            choices += [(6, self._delete_kernel), (1, self._stop_kernel), (1, self._trespass)]
        weights, operations = zip(*choices, strict=True)
        await self.chance.choices(operations, weights)[0](team)

    async def _call(self, socket: str, method: str, path: str, body: Any = None) -> Answer:
        answer = await self.node.try_call(method, path, body, socket=socket)
        assert answer.status != 500, (method, path, body, answer)
        self.answers[f"{method} {path.split('/')[2]} {answer.status}"] += 1
        if self._is_dying and answer.status == HTTPStatus.SERVICE_UNAVAILABLE:
            return NO_ANSWER
        return answer

    def _new_id(self, team: Team) -> str:
        self._number += 1
        return f"{team.socket}-{self._number}"

    def _own_claim(self, team: Team) -> ModelClaim:
        return self.chance.choice([c for c in self.claims.values() if c.team is team])

    def _users(self, claim: ModelClaim) -> list[ModelKernel]:
        return [k for k in self.kernels.values() if k.uses(claim.claim_id)]

    async def _claim(self, team: Team) -> None:
        claim, socket = self._new_claim(team)
        claim.restart_time(time.monotonic())
        answer = await self._call(socket, "POST", f"/v1/agents/{team.agent}/claims", claim.body)
        if answer is NO_ANSWER:
            claim.may_be_gone = True
            self.claims[claim.claim_id] = claim
        elif answer.status == 201:
            self._add_claim(claim, answer.json)
        else:
            assert (answer.status, answer.json["code"]) == (409, "InsufficientResource"), answer
            assert not claim.may_be_shared, answer
            claim.end_holder()

    def _new_claim(self, team: Team) -> tuple[ModelClaim, str]:
        """Choose a claim, and the socket on which it may be made."""
        claim = ModelClaim(team, {"claim_id": self._new_id(team)})
        self._holders.append(claim)
        socket = team.socket
        claim.body["slots"] = self.chance.choice(SLOTS)
        kind = self.chance.choice(["name", "ttl", "short", "pid", "cgroup"])
        if kind in ("pid", "cgroup"):
            claim.child = subprocess.Popen(["sleep", "100000"])
            claim.body["holder"] = {"pid": claim.child.pid}
        elif kind == "name":
            claim.body["holder"] = {"name": "x", "survives_reboot": self.chance.random() < 0.5}
        else:
            ttl = SHORT_TTL_S if kind == "short" else 3600
            claim.body["holder"] = {"ttl": ttl}
        if kind == "cgroup" and self._cgroups is not None and claim.child is not None:
            claim.cgroup = self._cgroups / f"agentd-claim-{os.getpid()}-{claim.claim_id}"
            claim.cgroup.mkdir()
            (claim.cgroup / "cgroup.procs").write_text(str(claim.child.pid))
            claim.body["holder"] = {"cgroup": f"/{claim.cgroup.name}"}
            socket = "agentd"
        if self.chance.random() < 0.15:
            claim.body["owner_uid"] = self.chance.choice([0, STRANGER])
            socket = "agentd"
        if self.chance.random() < 0.15:
            device = f"cuda{self.chance.randrange(6)}"
            claim.body |= {"observed": True, "slots": {"cuda.device": 1},
                           "devices": {"cuda": [device]}}  # fmt: skip
            socket = "agentd"
        if self.chance.random() < 0.5:
            claim.body["labels"] = {"n": str(self._number), "name": "\u00e9\n"}
        return claim, socket

    def _add_claim(self, claim: ModelClaim, view: dict[str, Any]) -> None:
        claim.view = view
        self.claims[claim.claim_id] = claim
        named = view["edits"]["env"].get("CUDA_VISIBLE_DEVICES", "")
        given = view["allocation"].get("cuda", {}).get("cuda.device", {})
        assert set(filter(None, named.split(","))) == set(given), view

    async def _repeat_claim(self, team: Team) -> None:
        """The same request is the same claim, another one of its id is refused."""
        claim = self._own_claim(team)
        if not claim.is_steady:
            return
        path = f"/v1/agents/{team.agent}/claims"
        for body, expected in ((claim.body, 200), ({**claim.body, "slots": {"cpu": 2}}, 409)):
            answer = await self._call("agentd", "POST", path, body)
            if answer is NO_ANSWER or not claim.is_steady:
                return
            assert answer.status == expected, answer

    async def _renew(self, team: Team) -> None:
        claim = self._own_claim(team)
        began_at, was_steady = time.monotonic(), claim.is_steady
        body = self.chance.choice([{}, {"ttl": 3600}, {"ttl": SHORT_TTL_S}])
        answer = await self._call(team.socket, "POST", f"{claim.path}/renew", body)
        if answer is NO_ANSWER:
            claim.is_stale = True
        elif claim.is_of_stranger or not was_steady:
            assert answer.status in (404, 409, 200)
            assert answer.status == 404 or not claim.is_of_stranger
        elif "ttl" not in claim.body["holder"]:
            assert answer.status == 409, answer
        if answer.status == 200:
            claim.view["holder"] = {"ttl": body.get("ttl", claim.view["holder"]["ttl"])}
            claim.over_at = began_at + claim.view["holder"]["ttl"]

    async def _release(self, team: Team) -> None:
        claim = self._own_claim(team)
        was_steady, users = claim.is_steady, self._users(claim)
        socket = self.chance.choice([team.socket, "agentd"])
        answer = await self._call(socket, "DELETE", claim.path)
        if answer is NO_ANSWER:
            claim.may_be_gone = True
        elif answer.status == 204:
            assert all(kernel.is_short for kernel in users), answer
            assert socket == "agentd" or not claim.is_of_stranger
            self._forget(claim)
        elif was_steady:
            hidden = socket != "agentd" and claim.is_of_stranger
            assert answer.status == (404 if hidden else 409), answer
            assert hidden or users

    async def _end_holder(self, team: Team) -> None:
        self._own_claim(team).end_holder()

    async def _patch_labels(self, team: Team) -> None:
        claim = self._own_claim(team)
        was_steady = claim.is_steady
        changes = {"n": None, "new": str(self.chance.random())}
        answer = await self._call("agentd", "PATCH", claim.path, {"labels": changes})
        if answer is NO_ANSWER:
            claim.is_stale = True
        elif answer.status == 200:
            labels = {k: v for k, v in claim.view["labels"].items() if k != "n"}
            claim.view["labels"] = labels | {"new": changes["new"]}
        else:
            assert not was_steady, answer

    async def _create(self, team: Team) -> None:
        body = {"kernel_id": self._new_id(team), "slots": {**KERNEL, "cuda.device": 1}}
        kernel = ModelKernel(team, {**body, "command": ["sleep", "100000"]})
        answer = await self._send_create(kernel)
        refused = answer.status == 409 and answer.json["code"] == "InsufficientResource"
        assert answer.status in (201, 0) or refused, answer

    async def _send_create(self, kernel: ModelKernel, socket: str = "") -> Answer:
        path = f"/v1/agents/{kernel.team.agent}/kernels"
        answer = await self._call(socket or kernel.team.socket, "POST", path, kernel.body)
        if answer is NO_ANSWER:
            self.unresolved.append(kernel)
        elif answer.status == 201:
            kernel.view = answer.json
            self.kernels[kernel.kernel_id] = kernel
        return answer

    async def _create_from_claim(self, team: Team) -> None:
        claim = self._own_claim(team)
        was_steady, users = claim.is_steady, self._users(claim)
        body: dict[str, Any] = {"kernel_id": self._new_id(team), "claim": claim.claim_id}
        body["keep_claim"] = self.chance.random() < 0.6
        body["command"] = self.chance.choice(
            [["sleep", "100000"], ["sleep", "100000"], ["true"], ["/nowhere"]]
        )
        body["slots"] = dict(KERNEL)
        if self.chance.random() < 0.5 and "cuda.device" in claim.body["slots"]:
            body["slots"] |= {"cuda.device": 1}
        kernel = ModelKernel(team, body)
        answer = await self._send_create(kernel)
        if answer is NO_ANSWER:
            return
        if claim.is_of_stranger:
            assert answer.status == 404, answer
        elif answer.status == 201:
            assert body["keep_claim"] or all(kernel.is_short for kernel in users), answer
            assert body["command"] != ["/nowhere"]
            if not body["keep_claim"]:
                await self._gone(claim)
        elif was_steady and not (users or claim.may_be_shared):
            expected = 422 if body["command"] == ["/nowhere"] else 201
            assert answer.status == expected or not claim.is_steady, (body, answer)
        else:
            assert answer.status in (404, 409, 422), answer

    async def _delete_kernel(self, team: Team) -> None:
        kernel = self.chance.choice([k for k in self.kernels.values() if k.team is team])
        answer = await self._call(team.socket, "DELETE", f"{kernel.path}?timeout=0")
        if answer is NO_ANSWER:
            self.unresolved.append(self.kernels.pop(kernel.kernel_id))
        else:
            assert answer.status == 204, answer
            del self.kernels[kernel.kernel_id]

    async def _stop_kernel(self, team: Team) -> None:
        kernel = self.chance.choice([k for k in self.kernels.values() if k.team is team])
        answer = await self._call(team.socket, "POST", f"{kernel.path}/stop", {"timeout": 0})
        if answer is NO_ANSWER:
            self.unresolved.append(self.kernels.pop(kernel.kernel_id))
        else:
            assert answer.status in (200, 202), answer
            kernel.view = answer.json

    async def _trespass(self, team: Team) -> None:
        """Try everything on a claim or kernel of this team as the other one."""
        (other,) = (each for each in TEAMS if each is not team)
        own = [*self.claims.values(), *self.kernels.values()]
        thing = self.chance.choice([each for each in own if each.team is team])
        calls: list[tuple[str, str, Any]] = [(verb, thing.path, None) for verb in ("GET", "DELETE")]
        if isinstance(thing, ModelClaim):
            if not thing.is_steady:
                return
            command = {"command": ["true"], "claim": thing.claim_id}
            calls += [
                ("POST", f"{thing.path}/renew", {}),
                ("POST", f"/v1/agents/{other.agent}/kernels", command),
                ("POST", "/v1/edits", {"claims": [thing.claim_id]}),
            ]
            if self._has_label_patch:
                calls += [("PATCH", thing.path, {"labels": {"n": "stolen"}})]
            same_id = {"claim_id": thing.claim_id, "holder": {"name": "x"}}
            path, code = f"/v1/agents/{other.agent}/claims", "ClaimConflict"
        else:
            calls += [("GET", f"{thing.path}/logs", None), ("POST", f"{thing.path}/stop", {})]
            same_id = {"kernel_id": thing.kernel_id, "command": ["true"]}
            path, code = f"/v1/agents/{other.agent}/kernels", "KernelConflict"
        for method, target, body in calls:
            answer = await self._call(other.socket, method, target, body)
            assert answer.status in (404, NO_ANSWER.status), (method, target, answer)
        answer = await self._call(other.socket, "POST", path, same_id)
        is_gone = isinstance(thing, ModelClaim) and not thing.is_steady
        if not is_gone and answer is not NO_ANSWER:
            assert (answer.status, answer.json["code"]) == (409, code), answer

    async def _race_for_claim(self, team: Team) -> None:
        """Two creates from one claim and its release at once: one of them wins."""
        claim = self._own_claim(team)
        if not claim.is_steady or claim.is_of_stranger or self._users(claim):
            return
        kernels = [
            ModelKernel(team, {"kernel_id": self._new_id(team), "claim": claim.claim_id,
                               "keep_claim": False, "command": ["sleep", "100000"],
                               "slots": dict(KERNEL)})
            for _ in range(2)
        ]  # fmt: skip
        *creates, released = await asyncio.gather(
            *(self._send_create(kernel, "agentd") for kernel in kernels),
            self._call("agentd", "DELETE", claim.path),
        )
        if NO_ANSWER in (*creates, released):
            claim.may_be_gone = True
            return
        statuses = sorted([*(answer.status for answer in creates), released.status])
        won = [answer.status for answer in (*creates, released) if answer.status in (201, 204)]
        assert len(won) == 1 or claim.may_be_shared or not claim.is_steady, statuses
        assert len(won) <= 1, statuses
        if won:
            await self._gone(claim)

    async def _race_for_id(self, team: Team) -> None:
        """Both teams claim with one id at once: one of them has it."""
        del team
        claims = [
            ModelClaim(each, {"claim_id": f"both-{self._number}", "slots": {"mem": "16m"},
                              "holder": {"name": "x"}})
            for each in TEAMS
        ]  # fmt: skip
        self._number += 1
        answers = await asyncio.gather(
            *(
                self._call(c.team.socket, "POST", f"/v1/agents/{c.team.agent}/claims", c.body)
                for c in claims
            )
        )
        if NO_ANSWER in answers:
            claims[0].may_be_gone = True
            self.claims[claims[0].claim_id] = claims[0]
            return
        assert sorted(answer.status for answer in answers) == [201, 409], answers
        for claim, answer in zip(claims, answers, strict=True):
            if answer.status == 201:
                self._add_claim(claim, answer.json)

    # Operations of the administrator.

    async def toggle_drain(self) -> None:
        device = f"cuda{self.chance.randrange(6)}"
        verb = "undrain" if device in self.drained else "drain"
        answer = await self._call("agentd", "POST", f"/v1/devices/cuda/{device}/{verb}")
        assert answer.status == 200, answer
        self.drained ^= {device}

    async def die(self) -> None:
        """Kill the daemon over operations of both teams, end some holders, and start it again."""
        tasks = [asyncio.create_task(self.run_operation(team)) for team in TEAMS]
        await asyncio.wait(tasks, timeout=self.chance.choice([0, 0.002, 0.01, 0.05]))
        self._is_dying = True
        await self.node.kill(self.chance.choice([signal.SIGKILL] * 3 + [signal.SIGTERM]))
        await asyncio.gather(*tasks)
        self._is_dying = False
        for claim in self.claims.values():
            if self.chance.random() < 0.1:
                claim.end_holder()
        dead_at = time.monotonic()
        assert await self.node.start()
        await self._resolve_kernels()
        await self._resolve_claims(dead_at)

    # The model.

    def _forget(self, claim: ModelClaim) -> None:
        self.claims.pop(claim.claim_id, None)
        claim.end_holder()

    async def _gone(self, claim: ModelClaim) -> None:
        """Wait until a claim has ended, and forget it."""
        answer = await until(
            lambda: self.node.try_call("GET", claim.path),
            lambda answer: answer.status in (404, NO_ANSWER.status),
            text=f"{claim} ends",
        )
        if answer is NO_ANSWER:
            claim.may_be_gone = True
        else:
            self._forget(claim)

    async def _resolve_kernels(self) -> None:
        """Find out which creates, stops and deletes without an answer took effect."""
        for kernel in self.unresolved:
            answer = await until(
                lambda path=kernel.path: self.node.daemon.call("GET", path),
                lambda answer: answer.status == 404 or answer.json["state"] in SETTLED,
                text=f"kernel {kernel.kernel_id} is resolved",
                within_s=40,
            )
            if answer.status == 200:
                kernel.view = answer.json
                self.kernels[kernel.kernel_id] = kernel
        self.unresolved.clear()

    async def _resolve_claims(self, dead_at: float) -> None:
        """Find the claims after a start: none is lost but by a call, its holder or its time."""
        views = {view["claim_id"]: view for view in await self.node.daemon.get("/v1/claims")}
        for claim_id, claim in list(self.claims.items()):
            view = views.get(claim_id)
            was_taken = any(
                k.body.get("claim") == claim_id and not k.body["keep_claim"]
                for k in self.kernels.values()
            )
            if view is None:
                has_ended = claim.has_ended or claim.over_at <= dead_at
                has_ended |= dead_at + claim.shortest_ttl <= time.monotonic()
                lines = [text for text in self.node.daemon.log.splitlines() if claim_id in text]
                assert claim.may_be_gone or was_taken or has_ended, f"lost: {claim}\n{lines}"
                self._forget(claim)
                continue
            assert not was_taken, f"{claim_id} and its kernel hold its devices"
            if claim.is_stale or not claim.view:
                claim.view = view
                claim.team = next(t for t in TEAMS if t.agent == view["agent_id"])
            claim.is_stale = claim.may_be_gone = False
            claim.over_at = dead_at + view["holder"].get("ttl", float("inf"))

    async def verify(self) -> None:
        """Fail unless the model, the answers, the records and the devices agree."""
        await self._wait_for_ends()
        try:
            await self._compare()
        except AssertionError:
            if all(claim.is_steady or self._users(claim) for claim in self.claims.values()):
                raise
            await self._wait_for_ends()  # the time of a claim was over meanwhile
            await self._compare()

    async def _wait_for_ends(self) -> None:
        """Wait for the ends of short kernels, and of claims whose holder or time has ended."""
        for kernel in self.kernels.values():
            if kernel.is_live and kernel.is_short:
                kernel.view = await until(
                    lambda path=kernel.path: self.node.daemon.get(path),
                    lambda view: view["state"] == "terminated",
                )
        for claim in list(self.claims.values()):
            if not claim.is_steady and not self._users(claim):
                await self._gone(claim)

    async def _compare(self) -> None:
        await self.node.check()
        kernels = {view["kernel_id"]: view for view in await self.node.daemon.get("/v1/kernels")}
        assert kernels.keys() == self.kernels.keys()
        for kernel_id, kernel in self.kernels.items():
            for member in ("agent_id", "state", "allocation", "claim_id"):
                assert kernels[kernel_id][member] == kernel.view[member]
        await self._verify_claims()
        await self._verify_devices()

    async def _verify_claims(self) -> None:
        """Compare the claims that are answered, the ones on disk and the ones of the model."""
        views = {view["claim_id"]: view for view in await self.node.daemon.get("/v1/claims")}
        folder = self.node.daemon.folder / "state" / "claims"
        records = {path.stem: json.loads(path.read_text()) for path in folder.iterdir()}
        assert views.keys() == records.keys() == self.claims.keys()
        for claim_id, view in views.items():
            claim, record = self.claims[claim_id], records[claim_id]
            for member in ("agent_id", "slots", "allocation", "edits", "holder", "labels"):
                assert view[member] == claim.view[member], (member, view, claim.view)
            assert view["state"] == ("used" if self._users(claim) else "held")
            assert amounts_of(view["allocation"]) == recorded_amounts(record), (view, record)
            assert (record["agent_id"], record["labels"]) == (view["agent_id"], view["labels"])
            holder = {k: v for k, v in record["holder"].items() if k not in ("type", "inode")}
            assert holder == view["holder"]
        for team in TEAMS:
            listed = (await self._call(team.socket, "GET", "/v1/claims")).json
            assert {view["agent_id"] for view in listed} <= {team.agent}

    async def _verify_devices(self) -> None:
        """Compare the holders of each device with the model, and what is free with the rest."""
        expected: dict[str, Amounts] = {}
        for kernel in self.kernels.values():
            if kernel.is_live:
                expected[kernel.kernel_id] = amounts_of(kernel.view["allocation"])
        for claim in self.claims.values():
            rest = amounts_of(claim.view["allocation"])
            for kernel in self._users(claim):
                for place, amount in expected[kernel.kernel_id].items():
                    if place in rest:
                        rest[place] = max(0, rest[place] - amount)
            expected[f"claim {claim.claim_id}"] = {p: a for p, a in rest.items() if a}
        held: dict[str, Amounts] = {holder: {} for holder in expected}
        for device in await self.node.daemon.get("/v1/devices"):
            name, totals = f"{device['device_name']}/{device['id']}", Counter[str]()
            for holder in device["holders"]:
                who = holder.get("kernel_id") or f"claim {holder['claim_id']}"
                for slot, amount in holder["amounts"].items():
                    totals[slot] += units(slot, amount)
                    held.setdefault(who, {})[name, slot] = units(slot, amount)
            for slot, use in device["slots"].items():
                capacity, free = units(slot, use["capacity"]), units(slot, use["free"])
                assert units(slot, use["allocated"]) == totals[slot], device
                is_given = device["state"] == "ok"
                assert free == (capacity - totals[slot] if is_given else 0), device
        assert held == expected

    async def release_everything(self) -> None:
        """End every claim and kernel, and fail unless nothing is left of them."""
        for kernel in [*self.kernels.values()]:
            answer = await self._call("agentd", "DELETE", f"{kernel.path}?timeout=0")
            assert answer.status == 204, answer
        self.kernels.clear()
        for claim in [*self.claims.values()]:
            was_steady = claim.is_steady
            answer = await self._call("agentd", "DELETE", claim.path)
            assert answer.status == 204 or (answer.status == 404 and not was_steady), answer
            self._forget(claim)
        await self.verify()
        state = self.node.daemon.folder / "state"
        left = [p for name in ("claims", "records", "intents", "ended", "kernels")
                for p in (state / name).glob("[!.]*")]  # fmt: skip
        assert not left
