"""The agent's bookkeeping of leases; pure: frames and deltas in, starts and frames out.

Decides which sequences this agent answers for. A lease is live from the StartFrame that gives it until its sequence
finishes or is stopped; tokens of anything else never leave the machine. Knows no sockets and no engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from penstock.errors import WireError
from penstock.instance.engine import SequenceStart, TokenDelta
from penstock.sample import Finish
from penstock.wire import MAX_FRAME_BYTES, StartFrame, StopFrame, TokenFrame, column, column_bytes, offsets

FRAME_BYTES = 256
"""What a token frame takes beside its rows."""
ROW_BYTES = 17
TOKEN_BYTES = 8
CAUSE_CHARACTERS = 1000
"""Of one row's cause; what is over is left out."""


@dataclass(slots=True)
class Started:
    """What a StartFrame becomes: sequences for the engine, and rows to hand back at once."""

    sequences: list[SequenceStart] = field(default_factory=list)
    handed_back: list[TokenFrame] = field(default_factory=list)


class Leases:
    """The live leases of one session with a manager."""

    def __init__(self) -> None:
        self._live: set[int] = set()
        self.tokens_dropped = 0
        """Tokens of sequences that had been stopped or lost their session before they could be sent."""

    def __len__(self) -> int:
        return len(self._live)

    def start(self, frame: StartFrame, version: int, limit_bytes: int = MAX_FRAME_BYTES) -> Started:
        """Takes a StartFrame; `version` is what the engine serves.

        Work for another version is handed back as Finish.ABORTED with the cause, in frames of at most `limit_bytes`.
        Raises WireError, and then nothing has changed, where the columns don't agree or a lease is live already.
        """
        sequences = _sequences(frame)
        leases = [sequence.lease for sequence in sequences]
        if len(set(leases)) != len(leases) or not self._live.isdisjoint(leases):
            raise WireError("a start frame gives a lease that is live already; leases are never given twice")
        if frame.version != version:
            cause = f"the engine serves weight version {version}, not {frame.version}"
            parts = _parts(_handed_back(sequences, version, cause), limit_bytes)
            return Started(handed_back=[_token_frame(part) for part in parts])
        self._live.update(leases)
        return Started(sequences=sequences)

    def stop(self, frame: StopFrame) -> list[int]:
        """The leases to stop in the engine; unknown ones are ignored, since they may have just finished."""
        stopped = [lease for lease in column(frame.leases, "Q") if lease in self._live]
        self._live.difference_update(stopped)
        return stopped

    def forget_all(self) -> list[int]:
        """The session is over and the manager gives the work to others: every lease, to be stopped."""
        gone = sorted(self._live)
        self._live.clear()
        return gone

    def frames(self, delta: TokenDelta, limit_bytes: int) -> list[TokenFrame]:
        """The delta as frames of at most `limit_bytes` each (usually one), without rows that are no longer live."""
        if not self._live.issuperset(delta.leases):
            delta = self._without_dead_rows(delta)
        if not delta.leases:
            return []
        self._live.difference_update(
            lease for lease, finish in zip(delta.leases, delta.finishes) if finish is not Finish.RUNNING
        )
        return [_token_frame(part) for part in _parts(delta, limit_bytes)]

    def _without_dead_rows(self, delta: TokenDelta) -> TokenDelta:
        kept = TokenDelta(version=delta.version, causes=delta.causes)
        begins = offsets(delta.counts)
        for row, lease in enumerate(delta.leases):
            begin, end = begins[row], begins[row + 1]
            if lease not in self._live:
                self.tokens_dropped += end - begin
                continue
            kept.leases.append(lease)
            kept.starts.append(delta.starts[row])
            kept.counts.append(delta.counts[row])
            kept.finishes.append(delta.finishes[row])
            kept.token_ids.extend(delta.token_ids[begin:end])
            kept.logprobs.extend(delta.logprobs[begin:end])
        return kept


def _token_frame(delta: TokenDelta) -> TokenFrame:
    causes = {row: delta.causes[lease] for row, lease in enumerate(delta.leases) if lease in delta.causes}
    return TokenFrame(
        version=delta.version,
        leases=column_bytes(delta.leases, "Q"),
        starts=column_bytes(delta.starts, "I"),
        counts=column_bytes(delta.counts, "I"),
        finishes=bytes(delta.finishes),
        token_ids=column_bytes(delta.token_ids, "i"),
        logprobs=column_bytes(delta.logprobs, "f"),
        causes={row: cause[:CAUSE_CHARACTERS] for row, cause in causes.items()},
    )


def _cause_bytes(cause: str) -> int:
    return 16 + len(cause[:CAUSE_CHARACTERS].encode())


def _parts(delta: TokenDelta, limit_bytes: int) -> Iterator[TokenDelta]:
    """Cuts a delta so that each part fits a frame; a row that is too long is cut too, and ends in its last piece."""
    cause_bytes = sum(_cause_bytes(cause) for cause in delta.causes.values())
    if FRAME_BYTES + ROW_BYTES * len(delta.leases) + TOKEN_BYTES * len(delta.token_ids) + cause_bytes <= limit_bytes:
        yield delta
        return
    part, room = TokenDelta(delta.version, causes=delta.causes), limit_bytes - FRAME_BYTES
    begins = offsets(delta.counts)
    for row, lease in enumerate(delta.leases):
        begin, end = begins[row], begins[row + 1]
        row_bytes = ROW_BYTES + (_cause_bytes(delta.causes[lease]) if lease in delta.causes else 0)
        while True:
            if part.leases and room < row_bytes + TOKEN_BYTES * (end - begin):
                yield part
                part, room = TokenDelta(delta.version, causes=delta.causes), limit_bytes - FRAME_BYTES
            cut = min(end, begin + (room - row_bytes) // TOKEN_BYTES)
            part.leases.append(lease)
            part.starts.append(delta.starts[row] + begin - begins[row])
            part.counts.append(cut - begin)
            part.finishes.append(delta.finishes[row] if cut == end else Finish.RUNNING)
            part.token_ids.extend(delta.token_ids[begin:cut])
            part.logprobs.extend(delta.logprobs[begin:cut])
            room -= row_bytes + TOKEN_BYTES * (cut - begin)
            begin = cut
            if cut == end:
                break
    yield part


def _sequences(frame: StartFrame) -> list[SequenceStart]:
    """The frame's rows, its columns checked against each other. Raises WireError."""
    leases = column(frame.leases, "Q").tolist()
    rows = len(leases)
    seeds = column(frame.seeds, "Q", rows).tolist()
    prompt_offsets = offsets(column(frame.prompt_lengths, "I", rows).tolist())
    prefix_offsets = offsets(column(frame.prefix_lengths, "I", rows).tolist())
    prompt_ids = column(frame.prompt_ids, "i", prompt_offsets[-1]).tolist()
    prefix_ids = column(frame.prefix_ids, "i", prefix_offsets[-1]).tolist()
    sampling_of = column(frame.sampling_of, "I", rows).tolist()
    if rows and max(sampling_of) >= len(frame.samplings):
        raise WireError(f"a row has sampling {max(sampling_of)} and the frame brings {len(frame.samplings)}")
    return [
        SequenceStart(
            lease=leases[row],
            seed=seeds[row],
            prompt_ids=prompt_ids[prompt_offsets[row] : prompt_offsets[row + 1]],
            prefix_ids=prefix_ids[prefix_offsets[row] : prefix_offsets[row + 1]],
            sampling=frame.samplings[sampling_of[row]],
        )
        for row in range(rows)
    ]


def _handed_back(sequences: list[SequenceStart], version: int, cause: str) -> TokenDelta:
    leases = [sequence.lease for sequence in sequences]
    return TokenDelta(
        version=version,
        leases=leases,
        starts=[len(sequence.prefix_ids) for sequence in sequences],
        counts=[0] * len(leases),
        finishes=[Finish.ABORTED] * len(leases),
        causes=dict.fromkeys(leases, cause),
    )
