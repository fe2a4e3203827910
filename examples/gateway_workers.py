"""One set of limits for many processes that know nothing of Penstock: `python examples/gateway_workers.py`.

Four worker processes ask a judge by the OpenAI API, each as fast as it can, as the reward workers of ROLL do (there:
`judge_model_type: api`, `judge_api_url: http://127.0.0.1:8700/v1`). They ask `penstock gateway`, which keeps the
provider's limit for all of them together. Offline, a few seconds.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import offline

WORKERS = 4
QUESTIONS = 10


def work(url: str, worker: int) -> None:
    """What a framework's reward worker does: a request for each sample, with nothing but the standard library here."""
    for n in range(QUESTIONS):
        question = f"{n} + {worker} = ?\n<answer x>\n{n + worker}\n</answer x>"
        body = {"model": "judge-1", "messages": [{"role": "user", "content": question}]}
        request = urllib.request.Request(
            f"{url}/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            verdict = json.loads(json.loads(answer.read())["choices"][0]["message"]["content"])
        assert verdict["correct"] == 1, verdict


@contextmanager
def gateway(pool: Path) -> Iterator[str]:
    """`penstock gateway` in a process of its own; gives its address. It ends when its input is closed."""
    command = [sys.executable, "-m", "penstock", "gateway", str(pool), "--port", "0", "--table-every", "0"]
    with subprocess.Popen([*command, "--exit-with-stdin"], stdin=-1, stdout=-1, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield process.stdout.readline().split()[-1]
        process.stdin.close()


def run(provider_url: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        pool = Path(folder) / "pool.toml"
        pool.write_text(f'[[endpoints]]\nurl = "{provider_url}"\nrequests_per_minute = {60 * offline.REQUESTS_PER_S}\n')
        with gateway(pool) as url:
            commands = [[sys.executable, __file__, url, str(worker)] for worker in range(WORKERS)]
            codes = [worker.wait() for worker in [subprocess.Popen(command) for command in commands]]
    assert codes == [0] * WORKERS, codes


async def main() -> None:
    async with offline.provider() as service:
        await asyncio.to_thread(run, service.url)
        print(f"{WORKERS} processes, {service.requests} requests, {service.provider.refused} of them refused")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        work(sys.argv[1], int(sys.argv[2]))
    else:
        asyncio.run(main())
