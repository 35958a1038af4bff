"""`sluice env`: the environment in which Ray is to start on this machine, for a shell or for systemd."""

import argparse
import getpass
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from deployments.command.claims import check_address, own_folder, port_number
from deployments.process.environment import (
    HAPROXY,
    MAX_CONNECTIONS,
    connections_within,
    files_for,
    haproxy_env,
    loopback_env,
    most_files,
    serve_env,
    several_hosts_env,
)

AUTH_MODE_ENV = "RAY_AUTH_MODE"
_RESTART_S = 5  # until a unit starts Ray again
_EPILOG = """\
examples:
  eval "$(sluice env)"                on every node of a cluster, before `ray start` and before `serve deploy`
  eval "$(sluice env --loopback)"     for a Ray on this machine alone: nothing of it listens to the outside
  sluice env --unit -- --head         a unit of systemd's that runs `ray start --block --head`, and starts it again

What is not as it should be here, and what to do about it, goes to standard error."""


def register(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    env = commands.add_parser(
        "env",
        help="print the environment in which Ray is to start on this machine",
        description="Print, as lines for a shell or as a unit of systemd's, what Ray has to find in its environment on "
        "this machine.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    kind = env.add_mutually_exclusive_group()
    kind.add_argument("--loopback", action="store_true", help="for a Ray that lives on this machine alone")
    kind.add_argument(
        "--unit",
        action="store_true",
        help="a unit of systemd's that runs `ray start` with the options after --, as this user, and again whenever it "
        "ends; it also reads ~/sluice.env, for what is secret",
    )
    env.add_argument(
        "--port",
        type=port_number,
        default=8000,
        help="of --loopback: http_options.port of the file (default: %(default)s)",
    )
    env.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Raises ApplicationStartError where --loopback finds its port taken, or a folder that another user owns."""
    env = {
        **serve_env(),
        **(_on_loopback(options.port) if options.loopback else _on_a_cluster()),
        **auth_env(os.environ),
    }
    if options.unit:
        env["RAY_SERVE_HAPROXY_MAXCONN"] = str(MAX_CONNECTIONS)  # it has a limit of its own
        print(_unit(env, options.ray_start))
    else:
        print("\n".join(f"export {name}={shlex.quote(value)}" for name, value in env.items()))
    connections = int(env["RAY_SERVE_HAPROXY_MAXCONN"])
    if connections < MAX_CONNECTIONS:
        _note(
            f"HAProxy takes {connections} connections, not {MAX_CONNECTIONS}: the hard limit of open files is "
            f"{most_files()}, and {files_for(MAX_CONNECTIONS)} are wanted (ulimit -Hn, LimitNOFILE)"
        )
    if env.get(AUTH_MODE_ENV) == "disabled":
        _note(
            "there is no token, so everyone who reaches Ray's ports may run anything there: "
            "`ray get-auth-token --generate` makes one, for every node the same; then print this again"
        )


def _unit(env: Mapping[str, str], options: Sequence[str]) -> str:
    """A raylet that the head took for dead ends itself, with all that runs on its host: nobody else starts it anew."""
    bin_folder = Path(sys.executable).parent
    variables = {"PATH": f"{bin_folder}:{os.defpath}", **env}
    lines = [f"Environment={_quoted(f'{name}={value}')}" for name, value in variables.items()]
    return "\n".join(
        [
            "[Unit]",
            "Description=Ray, as Sluice wants it",
            "Wants=network-online.target",
            "After=network-online.target",
            "StartLimitIntervalSec=0",
            "",
            "[Service]",
            f"User={getpass.getuser()}",
            *lines,
            f"EnvironmentFile=-{Path.home() / 'sluice.env'}",
            " ".join(["ExecStart=" + str(bin_folder / "ray"), "start --block", *map(_quoted, options)]),
            "Restart=always",
            f"RestartSec={_RESTART_S}",
            f"LimitNOFILE={files_for(MAX_CONNECTIONS)}",
            "",
            "[Install]",
            "WantedBy=multi-user.target",
        ]
    )


def _quoted(word: str) -> str:
    """As systemd reads it."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{escaped}"' if any(each in word for each in " \"'\\") else escaped


def _on_a_cluster() -> dict[str, str]:
    env = {
        **several_hosts_env(),
        "RAY_SERVE_HAPROXY_MAXCONN": str(connections_within(most_files())),
        **haproxy_env(),
    }
    if os.access(HAPROXY, os.X_OK):
        return env | {"RAY_SERVE_HAPROXY_BINARY_PATH": str(HAPROXY)}
    _note(f"Ray Serve cannot run {HAPROXY}, and starts HAProxy without it: chmod +x {HAPROXY}, and print this again")
    return env


def _on_loopback(port: int) -> dict[str, str]:
    check_address("127.0.0.1", port)
    folder = own_folder(f"sl-{os.getuid():x}-{port}")  # short: Unix sockets are in it
    folder.mkdir(mode=0o700, exist_ok=True)
    return loopback_env(folder, port=port)


def auth_env(env: Mapping[str, str]) -> dict[str, str]:
    """So that `ray start` and `serve deploy` agree: the former alone asks for a token wherever it finds one."""
    if AUTH_MODE_ENV in env:
        return {AUTH_MODE_ENV: env[AUTH_MODE_ENV]}
    file = Path(env.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    return {AUTH_MODE_ENV: "token" if env.get("RAY_AUTH_TOKEN") or file.is_file() else "disabled"}


def _note(text: str) -> None:
    print(f"sluice env: {text}", file=sys.stderr)
