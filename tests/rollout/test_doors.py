"""Who may come in at which door, by token and by certificate."""

from __future__ import annotations

import pytest

from penstock.errors import PenstockError
from penstock.rollout.doors import Doors, Knocks, Role, Tokens

OWN = Tokens(agent="a-token", trainer="t-token", operator="o-token")


def certificate(common_name: str = "", *units: str) -> dict[str, object]:
    """A verified one, as the ssl module gives it."""
    subject = [(("organizationName", "x"),), *(((("organizationalUnitName", unit),)) for unit in units)]
    return {"subject": (*subject, (("commonName", common_name),))}


@pytest.mark.parametrize("door", list(Role))
def test_each_role_comes_in_at_its_own_door_and_is_told_at_the_others_whose_token_it_has(door: Role) -> None:
    doors = Doors(OWN)
    for role in Role:
        refusal = doors.refusal(door, OWN.of(role))
        if role is door:
            assert refusal is None
        else:
            assert refusal is not None
            assert refusal.status == 403
            assert f"that token is a{'' if role is Role.TRAINER else 'n'} {role.value}'s" in refusal.cause


@pytest.mark.parametrize("given", ["", "wrong", "a-toke", "a-token ", "\u00e9", "x" * 100_000])
def test_a_token_of_nobody_gets_401_at_every_door(given: str) -> None:
    for tokens in (OWN, Tokens(shared="s")):
        for door in Role:
            refusal = Doors(tokens).refusal(door, given)
            assert refusal is not None
            assert refusal.status == 401
            assert "PENSTOCK_TOKEN" in refusal.cause


def test_one_shared_token_opens_all_doors_that_have_none_of_their_own() -> None:
    doors = Doors(Tokens(shared="s", operator="o"))
    assert doors.refusal(Role.AGENT, "s") is None
    assert doors.refusal(Role.TRAINER, "s") is None
    refused = doors.refusal(Role.OPERATOR, "s")
    assert refused is not None
    assert refused.status == 403
    assert doors.refusal(Role.OPERATOR, "o") is None


@pytest.mark.parametrize(
    ("tokens", "says"),
    [
        (Tokens(), "no token for: agent, trainer, operator"),
        (Tokens(agent="a", trainer="t"), "no token for: operator"),
        (Tokens(agent="x", trainer="x", operator="o"), "two roles have the same token"),
    ],
)
def test_doors_that_nobody_could_pass_or_everybody_are_refused(tokens: Tokens, says: str) -> None:
    with pytest.raises(PenstockError, match=says):
        Doors(tokens)


def test_tokens_are_never_shown() -> None:
    tokens = Tokens("s-token", "a-token", "t-token", "o-token")
    assert "token'" not in repr(tokens)
    assert "-token" not in repr(tokens)
    refusal = Doors(tokens).refusal(Role.AGENT, "t-token")
    assert refusal is not None
    assert "t-token" not in refusal.cause


@pytest.mark.parametrize(
    ("shown", "role"),
    [
        (certificate("agent/spot-7"), "agent"),
        (certificate("spot-7", "agent"), "agent"),
        (certificate("trainer/main"), "trainer"),
        (certificate("ops", "operator", "people"), "operator"),
    ],
)
def test_a_certificate_that_names_a_role_opens_its_door_without_a_token_and_no_other(
    shown: dict[str, object], role: str
) -> None:
    doors = Doors(Tokens(), by_certificate=True)
    for door in Role:
        refusal = doors.refusal(door, "", shown)
        if door == role:
            assert refusal is None
        else:
            assert refusal is not None
            assert refusal.status == 403
            assert f"that certificate is a{'' if role == 'trainer' else 'n'} {role}'s" in refusal.cause


def test_a_role_in_a_certificate_is_not_widened_by_another_roles_token() -> None:
    refusal = Doors(OWN, by_certificate=True).refusal(Role.TRAINER, "t-token", certificate("agent/spot-7"))
    assert refusal is not None
    assert refusal.status == 403


@pytest.mark.parametrize("shown", [certificate("spot-7"), certificate("agent"), certificate("agent/x", "trainer"), {}])
def test_a_certificate_that_names_no_role_or_two_needs_a_token(shown: dict[str, object]) -> None:
    doors = Doors(OWN, by_certificate=True)
    refusal = doors.refusal(Role.AGENT, "", shown)
    assert refusal is not None
    assert refusal.status == 401
    assert doors.refusal(Role.AGENT, "a-token", shown) is None


def test_a_door_without_a_token_is_not_opened_by_an_empty_one() -> None:
    doors = Doors(Tokens(), by_certificate=True)
    assert all(doors.refusal(door, "", None) is not None for door in Role)


def test_knocks_are_told_at_their_1st_2nd_4th_and_8th_time() -> None:
    knocks = Knocks()
    assert [knocks.count("agent", "wrong token") for _ in range(9)] == [1, 2, 0, 4, 0, 0, 0, 8, 0]
    assert knocks.count("trainer", "wrong token") == 1
