"""What stands around the engines: `keys`, `logs`, `batches` and `responses`."""

import re
from pathlib import Path
from typing import Self

from pydantic import Field, field_validator, model_validator

from deployments.config.section import LiveKey, Seconds, Section
from deployments.process.log_settings import LogFormat, LogLevel, LogSettings, LogTarget

# Stores in which of several that create an object one alone is told that it did: the log of a batch rests on that.
_CREATING_ONCE = ("file", "local", "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss")


class KeysSection(Section):
    """API keys. Without a source here and without SLUICE_API_KEYS in the environment, anyone may ask."""

    file: Path | None = None
    """YAML file of keys, see deployments/http/keys.py; read again when it changes."""
    redis: bool = False
    """Keys in Redis, written by `sluice keys new --store`."""
    isolate_prefixes: bool = False
    """Whether requests of each key find only prompts of that key in the caches. Without, how soon an answer begins can
    tell what others asked; with, what several keys ask is read once for each of them."""


class LogsSection(Section):
    """Logs of Sluice's processes, with a line for each request when it ends, never with what it says. Routers and
    engine replicas follow a change. The runner of batches and predictor replicas of their own go by `args`."""

    to: LiveKey[LogTarget] = "files"
    """`files` of Ray's in each node's session folder. `stdout` has a copy of every line on the standard output of the
    pod, or of what else has started Ray there: `ray start --block`, `sluice serve`."""
    format: LiveKey[LogFormat] = "json"
    """`json` has one object a line, `human` text for people."""
    level: LiveKey[LogLevel | None] = None
    """From which one on; the line of a request is INFO. null goes by SLUICE_LOG_LEVEL, and without it by INFO."""

    def settings(self) -> LogSettings:
        return LogSettings(to=self.to, format=self.format, level=self.level)


class BatchesSection(Section):
    """OpenAI's Batch API: files of requests that are answered within hours, by what other requests leave idle."""

    folder: str | None = None
    """Where files and batches are kept: a path from the root, or a URL of S3, Google Cloud Storage or Azure, as
    s3://bucket/folder, for the package of fsspec that reads it. All nodes must see it. null has no Batch API."""
    slo_class: str = "offline"
    """The class of the requests of batches; one with `fills_idle` delays no other class."""
    max_file_bytes: int = Field(default=200 << 20, ge=1)
    """Larger uploads get 413."""
    max_stored_bytes: int = Field(default=20 << 30, ge=1)
    """What one API key stores together: its files, and what its batches have written or may come to write. Uploads and
    batches beyond it get 413, and a batch whose answers reach it ends as `failed`."""
    max_files: int = Field(default=10_000, ge=1)
    """Files of one API key, and two for each of its open batches; uploads and batches beyond it get 413. Of as many
    ended batches the oldest are forgotten."""
    upload_timeout_s: Seconds = 600.0
    """The longest that an upload may take; then it gets 408."""
    max_lines: int = Field(default=100_000, ge=1)
    """Requests of a batch; it fails with more."""
    max_open: int = Field(default=100, ge=1)
    """Batches of one API key that have not ended; more get 429."""
    max_window_s: Seconds = 7 * 86_400.0
    """The longest `completion_window`; longer ones get 400."""
    keep_s: Seconds = 30 * 86_400.0
    """How long a file is kept after it was made, and a batch after its end; `expires_after` asks for less."""
    max_in_flight: int = Field(default=1024, ge=1)
    """Requests of batches that one model's engines may have together, however idle they are."""
    segment_s: Seconds = 5.0
    """How often answers are written down. Those since the last time are computed again after a failure."""
    num_cpus: float = Field(default=0.1, ge=0)
    """Cores that Ray reserves for the process that runs batches."""

    @field_validator("folder")
    @classmethod
    def _is_the_same_in_every_process(cls, folder: str | None) -> str | None:
        if folder is not None and not re.match(r"/|[a-z][a-z0-9+.-]*://", folder):
            raise ValueError(f"must be a path from the root or a URL, got {folder!r}: processes have other folders")
        scheme, colon, _ = (folder or "").partition("://")
        if colon and scheme not in _CREATING_ONCE:
            raise ValueError(
                f"{scheme}:// cannot be used: two that create a file there at once may both be told that they did, so "
                f"a batch could run twice; use a path from the root, or one of {', '.join(_CREATING_ONCE)}"
            )
        return folder

    @model_validator(mode="after")
    def _keeps_what_runs(self) -> Self:
        if self.keep_s <= self.max_window_s:
            raise ValueError(f"keep_s ({self.keep_s:g}) must be above max_window_s ({self.max_window_s:g})")
        return self


class ResponsesSection(Section):
    """What `/v1/responses` stores in Redis, so that any router can tell it, go on from it and cancel it."""

    store: bool = True
    """Whether anything is stored. Where not, requests that need it get 400: `store: true`, `background` and
    `previous_response_id`."""
    keep_s: Seconds = 86_400.0
    """How long a response is kept after its end."""
    max_stored_bytes: int = Field(default=64 << 20, ge=1)
    """Bytes of all stored responses with their conversations; beyond it the oldest are deleted. Redis needs this much
    memory besides its queue."""
    max_key_share: float = Field(default=0.5, gt=0, le=1)
    """The share of `max_stored_bytes` that one API key may fill before its own oldest are deleted. Requests without a
    key may fill all of it."""
