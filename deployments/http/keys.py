"""API keys: which requests may come, of which classes, and how much.

A key is kept as its SHA-256 alone. Keys come from a YAML file, from the environment variable SLUICE_API_KEYS (the same
YAML) and from Redis; all are read again every few seconds, so that keys change without a restart. `sluice keys new`
makes one. Entries:

    - name: team-a
      sha256: 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08
      default_class: interactive
      classes: [interactive, standard]      # none: all
      requests_per_minute: 600              # none: no limit
      tokens_per_minute: 1000000
      may_tighten: true                     # none: its x-slo-* headers may only loosen the targets of its class
"""

import asyncio
import hashlib
import json
import logging
import secrets
from collections.abc import Awaitable, Collection, Iterable, Iterator, Mapping
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, cast

import redis.asyncio as redis
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from deployments.config.messages import what_is_wrong
from deployments.config.section import LiveKey
from deployments.config.yaml_text import load_yaml
from policies.errors import ConfigError, StateStoreError
from router.admission import Tenant
from router.redis_store import AWAY

logger = logging.getLogger(__name__)

KEYS_ENV = "SLUICE_API_KEYS"
RELOAD_S = 5.0  # from a change of a key to its effect
MAX_FILE_BYTES = 32 << 20  # some 300 bytes for each of the most keys
_PREFIX = "sk-sluice-"
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class KeyEntry(BaseModel):
    """One key as it is written down."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    name: LiveKey[str] = Field(min_length=1, max_length=64)
    """Whose key it is; it stands in logs and metrics."""
    sha256: LiveKey[str] = Field(pattern=r"^[0-9a-f]{64}$")
    """The SHA-256 of the key, in hexadecimal; `sluice keys new` prints it."""
    default_class: LiveKey[str | None] = None
    """The class of its requests that name none; null is `default_class` of the application."""
    classes: LiveKey[frozenset[str] | None] = None
    """The classes that it may ask for; null allows all."""
    requests_per_minute: LiveKey[Rate | None] = None
    """Requests that it may start; a minute's worth may come at once. null sets no limit."""
    tokens_per_minute: LiveKey[Rate | None] = None
    """Tokens of prompts and answers together; a minute's worth may come at once. null sets no limit."""
    may_tighten: LiveKey[bool] = False
    """Whether its requests may ask for tighter targets than their class has."""

    @cached_property
    def tenant(self) -> Tenant:
        return Tenant(
            name=self.name,
            default_class=self.default_class,
            classes=self.classes,
            requests_per_minute=self.requests_per_minute,
            tokens_per_minute=self.tokens_per_minute,
            may_tighten=self.may_tighten,
        )


_entries = TypeAdapter(Annotated[list[KeyEntry], Field(max_length=100_000)])  # which are parsed within a second


def new_key() -> str:
    """A key of 256 random bits: nobody can guess it, so one round of SHA-256 protects it."""
    return _PREFIX + secrets.token_urlsafe(32)


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def parse_entries(text: str, source: str) -> list[KeyEntry]:
    """Raises ConfigError that names the source and the entry, never a value."""
    try:
        return _entries.validate_python(load_yaml(text) or [])
    except ConfigError as error:
        raise ConfigError(f"{source}: {str(error).partition(':')[0]}") from None
    except ValidationError as error:
        wrong = "; ".join(f"entry {each}" for each in what_is_wrong(error, KeyEntry, shows_values=False))
        raise ConfigError(f"{source}: {wrong}") from None


def salt_of_key(name: str, own: str | None) -> str:
    """What a key's prompts have in common in the engines' caches: by its name and its client's own salt.

    No secret is needed: every request of a key goes through here, and no two pairs give the same text to hash, so that
    no client can make another key's salt. The key itself is no part of it.
    """
    return hashlib.sha256(json.dumps([name, own]).encode()).hexdigest()


def redis_hash(application: str) -> str:
    """The Redis hash of an application's keys: SHA-256 -> one entry in YAML."""
    return f"{{sluice:{application}}}:keys"


class KeyRing:
    """All keys of an application. `reload` before use, and again from time to time."""

    def __init__(
        self,
        *,
        file: Path | None,
        environment: str | None,
        client: "redis.Redis | None",
        application: str,
        classes: Collection[str],
    ) -> None:
        """Args:
        classes: the classes of the application.
        """
        self._file, self._environment, self._redis = file, environment, client
        self._hash, self._classes = redis_hash(application), frozenset(classes)
        self._tenants: Mapping[str, Tenant] = {}
        self._by_name: Mapping[str, Tenant] = {}
        self._file_read: tuple[str, list[KeyEntry]] | None = None
        self._redis_read: dict[bytes, list[KeyEntry]] = {}

    @property
    def required(self) -> bool:
        """Whether a request needs a key: where a source of keys is configured."""
        return self._file is not None or self._environment is not None or self._redis is not None

    async def use_classes(self, classes: Collection[str]) -> None:
        """Replace the classes of the application. Raises as `reload`; after a ConfigError all is as it was."""
        before, self._classes = self._classes, frozenset(classes)
        try:
            await self.reload()
        except ConfigError:
            self._classes = before
            raise

    def find(self, key: str) -> Tenant | None:
        """Looked up by its hash: the time that it takes tells only of the hash, from which no key can be found."""
        return self._tenants.get(digest(key))

    def named(self, name: str) -> Tenant | None:
        """The tenant of the key with this name; None if it has been removed."""
        return self._by_name.get(name)

    async def reload(self) -> None:
        """Read every source again, and parse what is new in it. When one cannot be read, the keys stay as they are.

        Raises:
            ConfigError: the file or the environment is malformed or names a class that is not there, or two of their
                entries have one key. A wrong one in Redis, where nobody could check it, is left out by itself.
            StateStoreError: Redis does not answer.
        """
        stored = await self._from_redis()
        self._tenants = await asyncio.to_thread(self._parsed, stored)  # thousands of keys take longer than a step
        self._by_name = {tenant.name: tenant for tenant in self._tenants.values()}

    def _parsed(self, stored: Iterable[bytes]) -> Mapping[str, Tenant]:
        configured = [*self._from_file(), *self._from_environment]
        for entry in configured:
            if wrong := self._wrong_classes(entry):
                raise ConfigError(wrong)
        read = self._redis_read
        self._redis_read = {raw: read[raw] if raw in read else stored_entries(raw) for raw in stored}
        return _by_hash(configured, self._usable(chain.from_iterable(self._redis_read.values())))

    def _usable(self, entries: Iterable[KeyEntry]) -> Iterator[KeyEntry]:
        for entry in entries:
            if wrong := self._wrong_classes(entry):
                logger.error("%s: it is refused until that is put right", wrong)
            else:
                yield entry

    def _wrong_classes(self, entry: KeyEntry) -> str:
        """What is wrong with the classes that it names, or ""."""
        named = (entry.classes or frozenset()) | ({entry.default_class} if entry.default_class else frozenset())
        if not (unknown := named - self._classes):
            return ""
        return f"the key {entry.name!r} names classes {sorted(unknown)}; there are {', '.join(sorted(self._classes))}"

    def _from_file(self) -> list[KeyEntry]:
        if self._file is None:
            return []
        try:
            if self._file.stat().st_size > MAX_FILE_BYTES:
                raise ConfigError(f"keys.file {self._file} exceeds {MAX_FILE_BYTES} bytes")
            text = self._file.read_text("utf-8")
        except OSError as error:
            raise ConfigError(f"keys.file {self._file}: {error.strerror}") from error
        except UnicodeDecodeError:
            raise ConfigError(f"keys.file {self._file}: it is not UTF-8") from None
        if self._file_read is None or self._file_read[0] != text:
            self._file_read = text, parse_entries(text, f"keys.file {self._file}")
        return self._file_read[1]

    @cached_property
    def _from_environment(self) -> list[KeyEntry]:
        return [] if self._environment is None else parse_entries(self._environment, KEYS_ENV)

    async def _from_redis(self) -> list[bytes]:
        if self._redis is None:
            return []
        try:
            async with asyncio.timeout(RELOAD_S):
                return cast(list[bytes], await cast(Awaitable[Any], self._redis.hvals(self._hash)))
        except AWAY as error:
            raise StateStoreError(f"keys in Redis: {error}") from error


def stored_entries(raw: bytes) -> list[KeyEntry]:
    """One entry, or none if it is malformed: a malformed key must not keep changes of others from taking effect, above
    all those that revoke keys."""
    try:
        return parse_entries(f"[{raw.decode()}]", "a key in Redis")
    except (ConfigError, UnicodeDecodeError) as error:
        logger.error("%s: it is refused until that is put right", error)
        return []


def _by_hash(configured: Iterable[KeyEntry], stored: Iterable[KeyEntry]) -> dict[str, Tenant]:
    """Raises ConfigError: two configured entries have one key. A stored one whose key is known already is left out."""
    tenants: dict[str, Tenant] = {}
    for entry in configured:
        if entry.sha256 in tenants:
            raise ConfigError(f"keys {tenants[entry.sha256].name!r} and {entry.name!r} are one key")
        tenants[entry.sha256] = entry.tenant
    for entry in stored:
        if (known := tenants.setdefault(entry.sha256, entry.tenant)) is not entry.tenant:
            logger.error("the key %r is that of %r: it is left out until that is put right", entry.name, known.name)
    return tenants
