"""Asks for one completion, as a client does, and says what came back."""

import json
import os
import sys
import urllib.request

address = os.environ["SLUICE_ADDRESS"]
timeout_s = float(os.environ["SLUICE_TIMEOUT_S"])
headers = {"Content-Type": "application/json"}
if key := os.environ.get("SLUICE_API_KEY"):
    headers["Authorization"] = f"Bearer {key}"


def ask(path, body=None):
    request = urllib.request.Request(address + path, headers=headers, data=body and json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=timeout_s) as response:
        return json.load(response)


model = ask("/v1/models")["data"][0]["id"]
messages = [{"role": "user", "content": "Name three rivers."}]
answer = ask("/v1/chat/completions", {"model": model, "messages": messages, "max_tokens": 16})
print(f"{model}: {answer['choices'][0]['message']['content']!r}, {answer['usage']}")
sys.exit(0 if answer["usage"]["completion_tokens"] > 0 else "no token came")
