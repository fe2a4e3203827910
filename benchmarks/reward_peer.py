"""One of the clients that `penstock bench reward-sockets` compares with, in an environment of their own.

Reads one JSON line: {"peer", "urls", "jobs", "limits": [{"rate", "concurrency"}, ...]} and prints one:
{"wall_s", "done", "peer"}. A job is done when it came back with the text that was asked for.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any


def messages(n: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"question {n}"}]


def right(text: Any, n: int) -> bool:
    return text == f"echo: question {n}"


def openai_clients(urls: list[str], retries: int) -> Callable[[int], Awaitable[Any]]:
    from openai import AsyncOpenAI

    clients = [AsyncOpenAI(base_url=url, api_key="none", max_retries=retries) for url in urls]

    async def ask(n: int) -> Any:
        client = clients[n % len(clients)]
        answer = await client.chat.completions.create(model="m", messages=messages(n))  # type: ignore[arg-type]
        return answer.choices[0].message.content

    return ask


def qreward_client(urls: list[str], limits: list[dict[str, Any]], told: bool) -> Callable[[int], Awaitable[Any]]:
    from qreward.client import OpenAIChatProxy, OpenAIChatProxyManager

    manager = OpenAIChatProxyManager()
    for k, (url, limit) in enumerate(zip(urls, limits, strict=True)):
        known: dict[str, Any] = {}
        if told:
            known["rate_limiter_bucket_size"] = limit["rate"] or 1e6
            known["max_concurrent"] = limit["concurrency"] or 1000
        manager.add_proxy(str(k), OpenAIChatProxy(base_url=url, api_key="none", **known))

    from qreward.utils import schedule

    # Its client never retries, so its own decorator is put around it, with the retries that lose it least.
    @schedule(retry_times=10)
    async def ask(n: int) -> Any:
        return await manager.select_proxy().chat_completion(messages=messages(n), model="m")

    return ask


async def run(task: dict[str, Any]) -> dict[str, Any]:
    peer, urls = task["peer"], task["urls"]
    semaphore = asyncio.Semaphore(10**9)
    if peer == "openai gather":
        ask = openai_clients(urls, 2)
    elif peer == "openai semaphore":
        ask, semaphore = openai_clients(urls, 10), asyncio.Semaphore(64)
    else:
        ask = qreward_client(urls, task["limits"], peer == "qreward told")

    async def one(n: int) -> bool:
        async with semaphore:
            return right(await ask(n), n)

    began = time.monotonic()
    results = await asyncio.gather(*(one(n) for n in range(task["jobs"])), return_exceptions=True)
    wall_s = time.monotonic() - began
    failures = [repr(result) for result in results if isinstance(result, BaseException)]
    return {
        "peer": peer,
        "wall_s": wall_s,
        "done": sum(result is True for result in results),
        "failure": failures[0][:200] if failures else "",
    }


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    print(json.dumps(asyncio.run(run(json.loads(sys.stdin.readline())))))
