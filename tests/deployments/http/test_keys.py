"""API keys: their files, and the command that makes them."""

import asyncio
import json
import os
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
import yaml

from deployments.command import cli
from deployments.http.keys import KeyRing, digest, new_key, parse_entries, redis_hash
from policies.errors import ConfigError, StateStoreError
from router.redis_store import connect
from tests.deployments.bodies import key_ring

CLASSES = ("interactive", "offline")


def ring(file: Path | None = None, **source: Any) -> KeyRing:
    return key_ring(CLASSES, file=file, **source)


Command = Callable[..., str]


@pytest.fixture
def command(
    redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Command:
    """`sluice keys` on an application in Redis; returns what it printed."""
    monkeypatch.setenv("SLUICE_REDIS_URL", redis_url)

    def run(*argv: str) -> str:
        cli.main(["keys", *argv, "--application", namespace])
        return capsys.readouterr().out.strip()

    return run


def written(path: Path, *entries: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(list(entries)))
    return path


async def test_a_key_is_found_by_its_hash_alone(tmp_path: Path) -> None:
    key = new_key()
    keys = ring(written(tmp_path / "keys.yaml", {"name": "a", "sha256": digest(key), "classes": ["offline"]}))
    await keys.reload()
    tenant = keys.find(key)
    assert tenant is not None
    assert (tenant.name, tenant.classes) == ("a", frozenset({"offline"}))
    assert keys.find(key + "x") is None
    assert keys.find("") is None
    assert keys.required and not ring().required


async def test_keys_change_without_a_restart_and_a_broken_file_changes_nothing(tmp_path: Path) -> None:
    old, new = new_key(), new_key()
    file = written(tmp_path / "keys.yaml", {"name": "a", "sha256": digest(old)})
    keys = ring(file, entries=[{"name": "b", "sha256": digest("from the environment")}])
    await keys.reload()
    written(file, {"name": "a", "sha256": digest(new)})
    await keys.reload()
    assert keys.find(old) is None
    assert keys.find(new) is not None
    file.write_text("- name: [")
    with pytest.raises(ConfigError, match="not YAML"):
        await keys.reload()
    file.unlink()
    with pytest.raises(ConfigError, match=r"keys\.yaml"):
        await keys.reload()
    assert keys.find(new) is not None
    assert keys.find("from the environment") is not None


async def test_a_file_is_parsed_again_when_it_has_changed_and_not_before(tmp_path: Path) -> None:
    old, new = new_key(), new_key()
    link = tmp_path / "keys.yaml"
    link.symlink_to(written(tmp_path / "one.yaml", {"name": "a", "sha256": digest(old)}))
    keys = ring(link)
    await keys.reload()
    first = keys.find(old)
    await keys.reload()
    assert first is not None and keys.find(old) is first
    other = written(tmp_path / "two.yaml", {"name": "a", "sha256": digest(new)})
    link.unlink()
    link.symlink_to(other)  # as Kubernetes changes a Secret
    await keys.reload()
    assert keys.find(old) is None and keys.find(new) is not None


async def test_tokens_go_on_while_keys_are_read(tmp_path: Path) -> None:
    file, went_on = tmp_path / "keys.yaml", threading.Event()
    os.mkfifo(file)  # a reader of it waits for its writer

    def write() -> bool:
        did = went_on.wait(60)
        file.write_text("[]")
        return did

    writing = asyncio.get_running_loop().run_in_executor(None, write)
    reading = asyncio.create_task(ring(file).reload())
    await asyncio.sleep(0)
    went_on.set()
    await reading
    assert await writing


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("- {name: a, sha256: short}", r"\[0\]\.sha256: "),
        ("- {name: a}", r"\[0\]\.sha256: "),
        ("- {name: a, sha256: " + "0" * 64 + ", colour: red}", r"\[0\]\.colour: "),
        ("- {name: a, sha256: " + "0" * 64 + ", requests_per_minute: 0}", "requests_per_minute"),
        ("just text", "list"),
    ],
)
def test_a_wrong_entry_is_named_by_its_place(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        parse_entries(text, "a file")


def test_a_name_that_an_entry_has_twice_is_named_by_its_line_and_shows_nothing() -> None:
    text = f"- name: a\n  sha256: {'0' * 64}\n  sk-sluice-secret: 1\n  sk-sluice-secret: 2\n"
    with pytest.raises(ConfigError) as caught:
        parse_entries(text, "a file")
    assert str(caught.value) == "a file: line 4 repeats a name of line 3"


async def test_one_key_twice_is_refused(tmp_path: Path) -> None:
    entries = [{"name": name, "sha256": digest("one")} for name in ("a", "b")]
    with pytest.raises(ConfigError, match="'a' and 'b' are one key"):
        await ring(written(tmp_path / "keys.yaml", *entries)).reload()


async def test_a_file_that_is_no_text_is_refused_and_keeps_no_class_from_going_back(tmp_path: Path) -> None:
    key = new_key()
    file = written(tmp_path / "keys.yaml", {"name": "a", "sha256": digest(key)})
    keys = ring(file)
    await keys.reload()
    file.write_bytes(b"- name: \xff\n")
    with pytest.raises(ConfigError, match=r"keys\.yaml: it is not UTF-8"):
        await keys.use_classes(["gold"])
    written(file, {"name": "a", "sha256": digest(key), "classes": ["offline"]})
    await keys.reload()
    assert keys.find(key) is not None


async def test_a_key_that_stands_in_redis_a_second_time_is_left_out_by_itself(
    redis_url: str, namespace: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Else no key that is removed would lose its effect, as long as that stands there."""
    client = connect(redis_url)
    file = written(tmp_path / "keys.yaml", {"name": "of the file", "sha256": digest("one")})
    keys = ring(file, client=client, application=namespace)
    entries = {name: json.dumps({"name": name, "sha256": digest(key)}) for name, key in (("a", "one"), ("b", "two"))}
    await client.hset(redis_hash(namespace), mapping=entries | {"c": entries["b"].replace('"b"', '"c"')})
    await keys.reload()
    first, second = keys.find("one"), keys.find("two")
    assert first is not None and first.name == "of the file"
    assert second is not None and keys.named("c" if second.name == "b" else "b") is None
    assert "the key 'a' is that of 'of the file'" in caplog.text
    await client.hdel(redis_hash(namespace), "b", "c")
    await keys.reload()
    assert keys.find("two") is None
    await client.aclose()


@pytest.mark.parametrize("named", [{"classes": ["offline", "gold"]}, {"default_class": "gold"}])
async def test_a_class_that_is_not_there_is_named_with_its_entry_and_without_the_key(
    tmp_path: Path, named: dict[str, Any]
) -> None:
    key = new_key()
    known = {"name": "a", "sha256": digest(key), "classes": ["offline"], "default_class": "offline"}
    file = written(tmp_path / "keys.yaml", known)
    keys = ring(file)
    await keys.reload()
    written(file, known, {"name": "b", "sha256": digest("another"), **named})
    with pytest.raises(
        ConfigError, match=r"key 'b' names classes \['gold'\]; there are interactive, offline"
    ) as caught:
        await keys.reload()
    assert digest("another") not in str(caught.value)
    assert keys.find(key) is not None and keys.find("another") is None


def test_the_command_prints_a_key_and_an_entry_that_fits_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    cli.main(["keys", "new", "--name", "a", "--classes", "offline", "--tokens-per-minute", "1e6", "--may-tighten"])
    key, entry = capsys.readouterr().out.strip().split("\n", 1)
    (made,) = parse_entries(entry, "what it printed")
    assert made.sha256 == digest(key)
    assert (made.classes, made.tokens_per_minute) == (frozenset({"offline"}), 1e6)
    assert made.tenant.may_tighten


async def test_keys_in_redis_are_made_listed_used_and_removed(
    redis_url: str, namespace: str, command: Command, caplog: pytest.LogCaptureFixture
) -> None:
    key = command("new", "--name", "a", "--store")
    assert json.loads(command("list")) == {"name": "a", "sha256": digest(key)}
    client = connect(redis_url)
    keys = ring(client=client, application=namespace)
    mistyped = command("new", "--name", "b", "--classes", "ofline", "--store")
    await keys.reload()
    assert keys.find(key) is not None and keys.find(mistyped) is None
    assert "the key 'b' names classes ['ofline']" in caplog.text
    command("remove", "a")
    await keys.reload()
    assert keys.find(key) is None
    await client.aclose()


async def test_keys_in_redis_are_parsed_once_and_a_malformed_one_stands_alone(
    redis_url: str, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    client = connect(redis_url)
    keys = ring(client=client, application=namespace)
    stored = {digest(name): json.dumps({"name": name, "sha256": digest(name)}) for name in ("a", "b")}
    await client.hset(redis_hash(namespace), mapping={**stored, "x": "{name: [", "y": b"\xff", "z": "2026-02-30"})
    for _ in range(2):
        await keys.reload()
    assert caplog.text.count("a key in Redis: line 2 is not YAML") == 1
    first = keys.find("a")
    await client.hdel(redis_hash(namespace), digest("b"))
    await keys.reload()
    assert first is not None and keys.find("a") is first
    assert keys.find("b") is None
    await client.aclose()


async def test_a_malformed_key_in_redis_does_not_keep_others_from_being_listed_and_removed(
    redis_url: str, namespace: str, command: Command
) -> None:
    command("new", "--name", "a", "--store")
    client = connect(redis_url)
    await client.hset(redis_hash(namespace), mapping={"x": "{name: [", "y": b"\xff"})
    assert json.loads(command("list"))["name"] == "a"
    command("remove", "a")
    assert set(await client.hkeys(redis_hash(namespace))) == {b"x", b"y"}
    await client.aclose()


@pytest.mark.parametrize("url", ["http://127.0.0.1", "redis://127.0.0.1:port/0", "redis://:secret/x@127.0.0.1:1/0"])
def test_what_is_no_url_of_a_redis_is_an_error_in_words(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("SLUICE_REDIS_URL", url)
    with pytest.raises(SystemExit, match="SLUICE_REDIS_URL is not a Redis URL") as caught:
        cli.main(["keys", "list"])
    assert "secret" not in "".join(traceback.format_exception(caught.value))


def test_a_redis_that_goes_away_between_two_calls_is_an_error_in_words(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: Any) -> None:
        raise redis.ConnectionError("broken")

    command("new", "--name", "a", "--store")
    monkeypatch.setattr(redis.Redis, "hdel", away)
    with pytest.raises(SystemExit, match="Redis: broken"):
        command("remove", "a")


def test_a_redis_that_is_not_there_is_an_error_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICE_REDIS_URL", "redis://127.0.0.1:1/0")
    with pytest.raises(SystemExit, match="Redis"):
        cli.main(["keys", "list"])
    monkeypatch.delenv("SLUICE_REDIS_URL")
    with pytest.raises(SystemExit, match="SLUICE_REDIS_URL"):
        cli.main(["keys", "list"])


@pytest.mark.parametrize("breaks", [False, True])
async def test_a_redis_that_does_not_answer_or_has_just_broken_off_is_told(
    monkeypatch: pytest.MonkeyPatch, breaks: bool
) -> None:
    async def write(name: str) -> None:  # as uvloop refuses it
        raise RuntimeError("unable to perform operation on <TCPTransport closed=True>; the handler is closed")

    client = connect("redis://127.0.0.1:1/0")
    if breaks:
        monkeypatch.setattr(client, "hvals", write)
    with pytest.raises(StateStoreError, match="keys in Redis: " + breaks * "unable to perform"):
        await ring(client=client).reload()
    await client.aclose()


async def test_a_class_that_keys_name_cannot_go(tmp_path: Path) -> None:
    key = new_key()
    keys = ring(written(tmp_path / "keys.yaml", {"name": "a", "sha256": digest(key), "default_class": "offline"}))
    await keys.reload()
    with pytest.raises(ConfigError, match="the key 'a' names classes .'offline'.; there are interactive"):
        await keys.use_classes(["interactive"])
    await keys.reload()  # by the classes of before
    assert keys.find(key) is not None
    await keys.use_classes(["offline", "new"])
    written(tmp_path / "keys.yaml", {"name": "b", "sha256": digest(key), "default_class": "new"})
    await keys.reload()
    assert (found := keys.find(key)) is not None and found.default_class == "new"
