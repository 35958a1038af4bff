"""`sluice keys`: make API keys, and keep them in Redis."""

import argparse
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import redis

from deployments.http.keys import KeyEntry, digest, new_key, parse_entries, redis_hash, stored_entries
from deployments.process.environment import REDIS_URL_ENV
from policies.errors import ConfigError, StateStoreAccessError, StateStoreError
from router.redis_store import CALL_TIMEOUT_S, not_a_url, tls_options, why_refused

_EPILOG = """\
examples:
  sluice keys new --name team-a                         prints a key, and the entry for the file that keys.file names
  sluice keys new --name team-b --classes offline --tokens-per-minute 2e6
  sluice keys new --name team-c --store                 writes the entry to Redis (SLUICE_REDIS_URL) instead
  sluice keys list
  sluice keys remove team-c

A key is shown once: only its SHA-256 is kept. Routers read keys again every few seconds."""


def register(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    keys = commands.add_parser(
        "keys",
        help="make, list and remove API keys",
        description="Make API keys, and list or remove those in Redis.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = keys.add_subparsers(dest="action", required=True)
    new = actions.add_parser("new", help="make a key")
    new.add_argument("--name", required=True, help="whose key it is; it stands in logs")
    new.add_argument("--default-class", help="class of its requests that name none")
    new.add_argument("--classes", nargs="+", help="classes that it may ask for (default: all)")
    new.add_argument("--requests-per-minute", type=float, help="default: no limit")
    new.add_argument("--tokens-per-minute", type=float, help="prompt and answer (default: no limit)")
    tightens = "its x-slo-* headers may also ask for closer targets than those of its class"
    new.add_argument("--may-tighten", action="store_true", default=None, help=tightens)
    new.add_argument("--store", action="store_true", help="keep it in Redis")
    new.set_defaults(run=make)
    listing = actions.add_parser("list", help="the keys in Redis")
    listing.set_defaults(run=show)
    remove = actions.add_parser("remove", help="remove keys from Redis by name")
    remove.add_argument("name")
    remove.set_defaults(run=forget)
    for action in (new, listing, remove):
        action.add_argument("--application", default="sluice", help="`name` of the application (default: %(default)s)")
        action.add_argument("--redis-ca-certs", metavar="FILE", help="CA certificates of a Redis at rediss://")


@contextmanager
def _redis(ca_certs: str | None) -> Iterator["redis.Redis"]:
    url = os.environ.get(REDIS_URL_ENV)
    if url is None:
        raise ConfigError(f"{REDIS_URL_ENV} must name the Redis that the application uses")
    tls = tls_options(url, ca_certs)
    try:
        client = redis.Redis.from_url(url, socket_timeout=CALL_TIMEOUT_S, socket_connect_timeout=CALL_TIMEOUT_S, **tls)
    except ValueError:
        raise not_a_url(REDIS_URL_ENV) from None
    try:
        with client:
            yield client
    except redis.RedisError as error:
        if why := why_refused(error):
            raise StateStoreAccessError(why) from None
        raise StateStoreError(f"Redis: {error}") from error


def _stored(client: "redis.Redis", application: str) -> list[KeyEntry]:
    return [entry for raw in cast(list[bytes], client.hvals(redis_hash(application))) for entry in stored_entries(raw)]


def make(options: argparse.Namespace) -> None:
    key = new_key()
    fields: dict[str, Any] = {"name": options.name, "sha256": digest(key)}
    for field in ("default_class", "classes", "requests_per_minute", "tokens_per_minute", "may_tighten"):
        if (value := getattr(options, field)) is not None:
            fields[field] = value
    entry = json.dumps(fields)
    parse_entries(f"[{entry}]", "the new key")
    if options.store:
        with _redis(options.redis_ca_certs) as client:
            client.hset(redis_hash(options.application), fields["sha256"], entry)
    print(key)
    if not options.store:
        print(f"- {entry}")


def show(options: argparse.Namespace) -> None:
    with _redis(options.redis_ca_certs) as client:
        entries = _stored(client, options.application)
    for entry in sorted(entries, key=lambda e: e.name):
        print(json.dumps(entry.model_dump(mode="json", exclude_defaults=True)))


def forget(options: argparse.Namespace) -> None:
    with _redis(options.redis_ca_certs) as client:
        found = [entry.sha256 for entry in _stored(client, options.application) if entry.name == options.name]
        if not found:
            raise ConfigError(f"no key of {options.name!r} in Redis")
        client.hdel(redis_hash(options.application), *found)
    print(f"removed {len(found)} key{'s' * (len(found) > 1)} of {options.name}")
