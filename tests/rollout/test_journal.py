"""The journal: whatever byte a manager dies at, it comes back to a state that was there, and nothing comes twice."""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from rollout_helpers import SimulatedAgent, World, length_of, submit, tokens

from penstock.bench.journal_kills import InlineExecutor, MortalDisk, Story, run_story
from penstock.errors import StorageError
from penstock.observe.events import BatchEnded, ManagerRecovered, Warned
from penstock.rollout.journal import decode_record, encode_record, tokens_record
from penstock.rollout.journal_file import Journal, JournalConfig
from penstock.rollout.journal_replay import Recovered
from penstock.rollout.journal_segments import CHECKSUMS, Disk, SegmentReader, SegmentWriter
from penstock.rollout.manager import Decisions, ManagerConfig
from penstock.sample import Finish
from penstock.wire import ReleaseBatch, SubmitBatch, TrainerHello, VersionPublished, column_bytes


class JournaledWorld(World):
    """A manager with its journal in a folder, on a virtual clock and in one thread."""

    def __init__(self, folder: Path, disk: Disk | None = None, **options: object) -> None:
        self.journal: Journal | None = None
        self.gathers = False
        super().__init__(ManagerConfig(max_pending_per_instance=2, trainer_grace_s=100.0))
        self.told: list[tuple[bool, str]] = []
        self.config = JournalConfig(folder, **options)  # type: ignore[arg-type]
        self.journal = Journal(
            self.config, self.manager.snapshot, self._changed, disk, clock=lambda: self.now, threads=InlineExecutor()
        )
        self.recovered = self.journal.open(self.now)
        self.carry_out(self.manager.restore(self.recovered, self.now))
        self.journal.start(self.manager.epoch)
        self.carry_out(self.manager.on_trainer_connected(self.now))

    def _changed(self, running: bool, message: str) -> None:
        self.told.append((running, message))
        self.carry_out(self.manager.on_journal(running, message, self.now))

    def carry_out(self, decisions: Decisions) -> None:
        if self.journal is not None:
            self.journal.gather(decisions.records)
            if decisions.heard or not self.gathers:
                self.journal.flush()
        super().carry_out(decisions)

    def pass_time(self, seconds: float) -> None:
        super().pass_time(seconds)
        assert self.journal is not None
        self.journal.tick(self.now)

    def hello(self, session: str, open_batches: tuple[str, ...] = (), digest: str = "weights") -> None:
        self.trainer(TrainerHello(name="t", pid=1, session=session, open_batches=open_batches))
        self.trainer(VersionPublished(version=0, source="store", digest=digest))

    def die(self) -> None:
        """As by SIGKILL: nothing is said and nothing is closed but by the system."""
        assert self.journal is not None
        if self.journal._lock is not None:
            self.journal._lock.close()


def begun(folder: Path, disk: Disk | None = None, samples: int = 6, **options: object) -> JournaledWorld:
    """A world in the middle of a batch."""
    world = JournaledWorld(folder, disk, **options)
    world.hello("first")
    agent = world.join_ready(max_running=samples)
    world.trainer(submit(samples_per_prompt=samples))
    world.play(agent, 3)
    return world


def state_of(recovered: Recovered) -> list[object]:
    return [
        (batch.name, batch.finished, batch.failed, batch.next_fresh)
        + tuple((s.index, bytes(s.tokens), bytes(s.logprobs), s.finish, s.version_spans, s.cause) for s in samples)
        for batch in recovered.batches
        for samples in [sorted([*batch.moved, *batch.held.values()], key=lambda s: s.index)]
    ]


def read(folder: Path) -> Recovered:
    """What another manager would take up."""
    journal = Journal(JournalConfig(folder), lambda: pytest.fail("no snapshot is needed"), lambda *_: None)
    try:
        return journal.open(0.0)
    finally:
        journal.close()


# ---- killed anywhere


def test_killed_at_a_random_byte_500_times_it_comes_back_to_a_state_that_agents_reached(tmp_path: Path) -> None:
    stories = [run_story(tmp_path, seed, kills=5) for seed in range(100)]
    assert sum(story.kills for story in stories) >= 500
    assert sum(story.tokens_drawn for story in stories) > 10_000


class JournalMachine(RuleBasedStateMachine):
    """Any order of what may happen, with kills at any byte. The story raises where a promise does not hold."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()

    @initialize(seed=st.integers(0, 2**32))
    def begin(self, seed: int) -> None:
        self.story = Story(Path(self.folder.name) / "journal", seed)
        self.mortal.left = 1 << 40

    @property
    def mortal(self) -> MortalDisk:
        disk = self.story.journal._disk
        assert isinstance(disk, MortalDisk)
        return disk

    @rule()
    def draw(self) -> None:
        self.story.play(self.story.draw)

    @rule()
    def submit(self) -> None:
        self.story.play(self.story.submit)

    @rule()
    def release(self) -> None:
        self.story.play(self.story.release)

    @rule()
    def lose_an_agent(self) -> None:
        self.story.play(self.story.lose_agent)

    @rule()
    def resume_the_trainer(self) -> None:
        self.story.play(self.story.another_trainer)

    @rule(left=st.integers(0, 3000))
    def die_after(self, left: int) -> None:
        self.mortal.left = left

    def teardown(self) -> None:
        if hasattr(self, "story"):
            self.story.finish()
        self.folder.cleanup()


JournalMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestJournalMachine = JournalMachine.TestCase


# ---- what is read


def test_a_journal_cut_at_every_byte_is_a_state_that_was_there(tmp_path: Path) -> None:
    world = JournaledWorld(tmp_path / "whole")
    journal = world.journal
    assert journal is not None
    states = [state_of(read_copy(tmp_path))]

    def act(what: Callable[[], object]) -> None:
        what()
        states.append(state_of(read_copy(tmp_path)))

    act(lambda: world.hello("first"))
    agent = world.join_ready(max_running=2)
    act(lambda: world.trainer(submit(samples_per_prompt=2)))
    act(lambda: world.play(agent, 3))
    act(lambda: world.lose(agent))
    other = world.join_ready("other", max_running=2)
    act(lambda: world.play(other, 9))
    data = (tmp_path / "whole" / "segment-00000001").read_bytes()
    cut = tmp_path / "cut"
    lengths = []
    for size in range(len(data) + 1):
        cut.mkdir(exist_ok=True)
        (cut / "segment-00000001").write_bytes(data[:size])
        state = state_of(read(cut))
        lengths.append(sum(len(row[1]) for batch in state for row in batch[4:]))  # type: ignore[index]
        if size == len(data):
            assert state == states[-1]
    assert lengths == sorted(lengths), "what is kept grows with what is there"
    assert len(set(lengths)) > 2


def read_copy(tmp_path: Path) -> Recovered:
    copy = tmp_path / "copy"
    copy.mkdir(exist_ok=True)
    for path in copy.iterdir():
        path.unlink()
    for path in (tmp_path / "whole").iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    return read(copy)


def test_a_flipped_bit_ends_the_journal_before_its_record(tmp_path: Path) -> None:
    world = begun(tmp_path / "whole")
    world.die()
    data = bytearray((tmp_path / "whole" / "segment-00000001").read_bytes())
    whole = state_of(read_copy(tmp_path))
    for position in range(0, len(data), 7):
        data[position] ^= 4
        (tmp_path / "flipped").mkdir(exist_ok=True)
        path = tmp_path / "flipped" / "segment-00000001"
        path.write_bytes(data)
        recovered = read(tmp_path / "flipped")
        assert recovered.cut_bytes > 0
        for batch, rows in zip(state_of(recovered), whole, strict=False):
            kept = {row[0]: row[1] for row in batch[4:]}  # type: ignore[index]
            assert all(row[1].startswith(kept.get(row[0], b"")) for row in rows[4:])  # type: ignore[index]
        data[position] ^= 4


def test_zeros_behind_the_last_record_are_no_records(tmp_path: Path) -> None:
    world = begun(tmp_path / "journal")
    world.die()
    with (tmp_path / "journal" / "segment-00000001").open("ab") as file:
        file.write(bytes(4096))
    recovered = read(tmp_path / "journal")
    assert recovered.cut_bytes == 4096
    assert recovered.tokens > 0


@pytest.mark.parametrize("kind", sorted(CHECKSUMS))
def test_either_checksum_is_read_whatever_is_written_now(
    tmp_path: Path, kind: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as only:
        for other in set(CHECKSUMS) - {kind}:
            only.delitem(CHECKSUMS, other)
        writer = SegmentWriter(tmp_path / "file", 3, 17, Disk())
        writer.append([b"one", b"two"])
        writer.close()
    reader = SegmentReader(tmp_path / "file")
    assert list(reader) == [b"one", b"two"]
    assert (reader.number, reader.sequence) == (3, 19)


def test_records_of_a_frame_with_refused_rows_have_the_others_only() -> None:
    frame = tokens((1, 0, [5, 6], Finish.RUNNING), (2, 0, [7], Finish.RUNNING), (3, 0, [8, 9], Finish.RUNNING))
    record = decode_record(encode_record(tokens_record(frame, [1])))
    assert record == tokens_record(tokens((1, 0, [5, 6], Finish.RUNNING), (3, 0, [8, 9], Finish.RUNNING)), [])


def test_a_restarted_manager_goes_on_from_the_last_token_and_says_so(tmp_path: Path) -> None:
    world = begun(tmp_path)
    held = dict(world.delivered)
    before = world.manager.tracker.tokens_accepted
    world.die()
    again = JournaledWorld(tmp_path)
    [event] = again.of_kind(ManagerRecovered)
    assert isinstance(event, ManagerRecovered)
    assert event.tokens == before
    again.delivered |= held
    again.hello("first", ("train-0",))
    again.trainer(with_taken(submit(samples_per_prompt=6), held))
    agent = again.join_ready(max_running=6)
    assert sum(sequence.drawn for sequence in agent.sequences.values()) > 0, "its prefixes are what was there"
    again.play_out()
    assert len(again.delivered) == 6
    assert again.manager.tracker.tokens_accepted + before == sum(len(d.token_ids) for d in again.delivered.values())


def test_samples_that_were_put_back_to_wait_go_on_from_their_last_token_in_the_next_manager(tmp_path: Path) -> None:
    world = begun(tmp_path)
    [agent] = world.agents.values()
    tracker = world.manager.tracker
    [instance] = [held.id for held in world.manager.fleet]
    parked = {}
    for lease in list(agent.sequences)[:2]:
        sample = tracker.put_back(instance, lease)
        assert sample is not None
        del agent.sequences[lease]
        parked[sample.id] = bytes(sample.tokens)
    assert all(parked.values())
    held = dict(world.delivered)
    world.die()
    again = JournaledWorld(tmp_path)
    [batch] = again.recovered.batches
    assert parked.items() <= {sample.id: bytes(sample.tokens) for sample in batch.moved}.items()
    again.delivered |= held
    again.hello("first", ("train-0",))
    again.trainer(with_taken(submit(samples_per_prompt=6), held))
    again.join_ready(max_running=6)
    again.play_out()
    assert len(again.delivered) == 6
    for sample_id, tokens_before in parked.items():
        ended = again.delivered[sample_id.batch, sample_id.prompt, sample_id.replica]
        assert column_bytes(ended.token_ids, "i").startswith(tokens_before)


def test_a_late_frame_under_a_lease_of_an_earlier_manager_is_refused(tmp_path: Path) -> None:
    world = begun(tmp_path)
    [agent] = world.agents.values()
    lease = next(iter(agent.sequences))
    world.die()
    again = JournaledWorld(tmp_path)
    again.hello("first", ("train-0",))
    again.trainer(submit(samples_per_prompt=6))
    other = again.join_ready(max_running=6)
    assert lease not in other.sequences
    again.send(other, tokens((lease, 3, [10], Finish.RUNNING)))
    assert again.manager.counts.rows_refused == 1


def draw_of_the_longest(world: JournaledWorld, agent: SimulatedAgent) -> None:
    """A token of a sample that does not end with it, so that nobody hears of it."""

    def left(lease: int) -> int:
        held = agent.sequences[lease]
        return length_of(held.seed, held.limit) - held.drawn

    lease = max(agent.sequences, key=left)
    assert left(lease) > 1
    world.send(agent, agent.draw([lease], 1))


def test_records_that_nobody_has_heard_of_are_written_together_and_before_anybody_does(tmp_path: Path) -> None:
    disk = FailingDisk()
    world = begun(tmp_path, disk)
    world.gathers = True
    [agent] = world.agents.values()
    writes, before = disk.writes, read_copy_of(tmp_path).tokens
    for _ in range(3):
        draw_of_the_longest(world, agent)
    assert disk.writes == writes
    assert read_copy_of(tmp_path).tokens == before
    world.join_ready("other")
    assert disk.writes == writes + 1, "the tokens were there before another agent was welcomed"
    assert read_copy_of(tmp_path).tokens == world.manager.tracker.tokens_accepted > before


def test_what_is_gathered_is_in_a_snapshot_or_behind_it_and_never_both(tmp_path: Path) -> None:
    world = begun(tmp_path, compact_bytes=300)
    world.gathers = True
    assert world.journal is not None
    [agent] = world.agents.values()
    for _ in range(4):
        draw_of_the_longest(world, agent)
        world.journal.tick(world.now)
    assert list(tmp_path.glob("snapshot-*"))
    assert read_after_death(world, tmp_path).tokens == world.manager.tracker.tokens_accepted


def test_gathered_records_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.rollout.journal_file.GROUP_BYTES", 60)
    disk = FailingDisk()
    world = begun(tmp_path, disk)
    world.gathers = True
    [agent] = world.agents.values()
    writes = disk.writes
    for _ in range(4):
        draw_of_the_longest(world, agent)
    assert writes < disk.writes < writes + 4


@pytest.mark.parametrize("compact_bytes", [1 << 30, 300], ids=["records", "snapshot"])
@pytest.mark.parametrize("progress", [False, True])
def test_strikes_outlive_a_manager_and_a_token_forgives_them(
    tmp_path: Path, progress: bool, compact_bytes: int
) -> None:
    world = JournaledWorld(tmp_path, compact_bytes=compact_bytes)
    world.hello("first")
    world.trainer(submit())
    for _ in range(2):
        world.lose(world.join_ready())
    agent = world.join_ready()
    if progress:
        draw_of_the_longest(world, agent)
    world.pass_time(0.1)
    assert bool(list(tmp_path.glob("snapshot-*"))) == (compact_bytes == 300)
    world.die()
    again = JournaledWorld(tmp_path)
    again.hello("first", ("train-0",))
    again.trainer(submit())
    again.lose(again.join_ready())
    failed = [sample for sample in again.delivered.values() if sample.finish is Finish.FAILED]
    assert len(failed) == (0 if progress else 1)


@pytest.mark.parametrize("compact_bytes", [1 << 30, 300], ids=["records", "snapshot"])
def test_on_a_day_when_machines_die_by_themselves_a_manager_that_is_back_knows_it(
    tmp_path: Path, compact_bytes: int
) -> None:
    world = JournaledWorld(tmp_path, compact_bytes=compact_bytes)
    world.hello("first")
    for number in range(8):
        world.lose(world.join_ready(f"idle-{number}"))
    world.trainer(submit())
    for number in range(2):
        world.lose(world.join_ready(f"at-work-{number}"))
    world.pass_time(0.1)
    assert bool(list(tmp_path.glob("snapshot-*"))) == (compact_bytes == 300)
    world.die()
    again = JournaledWorld(tmp_path)
    again.hello("first", ("train-0",))
    again.trainer(submit())
    # Three in a row would be enough on another day.
    for strikes in (3, 4, 5):
        assert not again.delivered
        again.lose(again.join_ready(f"later-{strikes}"))
    assert [sample.finish for sample in again.delivered.values()] == [Finish.FAILED]
    again.pass_time(61.0)
    assert again.manager.tracker.strikes_needed == 3


@pytest.mark.parametrize("compact_bytes", [1 << 30, 300], ids=["records", "snapshot"])
def test_a_manager_says_what_those_before_it_had_taken_from_each_instance(tmp_path: Path, compact_bytes: int) -> None:
    world = begun(tmp_path, compact_bytes=compact_bytes)
    world.pass_time(0.1)
    other = world.join_ready("other", max_running=2)
    world.lose(next(iter(world.agents.values())))
    world.play(other, 1)
    taken = {name: tokens for name, tokens in world.manager.agents.accepted.items() if tokens}
    assert set(taken) == {"engine", "other"}
    world.die()
    for _ in range(2):
        again = JournaledWorld(tmp_path)
        [event] = again.of_kind(ManagerRecovered)
        assert isinstance(event, ManagerRecovered)
        assert event.accepted == taken
        again.die()


# ---- bounded


def test_snapshots_keep_the_folder_small_and_mean_the_same(tmp_path: Path) -> None:
    world = JournaledWorld(tmp_path, compact_bytes=2000)
    world.hello("first")
    agent = world.join_ready(max_running=40)
    for number in range(20):
        world.trainer(submit(f"train-{number}", samples_per_prompt=10, max_new_tokens=30))
        for _ in range(20):
            world.play(agent, 2)
            world.pass_time(0.1)
        assert f"train-{number}" in world.done
        if number < 19:
            world.trainer(ReleaseBatch(batch=f"train-{number}"))
    assert world.journal is not None
    assert world.journal._number > 5
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 16_000
    recovered = read_after_death(world, tmp_path)
    [batch] = recovered.batches
    assert batch.name == "train-19"
    assert batch.ended


def read_after_death(world: JournaledWorld, folder: Path) -> Recovered:
    world.die()
    return read(folder)


def test_a_damaged_snapshot_is_passed_over_for_what_is_behind_it(tmp_path: Path) -> None:
    world = begun(tmp_path)
    state = state_of(read_copy_of(tmp_path))
    (tmp_path / "snapshot-00000001").write_bytes(b"nonsense")
    (tmp_path / "snapshot-00000002.partial").write_bytes(b"half")
    assert state_of(read_after_death(world, tmp_path)) == state
    assert not list(tmp_path.glob("*.partial"))


def test_a_journal_that_can_not_be_read_is_set_aside_once_and_said(tmp_path: Path) -> None:
    begun(tmp_path).die()
    (tmp_path / "segment-00000001").rename(tmp_path / "segment-00000004")
    (tmp_path / "snapshot-00000004").write_bytes(b"nonsense" * 10)
    world = JournaledWorld(tmp_path)
    assert world.recovered.tokens == 0
    assert sorted(path.name for path in tmp_path.glob("*.damaged")) == [
        "segment-00000004.damaged",
        "snapshot-00000004.damaged",
    ]
    [warned] = world.of_kind(Warned)
    assert isinstance(warned, Warned)
    assert "set aside as *.damaged: snapshot-00000004, segment-00000004" in warned.message
    world.die()
    (tmp_path / "snapshot-00000001").write_bytes(b"other nonsense" * 10)
    JournaledWorld(tmp_path)
    assert [path.name for path in tmp_path.glob("*.damaged")] == ["snapshot-00000001.damaged"], "the last ones only"


def read_copy_of(folder: Path) -> Recovered:
    with tempfile.TemporaryDirectory() as copy:
        for path in folder.iterdir():
            (Path(copy) / path.name).write_bytes(path.read_bytes())
        return read(Path(copy))


def test_a_state_over_the_bound_suspends_the_journal_and_a_smaller_one_takes_it_up_again(tmp_path: Path) -> None:
    world = JournaledWorld(tmp_path, max_bytes=12_000, retry_s=1.0)
    world.hello("first")
    agent = world.join_ready(max_running=100)
    world.trainer(submit(samples_per_prompt=100, max_new_tokens=30))
    for _ in range(30):
        world.play(agent, 1)
        world.pass_time(0.1)
    assert world.told[-1][0] is False
    assert any("MiB" in message for _, message in world.told)
    world.play_out()
    world.trainer(ReleaseBatch(batch="train-0"))
    for _ in range(20):
        world.pass_time(10.0)
    assert world.told[-1] == (True, "the journal is written again, from a fresh snapshot")
    assert not read_after_death(world, tmp_path).batches


def test_a_second_manager_on_one_journal_is_refused(tmp_path: Path) -> None:
    world = begun(tmp_path)
    with pytest.raises(StorageError, match="in use by another manager"):
        JournaledWorld(tmp_path)
    world.die()
    JournaledWorld(tmp_path)


# ---- the disk


class FailingDisk(Disk):
    def __init__(self) -> None:
        self.fails = False
        self.syncs = 0
        self.writes = 0

    def write(self, descriptor: int, data: bytes | memoryview) -> int:
        if self.fails:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.writes += 1
        return super().write(descriptor, data)

    def fsync(self, descriptor: int) -> None:
        self.syncs += 1


def test_a_full_disk_costs_the_journal_and_not_the_run_until_it_has_room_again(tmp_path: Path) -> None:
    disk = FailingDisk()
    world = begun(tmp_path, disk, retry_s=1.0)
    [agent] = world.agents.values()
    disk.fails = True
    world.play(agent, 1)
    [warned] = world.of_kind(Warned)
    assert isinstance(warned, Warned)
    assert warned.where == "journal"
    assert "No space left on device" in warned.message
    assert world.journal is not None
    assert world.journal.trouble == "No space left on device"
    for _ in range(5):
        world.pass_time(1.0)
    assert len(world.of_kind(Warned)) == 1, "it is said once"
    disk.fails = False
    world.play(agent, 1)
    for _ in range(20):
        world.send(agent, _beat())
        world.pass_time(1.0)
    assert world.journal.trouble == ""
    world.play(agent, 1)
    accepted = world.manager.tracker.tokens_accepted
    assert read_after_death(world, tmp_path).tokens == accepted


def _beat() -> object:
    from penstock.wire import Heartbeat

    return Heartbeat(running=1, waiting=0, kv_tokens=0, tokens_generated=0, tokens_prefilled=0, tokens_per_s=0)


@pytest.mark.parametrize(("fsync", "waits"), [("never", 0), ("interval", 2), ("always", 7)])
def test_the_fsync_policy_says_when_the_disk_is_waited_for(tmp_path: Path, fsync: str, waits: int) -> None:
    disk = FailingDisk()
    world = begun(tmp_path, disk, fsync=fsync)
    [agent] = world.agents.values()
    start = disk.syncs
    world.pass_time(1.1)
    world.play(agent, 1)
    world.pass_time(1.1)
    assert disk.syncs - start == (1 if fsync == "always" else waits)
    assert start >= (5 if fsync == "always" else 1), "the epoch is on the disk before a lease is given"


# ---- whose batches they are


def with_taken(frame: SubmitBatch, delivered: dict[tuple[str, int, int], object]) -> SubmitBatch:
    frame.taken_prompts = column_bytes([prompt for _, prompt, _ in delivered], "I")
    frame.taken_replicas = column_bytes([replica for _, _, replica in delivered], "I")
    return frame


def lost_in_mid_batch() -> World:
    world = World(ManagerConfig(max_pending_per_instance=2, trainer_grace_s=100.0))
    world.trainer(TrainerHello(name="t", pid=1, session="first"))
    world.trainer(VersionPublished(version=0, source="store", digest="weights"))
    agent = world.join_ready(max_running=6)
    world.trainer(submit(samples_per_prompt=6))
    world.play(agent, 3)
    world.carry_out(world.manager.on_trainer_lost("killed", world.now))
    return world


def resumed(world: World, session: str, digest: str = "weights", **changes: object) -> None:
    world.carry_out(world.manager.on_trainer_connected(world.now))
    world.trainer(TrainerHello(name="t", pid=1, session=session, open_batches=()))
    world.trainer(VersionPublished(version=0, source="other store", digest=digest))
    world.trainer(submit(samples_per_prompt=6, **changes))  # type: ignore[arg-type]


def test_a_resumed_trainer_finds_finished_samples_and_partial_ones() -> None:
    world = lost_in_mid_batch()
    world.delivered.clear()
    [agent] = world.agents.values()
    world.play(agent, 1)
    assert not world.delivered, "nobody is there to have them"
    accepted = world.manager.tracker.tokens_accepted
    resumed(world, "second")
    assert agent.loading is None, "the weights are the ones that it holds"
    world.play_out()
    assert len(world.delivered) == 6
    assert sum(len(d.token_ids) for d in world.delivered.values()) == world.manager.tracker.tokens_accepted
    assert world.manager.tracker.tokens_accepted > accepted


@pytest.mark.parametrize("change", [{"digest": "others"}, {"digest": ""}, {"run_seed": 1}])
def test_other_weights_or_other_questions_under_the_same_name_are_another_batch(change: dict[str, object]) -> None:
    world = lost_in_mid_batch()
    world.delivered.clear()
    resumed(world, "second", **change)  # type: ignore[arg-type]
    assert any(isinstance(e, BatchEnded) and e.cause for e in world.events)
    [batch] = world.manager.tracker.batches()
    assert batch.tokens == 0
    world.play_out()
    assert len(world.delivered) == 6


def test_batches_that_nobody_comes_back_for_end_with_their_grace() -> None:
    world = lost_in_mid_batch()
    [agent] = world.agents.values()
    for _ in range(98):
        world.send(agent, _beat())  # type: ignore[arg-type]
        world.pass_time(1.0)
    assert world.manager.tracker.batch("train-0") is not None
    for _ in range(4):
        world.send(agent, _beat())  # type: ignore[arg-type]
        world.pass_time(1.0)
    assert world.manager.tracker.batch("train-0") is None
    assert not agent.sequences


def test_between_its_hello_and_its_claim_a_trainer_is_sent_nothing_of_a_batch() -> None:
    world = lost_in_mid_batch()
    taken = dict(world.delivered)
    [agent] = world.agents.values()
    world.carry_out(world.manager.on_trainer_connected(world.now))
    world.trainer(TrainerHello(name="t", pid=1, session="first", open_batches=("train-0",)))
    world.play(agent, 100)
    assert world.delivered == taken
    world.trainer(VersionPublished(version=0, source="store", digest="weights"))
    world.trainer(with_taken(submit(samples_per_prompt=6), taken))  # type: ignore[arg-type]
    assert len(world.delivered) == 6
    assert "train-0" in world.done


def test_a_manager_that_knows_nothing_is_told_what_its_trainer_has() -> None:
    world = World(ManagerConfig(max_pending_per_instance=2, trainer_grace_s=100.0))
    world.trainer(TrainerHello(name="t", pid=1, session="first", open_batches=("train-0",)))
    world.trainer(VersionPublished(version=0, source="store", digest="weights"))
    has = {("train-0", 0, replica): None for replica in (1, 4)}
    world.trainer(with_taken(submit(samples_per_prompt=6), has))  # type: ignore[arg-type]
    world.join_ready(max_running=6)
    world.play_out()
    assert sorted(replica for _, _, replica in world.delivered) == [0, 2, 3, 5]
    assert world.done["train-0"].samples == 6


def test_what_a_session_does_not_name_any_more_is_forgotten_at_once() -> None:
    world = lost_in_mid_batch()
    world.carry_out(world.manager.on_trainer_connected(world.now))
    world.trainer(TrainerHello(name="t", pid=1, session="first", open_batches=()))
    assert world.manager.tracker.batch("train-0") is None
