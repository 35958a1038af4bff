"""What runs on the host of the clients: `Traffic` until its standard input ends, then what became of it, as JSON.

    python -m tests.hosts.clients FILE URL [URL ...]

It prints a line when all its streams run. Times in FILE are of time.monotonic(), which hosts of one machine share.
"""

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.integration.traffic import Traffic

STREAMS, TOKENS = 12, 300
PATIENCE_S = 100.0


@dataclass(frozen=True)
class Address:
    url: str


def main() -> None:
    file, url, *more = sys.argv[1:]
    with Traffic(Address(url), more_urls=more, streams=STREAMS, tokens=TOKENS, patience_s=PATIENCE_S) as traffic:
        print("running", flush=True)
        sys.stdin.read()
    found = {"streams": [asdict(each) for each in traffic.streams], "probes": [asdict(each) for each in traffic.probes]}
    Path(file).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
