"""Ports that are given once, to this process and to others, before their servers come up."""

import os
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import pytest

from deployments.process import ports
from deployments.process.environment import one_machine_env
from deployments.process.ports import free_port, free_port_block
from tests.integration.application import REPOSITORY

DRAWER = """
import sys
from deployments.process.ports import free_port_block
print(free_port_block(3, range(*map(int, sys.argv[1:]))), flush=True)
sys.stdin.read()
"""


def test_nobody_is_given_the_chosen_ports_before_their_servers_come_up(tmp_path: Path) -> None:
    given_from = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    env = one_machine_env(tmp_path)
    ports = [int(value) for name, value in env.items() if name.endswith("_PORT")]
    assert len(ports) == len(set(ports)) == 6
    assert max(ports) < given_from and free_port() < given_from


def test_no_port_is_given_twice_before_its_server_comes_up() -> None:
    ports = [free_port() for _ in range(300)]
    assert len(set(ports)) == len(ports)


@pytest.fixture
def marks(monkeypatch: pytest.MonkeyPatch) -> Iterator[deque[int]]:
    """The marks of this process, which keeps no others meanwhile."""
    made: deque[int] = deque()
    monkeypatch.setattr(ports, "_marks", made)
    yield made
    for mark in made:
        os.close(mark)


@pytest.fixture
def two_blocks(marks: deque[int]) -> range:
    """Room for two blocks of three ports and their marks, where nobody else draws any."""
    first = free_port_block(8, range(32_000, 32_768))
    os.close(marks.pop())
    return range(first, first + 8)


def test_a_block_of_ports_leaves_out_the_public_one(two_blocks: range) -> None:
    mark, *block = two_blocks[:4]
    with pytest.raises(OSError, match=f"no 3 successive free ports between {mark} and {mark + 4}"):
        free_port_block(3, two_blocks[:4], without=block[1])
    assert free_port_block(3, two_blocks[:4], without=mark) == block[0]


def test_ports_that_another_process_was_given_are_its_own_until_it_ends(two_blocks: range) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", DRAWER, str(two_blocks.start), str(two_blocks.stop)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY,
    ) as other:  # fmt: skip
        assert other.stdout is not None
        theirs = int(other.stdout.readline())
        mine = free_port_block(3, two_blocks)
        assert {mine, theirs} == {two_blocks[1], two_blocks[5]}
        with pytest.raises(OSError, match="no 3 successive"):
            free_port_block(3, two_blocks)
        other.communicate()
    assert free_port_block(3, two_blocks) == theirs


def test_a_process_keeps_a_bounded_number_of_marks(marks: deque[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "_MOST_MARKS", 3)
    for _ in range(5):
        free_port()
    assert len(marks) == 3
