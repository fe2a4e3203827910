"""The manager's journal: what is recorded. What state a row of records stands for is in `journal_replay`, files are
`journal_file`; both records and replay are pure.

The manager is the only place that has a run's unfinished samples, so what it knows is written down before anybody
hears of it (`outbox.Decisions`). A record is a fact that was decided, not a request: taking records in again decides
nothing anew, so a journal is read without engines, trainer or clock.

States of a sample, and the records that move it:

    waiting --Placed--> placed --Tokens--> placed, longer --Ended--> held --Removed--> forgotten
                          '---- Placed again under another lease: it had moved

Invariants, which the tests hold up:

- Any prefix of the records is a state that the manager was in. A journal cut at any byte therefore stands for one.
- A sample's tokens only grow, in the order in which they were accepted.
- A lease has an epoch in its upper bits; each start of a manager begins a higher one (`Epoch`, the first record it
  writes). No frame of a machine that ran under an earlier manager can name a lease of this one.
- What is placed in the state that is read is with nobody: engines' connections died with the manager. It waits again,
  from its last token.
- Finished samples stay until their batch is removed. What a trainer has of them is its own to say when it comes back
  (`wire.SubmitBatch.taken_*`), so deliveries are not recorded: one that was sent and one that was taken in are told
  apart by its word alone.

What windows fitted is there for each number of remote instances (`WindowFitted`, see `window_memory`).

Not recorded: which instances there were, which join anew. Their names are, for what was taken from each: a run that
knows what its engines drew can then say what was drawn twice.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from penstock.errors import StorageError
from penstock.rollout.batch import TrackedSample
from penstock.wire import SubmitBatch, TokenFrame, column, column_bytes, offsets

__all__ = [
    "Accepted",
    "Died",
    "Ended",
    "Epoch",
    "Placed",
    "Published",
    "Record",
    "Removed",
    "Samples",
    "SnapshotEnd",
    "Struck",
    "Submitted",
    "Tokens",
    "Trainer",
    "WindowFitted",
    "decode_record",
    "encode_record",
    "placed_records",
    "strikes_column",
    "struck_records",
    "tokens_record",
]


class _Record(msgspec.Struct, array_like=True):
    pass


class Epoch(_Record, tag=0):
    """A manager has started; its leases are of this epoch."""

    epoch: int


class Trainer(_Record, tag=1):
    """Another trainer is there; what the one before published can't be pulled any more."""

    session: str


class Published(_Record, tag=2):
    version: int
    source: str
    digest: str


class Submitted(_Record, tag=3):
    frame: SubmitBatch


class Placed(_Record, tag=4):
    """Samples of one batch got leases."""

    batch: str
    leases: bytes  # Q[N]
    samples: bytes  # I[N], index in the batch
    instance: str = ""
    """Name of the one that has them."""


class Tokens(_Record, tag=5):
    """Accepted rows of one token frame, as they came."""

    version: int
    leases: bytes  # Q[N]
    counts: bytes  # I[N]
    token_ids: bytes  # i[sum of counts]
    logprobs: bytes  # f[sum of counts]


class Ended(_Record, tag=6):
    """Samples of one batch that are finished or failed, these with their causes by row."""

    batch: str
    samples: bytes  # I[N]
    finishes: bytes  # B[N]
    causes: dict[int, str]


class Removed(_Record, tag=7):
    """A batch was released, cancelled or given up."""

    batch: str


class Samples(_Record, tag=8):
    """Of a snapshot: samples of one batch that were placed at some time. Who has them now, `Placed` says behind it."""

    batch: str
    samples: bytes  # I[N]
    finishes: bytes  # B[N]
    lengths: bytes  # I[N]
    span_counts: bytes  # I[N]
    span_versions: bytes  # i[S]
    span_ends: bytes  # I[S]
    causes: dict[int, str]
    token_ids: bytes  # i[sum of lengths]
    logprobs: bytes  # f[sum of lengths]
    strikes: bytes = b""  # B[N]


class SnapshotEnd(_Record, tag=9):
    """The last record of a snapshot: without it, it is none."""


class Struck(_Record, tag=10):
    """Samples of one batch that were taken back without a new token, and how often they were in a row."""

    batch: str
    samples: bytes  # I[N]
    strikes: bytes  # B[N]


class Accepted(_Record, tag=11):
    """Of a snapshot: output tokens taken so far, by the name of the instance that drew them."""

    tokens: dict[str, int]


class Died(_Record, tag=12):
    """Machines that were lost with no sample of theirs to blame."""

    times: tuple[float, ...]
    """In seconds since 1970."""


class WindowFitted(_Record, tag=13):
    """What is known of the window for a number of remote instances; the last record of a number counts."""

    fleet: int
    plan: dict[str, float | dict[str, float]] | None = None
    """Fields of a `Plan`; its limits by name."""
    correction_s: float | None = None
    window_s: float | None = None
    """Where no plan was to be had."""


Record = (
    Epoch
    | Trainer
    | Published
    | Submitted
    | Placed
    | Tokens
    | Ended
    | Removed
    | Samples
    | SnapshotEnd
    | Struck
    | Accepted
    | Died
    | WindowFitted
)

encode_record = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Record).decode


def decode_record(data: bytes) -> Record:
    """Raises StorageError."""
    try:
        return _decode(data)
    except (msgspec.DecodeError, ValueError) as error:
        raise StorageError(f"{len(data)} bytes are no record of a journal: {error}") from error


def placed_records(samples: Iterable[TrackedSample], instance: str) -> Iterator[Placed]:
    """Of samples that have just got their leases, all with the instance of that name."""
    for batch, rows in _by_batch(samples):
        leases = array("Q", [sample.lease for sample in rows])
        yield Placed(batch, leases.tobytes(), _indices(rows), instance)


def struck_records(samples: Iterable[TrackedSample]) -> Iterator[Struck]:
    """Of samples that have just been struck."""
    for batch, rows in _by_batch(samples):
        yield Struck(batch, _indices(rows), strikes_column(sample.strikes for sample in rows))


def strikes_column(strikes: Iterable[int]) -> bytes:
    return bytes(min(count, 255) for count in strikes)


def _by_batch(samples: Iterable[TrackedSample]) -> Iterable[tuple[str, list[TrackedSample]]]:
    found: dict[str, list[TrackedSample]] = {}
    for sample in samples:
        found.setdefault(sample.batch.name, []).append(sample)
    return found.items()


def _indices(samples: Iterable[TrackedSample]) -> bytes:
    return array("I", [sample.index for sample in samples]).tobytes()


def tokens_record(frame: TokenFrame, refused_rows: Sequence[int]) -> Tokens:
    """Of a token frame whose other rows were accepted; its columns as they came where all of them were."""
    if not refused_rows:
        return Tokens(frame.version, frame.leases, frame.counts, frame.token_ids, frame.logprobs)
    refused = set(refused_rows)
    leases, counts = column(frame.leases, "Q").tolist(), column(frame.counts, "I").tolist()
    ends = offsets(counts)
    kept = [row for row in range(len(leases)) if row not in refused]
    return Tokens(
        frame.version,
        column_bytes([leases[row] for row in kept], "Q"),
        column_bytes([counts[row] for row in kept], "I"),
        b"".join(frame.token_ids[4 * ends[row] : 4 * ends[row + 1]] for row in kept),
        b"".join(frame.logprobs[4 * ends[row] : 4 * ends[row + 1]] for row in kept),
    )
