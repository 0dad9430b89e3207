"""Commands in documents are typed, and their output is compared.

The blocks of one page are run in one shell, in a folder with the repository's `configs` and
`.venv`, whose programs are on the path, and with each block of TOML that begins with its name, such
as `# half.toml`. Lines that begin with `$ ` are commands, the others are their output; `…` stands
for anything. A command whose output is not shown ends with status 0. The test waits for a daemon in
the background until it answers.

A block is run here, unless its fence says `console node` (run in a virtual machine, by
`tests/node/test_node_docs.py`) or `console not-run REASON`.
"""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from node.test_node_docs import PAGES as NODE_PAGES
from support.needs import require
from test_docs import ROOT, Block, blocks

LIMIT_S = 60
MOST_NOT_RUN = 62
"""Thirteen of them reset a GPU, switch MIG or upgrade its driver; as many are on two pages of the
fleet, which its end-to-end tests follow."""
PLACE = re.compile(r"/tmp/agentd-(dev|eight-gpus|half-a-gpu)")
"""Where examples have everything; each test has a place of its own."""
SHELLS = ("bash", "sh", "shell", "shell-session", "zsh")
READY = (
    "for _ in $(seq 400); do"
    " [ -S dev/agentd.sock ] && agentctl status >&3 2>&1 && break; sleep 0.05; done"
)
RUN_HERE = [block for block in blocks("console") if not block.info]
PAGES = list(dict.fromkeys(block.place.partition(":")[0] for block in RUN_HERE))


def commands(block: Block) -> list[tuple[str, str]]:
    """Return each command of a block, and what is shown to come of it."""
    parts = re.split(r"^\$ ", block.text, flags=re.MULTILINE)
    assert parts[0] == "", f"{block.place}: the first line is not a command"
    found = []
    for part in parts[1:]:
        command, shown = re.fullmatch(r"((?:.*\\\n)*.*\n?)((?s:.*))", part).groups()
        found.append((command.strip(), shown))
    return found


def script(typed: list[str]) -> str:
    """Return a shell's script that keeps the output and the status of each command apart."""
    lines = ["exec 3>noise"]
    for number, command in enumerate(typed):
        lines += [f"{{ {command}\n}} >{number}.out 2>&1", f"echo $? >{number}.status"]
        if command.endswith("&"):
            if config := re.search(r"--config (\S+)", command):
                lines.append(f"AGENTD_CONFIG={config[1]}; export AGENTD_CONFIG")
            lines.append(READY)
    return "\n".join([*lines, "agentctl ls -o json >left", "kill $(jobs -p); wait"])


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_a_page_print_what_it_shows(page: str, folder: Path) -> None:
    require("curl")
    (folder / ".venv").symlink_to(sys.prefix)
    (folder / "configs").mkdir()
    for file in (ROOT / "configs").glob("*.toml"):
        text = PLACE.sub(str(folder / "dev"), file.read_text())
        (folder / "configs" / file.name).write_text(text)
    for block in blocks("toml"):
        named = re.match(r"# ([\w-]+\.toml)\n", block.text)
        if named and block.place.partition(":")[0] == page:
            (folder / named[1]).write_text(block.text)
    mine = [block for block in RUN_HERE if block.place.partition(":")[0] == page]
    wanted = [pair for block in mine for pair in commands(block)]
    typed = [PLACE.sub(str(folder / "dev"), command) for command, _ in wanted]
    environ = {k: v for k, v in os.environ.items() if not k.startswith("AGENT")}
    environ |= {"NOTIFY_SOCKET": "", "AGENTD_RUN_DIR": str(folder / "run")}
    environ["PATH"] = f"{folder / '.venv/bin'}:{environ['PATH']}"
    shell = subprocess.Popen(
        ["bash", "-c", script(typed)], cwd=folder, env=environ, start_new_session=True
    )
    try:
        shell.wait(LIMIT_S)
    finally:
        if shell.poll() is None:
            os.killpg(shell.pid, signal.SIGKILL)
            shell.wait()
    for number, (command, shown) in enumerate(wanted):
        printed = (folder / f"{number}.out").read_text()
        if shown:
            pattern = re.escape(PLACE.sub(str(folder / "dev"), shown)).replace("…", ".*")
            assert re.fullmatch(pattern, printed), f"{page}: {command}\n{printed}"
        else:
            status = (folder / f"{number}.status").read_text()
            assert status == "0\n", f"{page}: {command}\n{printed}"
    assert json.loads((folder / "left").read_text()) == []


@pytest.mark.parametrize("block", [b for b in blocks("console") if b.info], ids=lambda b: b.place)
def test_console_block_is_run_elsewhere_or_says_why_not(block: Block) -> None:
    if block.info == ["node"]:
        assert block.place.partition(":")[0] in {f"docs/{page}" for page in NODE_PAGES}
    else:
        assert block.info[0] == "not-run"
        assert len(block.info) > 2, "a reason is missing"


def test_blocks_that_are_not_run_are_few() -> None:
    elsewhere = ["not-run", "with", "Slurm:", "tests/engines"]
    not_run = [
        block
        for block in blocks("console")
        if block.info[:1] == ["not-run"] and block.info != elsewhere
    ]
    for block in not_run:
        print(f"not run: {block.place}: {' '.join(block.info[1:])}")
    assert len(not_run) <= MOST_NOT_RUN


def test_commands_are_in_console_blocks() -> None:
    # A script of a batch job is not typed; tests/engines submits it.
    found = [
        block.place
        for language in SHELLS
        for block in blocks(language)
        if not block.text.startswith("#!")
    ]
    assert found == []
