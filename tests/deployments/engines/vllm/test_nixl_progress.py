"""A real NIXL agent, idle: how much processor its progress thread takes."""

import subprocess
import sys

import pytest

# In a process of its own, for what it changes would stay; the agent's threads count with it.
SCRIPT = """
import sys, time
from nixl import _api
from deployments.engines.vllm.nixl_progress import sleep_between_events
if sys.argv[1] == "sleeping":
    sleep_between_events(1000)
agent = _api.nixl_agent("idle", _api.nixl_agent_config(num_threads=4, capture_telemetry=True))
began_s = time.process_time()
time.sleep(1.0)
print("cpu_s", time.process_time() - began_s)
"""


def idle_cpu_s(how: str) -> float:
    command = [sys.executable, "-c", SCRIPT, how]
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    (line,) = [line for line in output.splitlines() if line.startswith("cpu_s ")]
    return float(line.removeprefix("cpu_s "))


@pytest.mark.long
@pytest.mark.slow
def test_an_idle_agent_takes_next_to_no_processor() -> None:
    takes = (idle_cpu_s("sleeping") for _ in range(3))  # a noisy machine may count other things with it
    sleeping = next((cpu_s for cpu_s in takes if cpu_s < 0.1), None)
    assert sleeping is not None
    tries = (idle_cpu_s("stock") for _ in range(3))  # one that found no free core has taken little of any
    assert any(stock > 5 * sleeping for stock in tries), (
        "NIXL sleeps by itself by now: this module is not needed any more"
    )
