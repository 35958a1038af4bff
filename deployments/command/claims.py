"""The address and the folder that a start claims for itself on this machine."""

import argparse
import contextlib
import fcntl
import os
import shutil
import socket
import tempfile
from pathlib import Path

import psutil

from deployments.process.ports import address
from policies.errors import ApplicationStartError


def port_number(text: str) -> int:
    """The type of an option. Raises argparse.ArgumentTypeError."""
    if not text.isdecimal() or not 1 <= int(text) <= 65_535:
        raise argparse.ArgumentTypeError(f"must be a number from 1 to 65535, got {text!r}")
    return int(text)


def check_address(host: str, port: int) -> str:
    """Returns the host as a number, of IPv4 or IPv6.

    Raises:
        ApplicationStartError: this machine has no such address, or something listens there already; that is named
            where the system tells.
    """
    try:
        (family, _, _, _, found), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # the latter for a name that is none, as a..b
        why = error.strerror if isinstance(error, OSError) else "no host can have that name"
        raise ApplicationStartError(f"cannot serve on {address(host, port)}: {why}. Is --host right?") from error
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(found)
        except OSError as error:
            raise ApplicationStartError(
                f"cannot serve on {address(host, port)}: {error.strerror}{_holder(port)}. "
                "Is Sluice running there already? Stop it, or choose another address with --port."
            ) from error
    return str(found[0])


def _holder(port: int) -> str:
    with contextlib.suppress(psutil.Error):  # seeing other users' sockets takes rights that we may not have
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr[1:] == (port,) and connection.pid:
                return f" (by {psutil.Process(connection.pid).name()}, pid {connection.pid})"
    return ""


def fresh_run_dir(port: int) -> Path:
    """A folder of this user and port, emptied: logs of the last run stay until the next one.

    Raises:
        ApplicationStartError: it is not ours, its path is too long for the sockets that Ray Serve puts there, or
            another process that called this for the port lives.
    """
    run_dir = own_folder(f"sluice-{os.getuid():x}-{port}")
    _claim(run_dir)
    shutil.rmtree(run_dir, ignore_errors=True)
    run_dir.mkdir(mode=0o700)
    return run_dir


def own_folder(name: str) -> Path:
    """The path of a temporary folder of this user's, which may be there or not.

    Raises:
        ApplicationStartError: it is not ours, or its path is too long for the sockets that Ray Serve puts there.
    """
    folder = Path(tempfile.gettempdir(), name)
    # A Unix socket's path holds 107 characters. The longest is HAProxy's temporary one, with a node id of 56.
    if len(f"{folder}/h/{'':56}/admin.sock.1234567.tmp") > 107:
        raise ApplicationStartError(
            f"{folder} is too long a path for Unix sockets: set TMPDIR to a shorter folder, such as /tmp"
        )
    if folder.is_symlink() or (folder.exists() and folder.stat().st_uid != os.getuid()):
        raise ApplicationStartError(f"{folder} belongs to somebody else: remove it, or set TMPDIR to another folder")
    return folder


def _claim(run_dir: Path) -> None:
    """Claim the folder for the life of this process, by a lock that the kernel releases and that no child inherits.

    An address in use is not enough: while Sluice starts it listens nowhere, and afterwards on one of several hosts.

    Raises:
        ApplicationStartError: another process holds it, or its file is not ours.
    """
    file = run_dir.with_name(f"{run_dir.name}.lock")
    try:
        lock = os.open(file, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise ApplicationStartError(f"{file}: {error.strerror}. Remove it, or set TMPDIR to another folder") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock)
        raise ApplicationStartError(
            f"Sluice is running there already, or starting: its files are in {run_dir}. "
            "Stop it, or choose another port with --port."
        ) from error
