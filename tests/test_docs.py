"""Documents are true and readable: configurations are accepted, links lead somewhere.

Generated pages follow the code, and every route, error code, event and command is documented.

A block of TOML is a whole `agent.toml` unless the word after `toml` says otherwise:
`fragment` (of a node that has the agents agent-1 and agent-2), `fleet` and `fleet-fragment` (of a
`fleet.toml`), `not-agentd`.
"""

import functools
import importlib.util
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import click
import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

import lint
from agentd.cli.agentctl.main import agentctl
from agentd.cli.agentd.main import agentd
from agentd.events import EventKind
from agentd.http.problem_responses import STATUSES
from agentd.rpc.routes import ROUTES
from agentd.runtimes.docker.container_config import CONTAINER_MEMBERS
from agentd.runtimes.host.request_limits import HOST_MEMBERS
from agentd_fleet.cli import agentd_fleet
from agentd_slurm.cli import agentctl_slurm, agentd_slurm
from support import fork_server

ROOT = Path(__file__).parents[1]
PAGES = lint.pages(ROOT)
AGENTS = "".join(f'[[agents]]\nid = "agent-{number}"\n' for number in (1, 2))
FLEET = '[fleet]\nnodes = ["https://node-1:6001"]\n'
KINDS = {
    "": ("agentd", ""),
    "fragment": ("agentd", AGENTS),
    "fleet": ("agentd-fleet", ""),
    "fleet-fragment": ("agentd-fleet", FLEET),
}
NOT_IN_ANCHORS = re.compile(r"[^\w\- ]")
"""The characters of a heading that its anchor lacks."""
NOT_HERE = (
    "systemd is not PID 1; use docker or process",
    "No such file or directory",
    "on this host",
    "cannot be written: permission denied",
    "not a member of group 'users'",
    "agentd is not root and runs kernels as its own user",
)
"""Ends of refusals that depend on the test's host and not on the document."""


class Block(NamedTuple):
    """A fenced block of a page: what stands after its fence, and its text."""

    place: str
    info: list[str]
    text: str


def tokens(page: Path) -> list[Token]:
    return parsed(page.read_text())


@functools.cache
def parsed(text: str) -> list[Token]:
    """Return the tokens of a page, each followed by its children."""
    found = MarkdownIt("commonmark").enable("table").parse(text)
    return [each for token in found for each in (token, *(token.children or ()))]


def blocks(language: str) -> list[Block]:
    return [
        Block(f"{page.relative_to(ROOT)}:{token.map[0] + 1}", token.info.split()[1:], token.content)
        for page in PAGES
        for token in tokens(page)
        if token.type == "fence" and token.map and token.info.split()[:1] == [language]
    ]


@pytest.mark.parametrize(
    "block",
    [block for block in blocks("toml") if block.info != ["not-agentd"]],
    ids=lambda block: block.place,
)
def test_configuration_in_a_document_is_accepted(block: Block, tmp_path: Path) -> None:
    program, base = KINDS[" ".join(block.info)]
    file = tmp_path / "written.toml"
    file.write_text(base + block.text)
    done = fork_server.run(program, "check-config", "--config", str(file))
    refused = [line for line in done.stderr.splitlines() if not line.endswith(NOT_HERE)]
    assert done.returncode == 0 or not refused, done.stderr


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    found: set[str] = set()
    headings = [token for token in tokens(page) if token.type == "heading_open" and token.map]
    lines = page.read_text().splitlines()
    for heading in headings:
        inline = MarkdownIt("commonmark").parseInline(lines[heading.map[0]].lstrip("# "))
        text = "".join(
            token.content for token in inline[0].children if token.type in ("text", "code_inline")
        )
        slug = NOT_IN_ANCHORS.sub("", text.strip().lower()).replace(" ", "-")
        again = itertools.count(1)
        anchor = slug
        while anchor in found:
            anchor = f"{slug}-{next(again)}"
        found.add(anchor)
    return found


def dead(page: Path, link: str) -> bool:
    """Return whether a link of a page leads to a file or a heading that is not there."""
    file, _, anchor = link.partition("#")
    target = page.parent / file if file else page
    if not target.exists():
        return True
    return bool(anchor) and target.suffix == ".md" and anchor not in anchors(target)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_images_lead_somewhere(page: Path) -> None:
    kinds = {"link_open": "href", "image": "src"}
    links = [str(token.attrs[kinds[token.type]]) for token in tokens(page) if token.type in kinds]
    inside = [link for link in links if "://" not in link and not link.startswith("mailto:")]
    assert [link for link in inside if dead(page, link)] == []


def test_dead_anchors_and_images_are_found(tmp_path: Path) -> None:
    page, other = tmp_path / "page.md", tmp_path / "other.md"
    other.write_text("# A `b_c`, d.\n## Twice\n## Twice\n")
    page.write_text("# Here\n")
    for link in ("#here", "other.md", "other.md#a-b_c-d", "other.md#twice-1"):
        assert not dead(page, link), link
    for link in ("#there", "none.png", "other.md#twice-2", "other.md#a-bc-d"):
        assert dead(page, link), link


spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
assert spec is not None
assert spec.loader is not None
generate = importlib.util.module_from_spec(spec)
spec.loader.exec_module(generate)


@pytest.mark.parametrize("page", generate.PAGES, ids=lambda page: page.stem)
def test_generated_page_follows_the_code(page: Path) -> None:
    assert page.read_text() == generate.PAGES[page](), "run python docs/generate.py"


def test_each_body_has_its_table_of_members() -> None:
    pages = generate.RPC.read_text() + generate.FLEET.read_text()
    assert {name for _, name in generate.MEMBERS.findall(pages)} == generate.BODIES.keys()


IN_NO_RESPONSE = {
    "DaemonFailed", "DuplicateNode", "FleetStoreCompacted", "OutputDropped", "StartRefused",
    "Unreachable",
}  # fmt: skip
"""Codes of errors that programs print, or that a client raises."""


def test_members_of_containers_alone_are_listed() -> None:
    page = (ROOT / "docs/reference/rpc.md").read_text()
    (paragraph,) = re.findall(r"systemd runtimes have no containers\..*?\n\n", page, re.DOTALL)
    others = CONTAINER_MEMBERS - HOST_MEMBERS - {"pull_policy"}
    assert [name for name in sorted(others) if f"`{name}`" not in paragraph] == []


def test_every_error_code_has_a_cause_and_a_remedy() -> None:
    texts_of = generate.error_texts()
    assert set(texts_of) == {*STATUSES, *generate.errors_by_code()}
    assert all(text["cause"] and text["remedy"] for text in texts_of.values())


def test_every_error_of_a_response_has_a_status() -> None:
    assert generate.errors_by_code().keys() - STATUSES.keys() == IN_NO_RESPONSE


def test_every_log_event_has_a_meaning() -> None:
    meanings, renamed = generate.event_texts()
    assert set(meanings) == set(generate.log_events())
    assert len(meanings) > 70
    assert not set(renamed) & set(meanings)


def test_index_of_the_documents_has_every_page() -> None:
    index = ROOT / "docs" / "README.md"
    links = [str(token.attrs["href"]) for token in tokens(index) if token.type == "link_open"]
    linked = {(index.parent / link.partition("#")[0]).resolve() for link in links}
    pages = {page for page in PAGES if page.is_relative_to(ROOT / "docs") and page != index}
    decisions = {page for page in pages if page.parent.name == "adr"}
    assert pages - decisions - linked == set()


def test_architecture_page_names_files_that_exist() -> None:
    page = (ROOT / "docs/explanation/architecture.md").read_text()
    named = set(re.findall(r"[a-z_]+(?:/[a-z_*]+)+\.(?:py|toml)", page))
    folders = [ROOT / "src/agentd", ROOT / "fleet/src/agentd_fleet", ROOT]
    assert len(named) > 40
    assert [name for name in named if not any(list(at.glob(name)) for at in folders)] == []


def commands(command: click.Command, path: str) -> Iterator[tuple[str, click.Command]]:
    yield path, command
    if isinstance(command, click.Group):
        for name, below in command.commands.items():
            yield from commands(below, f"{path} {name}")


PROGRAMS = [agentctl, agentd, agentd_fleet, agentctl_slurm, agentd_slurm]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda it: it.name)
def test_help_fits_its_line_and_every_option_has_a_text(program: click.Group) -> None:
    for path, command in commands(program, program.name or ""):
        assert len((command.help or "").split("\n")[0]) in range(1, 46), path
        options = [item for item in command.params if isinstance(item, click.Option)]
        assert [option.opts for option in options if not option.help] == [], path


def test_every_route_code_event_and_command_is_documented() -> None:
    reference = ROOT / "docs" / "reference"
    rpc = (reference / "rpc.md").read_text()
    for route in ROUTES:
        path = route.path.removesuffix("/undrain")
        assert re.search(f"{re.escape(path)}(?![/{{\\w])", rpc), route.path
    for code in STATUSES:
        assert f"`{code}`" in rpc, code
    events = rpc.partition("## Events")[2].partition("## Status page")[0]
    assert [kind for kind in EventKind if f"`{kind}`" not in events] == []
    commands = (reference / "commands.md").read_text()
    for group in (agentd, agentctl):
        for name in group.commands:
            assert name in commands, name
