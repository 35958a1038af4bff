"""The profile that a configuration names."""

from pathlib import Path

from policies.errors import ConfigError
from policies.profile import only_engine, parse_profile
from policies.types import StepTimes


def calibrated(profile: Path) -> StepTimes:
    """The one engine of a profile, as `sluice calibrate` writes it.

    Raises:
        ConfigError: it cannot be read, or holds several engines.
        InputError: a row of it is wrong.
    """
    try:
        with profile.open(newline="") as lines:
            return only_engine(parse_profile(lines, str(profile)), str(profile))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read profile {profile}: {error}") from error
