"""Reboots, power-offs and power cuts under load, and no kernel that is not accounted for."""

import os
import random

from node.conftest import CONFIG, Node, until_ready
from node.machine import Machine

ROUNDS = int(os.environ.get("AGENTD_REBOOTS", "20"))
COMMANDS = {
    "polite": "while :; do sleep 1; done",
    "deaf": "trap '' TERM; while :; do sleep 1; done",
    "busy": "while :; do :; done",
    "ends": "sleep 3; exit 4",
    "forks": "sleep 999 & sleep 999 & wait",
}
DOWN = ("reboot", "power-off", "power-cut")


def test_no_kernel_is_unaccounted_for(machine: Machine, node: Node) -> None:
    chance = random.Random(int(os.environ.get("AGENTD_SEED", "1")))
    node.must("systemctl enable --now agentd.socket agentd.service", 300)
    node.configure(CONFIG.format(runtime="systemd"))
    for number in range(ROUNDS):
        down = chance.choice(DOWN)
        made = {}
        for index in range(8):
            kind = chance.choice(list(COMMANDS))
            name = f"r{number}-{index}-{kind}"
            agent = chance.choice(["team-a", "team-b"])
            node.create(name, "sh", "-c", COMMANDS[kind], agent=agent,
                        slots={"cpu": 0, "mem": "16m"})  # fmt: skip
            made[name] = kind
        for name in chance.sample(sorted(made), 2):
            node.remove(name)
            made.pop(name)
        if down == "reboot":
            machine.reboot()
        elif down == "power-off":
            taken = machine.power_off()
            assert taken < 3 * (10 + 10), "thrice what it may take: this machine is interpreted"
            machine.start()
        else:
            node.must("sync")
            machine.pull_plug()
            machine.start()
        until_ready(node)
        kernels = {kernel["kernel_id"]: kernel for kernel in node.ask("GET", "/v1/kernels")[1]}
        assert kernels.keys() == made.keys(), (number, down)
        for name, kernel in kernels.items():
            assert kernel["state"] == "terminated", (down, kernel)
            if made[name] != "ends":
                assert kernel["reason"].startswith("the node restarted"), (down, kernel)
                assert down == "power-cut" or kernel["exit_code"] in (137, 143), (down, kernel)
        assert node.findings() == []
        node.remove(*made)
        print(f"{number + 1}. {down}: {', '.join(sorted(made.values()))}")
