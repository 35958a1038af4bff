"""drain.py SECONDS: before this pod stops, Ray moves its replicas elsewhere and their requests may end.

Ray Serve starts replacements for the replicas of a draining node and then ends these gracefully. The pod stops when
none is left, at the latest after SECONDS.
"""

import subprocess
import sys
import time

import psutil

limit_s = int(sys.argv[1])
deadline = time.monotonic() + limit_s


def raylet_option(name):
    """An option with which this pod's raylet was started; None without a raylet."""
    for process in psutil.process_iter(["name", "cmdline"]):
        if process.info["name"] == "raylet":
            found = [arg.partition("=")[2] for arg in process.info["cmdline"] or [] if arg.startswith(f"--{name}=")]
            return found[0] if found else None
    return None


def replicas():
    """Processes of Ray Serve's replicas in this pod: Ray names each process after what it runs."""
    titles = (" ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"]))
    return [title for title in titles if title.startswith("ray::ServeReplica")]


address, node_id = raylet_option("gcs-address"), raylet_option("node_id")
if address and node_id:
    command = ["ray", "drain-node", f"--address={address}", f"--node-id={node_id}"]
    command += ["--reason=DRAIN_NODE_REASON_PREEMPTION", "--reason-message=the pod is told to stop"]
    # Fails at once when the whole cluster goes, head included: then nothing could take the replicas.
    subprocess.run([*command, f"--deadline-remaining-seconds={limit_s}"], check=True, timeout=60)
    while replicas() and time.monotonic() < deadline:
        time.sleep(1)
