"""How long whoever asks waits behind a backlog: in passes of the event loop, and in time that a clock of ours says."""

from __future__ import annotations

import asyncio

from penstock.rollout.turns import Turns

PEERS = 50
FRAMES = 20
FRAME_S = 0.001
BUDGET_S = 0.005


async def work_off(turns: Turns, peer: int, frames: int, taken: list[int]) -> None:
    """A peer whose frames have all come in already: nothing but its turns makes it wait."""
    for _ in range(frames):
        await turns.wait()
        taken.append(peer)
        turns.spent(FRAME_S)


async def backlog(peers: int, frames: int) -> tuple[list[int], list[int]]:
    """Returns the peers in the order of their turns, and how many turns each pass of the loop had meanwhile."""
    turns, taken, passes = Turns(BUDGET_S), list[int](), list[int]()
    tasks = [asyncio.create_task(work_off(turns, peer, frames, taken)) for peer in range(peers)]
    while not all(task.done() for task in tasks):
        before = len(taken)
        await asyncio.sleep(0)
        passes.append(len(taken) - before)
    return taken, passes


async def test_a_pass_of_the_loop_takes_no_more_frames_than_fit_its_budget() -> None:
    taken, passes = await backlog(PEERS, FRAMES)
    assert len(taken) == PEERS * FRAMES
    # The very first one knows no frame's length yet.
    assert max(passes[1:]) <= 2 * BUDGET_S / FRAME_S
    # And none is wasted while frames wait.
    assert sum(passes) / len(passes) >= BUDGET_S / FRAME_S / 2


async def test_every_peer_has_its_turn_before_any_has_a_second_one() -> None:
    taken, _ = await backlog(PEERS, FRAMES)
    settled = taken[2 * PEERS :]
    for first in range(0, len(settled) - PEERS, PEERS):
        assert len(set(settled[first : first + PEERS])) >= PEERS - 1


async def test_a_peer_alone_does_not_wait_for_others() -> None:
    _, passes = await backlog(1, 4)
    assert len(passes) <= 3


async def test_a_peer_that_is_gone_before_its_turn_takes_none_from_others() -> None:
    turns = Turns(BUDGET_S)
    gone = asyncio.create_task(turns.wait())
    stays = asyncio.create_task(turns.wait())
    gone.get_loop().call_soon(gone.cancel)
    turns.spent(2 * BUDGET_S)
    await asyncio.wait_for(stays, 10)
    assert gone.cancelled()
