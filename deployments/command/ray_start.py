"""Ray and Ray Serve of `sluice serve`: only the parts that it needs, with as long as a busy machine takes for them.

Ray (2.60) starts an autoscaler, a dashboard without pages, a monitor of logs and an agent that collects metrics, which
has no switch, at four fifths of the CPU time that Ray takes to start; its raylet waits for the last of them, and ends
when that is late. And half a minute for a raylet and a minute for a proxy stand in its code. So both are held here,
for the time of the start: see docs/reference/workarounds.md.
"""

import functools
import logging
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from deployments.command.stages import Stages
from deployments.process.environment import START_S
from deployments.process.ports import free_port
from policies.errors import ApplicationStartError

LOOK_S = 0.1  # between two looks for the raylet
# Of the raylet's command line. In the place of the agent is something that lives as long as the raylet, which ends when
# its agent does; and it would wait for the agent to name ports: -1 says that there are none.
_WITHOUT_AGENT = {
    "--dashboard_agent_command": 'setpriv --pdeathsig KILL sh -c "exec sleep infinity"',
    "--metrics-agent-port": "-1",
    "--metrics_export_port": "-1",
    "--dashboard_agent_listen_port": "-1",
}
_PARTS = {"gcs_server": "its tables (GCS)", "raylet": "its raylet"}


def start_ray(run_dir: Path, port: int, stages: Stages) -> None:
    """Raises Ray's own exceptions for a part that does not come up, ApplicationStartError for one that has ended."""
    import ray  # only now, see one_machine.prepare
    from ray import serve
    from ray.serve._private import api, client

    # Its lines of the start are not about what the user did, and one reads like a warning.
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    for waiting in (api, client):
        waiting.HTTP_PROXY_TIMEOUT = START_S
    with _small_and_patient(stages):
        ray.init(
            address="local",
            include_dashboard=False,
            log_to_driver=False,
            logging_level="error",
            object_store_memory=80 << 20,  # little more than Ray demands: no data travels through its store
            _temp_dir=str(run_dir / "ray"),
        )
    stages.begin("starting Ray Serve: waiting for its controller and its proxy")
    serve.start(http_options={"host": "127.0.0.1", "port": port})


@contextmanager
def _small_and_patient(stages: Stages) -> Iterator[None]:
    """For the time of the block Ray starts in this process without those parts, and with patience for the others."""
    from ray._private import node, parameter, services

    raylet = _Raylet(services.start_ray_process, services.get_node, stages)
    parameters = functools.partial(
        parameter.RayParams, no_monitor=True, include_log_monitor=False, runtime_env_agent_port=free_port()
    )
    with (
        _replaced(parameter, "RayParams", parameters),
        _replaced(node.Node, "start_api_server", lambda *_, **__: None),
        _replaced(services, "start_ray_process", raylet.start_process),
        _replaced(services, "get_node", raylet.registered),
    ):
        yield


@contextmanager
def _replaced(place: Any, name: str, value: object) -> Iterator[None]:
    was = getattr(place, name)
    setattr(place, name, value)
    try:
        yield
    finally:
        setattr(place, name, was)


class _Raylet:
    """The functions that Ray calls to start its processes, and to learn whether the raylet has registered."""

    def __init__(self, start: Callable[..., Any], look_up: Callable[[str, str], Any], stages: Stages) -> None:
        self._start, self._look_up, self._stages = start, look_up, stages
        self._process: subprocess.Popen[bytes] | None = None

    def start_process(self, command: list[str], process_type: str, *args: Any, **options: Any) -> Any:
        if process_type in _PARTS:
            self._stages.begin(f"starting Ray: waiting for {_PARTS[process_type]}")
        if process_type != "raylet":
            return self._start(command, process_type, *args, **options)
        info = self._start(_without_agent(command), process_type, *args, **options)
        self._process = info.process
        return info

    def registered(self, gcs_address: str, node_id: str) -> Any:
        """Wait until Ray's own function returns, and return its result.

        Raises:
            RuntimeError: Ray's, after START_S.
            ApplicationStartError: the raylet has ended.
        """
        give_up_s = time.monotonic() + START_S
        while True:
            try:
                return self._look_up(gcs_address, node_id)
            except RuntimeError:
                if self._process is not None and (status := self._process.poll()) is not None:
                    raise ApplicationStartError(f"its raylet has ended with status {status}") from None
                if time.monotonic() > give_up_s:
                    raise
            time.sleep(LOOK_S)


def _without_agent(command: list[str]) -> list[str]:
    kept = [part for part in command if part.partition("=")[0] not in _WITHOUT_AGENT]
    return [*kept, *(f"{name}={value}" for name, value in _WITHOUT_AGENT.items())]
