"""What is wrong with a token frame and with its rows: checks of untrusted columns, at C speed where all is well. Pure.

Decides which rows are impossible, and says why. What becomes of them and of their samples is the tracker's.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Collection

from penstock.errors import WireError
from penstock.rollout.batch import TrackedSample
from penstock.sample import Finish
from penstock.wire import TokenFrame, column

__all__ = ["bad_rows", "checked_columns", "row_fault"]

LOGPROB_SLACK = 1e-3
"""A log-probability may be above 0 by this much: rounding in a low-precision softmax, not a lie."""
INT32_MAX = 2**31 - 1

_FINISHES = len(Finish)
_STOP = int(Finish.STOP)
_LENGTH = int(Finish.LENGTH)


def checked_columns(frame: TokenFrame, versions: Collection[int]) -> tuple[list[int], list[int], list[int]]:
    """Leases, starts and counts of a frame whose columns agree; WireError otherwise."""
    if frame.version not in versions:
        held = ", ".join(map(str, sorted(versions))) or "none"
        raise WireError(f"tokens of weight version {frame.version} from an instance that holds: {held}")
    leases = column(frame.leases, "Q").tolist()
    rows = len(leases)
    starts = column(frame.starts, "I", rows).tolist()
    counts = column(frame.counts, "I", rows).tolist()
    column(frame.finishes, "B", rows)
    if rows and max(frame.finishes) >= _FINISHES:
        raise WireError(f"a finish of {max(frame.finishes)}; the last one known is {_FINISHES - 1}")
    tokens = sum(counts)
    column(frame.token_ids, "i", tokens)
    column(frame.logprobs, "f", tokens)
    return leases, starts, counts


def bad_rows(token_ids: bytes, logprobs: bytes, counts: list[int], vocab_size: int) -> dict[int, str]:
    """Rows with an impossible token or log-probability, with the cause; usually none, found out at C speed.

    Ids are read as unsigned, so that one maximum finds negative ones too; a sum is finite only if all terms are.
    """
    if not token_ids:
        return {}
    top = vocab_size or INT32_MAX + 1
    ids = memoryview(token_ids).cast("I").tolist()
    values = memoryview(logprobs).cast("f").tolist()
    if max(ids) < top and max(values) <= LOGPROB_SLACK and math.isfinite(sum(values)):
        return {}
    bad: dict[int, str] = {}
    begin = 0
    for row, count in enumerate(counts):
        end = begin + count
        for token, value in zip(ids[begin:end], values[begin:end], strict=True):
            if token >= top:
                signed = array("i", array("I", [token]).tobytes())[0]
                bad[row] = f"token id {signed} is outside the vocabulary of {top}"
            elif not (math.isfinite(value) and value <= LOGPROB_SLACK):
                bad[row] = f"a log-probability of {value}"
        begin = end
    return bad


def row_fault(sample: TrackedSample, start: int, count: int, finish: int, last_token: bytes, bad_value: str) -> str:
    """Why a row of a lease in force can't be taken; empty where it can."""
    length = sample.length
    if start > length:
        return "a gap: the row starts beyond the sample's last token"
    if start < length:
        return "a repetition: the row starts before the sample's last token"
    if bad_value:
        return bad_value
    if start + count > sample.limit:
        return f"more than max_new_tokens = {sample.limit} tokens"
    if finish == _STOP:
        token = last_token if count else bytes(sample.tokens[-4:])
        if not token or int.from_bytes(token, "little") not in sample.batch.stop_ids:
            return "finished by STOP though its last token is no stop id"
    elif finish == _LENGTH and start + count < sample.limit:
        return "finished by LENGTH before max_new_tokens"
    return ""
