"""What outlives a redeploy on a Ray that runs already: batches, responses in the background, the embedded Redis, which
lives as long as the application does."""

import copy
import hashlib
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
import yaml

from deployments.serving.embedded_redis import PREFIX
from deployments.serving.redis_server import LOOKS, WATCH_S
from tests.integration import batches
from tests.integration.application import START_TIMEOUT_S, alive, command_of
from tests.integration.ray_head import LOCAL, RayHead
from tests.waiting import wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]

MOST_SECONDS_WITHOUT_STATUS = 2.0
ACTORS = "/api/v0/actors?detail=true&limit=1000"
ASKING = ("one", "two")  # applications that do nothing but ask where their Redis is
LINES = 1500
LEAVES_S = 5.0  # in which a router that is told to leave would have left
# More than are made until Ray Serve sees that its router has no more requests.
LONG: dict[str, Any] = {"max_output_tokens": 1000, "extra_body": {"ignore_eos": True}}


class StatusPage:
    """Asked for ten times a second, for the time of the block."""

    def __init__(self, url: str) -> None:
        self._url, self._enough = f"{url}/sluice/status", threading.Event()
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self.answers: list[tuple[float, int | str]] = []

    def _ask(self) -> None:
        while not self._enough.wait(0.1):
            self.answers.append((time.monotonic(), status_of(self._url)))

    def __enter__(self) -> "StatusPage":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._enough.set()
        self._thread.join(60)

    @property
    def longest_without_s(self) -> float:
        """From the last answer of 200 to the next, where there is another one in between."""
        good = [at_s for at_s, answer in self.answers if answer == 200]
        bad = [at_s for at_s, answer in self.answers if answer != 200]
        return max(
            (b - a for a, b in zip(good, good[1:], strict=False) if any(a < each < b for each in bad)), default=0
        )


def status_of(url: str) -> int | str:
    try:
        with urllib.request.urlopen(url, timeout=10) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError as error:
        return type(error).__name__


def settings(*asking: str, **args: Any) -> dict[str, Any]:
    """The shipped configuration with other `args` on top, and these applications that ask."""
    made = yaml.safe_load(LOCAL.read_text())
    (shipped,) = made["applications"]
    shipped["args"]["engine"] |= {"replicas": 1, "drain_timeout_s": START_TIMEOUT_S}
    shipped["args"] |= args
    for name in asking:
        asks = {"name": name, "route_prefix": f"/{name}", "import_path": "tests.integration.asks_for_redis:build"}
        made["applications"].append({**asks, "args": copy.deepcopy(args)})
    return made


@pytest.fixture(scope="module")
def with_batches(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return {"batches": {"folder": str(tmp_path_factory.mktemp("batches"))}}


@pytest.fixture(scope="module")
def head(ray_on_loopback: RayHead, with_batches: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> RayHead:
    ray_on_loopback.deploy(settings(*ASKING, **with_batches), tmp_path_factory.mktemp("deployed"))
    for name in ("sluice", *ASKING):
        wait_until(lambda name=name: ray_on_loopback.serving(name), START_TIMEOUT_S, f"all replicas of {name} run")
    return ray_on_loopback


def processes(name: str) -> list[psutil.Process]:
    ours = psutil.Process().children(recursive=True)
    return [each for each in ours if any(name in part for part in command_of(each))]


def redis_of(head: RayHead, application: str) -> psutil.Process:
    """Raises ValueError while there is none."""
    (owner,) = (
        each["pid"]
        for each in head.listed("actors")
        if (each["name"], each["state"]) == (f"redis-{application}", "ALIVE")
    )
    (found,) = psutil.Process(owner).children()
    return found


def password_of(redis: psutil.Process) -> str:
    lines = Path(redis.cwd(), "redis.conf").read_text().splitlines()
    return dict(line.split(" ", 1) for line in lines)["requirepass"]


def address_of(head: RayHead, application: str) -> str:
    with urllib.request.urlopen(f"{head.url}/{application}", timeout=60) as response:
        return str(response.read().decode())


def redeployed(head: RayHead, folder: Path, name: str, made: dict[str, Any]) -> None:
    """Returns once other replicas run, and no old one."""
    before = head.serving(name)
    head.deploy(made, folder)
    wait_for_others(head, name, before)


def wait_for_others(head: RayHead, name: str, before: dict[str, int]) -> None:
    def replaced() -> bool:
        now = head.serving(name)
        return bool(now) and not before.keys() & now.keys()

    wait_until(replaced, START_TIMEOUT_S, f"all replicas of {name} have been replaced")


def is_leaving(head: RayHead, deployment: str) -> bool:
    """Whether one of its replicas is. While an application is built, Ray lists no deployments."""
    found = head.applications()["sluice"]["deployments"].get(deployment, {"replicas": []})
    return any(replica["state"] == "STOPPING" for replica in found["replicas"])


def test_a_redeploy_loses_no_line_of_a_batch_and_no_response_in_the_background(
    head: RayHead, with_batches: dict[str, Any], tmp_path: Path
) -> None:
    before = head.serving("sluice")
    (core,) = processes("VLLM::EngineCore")
    with openai.OpenAI(base_url=f"{head.url}/v1", api_key="none", timeout=180) as client:
        batch = batches.submitted(client, batches.write(tmp_path / "in.jsonl", LINES))
        wait_until(lambda: batches.completed(client, batch), START_TIMEOUT_S, "some lines are answered")
        core.suspend()  # so that nothing ends before its router is told to leave
        try:
            begun = client.responses.create(model=batches.MODEL, input="Rivers?", background=True, **LONG)
            head.deploy(settings(*ASKING, **with_batches, default_class="offline"), tmp_path)
            wait_until(lambda: is_leaving(head, "Router"), START_TIMEOUT_S, "the old router is told to leave")
            time.sleep(LEAVES_S)
        finally:
            core.resume()
        wait_for_others(head, "sluice", before)
        response = client.responses.retrieve(begun.id)
        assert response.usage is not None and response.usage.output_tokens == LONG["max_output_tokens"], response
        ended = batches.ended(client, batch, START_TIMEOUT_S)
        assert ended.status == "completed"
        assert batches.ids(client, ended) == {str(number): 1 for number in range(LINES)}


def test_a_redeploy_keeps_the_redis_and_the_status_page(head: RayHead, tmp_path: Path) -> None:
    redis, password = redis_of(head, "sluice"), password_of(redis_of(head, "sluice"))
    with StatusPage(head.url) as page:
        redeployed(head, tmp_path, "sluice", settings(*ASKING, default_class="interactive"))
    assert redis_of(head, "sluice") == redis and alive([redis])
    assert password_of(redis) == password
    assert len(page.answers) > 20
    assert page.longest_without_s < MOST_SECONDS_WITHOUT_STATUS, page.answers


def test_applications_of_one_name_have_each_a_redis_of_their_own(head: RayHead) -> None:
    """`name` of the settings is "sluice" in all of them, by default."""
    assert len({redis_of(head, name).pid for name in ("sluice", *ASKING)}) == 3
    assert address_of(head, "one") != address_of(head, "two")


def test_its_password_stands_in_no_log_and_in_nothing_that_ray_shows(head: RayHead) -> None:
    passwords = [password_of(redis_of(head, name)).encode() for name in ("sluice", *ASKING)]
    shown = [
        head.get(path)
        for path in (
            "/api/serve/applications/",
            ACTORS,
            "/api/v0/tasks?detail=true&limit=1000",
            "/api/v0/objects?detail=true&limit=1000",
            "/api/v0/workers?detail=true&limit=1000",
            "/logical/actors",
        )
    ]
    assert b"redis-sluice" in shown[1], "the actor is among what is shown"
    logs = [path for path in head.temporary.glob("ray/session_*/logs/**/*") if path.is_file()]
    assert len(logs) > 20
    found = [path for path in logs if any(password in path.read_bytes() for password in passwords)]
    assert not found
    assert not [page for page in shown if any(password in page for password in passwords)]


@pytest.mark.parametrize("victim", ["owner", "redis"])
def test_a_killed_redis_or_its_owner_comes_back_under_the_same_address(head: RayHead, victim: str) -> None:
    owner, redis, address = redis_of(head, "one").parent(), redis_of(head, "one"), address_of(head, "one")
    password = password_of(redis)
    assert owner is not None
    (owner if victim == "owner" else redis).kill()

    def another() -> bool:
        try:
            return password_of(redis_of(head, "one")) == password and redis_of(head, "one") != redis
        except (ValueError, psutil.Error, OSError):  # between the two
            return False

    wait_until(another, START_TIMEOUT_S, "another one with this password")
    assert not alive([redis])
    assert address_of(head, "one") == address
    assert (redis_of(head, "one").parent() == owner) == (victim == "redis")


END = """
import sys, ray
ray.init(address=sys.argv[1], logging_level="error")
ray.kill(ray.get_actor("redis-one", namespace="sluice"))
"""


def test_a_redeploy_brings_a_redis_where_there_is_none(head: RayHead, tmp_path: Path) -> None:
    before = redis_of(head, "one")
    subprocess.run([sys.executable, "-c", END, head.address], env=head.env, check=True, timeout=120)
    wait_until(lambda: not alive([before]), START_TIMEOUT_S, "it has ended with its owner")
    redeployed(head, tmp_path, "one", settings(*ASKING, default_class="offline"))
    password = password_of(redis_of(head, "one"))
    assert address_of(head, "one").startswith(hashlib.sha256(password.encode()).hexdigest())
    assert redis_of(head, "one") != before


def test_after_its_deletion_nothing_of_an_application_is_left(head: RayHead, tmp_path: Path) -> None:
    """And a new one of that name has a new Redis."""
    redis, before = redis_of(head, "two"), address_of(head, "two")
    owner, folder = redis.parent(), Path(redis.cwd())
    assert owner is not None and folder.is_dir() and folder.name.startswith(PREFIX)
    head.deploy(settings("one", default_class="offline"), tmp_path)
    wait_until(lambda: "two" not in head.applications(), START_TIMEOUT_S, "the application is gone")
    wait_until(lambda: not alive([owner, redis]), 10 * LOOKS * WATCH_S, "its Redis and the owner of that are gone")
    assert not folder.exists()
    assert alive([redis_of(head, "sluice"), redis_of(head, "one")])

    head.deploy(settings(*ASKING, default_class="offline"), tmp_path)
    wait_until(lambda: head.serving("two"), START_TIMEOUT_S, "it is there again")
    assert address_of(head, "two") != before


def test_once_serve_is_shut_down_nothing_is_left(head: RayHead, tmp_path: Path) -> None:
    servers = [redis_of(head, name) for name in ("sluice", *ASKING)]
    folders = [Path(redis.cwd()) for redis in servers]  # a killed owner's goes at a later start
    head.deploy({"applications": []}, tmp_path)
    wait_until(lambda: not alive(servers), START_TIMEOUT_S, "no Redis is left")
    wait_until(lambda: not processes("RedisServer"), START_TIMEOUT_S, "no owner is left")
    assert not [folder for folder in folders if folder.exists()]
