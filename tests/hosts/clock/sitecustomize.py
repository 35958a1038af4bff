"""On a host whose clock is wrong, every Python begins with this: `Host.set_clock` puts its folder onto their path."""

import os
import time

_right_ns, _ahead_s = time.time_ns, int(os.environ["HOSTS_CLOCK_AHEAD_S"])


def _time_ns() -> int:
    return _right_ns() + _ahead_s * 1_000_000_000


def _time() -> float:
    return _time_ns() / 1e9


time.time_ns, time.time = _time_ns, _time
