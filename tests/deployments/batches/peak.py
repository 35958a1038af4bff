"""The memory that a batch takes: `python -m tests.deployments.batches.peak REQUESTS` prints bytes.

In a process of its own, for the highest use of memory is known of a whole process alone.
"""

import asyncio
import resource
import sys
import tempfile

from deployments.batches import runner as module
from deployments.batches.files import Files
from deployments.batches.runner import Runner
from deployments.batches.state import Batches
from deployments.batches.storage import Storage
from deployments.config.services import BatchesSection
from tests.deployments.batches.routers import Routers, asking, line


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


async def run(requests: int, folder: str) -> None:
    storage, section = Storage(folder), BatchesSection(segment_s=0.5)
    files, batches = Files(storage, section), Batches(storage, section)
    content = (line(f"{number:06}", filler="x" * 200) for number in range(requests))
    record = batches.create("me", None, asking(files.add("me", "in.jsonl", "batch", content).id), window_s=86_400)
    runner = Runner(section, storage, Routers(pause_s=0.001))
    runner.start()
    while batches.open_ids():  # noqa: ASYNC110  # in another thread
        await asyncio.sleep(0.05)
    await runner.close()
    shown = batches.as_openai(record)
    assert shown["request_counts"] == {"total": requests, "completed": requests, "failed": 0}, shown


if __name__ == "__main__":
    module.LOAD_S = 0.02
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(run(int(sys.argv[1]), folder))
    print(peak_bytes())
