"""Batches for the demo model, and what has come of them."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import openai
from openai.types import Batch

from tests.waiting import wait_until

MODEL = "sluice-demo"
CHAT = "/v1/chat/completions"
ENDED = ("completed", "failed", "expired", "cancelled")


def write(file: Path, requests: int, max_tokens: int = 8) -> Path:
    with file.open("w") as lines:
        for number in range(requests):
            messages = [{"role": "user", "content": f"Name {number} rivers."}]
            body = {"model": MODEL, "max_tokens": max_tokens, "messages": messages}
            line = {"custom_id": str(number), "method": "POST", "url": CHAT, "body": body}
            lines.write(json.dumps(line) + "\n")
    return file


def submitted(client: openai.OpenAI, file: Path) -> Batch:
    uploaded = client.files.create(file=file, purpose="batch")
    return client.batches.create(input_file_id=uploaded.id, endpoint=CHAT, completion_window="24h")


def completed(client: openai.OpenAI, batch: Batch) -> int:
    """Requests that are answered, as it tells."""
    counts = client.batches.retrieve(batch.id).request_counts
    return counts.completed if counts else 0


def ended(client: openai.OpenAI, batch: Batch, timeout_s: float) -> Batch:
    def look() -> Batch | None:
        found = client.batches.retrieve(batch.id)
        return found if found.status in ENDED else None

    found: Batch = wait_until(look, timeout_s, f"{batch.id} has ended")
    return found


def lines(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    return [json.loads(line) for line in client.files.content(file_id).text.splitlines()] if file_id else []


def ids(client: openai.OpenAI, batch: Batch) -> Counter[str]:
    """The ids of all lines of output and of errors."""
    found = (*lines(client, batch.output_file_id), *lines(client, batch.error_file_id))
    return Counter(each["custom_id"] for each in found)
