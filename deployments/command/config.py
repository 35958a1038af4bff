"""`sluice config`: check a file of settings before anything starts, and say what its keys mean."""

import argparse
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from deployments.command.args_check import check_args
from deployments.command.settings import read_settings, with_defaults
from deployments.config.application import AppConfig, checked
from deployments.config.live import ROUTER, with_live
from deployments.config.reference import Key, all_keys, below, find, nearest, schema
from deployments.http.keys import KeyEntry
from policies.errors import ConfigError

DIALECT = "https://json-schema.org/draft/2020-12/schema"  # pydantic's
IMPORT_PATH = "deployments.app:build"
_EPILOG = """\
examples:
  sluice config check sluice.yaml                a file for `sluice serve --config`
  sluice config check deployments/configs/gpu.yaml   one for `serve deploy`
  sluice config schema > sluice.schema.json      for editors that complete and check YAML
  sluice config explain engine.scheduler         what stands in a section
  sluice config explain classes.NAME.ttft_s"""
_HEAD = """\
# Configuration

<!-- Written by `python -m tests.k8s.refresh`; the text is that of deployments/config/. -->

What stands under `args` in a file for `serve deploy`, in a file for `sluice serve --config`, and under `app` in the
values of the chart, which sets some of it itself ([which](../../k8s/sluice/README.md)). `NAME` stands for any name,
`[]` for each item of a list. `sluice config check FILE` checks a file, vLLM's arguments included;
`sluice config explain KEY` says what stands here; `sluice config schema` is for editors.

What "changes" says: `live` changes while engines serve, where it stands in `user_config` of the deployment `Router`
([how](../guides/operate.md#change-settings-without-a-restart)). Any other key stands under `args` alone, where a change
restarts engines. The end of a name is its unit: `_s` seconds, `_tokens`, `_bytes`.
"""
_KEYS = """
## Entries of `keys.file`

Of SLUICE_API_KEYS and of keys in Redis as well: one for each API key. All of them are read again every few seconds.
"""


def register(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    config = commands.add_parser(
        "config",
        help="check settings, and say what they mean",
        description="Check a file of settings, print their JSON schema, or say what a key means.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = config.add_subparsers(dest="action", required=True)
    check = actions.add_parser("check", help="check a file, vLLM's arguments included; starts nothing")
    check.add_argument("file", type=Path, help="settings for `sluice serve --config` or `serve deploy`")
    check.set_defaults(run=run_check)
    printed = actions.add_parser("schema", help="print the JSON schema of the settings")
    printed.set_defaults(run=lambda _: print(json.dumps({"$schema": DIALECT, **schema(AppConfig)}, indent=2)))
    explain = actions.add_parser("explain", help="what a key means, or what stands in a section")
    explain.add_argument("key", nargs="?", default="", help="such as engine.replicas (default: what stands at the top)")
    explain.set_defaults(run=run_explain)


def run_check(options: argparse.Namespace) -> None:
    """Raises ConfigError for the first application that is wrong."""
    for config in _applications(options.file):
        models = config.each_model()
        off = check_args(models)
        print(f"{options.file}: the settings of {', '.join(each.public_name for each in models)} can be served")
        for line in off:
            print(f"  {line}")


def _applications(path: Path) -> Iterator[AppConfig]:
    """Sluice's applications in a file for `serve deploy`; any other file is one for `sluice serve`."""
    settings = read_settings(path)
    if "applications" not in settings:
        yield checked(with_defaults(settings))
        return
    found = settings["applications"] or []
    if not isinstance(found, list):
        raise ConfigError(f"{path}: applications must be a list, with import_path and args for each")
    ours = [each for each in found if isinstance(each, dict) and each.get("import_path") == IMPORT_PATH]
    if not ours:
        raise ConfigError(f"{path}: none of its applications has import_path: {IMPORT_PATH}")
    yield from map(_application, ours)


def _application(found: dict[str, Any]) -> AppConfig:
    """From its `args` and the `user_config` over them. Raises ConfigError for a `user_config` that nothing reads."""
    config = checked(found.get("args") or {})
    if not isinstance(deployments := found.get("deployments") or [], list):
        raise ConfigError("deployments must be a list, with name and user_config for each")
    for deployment in deployments:
        if not isinstance(deployment, dict) or "user_config" not in deployment:
            continue
        if (name := deployment.get("name")) != ROUTER:
            raise ConfigError(f"deployments: {name} takes no user_config, only {ROUTER} does")
        config = with_live(config, deployment["user_config"])
    return config


def run_explain(options: argparse.Namespace) -> None:
    """Raises ConfigError where there is no such key."""
    keys = all_keys(AppConfig)
    if not (text := explanation(keys, options.key)):
        found = nearest(keys, options.key)
        hint = f"did you mean {found[0]}?" if found else "`sluice config explain` lists those at the top"
        raise ConfigError(f"there is no key {options.key}; {hint}")
    print(text)


def explanation(keys: Sequence[Key], path: str) -> str:
    """The text for a key, or for a section and its keys; "" is the top. Empty if there is no such key."""
    key = find(keys, path)
    inside = [*below(keys, path), *below(keys, f"{path}.NAME")]
    lines = [] if key is None else [path, *(f"    {line}" for line in _about(key)), *([""] if inside else [])]
    return "\n".join([*lines, *(f"{each.path}\n    {each.meaning}" for each in inside)])


def _about(key: Key) -> Iterator[str]:
    yield key.meaning
    if key.type == "section":
        return
    yield f"{key.type}{key.in_unit}; {_default(key)}"
    yield "changes live, in user_config of Router" if key.is_live else "a change restarts engines"


def _default(key: Key) -> str:
    return "it must be given" if key.is_needed else f"default {key.default}"


def page() -> str:
    """docs/reference/configuration.md."""
    return "".join([_HEAD, _tables(AppConfig, "At the top"), _KEYS, *_rows(all_keys(KeyEntry))])


def _tables(model: type[BaseModel], top: str) -> str:
    """One for each section, those at the top under a heading of their own."""
    keys = all_keys(model)
    sections: dict[str, list[Key]] = {}
    for key in keys:
        if key.type != "section":
            sections.setdefault(key.section, []).append(key)
    first = {rows[0].owner: path for path, rows in reversed(sections.items())}
    return "".join(
        line
        for path, rows in sections.items()
        for line in [f"\n## {path or top}\n", *_section(keys, path, rows, first[rows[0].owner])]
    )


def _section(keys: Sequence[Key], path: str, rows: Sequence[Key], like: str) -> Iterator[str]:
    """Its text and its keys; of one that stands there already, at `like`, no more than that."""
    if path != like:
        yield f"\nAs `{like}`.\n"
        return
    section = find(keys, path.removesuffix(".NAME"))
    if section is not None and section.holds:
        yield f"\n{section.holds}\n"
    yield from _rows(rows)


def _rows(keys: Iterable[Key]) -> Iterator[str]:
    yield "\n| key | type | default | changes | meaning |\n|---|---|---|---|---|\n"
    for key in keys:
        default = "needed" if key.is_needed else f"`{key.default}`"
        cells = (f"`{key.path}`", key.type, default, "live" if key.is_live else "", key.meaning)
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n"
