import asyncio

import grpc
import psutil
import pytest
from ray import serve
from ray.serve._private import replica
from ray.serve.exceptions import BackPressureError

from deployments.config.lengths import PredictorSection
from deployments.process.environment import LOOPBACK_ENV
from deployments.process.log_settings import LogSettings
from deployments.serving.predictor import (
    PredictorReplica,
    RemoteScorer,
    learned_predictor,
    local_batcher,
    predictor_application,
)
from policies.errors import AdmissionError, ConfigError, PredictorError
from policies.router.promise import Promise
from predictor.learned import Question

pytestmark = pytest.mark.slow  # loading torch and a model takes seconds

SECTION = PredictorSection(kind="bert", deadline_s=30.0, dtype="float32")


class FailingReplicas:
    """A handle whose every call ends in one error."""

    def __init__(self, error: Exception) -> None:
        self._error = error
        self.score = self

    async def remote(self, prompt: str) -> float:
        raise self._error


async def foreseen(asked: object, prompt: str) -> float:
    assert asked is not None
    foresight = await asked.foresee(Question(prompt=prompt, model="m", slo_class="standard"))  # type: ignore[attr-defined]
    assert foresight.prediction is not None
    return float(foresight.prediction.mean_tokens)


async def test_the_shipped_predictor_expects_more_of_an_essay_than_of_a_single_word() -> None:
    learned = learned_predictor(SECTION.model_copy(update={"place": "router"}), None)
    brief = await foreseen(learned, "Answer with one word: what is the capital of France?")
    essay = await foreseen(
        learned, "Write a detailed essay about the causes and consequences of the French Revolution."
    )
    assert essay > 2.0 * brief


async def test_a_deployed_replica_scores_as_the_router_itself_would() -> None:
    handle = serve.run(predictor_application(SECTION, LogSettings()), _local_testing_mode=True)
    prompt = "Explain how a lock on a canal works."
    batcher = await asyncio.to_thread(local_batcher, SECTION)
    remote, local = await RemoteScorer(handle).score(prompt), await batcher.score(prompt)
    assert remote == pytest.approx(local, abs=1e-4)
    await batcher.close()


async def test_on_one_machine_the_port_that_serve_opens_for_a_replica_is_on_loopback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(LOOPBACK_ENV, "1")
    monkeypatch.setattr(replica, "add_port_to_grpc_server", replica.add_port_to_grpc_server)  # to be put back
    PredictorReplica(SECTION, LogSettings())
    server = grpc.aio.server()
    port = replica.add_port_to_grpc_server(server, "[::]:0")
    await server.start()
    try:
        mine = psutil.Process().net_connections("tcp")
        assert [c.laddr.ip.removeprefix("::ffff:") for c in mine if c.laddr.port == port] == ["127.0.0.1"]
    finally:
        await server.stop(None)


@pytest.mark.parametrize(
    ("error", "translated"),
    [
        (BackPressureError(num_queued_requests=1, max_queued_requests=1), AdmissionError),
        (AdmissionError("full"), AdmissionError),
        (PredictorError("broken"), PredictorError),
    ],
)
async def test_what_goes_wrong_is_an_error_of_ours(error: Exception, translated: type[Exception]) -> None:
    with pytest.raises(translated):
        await RemoteScorer(FailingReplicas(error)).score("p")


def test_a_machine_too_slow_for_the_deadline_is_told_at_the_start(caplog: pytest.LogCaptureFixture) -> None:
    local_batcher(SECTION)
    assert not caplog.messages
    local_batcher(SECTION.model_copy(update={"deadline_s": 1e-6}))
    assert any("raise predictor.deadline_s" in message for message in caplog.messages)


def test_the_histogram_needs_no_learned_predictor() -> None:
    whole = [Promise(e2e_s=8.0)]
    assert learned_predictor(PredictorSection(), None) is None
    assert learned_predictor(PredictorSection(kind="histogram", place="router"), None, whole) is None
    assert learned_predictor(PredictorSection(), None, whole) is None, "none was started"


def test_beside_whole_answers_it_has_to_prove_better_first() -> None:
    def believed(kind: str) -> bool:
        section = SECTION.model_copy(update={"kind": kind, "place": "router"})
        learned = learned_predictor(section, None, [Promise(e2e_s=8.0)])
        assert learned is not None
        return learned._learned["m", "standard"].is_on

    assert (believed("auto"), believed("bert")) == (False, True)


def test_a_checkpoint_that_is_not_there_is_refused(tmp_path: object) -> None:
    with pytest.raises(ConfigError, match="holds no predictor checkpoint"):
        learned_predictor(SECTION.model_copy(update={"checkpoint": tmp_path}), None)
