"""Teams among each other: each sentence of docs/explanation/trust.md has its tests."""

from collections.abc import Mapping
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "explanation" / "trust.md"
CLAIMS = "services/claims/test_claim_service.py"
ACCESS = "end_to_end/test_access.py"
TEAMS = "hostile/test_teams.py"
USERS = "end_to_end/test_claims_of_users.py"
SENTENCES: Mapping[str, tuple[tuple[str, str], ...]] = {
    "take capacity in shared mode": ((TEAMS, "test_team_takes_shared_capacity_from_another"),),
    "take an id of a kernel": (
        (ACCESS, "test_an_id_that_another_team_has_is_only_taken"),
        (USERS, "test_claims_of_others_cannot_be_seen_or_used"),
        ("core/allocation/test_ports.py", "test_no_port_is_ever_given_twice"),
    ),
    "take every connection over TCP": (
        ("hostile/test_clients.py", "test_half_requests_do_not_block_other_clients"),
    ),
    "push older events": (
        ("end_to_end/test_events.py", "test_listener_resumes_or_gets_a_reset"),
        ("test_events.py", "test_log_keeps_the_last_events_of_all"),
    ),
    "push older refusals": (("services/test_refusals.py", "test_a_flood_keeps_the_latest"),),
    "use the disk of the state folder": (
        ("hostile/test_kernels.py", "test_endless_log_is_bounded"),
        (TEAMS, "test_team_has_any_number_of_small_kernels"),
    ),
    "withhold a free device": (
        ("services/test_engines.py", "test_unclaimed_process_counts_after_a_while"),
    ),
    "use a device without a claim": (
        ("services/test_unclaimed.py", "test_process_on_a_partly_held_device_does_not_count"),
    ),
    "signal another team's process kernels": (
        (TEAMS, "test_kernels_of_teams_run_as_one_user_by_default"),
    ),
    "take a device of another agent": ((TEAMS, "test_team_takes_no_device_of_another"),),
    "take a part of a device": (
        ("core/partition/test_limits.py", "test_limits_and_guarantees_hold_for_all_agents"),
        (TEAMS, "test_team_takes_no_part_that_is_guaranteed"),
    ),
    "use another agent's part of the claims": (
        (CLAIMS, "test_agents_share_the_claims_of_a_node_equally"),
        (TEAMS, "test_claims_above_a_new_bound_stay"),
    ),
    "use the file descriptors": (
        (CLAIMS, "test_pid_holders_leave_half_of_the_descriptors"),
        (TEAMS, "test_pid_holders_of_a_team_leave_descriptors"),
    ),
    "use another agent's part of the bytes": (
        ("core/test_labels.py", "test_agents_share_the_bytes_of_labels_equally"),
    ),
    "keep another team off its unix socket": (
        ("http/test_server.py", "test_full_socket_leaves_connections_to_others"),
    ),
    "delay another team's requests": (
        ("http/connections/test_request_turns.py", "test_callers_do_not_wait_for_each_other"),
    ),
    "use another team's streams up": ((TEAMS, "test_streams_of_a_team_are_its_own"),),
    "have another agent's part of the ended kernels": (
        ("services/kernels/test_retention.py", "test_agent_loses_no_ended_kernels_to_another"),
    ),
    "see, stop, read or use": (
        (ACCESS, "test_callers_have_exactly_the_rights_of_the_table"),
        (ACCESS, "test_foreign_kernel_reads_as_an_unknown_one_on_every_route"),
        (USERS, "test_claims_of_others_cannot_be_seen_or_used"),
    ),
    "take an id that an engine derives": ((USERS, "test_only_admins_choose_ids_of_engines"),),
    "pose as a process": (
        (USERS, "test_users_name_their_own_processes_alone"),
        ("host/test_claim_holders.py", "test_process_name_does_not_show_another_pid_namespace"),
    ),
}
"""The tests of each sentence, by its first words."""


def sentences() -> list[str]:
    section = PAGE.read_text().partition("## Teams among each other")[2]
    items = section.partition("\n## ")[0].split("\n- ")[1:]
    return [" ".join(item.split("\n\n")[0].split()) for item in items]


@pytest.mark.parametrize(("start", "sentence"), [*zip(SENTENCES, sentences(), strict=True)])
def test_each_sentence_about_teams_has_its_tests(start: str, sentence: str) -> None:
    assert sentence.startswith(start)
    for file, name in SENTENCES[start]:
        assert f"def {name}(" in (TESTS / file).read_text(), name
