"""Requests that are refused: the HTTP status, and an error in OpenAI's shape that says why."""

from collections.abc import Mapping
from http import HTTPStatus

from starlette.responses import JSONResponse

from policies.errors import AdmissionError, InputError, SluiceError


def error_response(status: int, message: str, kind: str | None = None, param: str | None = None) -> JSONResponse:
    """In the shape of OpenAI's errors. The type is the status in words unless one is given; `param` is the field that
    is wrong."""
    kind = kind or HTTPStatus(status).phrase.replace(" ", "")
    return JSONResponse({"error": {"message": message, "type": kind, "param": param, "code": int(status)}}, int(status))


class HttpError(SluiceError):
    """A request that is refused, with the status and the headers of its answer."""

    def __init__(self, status: HTTPStatus, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self._headers = status, headers or {}

    def response(self) -> JSONResponse:
        response = error_response(self.status, str(self))
        response.headers.update(self._headers)
        return response


def bad_request(message: str) -> HttpError:
    return HttpError(HTTPStatus.BAD_REQUEST, message)


def status_of(error: SluiceError) -> HTTPStatus:
    """The status of a request that may not queue, or that waited in vain."""
    if isinstance(error, AdmissionError):
        return HTTPStatus.TOO_MANY_REQUESTS
    return HTTPStatus.BAD_REQUEST if isinstance(error, InputError) else HTTPStatus.SERVICE_UNAVAILABLE
