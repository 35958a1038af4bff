"""OpenAI's routes of files and batches, in front of vLLM's application."""

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from http import HTTPStatus
from typing import Any, TypeVar

import msgspec
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.batches.files import (
    CursorError,
    ExpiresAfter,
    FileRecord,
    Files,
    NotFoundError,
    UnreadableError,
    owner_of,
)
from deployments.batches.ledger import FullError
from deployments.batches.state import ENDED, Batches, BatchRecord, BatchRequest
from deployments.batches.storage import CHUNK_BYTES, Storage
from deployments.batches.uploads import Uploads
from deployments.config.services import BatchesSection
from deployments.http.bodies import ClientLeftError
from deployments.http.errors import HttpError, bad_request, error_response
from deployments.http.middleware import asking_tenant
from deployments.http.own_routes import in_front_of
from router.admission import Tenant

T = TypeVar("T")
logger = logging.getLogger(__name__)

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")
UPLOAD_PATH = "/v1/files"
_OURS = re.compile(r"\w+ /v1/(files|batches)(/.*)?")
_WINDOW = re.compile(r"(\d{1,6})([mhd])", re.ASCII)
_SECONDS = {"m": 60, "h": 3600, "d": 86_400}
_FILES_OF_A_PAGE, _BATCHES_OF_A_PAGE, _MOST_OF_A_PAGE = 100, 20, 1000
_EXPIRES_AFTER = {f"expires_after[{name}]": name for name in ("anchor", "seconds")}
_METADATA_PAIRS = 16  # as OpenAI's API has it
EXPECTED_END, TROUBLE = "sluice_expected_end", "sluice_trouble"  # in the metadata of answers


class BatchApi:
    """The routes of files and batches; `app` serves all other paths."""

    def __init__(
        self,
        app: ASGIApp,
        section: BatchesSection,
        storage: Storage,
        served: Collection[str],
        look: Callable[[], None],
        troubles: Callable[[str], Awaitable[Mapping[str, str]]],
    ) -> None:
        """Args:
        served: paths that the application has.
        look: tells the runner that a batch is new, or cancelled.
        troubles: why batches of an owner do not get on, as far as the runner knows now; no exception where it is away.
        """
        self._section, self._look, self._troubles = section, look, troubles
        self._files, self._batches = Files(storage, section), Batches(storage, section)
        self._endpoints = [each for each in ENDPOINTS if each in served]
        # Its own: a folder that is slow would take those in which bodies of other requests are judged.
        self._threads = ThreadPoolExecutor(8, "batches")
        self._uploads = Uploads(section.max_file_bytes, section.upload_timeout_s)
        routes = Router(
            [
                _route(UPLOAD_PATH, "POST", self._upload),
                _route(UPLOAD_PATH, "GET", self._list_files),
                _route("/v1/files/{id}", "GET", self._show_file),
                _route("/v1/files/{id}", "DELETE", self._delete_file),
                _route("/v1/files/{id}/content", "GET", self._content),
                _route("/v1/batches", "POST", self._create),
                _route("/v1/batches", "GET", self._list_batches),
                _route("/v1/batches/{id}", "GET", self._show_batch),
                _route("/v1/batches/{id}/cancel", "POST", self._cancel),
            ],
            redirect_slashes=False,
        )
        self._served = in_front_of(app, _OURS, routes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._served(scope, receive, send)

    async def _in_thread(self, call: Callable[..., T], *args: Any) -> T:
        """The result of a call that blocks, in the context of this task."""
        within = partial(copy_context().run, call, *args)
        return await asyncio.get_running_loop().run_in_executor(self._threads, within)

    async def _upload(self, request: Request) -> Response:
        async with self._uploads.receiving(asking_owner()) as upload:
            bounded = Request(request.scope, self._uploads.bounded(upload, request.receive))
            try:
                async with bounded.form(max_files=1, max_fields=8, max_part_size=4096) as form:
                    stored = await self._uploads.stored(upload, self._stored(form))
                    return JSONResponse(stored.as_openai())
            except ClientDisconnect as error:
                raise ClientLeftError("the client left before its file was whole") from error
            except (MultiPartException, HTTPException, UnicodeError) as error:  # the last of a charset that is none
                raise bad_request(f"not a form with a file: {getattr(error, 'message', None) or error}") from error

    async def _stored(self, form: FormData) -> FileRecord:
        upload, owner = form.get("file"), asking_owner()
        if not isinstance(upload, UploadFile):
            raise bad_request("the form has no file: name it `file`")
        if (purpose := form.get("purpose")) != "batch":
            raise bad_request(f"purpose must be batch, got {str(purpose)[:64]!r}")
        if unknown := sorted(form.keys() - {"file", "purpose", *_EXPIRES_AFTER}):
            raise bad_request(f"{unknown} are not known here")
        name, size = (upload.filename or "file")[:255], upload.size or 0
        return await self._in_thread(
            self._files.upload, owner, name, _chunks(upload), size, self._keep_s(_expires_after(form))
        )

    def _keep_s(self, asked: ExpiresAfter | None) -> float | None:
        """None where nothing is asked for."""
        if asked is not None and asked.seconds > self._section.keep_s:
            why = f"files are kept for {self._section.keep_s:g} s at most (batches.keep_s), asked for {asked.seconds}"
            raise bad_request(f"expires_after: {why}")
        return None if asked is None else float(asked.seconds)

    async def _list_files(self, request: Request) -> Response:
        asked = request.query_params
        if asked.get("order", "desc") != "desc":
            raise bad_request("order must be desc: newest first")
        page = (asked.get("after"), _limit(request, _FILES_OF_A_PAGE), asked.get("purpose"))
        found, has_more = await self._in_thread(self._files.page, asking_owner(), *page)
        return _listed([each.as_openai() for each in found], has_more)

    async def _show_file(self, request: Request) -> Response:
        return JSONResponse((await self._file(request)).as_openai())

    async def _file(self, request: Request) -> FileRecord:
        return await self._in_thread(self._files.get, asking_owner(), request.path_params["id"])

    async def _delete_file(self, request: Request) -> Response:
        record, owner = await self._file(request), asking_owner()
        if users := await self._in_thread(self._open_with, owner, record.id):
            why = f"{users[0]} reads it: cancel that, or wait for its end"
            raise HttpError(HTTPStatus.CONFLICT, f"{record.id} is in use, {why}")
        await self._in_thread(self._files.remove, owner, record.id)
        return JSONResponse({"id": record.id, "object": "file", "deleted": True})

    def _open_with(self, owner: str, file_id: str) -> list[str]:
        """Batches that have this file for input and have not ended."""
        users = []
        for batch_id in (batch_id for of, batch_id in self._batches.open_ids() if of == owner):
            with suppress(NotFoundError):  # it is not whole yet, or its creator was lost
                if self._batches.get(owner, batch_id).input_file_id == file_id:
                    users.append(batch_id)
        return users

    async def _content(self, request: Request) -> Response:
        record = await self._file(request)
        chunks = self._files.chunks(asking_owner(), record.id)
        try:
            first = await self._in_thread(lambda: next(chunks, b""))  # while an error can still be the answer
        except FileNotFoundError:
            raise NotFoundError(f"the content of {record.id} is lost") from None
        headers = {"Content-Length": str(record.bytes)}
        return StreamingResponse(self._streamed(first, chunks), media_type="application/jsonl", headers=headers)

    async def _streamed(self, chunk: bytes, further: Iterator[bytes]) -> AsyncIterator[bytes]:
        while chunk:
            yield chunk
            chunk = await self._in_thread(next, further, b"")

    async def _create(self, request: Request) -> Response:
        try:
            asked = msgspec.json.decode(await request.body(), type=BatchRequest)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise bad_request(f"not a request for a batch: {error}") from error
        window_s, tenant = self._window_s(asked.completion_window), asking_tenant()
        if asked.endpoint not in self._endpoints:
            raise bad_request(f"endpoint must be one of {', '.join(self._endpoints)}, got {asked.endpoint[:64]!r}")
        if len(asked.metadata or {}) > _METADATA_PAIRS or {EXPECTED_END, TROUBLE} & (asked.metadata or {}).keys():
            why = f"metadata may have {_METADATA_PAIRS} pairs, and {EXPECTED_END} and {TROUBLE} are for the answer"
            raise bad_request(why)
        if tenant is not None and not tenant.may_use(self._section.slo_class):
            why = f"this key may not use the class of batches, {self._section.slo_class!r} (batches.slo_class)"
            raise HttpError(HTTPStatus.FORBIDDEN, why)
        self._keep_s(asked.output_expires_after)
        record = await self._in_thread(self._opened, tenant, asked, window_s)
        self._look()
        return JSONResponse(record)

    def _opened(self, tenant: Tenant | None, asked: BatchRequest, window_s: float) -> dict[str, Any]:
        key = tenant.name if tenant else None
        owner = owner_of(key)
        input_file = self._files.get(owner, asked.input_file_id)
        if input_file.purpose != "batch":
            raise bad_request(f"{asked.input_file_id} was not uploaded with purpose batch")
        if sum(each == owner for each, _ in self._batches.open_ids()) >= self._section.max_open:
            why = f"you have {self._section.max_open} batches that have not ended (batches.max_open)"
            raise HttpError(HTTPStatus.TOO_MANY_REQUESTS, f"{why}: cancel one, or wait for the end of one")
        return self._batches.as_openai(self._batches.create(owner, key, asked, window_s, input_file.bytes))

    def _window_s(self, window: str) -> float:
        match = _WINDOW.fullmatch(window)
        seconds = int(match[1]) * _SECONDS[match[2]] if match else 0
        if not 0 < seconds <= self._section.max_window_s:
            raise bad_request(
                f"completion_window must be as 24h, 90m or 2d, and at most {self._section.max_window_s:g} s "
                f"(batches.max_window_s), got {window[:64]!r}"
            )
        return float(seconds)

    async def _list_batches(self, request: Request) -> Response:
        page = (request.query_params.get("after"), _limit(request, _BATCHES_OF_A_PAGE))
        found, has_more = await self._in_thread(self._page, *page)
        return _listed(await self._with_troubles(found), has_more)

    def _page(self, after: str | None, limit: int) -> tuple[list[dict[str, Any]], bool]:
        found, has_more = self._batches.page(asking_owner(), after, limit)
        return list(self._shown(found)), has_more

    def _shown(self, found: Iterable[BatchRecord]) -> Iterator[dict[str, Any]]:
        """Those whose state can be read."""
        for each in found:
            try:
                yield self._batches.as_openai(each)
            except UnreadableError as error:
                logger.error("a list is without one: %s", error)

    async def _show_batch(self, request: Request) -> Response:
        (shown,) = await self._with_troubles([await self._in_thread(self._batch, request.path_params["id"])])
        return JSONResponse(shown)

    async def _with_troubles(self, shown: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """As they are shown, with what keeps those that have not ended: a folder that fails cannot tell it."""
        if all(each["status"] in ENDED for each in shown):
            return shown
        troubles = await self._troubles(asking_owner())
        return [_with_trouble(each, troubles.get(each["id"])) for each in shown]

    def _batch(self, batch_id: str) -> dict[str, Any]:
        return self._batches.as_openai(self._batches.get(asking_owner(), batch_id))

    async def _cancel(self, request: Request) -> Response:
        cancelled = await self._in_thread(self._cancelled, request.path_params["id"])
        self._look()
        return JSONResponse(cancelled)

    def _cancelled(self, batch_id: str) -> dict[str, Any]:
        record = self._batches.get(asking_owner(), batch_id)
        status = self._batches.as_openai(record)["status"]
        if status in ENDED:
            raise HttpError(HTTPStatus.CONFLICT, f"{batch_id} has ended already: it is {status}")
        self._batches.cancel(record)
        return self._batches.as_openai(record)


def no_batch_api(app: ASGIApp) -> ASGIApp:
    """In place of BatchApi if `batches.folder` is not set."""
    why = "there is no Batch API here: set batches.folder, or start `sluice serve` with --batch-folder"
    return in_front_of(app, _OURS, error_response(HTTPStatus.NOT_IMPLEMENTED, why, "NotImplementedError"))


def _route(path: str, method: str, answer: Callable[[Request], Awaitable[Response]]) -> Route:
    async def endpoint(request: Request) -> Response:
        try:
            return await answer(request)
        except HttpError as error:
            return error.response()
        except NotFoundError as error:
            return error_response(404, str(error))
        except FullError as error:
            return HttpError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, str(error)).response()
        except CursorError as error:
            return bad_request(str(error)).response()
        except OSError:
            logger.exception("batches.folder cannot be used")
            return error_response(503, "the folder of batches cannot be used now")

    return Route(path, endpoint, methods=[method])


def _expires_after(form: FormData) -> ExpiresAfter | None:
    """None where nothing is asked for."""
    asked = {name: form[field] for field, name in _EXPIRES_AFTER.items() if field in form}
    try:
        return msgspec.convert(asked, ExpiresAfter, strict=False) if asked else None
    except msgspec.ValidationError as error:
        raise bad_request(f"expires_after: {error}") from error


def _chunks(upload: UploadFile) -> Iterator[bytes]:
    upload.file.seek(0)
    while chunk := upload.file.read(CHUNK_BYTES):
        yield chunk


def asking_owner() -> str:
    """The owner of the files and batches that the request of the calling task may see."""
    tenant = asking_tenant()
    return owner_of(tenant.name if tenant else None)


def _limit(request: Request, default: int) -> int:
    text = request.query_params.get("limit", str(default))
    if not text.isdecimal() or len(text) > 9 or not int(text):
        raise bad_request(f"limit must be a number above 0, got {text[:64]!r}")
    return min(int(text), _MOST_OF_A_PAGE)


def _with_trouble(shown: dict[str, Any], trouble: str | None) -> dict[str, Any]:
    if trouble is None or shown["status"] in ENDED:
        return shown
    return {**shown, "metadata": {**(shown["metadata"] or {}), TROUBLE: trouble}}


def _listed(data: list[dict[str, Any]], has_more: bool) -> Response:
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
    return JSONResponse({"object": "list", "data": data, "has_more": has_more, **ends})
