"""An operator of a manager, as a process of its own: asks its pages in turn and says how long each answer took.

`python -m penstock.bench.manager_operator URL`, with the token in PENSTOCK_TOKEN, until its standard input ends; then
one line of JSON, seconds of every answer. A process of its own, so that it waits for nobody but the manager.
"""

from __future__ import annotations

import http.client
import itertools
import json
import os
import select
import sys
import time

PAGES = ("/instances", "/samples", "/metrics")
PAUSE_S = 0.02
ANSWER_S = 30.0


def main() -> None:
    host = sys.argv[1].rpartition("//")[2]
    connection = http.client.HTTPConnection(host, timeout=ANSWER_S)
    headers = {"Authorization": f"Bearer {os.environ['PENSTOCK_TOKEN']}"}
    answers_s = []
    for page in itertools.cycle(PAGES):
        began = time.monotonic()
        connection.request("GET", page, headers=headers)
        response = connection.getresponse()
        response.read()
        if response.status != 200:
            raise SystemExit(f"{page}: HTTP {response.status}")
        answers_s.append(time.monotonic() - began)
        if select.select([sys.stdin], [], [], PAUSE_S)[0]:
            break
    print(json.dumps(answers_s))


if __name__ == "__main__":
    main()
