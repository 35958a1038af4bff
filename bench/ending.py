"""How a benchmark ends: every server that it started is stopped, and its exit status says why."""

import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack

from bench.chat_client import RequestFailed
from bench.load import ServerUnusable
from bench.servers import ServerFailed

MEASURED, UNUSABLE, INTERRUPTED = 0, 2, 130
_EXPECTED = (ServerFailed, ServerUnusable, RequestFailed, OSError, ValueError)


def exit_status(
    program: str, measure: Callable[[ExitStack], int | None], expected: tuple[type[Exception], ...] = ()
) -> int:
    """Of a measurement, which puts what it starts on the stack; one of its own, or MEASURED.

    Args:
        expected: further exceptions that say that a server or the arguments are unusable.
    """
    failures: tuple[type[Exception], ...] = (*_EXPECTED, *expected)
    try:
        with ExitStack() as stack:
            # As Ctrl-C: the servers are stopped in either case.
            stack.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, signal.default_int_handler))
            return measure(stack) or MEASURED
    except failures as error:
        print(f"{program}: {error}", file=sys.stderr)
        return UNUSABLE
    except KeyboardInterrupt:
        print(f"{program}: interrupted; every server that it started has been stopped", file=sys.stderr)
        return INTERRUPTED
