"""What supports serving dies, one after another, under load: the table in docs/reference/failures.md."""

import contextlib
import json
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import openai
import psutil
import pytest
import redis
from playwright.sync_api import expect

from tests.integration.application import START_TIMEOUT_S, Sluice, kill_all
from tests.integration.browser import opened
from tests.integration.traffic import Traffic, undisturbed
from tests.otlp_receiver import Receiver
from tests.waiting import wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

# Of a machine that does nothing else; what is expected stands in the table, and what was before is far above.
SOON_S = 15.0
STARTS = 4  # of Python with Ray Serve: where a new proxy actor takes longer than SOON_S, so does each of these
STANDS_STILL_S = 20.0
# More than without the harm, in the same minute: the machine may be at half of its speed.
NO_CALL_TO_REDIS_S = 4.0  # where all the time that one has would be 5 s
NO_SPANS_SENT_S = 8.0  # where a try to send them is given up after 10 s
REACHED = {200, "ConnectError", "ReadError", "RemoteProtocolError", 503}  # what clients try again, beside answers


def replicas(sluice: Sluice) -> set[int]:
    return {process.pid for process in (*sluice.routers(), *sluice.engine_replicas(), *sluice.engine_cores())}


def another(find: Callable[[], psutil.Process | None], than: psutil.Process) -> psutil.Process:
    def found() -> psutil.Process | None:
        process = find()
        return None if process is None or process.pid == than.pid else process

    process: psutil.Process = wait_until(found, START_TIMEOUT_S, f"another one than {than}")
    return process


def calm(traffic: Traffic) -> float:
    """The seconds that nine of ten new requests take before anything happens."""
    traffic.wait_for_whole_streams(6)
    return traffic.nine_of_ten_s


def soon_s() -> float:
    began_s = time.monotonic()
    subprocess.run([sys.executable, "-c", "import ray.serve"], check=True, timeout=START_TIMEOUT_S)
    return max(SOON_S, STARTS * (time.monotonic() - began_s))


def test_a_killed_controller_stops_no_replica_and_costs_nobody_anything(sluice: Sluice) -> None:
    before, haproxy = replicas(sluice), sluice.haproxy()
    (controller,) = sluice.named("ServeController")
    with undisturbed(sluice) as traffic:
        controller.kill()
        new = another(lambda: next(iter(sluice.named("ServeController")), None), controller)
        log = sluice.logs / "serve" / f"controller_{new.pid}.log"
        wait_until(lambda: log.exists() and "Finished recovering" in log.read_text(), START_TIMEOUT_S, f"{log}")
        another(sluice.haproxy, haproxy)  # HAProxy too starts anew, under the streams
        traffic.wait_for_whole_streams(12)
    assert "will be stopped" not in log.read_text()
    assert replicas(sluice) == before


def test_a_killed_proxy_actor_cuts_no_stream(sluice: Sluice) -> None:
    haproxy = sluice.haproxy()
    assert haproxy is not None
    (actor,) = sluice.named("HAProxyManager")
    with Traffic(sluice) as traffic:
        actor.kill()
        assert traffic.wait_for_a_new_answer() < soon_s()
        another(sluice.haproxy, haproxy)
    assert {stream.why_not for stream in traffic.streams} <= {None, "ConnectError"}  # of new ones
    assert traffic.answers <= REACHED


def test_a_killed_haproxy_is_back_soon_and_says_to_nobody_that_there_is_nothing(sluice: Sluice) -> None:
    haproxy = sluice.haproxy()
    assert haproxy is not None
    with Traffic(sluice) as traffic:
        haproxy.kill()
        assert traffic.wait_for_a_new_answer() < soon_s()
        another(sluice.haproxy, haproxy)
        traffic.wait_for_whole_streams(12)
    assert traffic.answers <= REACHED
    assert {probe.retry_after for probe in traffic.probes if probe.answer == 503} <= {"5"}


def fill(client: "redis.Redis") -> None:
    client.config_set("maxmemory", 1)


@pytest.mark.parametrize("harm", [fill, redis.Redis.script_flush, redis.Redis.flushall], ids=["full", "lost", "empty"])
def test_whatever_happens_to_what_redis_holds_costs_nobody_anything(
    sluice: Sluice, harm: Callable[["redis.Redis"], object]
) -> None:
    with redis.Redis.from_url(sluice.redis_url()) as client, undisturbed(sluice) as traffic:
        room, calm_s = client.config_get("maxmemory")["maxmemory"], calm(traffic)
        try:
            harm(client)
            traffic.wait_for_whole_streams(12)
        finally:
            client.config_set("maxmemory", room)
        traffic.wait_for_a_new_answer()
    assert traffic.nine_of_ten_s < calm_s + NO_CALL_TO_REDIS_S


def test_a_redis_that_stands_still_costs_new_requests_no_more_than_a_moment(sluice: Sluice) -> None:
    check_redis_that_stands_still(sluice, lambda traffic: traffic.wait_for_whole_streams(12))


def check_redis_that_stands_still(sluice: Sluice, until: Callable[[Traffic], None]) -> None:
    server = sluice.redis()
    with undisturbed(sluice) as traffic:
        calm_s = calm(traffic)
        server.suspend()
        try:
            until(traffic)
        finally:
            server.resume()
        traffic.wait_for_whole_streams(12)
    assert traffic.nine_of_ten_s < calm_s + NO_CALL_TO_REDIS_S


def test_a_router_that_can_open_no_file_says_so_and_loses_nothing_for_good(sluice: Sluice) -> None:
    router, _ = sluice.routers()
    (log,) = sluice.logs.glob(f"worker-*-{router.pid}.err")
    most = resource.prlimit(router.pid, resource.RLIMIT_NOFILE)
    used = {int(file.name) for file in Path(f"/proc/{router.pid}/fd").iterdir()}
    none_free = min(set(range(len(used) + 1)) - used)
    with Traffic(sluice) as traffic:
        resource.prlimit(router.pid, resource.RLIMIT_NOFILE, (none_free, most[1]))
        try:
            wait_until(lambda: "no file can be opened" in log.read_text(), START_TIMEOUT_S, "it says so")
            traffic.wait_for_whole_streams(12)
            traffic.wait_for_a_new_answer()
        finally:
            resource.prlimit(router.pid, resource.RLIMIT_NOFILE, most)
        assert router.is_running()
        served = requests_in(log)
        wait_until(lambda: requests_in(log) > served + 12, START_TIMEOUT_S, "it serves again")
    assert {stream.why_not for stream in traffic.streams} <= {None, "502: []"}  # of new ones
    assert traffic.answers <= {200, 502}


def requests_in(log: Path) -> int:
    return sum('"message": "request"' in line for line in log.read_text().splitlines())


@pytest.mark.parametrize("names", [(":Router",), ("raylet/raylet", "gcs_server")], ids=["routers", "ray"])
def test_what_stands_still_for_a_while_goes_on_as_if_nothing_had_been(sluice: Sluice, names: tuple[str, ...]) -> None:
    before, stopped = replicas(sluice), [process for name in names for process in sluice.named(name)]
    assert len(stopped) == 2
    with undisturbed(sluice) as traffic:
        for process in stopped:
            process.suspend()
        time.sleep(STANDS_STILL_S)
        for process in stopped:
            process.resume()
        traffic.wait_for_whole_streams(12)
    assert replicas(sluice) == before


def test_a_receiver_of_traces_that_hangs_costs_nobody_anything(sluice: Sluice, receiver: Receiver) -> None:
    (router, _) = sluice.routers()
    (log,) = sluice.logs.glob(f"worker-*-{router.pid}.err")
    told = log.read_text().count("spans are dropped")
    with undisturbed(sluice) as traffic:
        calm_s = calm(traffic)
        with receiver.hanging():
            wait_until(lambda: log.read_text().count("spans are dropped") > told, 120, "a router gives spans up")
            traffic.wait_for_whole_streams(12)
        before = len(receiver.spans)
        wait_until(lambda: len(receiver.spans) > before, 120, "spans come again")
    assert traffic.nine_of_ten_s < calm_s + NO_SPANS_SENT_S


def test_the_page_shows_a_killed_replica_and_the_one_in_its_place(sluice: Sluice) -> None:
    with opened(sluice.url) as page:
        expect(page.locator("#what")).to_contain_text("2 replicas")
        sluice.engine_replicas()[0].kill()
        expect(page.locator("#replicas .bad")).to_contain_text(["", "gone since"])
        expect(page.locator("#what")).to_contain_text("2 replicas", timeout=1000 * START_TIMEOUT_S)


def test_both_engines_killed_at_once_cost_time_and_no_stream(sluice: Sluice) -> None:
    engines = sluice.engine_replicas()
    assert len(engines) == 2
    with undisturbed(sluice) as traffic:
        for engine in engines:
            engine.send_signal(signal.SIGKILL)
        traffic.wait_for_a_new_answer()


def test_what_vllm_says_of_a_request_is_in_the_log_with_its_id(sluice: Sluice) -> None:
    body = {"model": "nobody", "messages": [{"role": "user", "content": "Hello"}]}
    url, headers = f"{sluice.url}/v1/chat/completions", {"X-Request-Id": "looked-for"}
    assert httpx.post(url, json=body, headers=headers, timeout=60, trust_env=False).status_code == 404
    lines = wait_until(lambda: lines_about(sluice.logs, "looked-for"), 60, "the lines about it")
    assert {line["levelname"] for line in lines if line["name"].startswith("vllm.")} == {"ERROR"}
    (request,) = [line for line in lines if line["message"] == "request"]
    assert (request["status"], "nobody" in request["error"]) == (404, True)


def lines_about(logs: Path, request_id: str) -> list[dict[str, str]]:
    """Once the last of them is written, which is the request's own."""
    lines = [line for log in logs.glob("worker-*.err") for line in log.read_text().splitlines() if request_id in line]
    found = [json.loads(line) for line in lines]
    return found if any(line["message"] == "request" for line in found) else []


def test_routers_that_die_leave_no_response_in_progress_and_every_stored_one(sluice: Sluice) -> None:
    client, cores = sluice.client(), sluice.engine_cores()
    kept = client.responses.create(model="sluice-demo", input="Rivers?", max_output_tokens=8)
    for core in cores:  # so that it cannot end before
        core.suspend()
    try:
        begun = client.responses.create(model="sluice-demo", input="Rivers?", background=True)
        kill_all(sluice.routers())
    finally:
        for core in cores:
            core.resume()

    def answered() -> str | None:
        with contextlib.suppress(openai.APIError):  # nobody is there yet
            return sluice.client().responses.retrieve(begun.id).status
        return None

    in_progress = (None, "queued", "in_progress")
    wait_until(lambda: answered() not in in_progress, START_TIMEOUT_S, "a new router tells that it has failed")
    lost = sluice.client().responses.retrieve(begun.id)
    assert (lost.status, lost.error and "router" in lost.error.message) == ("failed", True)
    again = sluice.client().responses.create(
        model="sluice-demo", input="And?", previous_response_id=kept.id, max_output_tokens=8
    )
    assert again.output_text
