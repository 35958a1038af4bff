"""`sluice batch`: whole files of requests, by OpenAI's Batch API."""

import argparse
import json
import os
import shlex
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from deployments.command.client import add_options, api_client
from policies.errors import InputError, SluiceError

if TYPE_CHECKING:
    import openai
    from openai.types import Batch

_EPILOG = """\
examples:
  sluice batch run prompts.jsonl -o answers.jsonl
  sluice batch follow batch_0123 -o answers.jsonl       goes on where a run was interrupted
  sluice batch list
  sluice batch cancel batch_0123

Each line of the file is a request: {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {...}}.
An API key is read from OPENAI_API_KEY."""

_LOOK_S = 1.0  # between two looks at a batch that runs
_ENDED = ("completed", "failed", "expired", "cancelled")
_SHOWN_ERRORS = 10  # of a batch that failed; its file of errors has them all


def register(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    batch = commands.add_parser(
        "batch",
        help="run files of requests, by the Batch API",
        description="Submit files of requests, follow them to their end and fetch the answers.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = batch.add_subparsers(dest="action", required=True)
    run = actions.add_parser("run", help="submit a file, follow it, and fetch the answers")
    run.add_argument("file", type=Path, metavar="FILE", help="requests, one a line")
    run.add_argument("--window", default="24h", help="time that it may take, as 30m, 24h or 2d (default: %(default)s)")
    run.set_defaults(run=submit)
    follow = actions.add_parser("follow", help="follow a batch that was submitted before, and fetch the answers")
    follow.add_argument("batch", metavar="BATCH", help="its id")
    follow.set_defaults(run=resume)
    for action in (run, follow):
        action.add_argument("-o", "--output", type=Path, required=True, metavar="OUT", help="file for the answers")
    listing = actions.add_parser("list", help="batches, the newest first")
    listing.set_defaults(run=show)
    cancelling = actions.add_parser("cancel", help="cancel a batch; what is answered by then can be fetched")
    cancelling.add_argument("batch", metavar="BATCH", help="its id")
    cancelling.set_defaults(run=cancel)
    for action in (run, follow, listing, cancelling):
        add_options(action)


def submit(options: argparse.Namespace) -> None:
    endpoint = _endpoint(options.file)
    _check_output(options.output)
    with api_client(options) as client:
        with options.file.open("rb") as file:
            uploaded = client.files.create(file=(options.file.name, file), purpose="batch")
        batch = client.batches.create(input_file_id=uploaded.id, endpoint=endpoint, completion_window=options.window)
        print(batch.id, file=sys.stderr, flush=True)
        _follow(client, batch, options)


def _endpoint(file: Path) -> Any:
    """The url of the first request. Raises InputError: the file cannot be read, or holds none."""
    try:
        with file.open("rb") as lines:
            first = json.loads(next((line for line in lines if line.strip()), b"null"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"cannot read {file}: {error}") from error
    if not isinstance(first, dict) or not isinstance(endpoint := first.get("url"), str):
        raise InputError(f"{file}: the first line has no url, such as /v1/chat/completions")
    return endpoint


def _check_output(output: Path) -> None:
    """Before a batch runs for hours. Raises InputError."""
    if output.is_dir():
        raise InputError(f"cannot write {output}: it is a folder, name a file in it with -o")
    if _is_device(output):
        return
    if not output.parent.is_dir() or not os.access(output.parent, os.W_OK | os.X_OK):
        raise InputError(f"cannot write {output}: {output.parent} is no folder that you may write to")


def _is_device(output: Path) -> bool:
    """As /dev/stdout or a pipe, which is written as it is."""
    return output.exists() and not output.is_file()


def resume(options: argparse.Namespace) -> None:
    _check_output(options.output)
    with api_client(options) as client:
        _follow(client, client.batches.retrieve(options.batch), options)


def _follow(client: "openai.OpenAI", batch: "Batch", options: argparse.Namespace) -> None:
    """Wait for its end and fetch its files. Raises SluiceError: it was not completed."""
    try:
        batch = _ended(client, batch)
        _fetch(client, batch.output_file_id, options.output)
        errors = options.output.with_name(f"{options.output.name}.errors")
        if _fetch(client, batch.error_file_id, errors):
            print(f"requests without an answer: {errors}", file=sys.stderr)
    except BaseException:  # Ctrl-C, or an application that is away: nothing of it is lost
        words = "has ended" if batch.status in _ENDED else "goes on"
        again = shlex.join(["sluice", "batch", "follow", batch.id, "-o", str(options.output)])
        print(f"\n{batch.id} {words}: {again}", file=sys.stderr)
        raise
    if batch.status != "completed":
        raise SluiceError(f"{batch.id} {batch.status}{_why(batch)}")


def _ended(client: "openai.OpenAI", batch: "Batch") -> "Batch":
    with tqdm(unit="request", disable=None) as bar:
        while batch.status not in _ENDED:
            time.sleep(_LOOK_S)
            batch = client.batches.retrieve(batch.id)
            bar.set_description((batch.metadata or {}).get("sluice_trouble", batch.status))
            if (counts := batch.request_counts) is not None:
                bar.total = counts.total
                bar.update(counts.completed + counts.failed - bar.n)
    return batch


def _fetch(client: "openai.OpenAI", file_id: str | None, target: Path) -> bool:
    """False if there is no such file. Nothing stands at `target` before all of it is there. Raises SluiceError."""
    if file_id is None:
        return False
    import openai  # only here, as in deployments.command.client

    part = target if _is_device(target) else target.with_name(f"{target.name}.part")
    try:
        with client.files.with_streaming_response.content(file_id) as content:
            content.stream_to_file(part)
        if part != target:
            part.replace(target)
    except openai.OpenAIError:
        raise
    except OSError as error:
        raise SluiceError(f"cannot write {target}: {error.strerror}") from error
    except Exception as error:  # its HTTP library's own, of an answer that has begun
        raise SluiceError(f"{file_id} did not come whole: {error}") from error
    finally:
        if part != target:
            part.unlink(missing_ok=True)
    return True


def _why(batch: "Batch") -> str:
    errors = (batch.errors.data if batch.errors else None) or []
    lines = [f"\n  line {each.line}: {each.message}" if each.line else f"\n  {each.message}" for each in errors]
    more = f"\n  and {len(lines) - _SHOWN_ERRORS} more" if len(lines) > _SHOWN_ERRORS else ""
    return "".join(lines[:_SHOWN_ERRORS]) + more


def show(options: argparse.Namespace) -> None:
    with api_client(options) as client:
        for batch in client.batches.list():
            counts = batch.request_counts
            of_all = f"{counts.completed + counts.failed}/{counts.total}" if counts else ""
            made = datetime.fromtimestamp(batch.created_at).isoformat(" ")
            print(f"{batch.id}  {made}  {batch.status:<11}  {of_all}")


def cancel(options: argparse.Namespace) -> None:
    with api_client(options) as client:
        print(f"{options.batch} {client.batches.cancel(options.batch).status}")
