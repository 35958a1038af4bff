"""Ports of this machine that nothing listens on, and that nobody else is given before their servers come up."""

import os
import random
import socket
from collections import deque

# Below the ports that the system hands out by itself (32768 and up): Ray's own servers and connections would take one
# before its server comes up some seconds later. And above those that `ray start` keeps for workers (10002 to 19999), or
# it refuses to start. A single port is even, and the odd one before it is its mark.
SINGLE_PORTS = range(28_001, 32_000)
# Random numbers of the system: where the common generator is seeded, all processes would draw the same port.
_chance = random.SystemRandom()
# Descriptors of the sockets that mark ports as given, and how many of them a process keeps.
_marks: deque[int] = deque()
_MOST_MARKS = 512


def free_port(host: str = "127.0.0.1") -> int:
    """A port of this address that nothing listens on and that the system does not hand out by itself.

    Raises:
        OSError: there is none.
    """
    return free_port_block(1, SINGLE_PORTS, host=host)


def free_port_block(size: int, among: range, without: int | None = None, host: str = "127.0.0.1") -> int:
    """The first of `size` successive ports that nothing listens on at this address, none of them ``without``.

    Their servers may come up much later. So this process keeps a socket on the port before them until it ends or has
    drawn hundreds more, and other processes pass over a block whose mark is taken: applications that start together
    draw different ports.

    Ray Serve shares a port with a server that listens there already, so two applications on its defaults (8500 and 9500
    for the proxies that answer until a replica does, 30000 and up for replicas) get each other's requests.

    Raises:
        OSError: there is none.
    """
    marks = range(among.start, among.stop - size, size + 1)
    for _ in range(100):
        mark = _chance.choice(marks)
        block = range(mark + 1, mark + 1 + size)
        if without not in block and all(_is_free(host, port) for port in block) and _could_mark(mark):
            return block.start
    raise OSError(f"no {size} successive free ports between {among.start} and {among.stop}")


def _is_free(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def _could_mark(port: int) -> bool:
    """Mark the ports that follow this one as this process's; False if another process has marked them."""
    mark = socket.socket()
    try:
        mark.bind(("127.0.0.1", port))
    except OSError:
        mark.close()
        return False
    while len(_marks) >= _MOST_MARKS:
        os.close(_marks.popleft())
    _marks.append(mark.detach())
    return True


def address(host: str, port: int) -> str:
    """Host and port as in a URL."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
