"""The manager's doors: who may come in as an agent, as the trainer or as an operator.

Decides by the token, or by the role that a verified certificate names, and words the refusal. Each role has its own
token; one token may serve for all where nothing else is given. Refuses to know sockets, and never puts a token into
words.
"""

from __future__ import annotations

import enum
import hmac
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.errors import PenstockError
from penstock.tls import certificate_role

__all__ = ["Doors", "Knocks", "Refusal", "Role", "Tokens", "agents_environment", "managers_environment"]


class Role(enum.StrEnum):
    AGENT = "agent"
    TRAINER = "trainer"
    OPERATOR = "operator"


ROLES = frozenset(Role)
SHARED_VARIABLE = "PENSTOCK_TOKEN"
OWN_VARIABLES = {role: f"PENSTOCK_{role.name}_TOKEN" for role in Role}
"""Environment variables that tokens come in: the shared one, or the one that a process is to knock with, and the roles'
own, which a manager reads."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """`shared` opens every door that has no token of its own; an empty one opens nothing."""

    shared: str = field(default="", repr=False)
    agent: str = field(default="", repr=False)
    trainer: str = field(default="", repr=False)
    operator: str = field(default="", repr=False)

    def of(self, role: Role) -> str:
        own: str = getattr(self, role.value)
        return own or self.shared


def agents_environment(environment: Mapping[str, str], token: str, *others: str) -> dict[str, str]:
    """For an agent that this process starts: it gets its own token, and none that is in the variables of the others.

    `others`: names of further variables that hold a token.
    """
    hidden = {SHARED_VARIABLE, *OWN_VARIABLES.values(), *others}
    return {name: value for name, value in environment.items() if name not in hidden} | {SHARED_VARIABLE: token}


def managers_environment(environment: Mapping[str, str], tokens: Tokens, *others: str) -> dict[str, str]:
    """For a manager that this process starts: it gets every token there is."""
    own = {variable: held for role, variable in OWN_VARIABLES.items() if (held := getattr(tokens, role.value))}
    return agents_environment(environment, tokens.shared, *others) | own


@dataclass(frozen=True, slots=True)
class Refusal:
    status: int
    """401: nobody is known by that; 403: somebody who has no business at this door."""
    cause: str
    """One of few, so that repeats can be counted; says what to do."""


class Doors:
    """`by_certificate`: peers have certificates, verified by TLS, and one that names a role needs no token.

    Raises PenstockError where a role has no way in, or where two roles have the same token and not by sharing it.
    """

    def __init__(self, tokens: Tokens, by_certificate: bool = False) -> None:
        self._tokens = {role: tokens.of(role).encode() for role in Role}
        own = [token for token in (tokens.agent, tokens.trainer, tokens.operator) if token]
        if len(set(own)) != len(own):
            raise PenstockError("two roles have the same token; give each its own, or one shared token to all")
        missing = [role.value for role, token in self._tokens.items() if not token]
        if missing and not by_certificate:
            raise PenstockError(
                f"no token for: {', '.join(missing)}; set PENSTOCK_TOKEN, or give --token-file or the role's own file"
            )

    def refusal(self, door: Role, token: str, certificate: Mapping[str, Any] | None = None) -> Refusal | None:
        """None where the peer may come in. `certificate`: as the ssl module gives a verified one."""
        named = certificate_role(certificate, ROLES) if certificate else ""
        if named:
            return None if named == door else _other_role("certificate", Role(named), door)
        holders = self._holders(token)
        if door in holders:
            return None
        if holders:
            return _other_role("token", holders[0], door)
        if certificate and not token:
            return Refusal(401, "its certificate names no role (OU agent, or CN agent/...), and it gave no token")
        return Refusal(
            401,
            "the token is missing or wrong; give the role's token in the environment variable PENSTOCK_TOKEN or with "
            "--token-file (sent as 'Authorization: Bearer <token>')",
        )

    def _holders(self, token: str) -> list[Role]:
        """Roles whose token this is. Every one is compared, in constant time."""
        given = token.encode(errors="surrogateescape")
        same = [(role, hmac.compare_digest(given, held)) for role, held in self._tokens.items()]
        return [role for role, equal in same if equal and self._tokens[role]]


class Knocks:
    """Counts connections that were not let in: repeats are worth a word at their 1st, 2nd, 4th, 8th time."""

    def __init__(self) -> None:
        self._times: Counter[tuple[str, str]] = Counter()

    def count(self, door: str, cause: str) -> int:
        """How often this cause was met at this door, or 0 where that is not worth a word."""
        self._times[door, cause] += 1
        times = self._times[door, cause]
        return times if times & (times - 1) == 0 else 0


def _other_role(what: str, holder: Role, door: Role) -> Refusal:
    whose = "an" if holder.value[0] in "ao" else "a"
    doors = {Role.AGENT: "agents", Role.TRAINER: "the trainer", Role.OPERATOR: "operators"}
    return Refusal(403, f"that {what} is {whose} {holder.value}'s, and this door is for {doors[door]}")
