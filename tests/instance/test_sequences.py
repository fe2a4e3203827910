"""What is refused of a server's words, without any server."""

from __future__ import annotations

import math

import pytest

from penstock.errors import EngineError
from penstock.instance.dialect import Chunk
from penstock.instance.engine import SequenceStart
from penstock.instance.sequences import Held, check_chunk
from penstock.sample import Finish
from penstock.wire import Sampling

VOCAB = 50
STOP_ID = 9


def held(drawn: int = 0) -> Held:
    sampling = Sampling(max_new_tokens=4, stop_ids=(STOP_ID,))
    return Held(SequenceStart(lease=1, seed=0, prompt_ids=[1, 2], prefix_ids=[], sampling=sampling), [3] * drawn)


def chunk(ids: list[int], finish: Finish = Finish.RUNNING, logprob: float = -0.5, version: str = "7") -> Chunk:
    return Chunk(token_ids=ids, logprobs=[logprob] * len(ids), finish=finish, weight_version=version)


@pytest.mark.parametrize(
    ("said", "drawn", "reason"),
    [
        (chunk([3, VOCAB]), 0, "token id 50, which is outside the vocabulary of 50"),
        (chunk([-1]), 0, "token id -1, which is outside"),
        (chunk([3], logprob=math.nan), 0, "log-probability nan"),
        (chunk([3], logprob=-math.inf), 0, "log-probability -inf"),
        (chunk([3], logprob=0.5), 0, r"log-probability 0\.5"),
        (Chunk(token_ids=[3, 4], logprobs=[-1.0]), 0, "1 log-probabilities for 2 tokens"),
        (chunk([3], version="6"), 0, "draws with its weight version '6' and should serve 7"),
        (chunk([3, 3]), 3, "1 tokens more than max_new_tokens"),
        (chunk([3], Finish.STOP), 0, "stopped a sequence after 3, which is none of its stop ids"),
        (chunk([], Finish.STOP), 0, "stopped a sequence after no token"),
    ],
)
def test_what_no_sound_server_says_is_refused(said: Chunk, drawn: int, reason: str) -> None:
    with pytest.raises(EngineError, match=reason):
        check_chunk(said, held(drawn), 7, VOCAB)


def test_what_a_sound_server_says_is_taken_and_its_rounding_forgiven() -> None:
    said = chunk([3, STOP_ID], Finish.STOP, logprob=1e-6, version="")
    check_chunk(said, held(2), 7, VOCAB)
    assert said.logprobs == [0.0, 0.0]
