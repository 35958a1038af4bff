"""`sluice serve` as a command: it keeps to itself, and it says what stands in its way."""

import subprocess

from tests.integration.application import SLUICE, Sluice, is_loopback


def test_a_second_start_on_the_same_port_says_what_is_wrong(sluice: Sluice) -> None:
    second = subprocess.run(
        [SLUICE, "serve", "--port", str(sluice.port)], capture_output=True, text=True, timeout=300, check=False
    )
    assert second.returncode == 1
    assert f"127.0.0.1:{sluice.port}" in second.stderr
    assert "--port" in second.stderr
    assert "Traceback" not in second.stderr


def test_its_start_is_told_in_its_own_words_alone(sluice: Sluice) -> None:
    said = [line.split(":")[0].split(" ")[0] for line in sluice.output().splitlines()]
    assert set(said) <= {"checking", "logs", "starting", "loading", "Sluice", "model", "try"}, sluice.output()


def test_nothing_listens_beyond_loopback(sluice: Sluice) -> None:
    listening = sluice.listening()
    assert listening
    assert [each for each in listening if not is_loopback(each[0])] == []
