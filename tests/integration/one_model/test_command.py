"""`sluice serve` as a command: it keeps to itself, and it says what stands in its way."""

import re
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
    """Each line of a stage with the seconds so far, in the order in which the stages can come."""
    stage = re.compile(r" *\d+\.\d s  (.*)")
    lines = sluice.output().splitlines()
    told = [found[1] for line in lines if (found := stage.fullmatch(line))]
    stages = [each for each in told if not each.startswith("still ")]  # on a busy machine
    others = [line.partition(":")[0] for line in lines if not stage.fullmatch(line)]
    assert others == ["logs", "Sluice is ready", "page", "model", "try"], sluice.output()
    first, *between, last = [each for each in stages if not each.startswith(("engine ", "router ", "the embedded"))]
    assert first == "checking the configuration" and last == f"waiting for the first answer of {sluice.url}/health"
    assert between[-2:] == [
        "starting Ray Serve: waiting for its controller and its proxy",
        "deploying sluice-demo with 2 engine replicas",
    ]
    parts = ("its tables (GCS)", "its raylet")
    assert between[-5:-2] == ["starting Ray", *(f"starting Ray: waiting for {part}" for part in parts)]
    for number in (1, 2):
        of_engine = [each.partition(": ")[2] for each in stages if each.startswith(f"engine {number}: ")]
        assert of_engine == ["loading the model", "measuring what steps cost", "ready"], stages
        of_router = [each.partition(": ")[2] for each in stages if each.startswith(f"router {number}: ")]
        assert of_router == ["waiting for engines", "building the front end"], stages
    assert stages.index("the embedded Redis has started") < stages.index("engine 1: ready")


def test_nothing_listens_beyond_loopback(sluice: Sluice) -> None:
    listening = sluice.listening()
    assert listening
    assert [each for each in listening if not is_loopback(each[0])] == []
