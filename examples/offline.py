"""What stands in for a service in these examples: a rate-limited provider on this machine, with a judge behind it.

The judge knows sums: it reads the question and the answer that it is shown and grades the answer by the rubric it is
given. Everything else (limits, latency, HTTP) is as with a real service.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from penstock.simulate.provider_server import ProviderServer
from penstock.simulate.providers import Provider

REQUESTS_PER_S = 50.0


def provider() -> ProviderServer:
    """A service of 50 requests a second that takes about 20 ms for each."""
    return ProviderServer(Provider(rate=REQUESTS_PER_S, burst=10, median_s=0.02, round_trip_s=0.0), answer=judged)


def judged(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """A chat completion: reasons and grades as a JSON object, or "no idea" for what holds no sum."""
    text = " ".join(message["content"] for message in body["messages"])
    a, b = (int(number) for number in re.findall(r"(\d+) \+ (\d+)", text)[0])
    answered = re.search(r"<answer \w+>\s*(.*?)\s*</answer", text, re.S)
    answer = answered[1] if answered else ""
    verdict = {"reasoning": f"{a} + {b} = {a + b}", "correct": int(str(a + b) in answer.split())}
    if '"brief"' in text:
        verdict["brief"] = 5 if len(answer) < 10 else 2
    said = json.dumps(verdict) if answer != "?" else "no idea"
    return {
        "object": "chat.completion",
        "model": body["model"],
        "choices": [{"index": 0, "message": {"role": "assistant", "content": said}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 80, "completion_tokens": 20, "total_tokens": 100},
    }


def judge_options(folder: Path, url: str) -> dict[str, Any]:
    """The judge of a run as its configuration names it: `options` of `penstock.reward.judge:judge`."""
    pool, rubric = folder / "pool.toml", folder / "rubric.toml"
    pool.write_text(f'[[endpoints]]\nurl = "{url}"\nrequests_per_minute = {60 * REQUESTS_PER_S}\n')
    rubric.write_text(
        'question_field = "question"\nreference_field = "answer"\n\n'
        '[[criteria]]\nname = "correct"\ndescription = "0: wrong. 1: right."\nlow = 0\nhigh = 1\n'
    )
    return {"pool": str(pool), "model": "judge-1", "rubric": str(rubric)}
