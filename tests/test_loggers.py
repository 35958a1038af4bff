"""What tests hear of our loggers does not depend on the tests before them."""

import logging
import logging.config
from collections.abc import Iterator

import pytest

from deployments.process import spans
from deployments.process.logs import LogSettings, log_by


@pytest.fixture(scope="module")
def loggers_as_a_replica_leaves_them() -> Iterator[None]:
    log_by(LogSettings())
    logging.config.dictConfig({"version": 1})  # disables what exists, as a user's logging configuration may
    logging.root.setLevel(logging.ERROR)  # as vLLM's routes do
    yield


@pytest.mark.usefixtures("loggers_as_a_replica_leaves_them")
@pytest.mark.parametrize("time", ["first", "second"])
def test_a_logger_is_heard_though_a_module_set_it_up_anew(time: str, caplog: pytest.LogCaptureFixture) -> None:
    spans.logger.warning("the %s time", time)
    assert caplog.messages == [f"the {time} time"]
