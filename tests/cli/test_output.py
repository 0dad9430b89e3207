"""Formats of answers and of errors."""

import json

import click
import pytest
import yaml
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from agentd.cli.agentctl.doctor import print_named_claims
from agentd.cli.agentctl.main import agentctl
from agentd.cli.output import (
    FORMATS,
    CommandError,
    encode,
    output_format,
    output_option,
    print_answer,
)

ROWS = [{"name": "a", "state": "ok", "size": 1}, {"name": "b", "state": "ok", "size": 2}]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda below: st.lists(below) | st.dictionaries(st.text(), below),
    max_leaves=5,
)


@click.command()
@output_option
def listing() -> None:
    print_answer(ROWS, ["name", "state"], wide=["size"])


@click.command()
@output_option
def failing() -> None:
    raise CommandError(f"no answer in {output_format()}\nat all", ["start it", "or \x1b[31m not"])


def lines_of(*words: str) -> list[str]:
    done = CliRunner().invoke(listing, words)
    assert done.exit_code == 0, done.output
    return [line.rstrip() for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["-o", "name"], ["a", "b"]),
        (["-o", "json"], json.dumps(ROWS, indent=1).splitlines()),
        (["--json"], json.dumps(ROWS, indent=1).splitlines()),
        (["--json", "-o", "wide"], json.dumps(ROWS, indent=1).splitlines()),
        (["-o", "wide", "--json"], json.dumps(ROWS, indent=1).splitlines()),
        (["-o", "yaml"], yaml.safe_dump(ROWS, sort_keys=False).splitlines()),
    ],
)
def test_answer_has_the_format_asked_for(words: list[str], expected: list[str]) -> None:
    assert lines_of(*words) == expected


def test_table_shows_further_columns_when_wide() -> None:
    assert lines_of()[0].split() == ["NAME", "STATE"]
    assert lines_of("-o", "wide")[0].split() == ["NAME", "STATE", "SIZE"]


@given(JSON)
def test_yaml_reads_back_as_the_json_does(content: object) -> None:
    text = encode(content, "yaml")
    assert yaml.safe_load(text) == json.loads(encode(content, "json"))
    assert text.replace("\n", "").isprintable()


def test_failure_is_a_fact_and_indented_remedies() -> None:
    done = CliRunner().invoke(failing, prog_name="agentd")
    assert done.exit_code == 1
    assert done.stdout == ""
    assert done.stderr == ("agentd: no answer in None at all\n  start it\n  or \\x1b[31m not\n")


@pytest.mark.parametrize(
    "path",
    ["status", "doctor", "devices", "agents", "slots", "ls", "ps", "inspect", "stats", "events",
     "create", "explain", "stop", "rm", "drain", "undrain", "runtimes", "plugins", "whoami",
     "fleet nodes", "fleet slots", "fleet devices", "fleet ls", "fleet ps", "fleet create",
     "fleet stats", "fleet rm"],
)  # fmt: skip
def test_command_that_answers_takes_all_formats(path: str) -> None:
    command: click.Command = agentctl
    for word in path.split():
        assert isinstance(command, click.Group)
        command = command.commands[word]
    (option,) = [one for one in command.params if "--output" in one.opts]
    assert isinstance(option.type, click.Choice)
    assert tuple(option.type.choices) == FORMATS
    assert any("--json" in one.opts for one in command.params)


def test_doctor_lists_no_unreadable_claim_as_named(capsys: pytest.CaptureFixture[str]) -> None:
    """Its holder cannot be known, and a condition has it."""
    claim = {"claim_id": "c1", "agent_id": "", "holder": {"name": "c1"}, "created_at": None}
    print_named_claims([{**claim, "state": "unreadable"}])
    assert capsys.readouterr().out == ""
    print_named_claims([{**claim, "state": "held"}])
    assert "named claim: claim c1 of c1" in capsys.readouterr().out
