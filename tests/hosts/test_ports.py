"""The table of ports in docs/start/install.md names all that listens beyond loopback on a cluster."""

import json
import re

import pytest

from tests.documented import ROOT
from tests.hosts.faults import Trial
from tests.hosts.lab import Host

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

LISTENERS = """python - <<END
import json, psutil
sockets = [each for each in psutil.net_connections("tcp") if each.status == "LISTEN"]
beyond = [each for each in sockets if not each.laddr.ip.startswith(("127.", "::1", "::ffff:127."))]
print(json.dumps(sorted({(each.laddr.port, psutil.Process(each.pid).name()) for each in beyond})))
END"""
ROW = re.compile(r"^\| (\d+)(?: to (\d+)|, (\d+))? \| ([^|]+) \|", re.MULTILINE)


def documented(kind: str) -> set[int]:
    """Ports that may listen on a host of this kind: head, workers or Redis."""
    _, _, section = (ROOT / "docs/start/install.md").read_text().partition("### Ports\n")
    rows = [row for row in ROW.findall(section.partition("\n## ")[0]) if kind in row[3].split(", ")]
    return {
        port
        for first, last, other, _ in rows
        for port in (*range(int(first), int(last or first) + 1), int(other or first))
    }


def listeners(host: Host) -> list[tuple[int, str]]:
    return [(port, name) for port, name in json.loads(host.run(LISTENERS))]


def test_all_that_listens_is_in_the_table(trial: Trial) -> None:
    cluster = trial.cluster
    for host, kind in (
        (cluster.head, "head"),
        *((each, "workers") for each in cluster.workers),
        (cluster.redis, "Redis"),
    ):
        found = listeners(host)
        assert found
        assert [each for each in found if each[0] not in documented(kind)] == [], host.name


def test_an_engine_on_one_host_listens_on_loopback_alone(trial: Trial) -> None:
    """Its replica has the one port that routers need."""
    for host in trial.cluster.workers:
        assert not [port for port, name in listeners(host) if name.startswith("VLLM")]
