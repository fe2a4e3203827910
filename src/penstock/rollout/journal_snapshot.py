"""A snapshot of the living state: taken at once, written down while the state goes on. Pure.

What is taken at the cut is little (lengths, leases and references); the tokens are read later, by another thread,
piece by piece. That is sound because a sample's tokens only grow: its first `length` tokens are the same for ever,
and reading a slice of a bytearray is one step that no append can come between.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from penstock.rollout.batch import Batch, TrackedSample
from penstock.rollout.journal import (
    Accepted,
    Died,
    Epoch,
    Placed,
    Published,
    Record,
    Samples,
    SnapshotEnd,
    Submitted,
    Trainer,
    strikes_column,
)
from penstock.rollout.tracker import Tracker
from penstock.rollout.versions import Versions
from penstock.sample import Finish
from penstock.wire import SubmitBatch

__all__ = ["Snapshot"]

PIECE_TOKENS = 1 << 17
"""Tokens of one record: a mebibyte, for which nobody is kept waiting."""

_Spans = tuple[tuple[int, int], ...]


@dataclass(slots=True)
class _BatchCut:
    frame: SubmitBatch
    samples: list[TrackedSample]
    lengths: list[int]
    leases: list[int]
    instances: list[str]
    """Ids, empty where a sample is with nobody."""
    strikes: bytes
    finishes: list[Finish]
    versions: list[int]
    closed_spans: list[_Spans]
    """(version, end) of each sample's spans before the last one, which is of `versions` and ends with the sample."""


@dataclass(slots=True)
class Snapshot:
    """The records that stand for a state. `nbytes`: about how many bytes they take."""

    _head: list[Record]
    _cuts: list[_BatchCut]
    _names: dict[str, str]
    nbytes: int

    @classmethod
    def of(
        cls,
        epoch: int,
        session: str,
        versions: Versions,
        tracker: Tracker,
        batches: Iterable[Batch],
        names: dict[str, str],
        accepted: Mapping[str, int],
        deaths: Iterable[float] = (),
        windows: Iterable[Record] = (),
    ) -> Snapshot:
        """`names` of instances by id; `accepted` output tokens by such a name; `deaths` in seconds since 1970."""
        head: list[Record] = [Accepted(dict(accepted)), Died(tuple(deaths)), *windows]
        head += [Published(version, "earlier", digest) for version, digest in versions.earlier()]
        head.append(Trainer(session))
        head += [Published(*told) for told in versions.published()]
        head.append(Epoch(epoch))
        cuts = [_cut(tracker, batch) for batch in batches]
        tokens = sum(sum(cut.lengths) for cut in cuts)
        rows = sum(len(cut.samples) for cut in cuts)
        prompts = sum(len(cut.frame.prompt_ids) for cut in cuts)
        return cls(head, cuts, names, 8 * tokens + 32 * rows + prompts + 4096)

    def records(self) -> Iterator[Record]:
        """Each is made when it is asked for; may be called in another thread than the one that the state lives in."""
        yield from self._head
        for cut in self._cuts:
            yield Submitted(cut.frame)
            first = tokens = 0
            for row, length in enumerate(cut.lengths):
                if tokens and tokens + length > PIECE_TOKENS:
                    yield _piece(cut, first, row)
                    first, tokens = row, 0
                tokens += length
            if cut.lengths:
                yield _piece(cut, first, len(cut.lengths))
            yield from self._placed(cut)
        yield SnapshotEnd()

    def _placed(self, cut: _BatchCut) -> Iterator[Placed]:
        held: dict[str, tuple[array[int], array[int]]] = {}
        for sample, lease, instance in zip(cut.samples, cut.leases, cut.instances, strict=True):
            if lease:
                leases, indices = held.setdefault(instance, (array("Q"), array("I")))
                leases.append(lease)
                indices.append(sample.index)
        for instance, (leases, indices) in held.items():
            yield Placed(cut.frame.batch, leases.tobytes(), indices.tobytes(), self._names.get(instance, ""))


def _cut(tracker: Tracker, batch: Batch) -> _BatchCut:
    samples = [*batch.held.values(), *tracker.unfinished_of(batch)]
    return _BatchCut(
        frame=batch.frame,
        samples=samples,
        lengths=[sample.length for sample in samples],
        leases=[sample.lease for sample in samples],
        instances=[sample.instance for sample in samples],
        strikes=strikes_column(s.strikes if s.length == s.placed_length or not s.lease else 0 for s in samples),
        finishes=[sample.finish for sample in samples],
        versions=[sample.version for sample in samples],
        closed_spans=[sample.closed_spans for sample in samples],
    )


def _piece(cut: _BatchCut, first: int, last: int) -> Samples:
    rows = range(first, last)
    samples, lengths = cut.samples[first:last], cut.lengths[first:last]
    spans = [
        (*closed, (version, length)) if length else ()
        for version, length, closed in zip(cut.versions[first:last], lengths, cut.closed_spans[first:last], strict=True)
    ]
    replicas = cut.frame.samples_per_prompt
    return Samples(
        batch=cut.frame.batch,
        samples=array("I", [sample.prompt * replicas + sample.replica for sample in samples]).tobytes(),
        finishes=bytes(cut.finishes[first:last]),
        lengths=array("I", lengths).tobytes(),
        span_counts=array("I", map(len, spans)).tobytes(),
        span_versions=array("i", [version for span in spans for version, _ in span]).tobytes(),
        span_ends=array("I", [end for span in spans for _, end in span]).tobytes(),
        causes={row - first: cut.samples[row].cause for row in rows if cut.finishes[row] and cut.samples[row].cause},
        token_ids=b"".join([sample.tokens[: 4 * n] for sample, n in zip(samples, lengths, strict=True)]),
        logprobs=b"".join([sample.logprobs[: 4 * n] for sample, n in zip(samples, lengths, strict=True)]),
        strikes=cut.strikes[first:last],
    )
