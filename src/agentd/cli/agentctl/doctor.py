"""Rows of `agentctl doctor`: one for each check, with its findings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentd.cli.output import print_text


def check_row(check: str, promise: str, *findings: str) -> dict[str, Any]:
    """Return the row of a check, which passed if it has no findings."""
    row = {"check": check, "promise": promise, "passed": not findings}
    return {**row, "findings": list(findings)}


def runtimes_row(node: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row for the node's runtimes."""
    runtimes = [
        f"{runtime['name']}: {runtime['reason']}"
        for runtime in (node["runtime"], *node["other_runtimes"])
        if runtime["state"] != "available"
    ]
    return check_row("runtimes", "every runtime answers", *runtimes)


def print_checks(rows: Sequence[Mapping[str, Any]], warnings: Sequence[str]) -> None:
    """Print the checks as a table, and the node's warnings below it."""
    from agentd.cli.tables import print_rows

    table_rows = [
        {"check": row["check"], "passed": "yes" if row["passed"] else "NO", "detail": detail}
        for row in rows
        for detail in row["findings"] or [row["promise"]]
    ]
    print_rows(table_rows, ["check", "passed", "detail"])
    for warning in warnings:
        print_text(f"warning: {warning}")


def print_named_claims(claims: Sequence[Mapping[str, Any]]) -> None:
    """Print the claims that only a caller ends, the oldest first: one may be forgotten."""
    from agentd.cli.tables import format_age

    for claim in claims:
        if "name" in claim["holder"]:
            text = f"claim {claim['claim_id']} of {claim['holder']['name']}"
            age = format_age(claim["created_at"])
            print_text(f"named claim: {text}, agent {claim['agent_id']}, {age} old")
