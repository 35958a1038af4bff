"""The client of commands that ask a running application: its address, the API key, errors with a way out."""

import argparse
import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from policies.errors import InputError, SluiceError

if TYPE_CHECKING:
    import openai

KEY_ENV = "OPENAI_API_KEY"
TIMEOUT_S = 600.0  # files of batches are large


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of the application (default: %(default)s)")
    parser.add_argument(
        "--key", metavar="KEY", help=f"an API key, in place of {KEY_ENV}; other users of this machine can see it here"
    )


@contextlib.contextmanager
def api_client(options: argparse.Namespace, timeout_s: float = TIMEOUT_S) -> Iterator["openai.OpenAI"]:
    """Raises SluiceError with what the application says, or that none is there."""
    import openai  # only here: it takes other commands most of a second

    url, key = options.url, options.key or os.environ.get(KEY_ENV) or "none"
    _check(url, key)
    try:
        with openai.OpenAI(base_url=f"{root(url)}/v1", api_key=key, timeout=timeout_s) as client:
            yield client
    except openai.AuthenticationError as error:
        raise SluiceError(f"{url}: {error.message}. It is read from {KEY_ENV}, or from --key") from error
    except openai.APIStatusError as error:
        raise SluiceError(f"{url}: {error.message}") from error
    except openai.APIConnectionError as error:
        raise SluiceError(
            f"{url} does not answer: {error.__cause__ or error}. Is --url right, and does Sluice run there?"
        ) from error


def _check(url: str, key: str) -> None:
    """What HTTP has no letters or numbers for. Raises InputError."""
    try:
        parts = urlsplit(url)
        is_one = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        (parts.hostname or "").encode("idna")
    except ValueError:  # a bracket too many, a port beyond all, a name that is none
        is_one = False
    if not is_one:
        raise InputError(f"--url must be an address such as http://127.0.0.1:8000, got {url!r}")
    if not (key.isascii() and key.isprintable()):
        raise InputError(f"the API key has letters that no key has: see {KEY_ENV}, or --key")


def root(url: str) -> str:
    """Without the /v1 that clients of OpenAI's API have in theirs."""
    return url.rstrip("/").removesuffix("/v1")
