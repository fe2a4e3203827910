"""A judge with a rubric, over a rate-limited service: `python examples/judge.py`. Offline, about a second.

With a service of your own, leave `offline` out and put its address and limits into the pool.
"""

from __future__ import annotations

import asyncio
from array import array

import offline

from penstock.reward import ComputePool, Endpoint, Score, score_batch
from penstock.reward.judge import Criterion, Rubric, judge
from penstock.sample import Finish, Prompt, Sample, SampleId

RUBRIC = Rubric(
    (
        Criterion("correct", description="0: wrong. 1: right.", weight=3, low=0, high=1),
        Criterion("brief", description="1: rambling. 5: nothing to leave out."),
    ),
    reference_field="answer",
)


def sample(n: int, response: str) -> Sample:
    prompt = Prompt(n, f"{n} + 1 = ?", (), {"answer": str(n + 1)}, f"sums:{n}")
    return Sample(SampleId("example", n, 0), prompt, array("i"), array("f"), (), Finish.STOP, response)


async def main() -> None:
    answers = ["1", "2", "I believe it to be 3", "5", "?"] * 8
    async with offline.provider() as service:
        async with ComputePool([Endpoint(service.url, requests_per_minute=60 * offline.REQUESTS_PER_S)]) as pool:
            reward = judge(pool, "judge-1", RUBRIC)
            report = await score_batch(reward, [sample(n % 5, answer) for n, answer in enumerate(answers)])
        print(f"{service.requests} requests, {service.provider.refused} of them refused")
    for answer, result in list(zip(answers, report.results, strict=True))[:5]:
        said = f"{result.value:.4f}  {dict(result.parts)}" if isinstance(result, Score) else result
        print(f"{answer:<22}{said}")
    unscored = sum(report.causes.values())
    print(f"{len(answers) - unscored} scored, {unscored} unscored")


if __name__ == "__main__":
    asyncio.run(main())
