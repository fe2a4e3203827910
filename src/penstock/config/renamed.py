"""Keys that users bring from elsewhere: carried over to Penstock's own, each with a hint that says which one it is.

Pure. Decides what an old key means; a key that is given in both ways, and two switches that exclude each other, are
problems. What the keys themselves mean is the models' business (`run`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Key = tuple[str, str]

RENAMED: dict[Key, Key] = {
    ("trainer", "execute_mode"): ("cluster", "execute_mode"),
    ("trainer", "execute_thread_pool_size"): ("cluster", "execute_threads"),
}
"""verl's names (its pull request 2861) for what is the same here."""
REWARD_SECTIONS = ("reward", "reward_model")
REWARD_SWITCHES = {"launch_reward_fn_async": "process", "launch_reward_fn_sub_thread": "thread"}
"""Switches that one setting, `reward.mode`, stands for."""


def carry_over(
    values: dict[str, Any], moved: Callable[[Key, Key], None] = lambda old, new: None
) -> tuple[list[str], list[str]]:
    """Replaces old keys in `values`. Returns (hints, problems); `moved` is told of each old and its key."""
    hints: list[str] = []
    problems: list[str] = []
    for old, new in RENAMED.items():
        if old[1] in _section(values, old[0]):
            value = _section(values, old[0]).pop(old[1])
            moved(old, new)
            _put(values, old, new, value, hints, problems)
    _carry_switches(values, moved, hints, problems)
    for name in ("trainer", "reward_model"):
        if values.get(name) == {}:
            del values[name]
    return hints, problems


def _carry_switches(
    values: dict[str, Any], moved: Callable[[Key, Key], None], hints: list[str], problems: list[str]
) -> None:
    on: list[tuple[Key, str]] = []
    for section in REWARD_SECTIONS:
        for switch, mode in REWARD_SWITCHES.items():
            if switch not in _section(values, section):
                continue
            value = values[section].pop(switch)
            old = (section, switch)
            if value is True:
                on.append((old, mode))
            elif value is False:
                hints.append(f"{section}.{switch} = false says nothing here; reward.mode says how rewards are computed")
            else:
                problems.append(f"{section}.{switch} = {value!r}: must be true or false")
    if len({mode for _, mode in on}) > 1:
        names = " and ".join(".".join(old) for old, _ in on)
        problems.append(f"{names} exclude each other; set reward.mode instead: sync, thread, process or ray")
        return
    for old, mode in on[:1]:
        moved(old, ("reward", "mode"))
        _put(values, old, ("reward", "mode"), mode, hints, problems)


def _put(values: dict[str, Any], old: Key, new: Key, value: Any, hints: list[str], problems: list[str]) -> None:
    was, now = ".".join(old), ".".join(new)
    section = values.setdefault(new[0], {})
    if not isinstance(section, dict):
        return  # the models refuse it, and say why
    if new[1] in section:
        problems.append(f"{was} and {now} are both given; {now} is the name, leave the other out")
        return
    section[new[1]] = value
    hints.append(f"{was} is called {now} here; write {now} = {value!r}".replace("'", '"'))


def _section(values: dict[str, Any], name: str) -> dict[str, Any]:
    section = values.get(name)
    return section if isinstance(section, dict) else {}
