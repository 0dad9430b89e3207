"""Records damaged at random while the daemon is dead.

It starts whatever its records look like. A damaged record is read as it was, or is unreadable and
holds whatever it may have held; the others are as before. An administrator's DELETE ends it.
"""

import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.checked_node import ONE, SEED, SOAK_S, CheckedNode
from support.daemon import AGENTS, TEAM_SOCKETS, gpus
from support.damage import flipped

BRIEF_S = 20.0
NODE = '[plugins]\nallow = ["sim"]\n' + AGENTS + gpus(12) + TEAM_SOCKETS
CLAIMS = ("name", "ttl", "pid", "kept", "observed")
KERNELS = ("plain", "of-kept", "ended")
OLD = 86400.0
"""The modification time of a damaged file, in seconds since the epoch: before any boot."""
LATER = {"expires_at", "started_at"}
"""Members whose values a start may change."""
OF_END = {"pid", "exit_code", "finished_at"}
"""Members of a kernel that its identity and its exit status tell, which have no copy."""


def is_regular(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def rewrite(path: Path, content: bytes) -> None:
    """Replace a record, whose mode allows no writing."""
    path.unlink()
    path.write_bytes(content)


def flip(path: Path, chance: random.Random) -> None:
    rewrite(path, flipped(path.read_bytes(), chance.randrange(2**20)))


def flip_several(path: Path, chance: random.Random) -> None:
    for _ in range(chance.randint(2, 30)):
        flip(path, chance)


def truncate(path: Path, chance: random.Random) -> None:
    content = path.read_bytes()
    rewrite(path, content[: chance.randrange(len(content))])


def empty(path: Path, _: random.Random) -> None:
    rewrite(path, b"")


def zero(path: Path, _: random.Random) -> None:
    rewrite(path, bytes(len(path.read_bytes())))


def overwrite(path: Path, chance: random.Random) -> None:
    rewrite(path, chance.randbytes(chance.randrange(1, 2000)))


def lengthen(path: Path, chance: random.Random) -> None:
    rewrite(path, path.read_bytes() + chance.randbytes(chance.randrange(1, 2000)))


def deepen(path: Path, _: random.Random) -> None:
    rewrite(path, b"[" * 100_000)


def swap(path: Path, chance: random.Random) -> None:
    """Put the content of another file of the same folder there, or of another state."""
    others = [*path.parents[1].glob(f"*/{path.name}"), *path.parent.glob("*.json")]
    if others := sorted(other for other in others if other != path and is_regular(other)):
        rewrite(path, chance.choice(others).read_bytes())


def make_fifo(path: Path, _: random.Random) -> None:
    path.unlink()
    os.mkfifo(path, 0o400)
    os.utime(path, (OLD, OLD))


def make_folder(path: Path, _: random.Random) -> None:
    path.unlink()
    path.mkdir()


def link_to_endless(path: Path, _: random.Random) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def remove_all_rights(path: Path, _: random.Random) -> None:
    path.chmod(0)


DAMAGES: tuple[Callable[[Path, random.Random], None], ...] = (
    *[flip] * 12, flip_several, truncate, empty, zero, overwrite, lengthen, deepen, swap, make_fifo,
    make_folder, link_to_endless, remove_all_rights,
)  # fmt: skip


class DamagedNode:
    """A node with claims of all kinds and kernels, each on devices of its own."""

    def __init__(self, node: CheckedNode, chance: random.Random) -> None:
        self.node, self.daemon, self.chance = node, node.daemon, chance
        self.child = subprocess.Popen(["sleep", "100000"])
        self.state = node.daemon.folder / "state"
        self.outcomes: Counter[str] = Counter()

    def close(self) -> None:
        self.child.kill()
        self.child.wait()

    async def fill(self) -> None:
        """Make what is not there: claims and kernels."""
        holders: dict[str, dict[str, Any]] = {
            "name": {"name": "x", "survives_reboot": True},
            "ttl": {"ttl": 3600},
            "pid": {"pid": self.child.pid},
            "kept": {"name": "kept"},
            "observed": {"name": "x"},
        }
        there = await self.node.claim_ids()
        for claim_id in CLAIMS:
            if claim_id in there:
                continue
            more = {"observed": True} if claim_id == "observed" else {}
            labels = {"engine": "test", "name": "\u00e9"}
            answer = await self.node.claim(
                claim_id, holder=holders[claim_id], labels=labels, **more
            )
            assert answer.status == 201, answer
        there = await self.daemon.kernel_ids()
        for kernel_id in KERNELS:
            if kernel_id in there:
                continue
            body: dict[str, Any] = {"kernel_id": kernel_id, "slots": ONE}
            if kernel_id == "of-kept":
                body = {**body, "slots": {"cpu": 0, "mem": "16m"}, "claim": "kept"}
                body["keep_claim"] = True
            await self.daemon.running(**body)
            if kernel_id == "ended":
                stop = await self.daemon.call("POST", "/v1/kernels/ended/stop", {"timeout": 0})
                assert stop.json["state"] == "terminated"

    async def views(self) -> dict[str, dict[str, Any]]:
        """Return the answers of claims and kernels, by kind and id."""
        listed = {
            **{f"claim {c['claim_id']}": c for c in await self.daemon.get("/v1/claims")},
            **{f"kernel {k['kernel_id']}": k for k in await self.daemon.get("/v1/kernels")},
        }
        return {
            name: {member: value for member, value in view.items() if member not in LATER}
            for name, view in listed.items()
        }

    def files(self) -> list[tuple[str, Path]]:
        """Return every record with its owner."""
        found = [(f"claim {name}", self.state / "claims" / f"{name}.json") for name in CLAIMS]
        for kernel_id in KERNELS:
            bundle = self.state / "kernels" / kernel_id
            paths = [*self.state.glob(f"*/{kernel_id}.json"), *bundle.glob("[!.]*.json")]
            paths = [path for path in paths if path.parent.name != "claims"]
            found += [(f"kernel {kernel_id}", path) for path in sorted(paths)]
        found += [("node", self.state / name) for name in ("devices.json", "node.json")]
        return [(owner, path) for owner, path in found if is_regular(path)]

    async def round(self) -> None:
        """Damage some files of a dead daemon, and compare what it does with what it knew."""
        before, devices = await self.views(), await self.devices()
        commands = self.node.live_commands()
        await self.node.kill(signal.SIGKILL)
        victims: set[str] = set()
        done: list[str] = []
        for owner, path in self.chance.sample(self.files(), self.chance.randint(1, 3)):
            damage = self.chance.choice(DAMAGES)
            damage(path, self.chance)
            victims.add(owner)
            done.append(f"{damage.__name__} {path.relative_to(self.state)}")
        assert await self.node.start(), done
        try:
            assert self.node.live_commands() == commands
            await self.compare(before, devices, victims)
            await self.end(victims)
        except AssertionError as error:
            raise AssertionError(f"after {done}: {error}") from error

    async def devices(self) -> dict[str, set[str]]:
        """Return the holders of each device."""
        return {
            f"{d['device_name']}/{d['id']}": {
                f"claim {h['claim_id']}" if "claim_id" in h else f"kernel {h['kernel_id']}"
                for h in d["holders"]
            }
            for d in await self.daemon.get("/v1/devices")
        }

    async def compare(
        self, before: dict[str, Any], devices: dict[str, set[str]], victims: set[str]
    ) -> None:
        """Fail unless each victim is as before, or says what is wrong and holds what it held."""
        after, now = await self.views(), await self.devices()
        assert after.keys() == before.keys()
        for device, holders in devices.items():
            assert holders <= now[device], (device, holders, now[device])
        warnings, unreadable = await self.daemon.warnings(), set()
        for name, view in before.items():
            changed = {
                m: (v, after[name].get(m)) for m, v in view.items() if after[name].get(m) != v
            }
            if name.startswith("kernel") and name in victims:
                changed = {m: values for m, values in changed.items() if m not in OF_END}
            if name == "claim kept" and "kernel of-kept" in victims:
                changed.pop("state", None)  # whose kernel it is stands in its record alone
            if not changed:
                self.outcomes.update({f"{name} as before"} if name in victims else ())
                continue
            assert name in victims, (name, changed)
            assert after[name]["reason"], changed
            is_live = name != "kernel ended"
            assert not is_live or any(name in text for text in warnings), (name, warnings)
            self.outcomes[f"{name} {after[name]['state']}"] += 1
            if after[name]["state"] == "unreadable":
                unreadable.add(name)
            else:
                assert name.startswith("kernel"), changed
        if any(name.startswith("claim") for name in unreadable):
            assert await self.daemon.free("cuda.device") == "0"
            assert (await self.daemon.create(slots=ONE)).status == 409

    async def end(self, victims: set[str]) -> None:
        """End the damaged ones as an administrator; a team cannot end what has no agent."""
        for name in sorted(victims - {"node"}, reverse=True):  # kernels before their claims
            kind, name_id = name.split()
            path = f"/v1/{kind}s/{name_id}"
            view = await self.daemon.get(path)
            if view["agent_id"] == "":
                for socket in ("a", "b"):
                    assert (await self.daemon.call("DELETE", path, socket=socket)).status == 404
            if name == "claim kept":
                await self.node.remove("of-kept")
            answer = await self.daemon.call("DELETE", path + "?timeout=0" * (kind == "kernel"))
            assert answer.status == 204, answer
        await self.fill()
        await self.node.check()
        assert await self.daemon.free("cuda.device") == str(12 - len(CLAIMS) - 1)


@pytest.mark.long
@pytest.mark.timeout(300 + 2 * SOAK_S)
@pytest.mark.needs("cgroups")
async def test_damaged_records_give_no_device_away(process_node: CheckedNode) -> None:
    chance = random.Random(SEED)
    damaged = DamagedNode(process_node, chance)
    end, rounds = time.monotonic() + (SOAK_S or BRIEF_S), 0
    try:
        text = NODE.format(folder=process_node.daemon.folder)
        assert await process_node.start(text=text)
        await damaged.fill()
        while time.monotonic() < end:
            await damaged.round()
            rounds += 1
    finally:
        damaged.close()
    print(f"\nseed {SEED}: {rounds} rounds, {dict(damaged.outcomes)}")
    assert "Traceback" not in process_node.daemon.log
