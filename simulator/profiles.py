"""Step-time profiles as files; their columns are `policies.profile`'s."""

import gzip
import zlib
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO

from policies.errors import ConfigError
from policies.profile import ProfileRow, only_engine, parse_profile
from policies.types import StepTimes


def opened(path: Path) -> AbstractContextManager[IO[str]]:
    """The text of a file, gzipped or not, as the csv module wants it."""
    encoding = "utf-8-sig"  # without the mark at the beginning that some programs write
    if path.suffix == ".gz":
        return gzip.open(path, "rt", newline="", encoding=encoding)
    return path.open(newline="", encoding=encoding)


def read_profile(path: Path) -> list[ProfileRow]:
    """All rows of a profile, gzipped or not.

    Raises:
        InputError: as `parse_profile`.
    """
    with opened(path) as file:
        return parse_profile(file, str(path))


def calibrated(profile: Path) -> StepTimes:
    """The one engine of a profile, as `sluice calibrate` writes it.

    Raises:
        ConfigError: it cannot be read, or holds several engines.
    """
    try:
        rows = read_profile(profile)
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise ConfigError(f"cannot read profile {profile}: {error}") from error
    return only_engine(rows, str(profile))
