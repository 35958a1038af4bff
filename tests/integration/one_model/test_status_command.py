"""`sluice status` of an application that runs, as a user asks for it."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import time

from tests.integration.application import SLUICE, Sluice

WITH_CTRL_C = ("env", "--default-signal=INT")  # where a shell runs the tests in the background, they ignore it


def asked(sluice: Sluice, *options: str) -> str:
    command = [SLUICE, "status", "--url", sluice.url, *options]
    env = {**os.environ, "NO_PROXY": "127.0.0.1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=True, env=env).stdout


def test_it_shows_what_runs_in_the_words_of_the_page(sluice: Sluice) -> None:
    sluice.client().completions.create(model="sluice-demo", prompt="Hello", max_tokens=2)
    shown = asked(sluice)
    first, *lines = shown.splitlines()
    assert re.fullmatch(
        r"sluice-demo · 2 replicas · 2 routers · (\d+ sessions, .+ · )?Sluice .+, vLLM .+, Ray 2\..+", first
    )
    for replica_id in sluice.status()["replicas"]:
        (line,) = [line for line in lines if line.startswith(f"{replica_id} ")]
        assert re.search(r"sluice-demo +\d+ of \d+ +\d+\.\d % .*it takes more", line), shown
    of_class, of_its_promises = (line for line in lines if line.startswith("standard "))
    assert "2.00 s" in of_class and "%" in of_its_promises, shown
    ended = lines[next(at for at, line in enumerate(lines) if line.startswith("Recent requests")) + 3]
    assert re.search(r"standard .* 2 +\S+ m?s +\S+ m?s .*length", ended), shown


def test_its_json_is_what_the_address_says(sluice: Sluice) -> None:
    found = json.loads(asked(sluice, "--json"))
    assert found.keys() == sluice.status().keys()
    assert all(each["now"] == "it takes more" for each in found["replicas"].values())


def test_it_looks_again_until_ctrl_c_without_a_terminal(sluice: Sluice) -> None:
    command = [*WITH_CTRL_C, SLUICE, "status", "--url", sluice.url, "--json", "--watch", "0.1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watching:
        assert watching.stdout is not None
        looks = [json.loads(watching.stdout.readline()) for _ in range(3)]
        watching.send_signal(signal.SIGINT)
        assert watching.wait(60) == 0
    assert all(each["model"] == "sluice-demo" for each in looks)


def test_a_terminal_is_drawn_anew_and_is_as_before_in_the_end(sluice: Sluice) -> None:
    ours, theirs = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "200", "LINES": "60"}
    command = [*WITH_CTRL_C, SLUICE, "status", "--url", sluice.url, "--watch", "0.1"]
    with subprocess.Popen(command, stdout=theirs, stdin=theirs, env=env) as watching:
        os.close(theirs)
        shown, give_up_s = "", time.monotonic() + 300
        while shown.count("2 replicas") < 3 and time.monotonic() < give_up_s:
            shown += os.read(ours, 65536).decode(errors="replace")
        watching.send_signal(signal.SIGINT)
        give_up_s = time.monotonic() + 60
        while time.monotonic() < give_up_s and select.select([ours], [], [], 60)[0]:
            try:
                shown += os.read(ours, 65536).decode(errors="replace")
            except OSError:  # as Linux says that nobody writes any more
                break
        assert watching.wait(60) == 0
    os.close(ours)
    assert shown.index("\x1b[?1049h") < shown.index("2 replicas") < shown.index("\x1b[?1049l")
