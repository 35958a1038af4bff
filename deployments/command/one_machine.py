"""`sluice serve`: the whole application on this machine, from nothing to ready, and back to nothing."""

import contextlib
import os
import signal
import sys
import threading
import time
import urllib.request
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil

from deployments.command.claims import check_address, fresh_run_dir
from deployments.command.cores import engines_undisturbed
from deployments.command.ray_start import start_ray
from deployments.command.stages import Stages
from deployments.config.application import AppConfig
from deployments.process.environment import BODY_TIMEOUT_ENV, START_S, one_machine_env, serve_env
from deployments.process.ports import address
from deployments.process.stages import STAGES_ENV
from policies.errors import ApplicationStartError

ENDING_S = 5.0  # for Ray's processes to end by themselves
STAGES = "stages"  # the file in which processes tell what they do while they start


def prepare(host: str, port: int) -> Path:
    """Checks the address and sets the environment; returns the folder of this run.

    Comes before anything that imports Ray, for Ray reads its environment when it is imported, and vLLM imports Ray: too
    late, it would listen on every interface.

    Raises:
        ApplicationStartError: the address is taken, the folder is not ours or in use, or Ray has been imported.
    """
    if "ray" in sys.modules:
        raise ApplicationStartError(
            "Ray has been imported before its environment was set: it would listen on every interface"
        )
    number = check_address(host, port)
    run_dir = fresh_run_dir(port)
    env = {**serve_env(), **one_machine_env(run_dir, number, port), STAGES_ENV: str(run_dir / STAGES)}
    os.environ.update({name: value for name, value in env.items() if name not in os.environ})
    paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    return run_dir


@contextlib.contextmanager
def running(config: AppConfig, run_dir: Path, host: str, port: int, stages: Stages) -> Iterator[str]:
    """Run the application for the time of the block, after `prepare`; yields its address once it is ready.

    Raises:
        ApplicationStartError: it does not come up.
    """
    stages.follow(run_dir / STAGES)
    stages.begin("starting Ray")
    os.environ.setdefault(BODY_TIMEOUT_ENV, str(round(1e3 * config.router.body_timeout_s)))
    with _ray(run_dir, port, stages):
        _deploy(config, stages)
        url = f"http://{address(host, port)}"
        stages.begin(f"waiting for the first answer of {url}/health")
        _wait_until_healthy(url)
        with engines_undisturbed(config):
            yield url


@contextlib.contextmanager
def _ray(run_dir: Path, port: int, stages: Stages) -> Iterator[None]:
    import ray  # only now, see prepare
    from ray import serve

    here = psutil.Process()
    before = set(here.children(recursive=True))
    try:
        _start_ray(run_dir, port, stages)
        yield
    finally:
        started = set(here.children(recursive=True)) - before
        try:
            # Ray tells at every end that the controller, which it has just ended, cannot finish its task.
            with (
                open(os.devnull, "w") as nowhere,
                contextlib.redirect_stdout(nowhere),
                contextlib.redirect_stderr(nowhere),
            ):
                if ray.is_initialized():  # else Serve would start another Ray in order to shut down
                    from deployments.serving.redis_server import close_redis_servers

                    try:
                        serve.shutdown()
                        close_redis_servers()
                    finally:  # also after a second Ctrl-C
                        ray.shutdown()
        finally:
            end(started)


def _start_ray(run_dir: Path, port: int, stages: Stages) -> None:
    """Raises ApplicationStartError."""
    try:
        start_ray(run_dir, port, stages)
    except Exception as error:  # for what does not come up in its time Ray has errors of every kind, bare ones too
        raise ApplicationStartError(
            f"Ray did not start: {error}\nWhat its parts say of it is in the folder of logs named above"
        ) from error


def end(processes: Iterable[psutil.Process]) -> None:
    """Kill what has not ended by itself after ENDING_S.

    Ray gives its raylet a second to end what that has started, and then kills the raylet alone: on a busy machine its
    agents and workers would go on for up to a minute.
    """
    left = _living_after(processes, ENDING_S)
    for process in left:
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile
            process.kill()
    for process in _living_after(left, ENDING_S):
        say(f"process {process.pid} does not end")


def _living_after(processes: Iterable[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Those that live after the time; returns at once when none does."""
    give_up_s = time.monotonic() + timeout_s
    while (left := [process for process in processes if _lives(process)]) and time.monotonic() < give_up_s:
        time.sleep(0.05)
    return left


def _lives(process: psutil.Process) -> bool:
    """False also for a process that has ended and that its parent has not waited for."""
    with contextlib.suppress(psutil.Error):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def _deploy(config: AppConfig, stages: Stages) -> None:
    from ray import serve

    from deployments.app import application

    _check_resources(config)
    models = config.each_model()
    replicas = sum(each.engine_replicas for each in models)
    names = ", ".join(each.public_name for each in models)
    stages.begin(f"deploying {names} with {replicas} engine replica{'s' * (replicas > 1)}")
    try:
        serve.run(application(config), name=config.name, route_prefix="/")
    except RuntimeError as error:
        raise ApplicationStartError(f"{error}\n{_why(config.name)}") from error


def _check_resources(config: AppConfig) -> None:
    """Ray would wait for ever for what this machine does not have."""
    import ray

    present = ray.cluster_resources()
    lacking = [
        f"{amount:g} of {name}, this machine has {present.get(name, 0.0):g}"
        for name, amount in config.resources.items()
        if amount > present.get(name, 0.0)
    ]
    if lacking:
        raise ApplicationStartError(
            f"the replicas need {'; '.join(lacking)}: set --engine-replicas, --num-gpus, or num_gpus, num_cpus and "
            "resources of engine, router and predictor"
        )


def _why(name: str) -> str:
    """The last lines of each deployment's message about its failure."""
    from ray import serve

    application = serve.status().applications[name]
    messages = [application.message, *(d.message for d in application.deployments.values())]
    return "\n".join("\n".join(message.strip().splitlines()[-12:]) for message in messages if message)


def _wait_until_healthy(url: str) -> None:
    give_up_s = time.monotonic() + START_S
    no_proxy = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while True:
        try:
            # A router that starves beside others answers late, and asking anew makes it later.
            with no_proxy.open(f"{url}/health", timeout=30.0) as response:
                if response.status == 200:
                    return
                why = f"status {response.status}"
        except OSError as error:
            why = str(error)
        if time.monotonic() > give_up_s:
            raise ApplicationStartError(f"{url}/health does not answer as it should: {why}")
        time.sleep(0.2)


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def wait_for_signal() -> None:
    """Until SIGINT or SIGTERM."""
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    stop.wait()
