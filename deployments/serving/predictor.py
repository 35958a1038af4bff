"""The learned length predictor as a Ray Serve deployment, and the router's way to it.

A replica batches by itself (`predictor.batching`): Serve's own batching counts requests, not tokens, and has no cache.
"""

import logging
import time
from collections.abc import Callable, Iterable, Sequence

from ray import serve
from ray.exceptions import RayError
from ray.serve import Application
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from deployments.config.lengths import PredictorSection
from deployments.process.log_settings import LogSettings
from deployments.process.logs import log_by
from deployments.process.loopback import keep_to_loopback
from policies.errors import AdmissionError, PredictorError
from policies.lengths.drift import DriftConfig
from policies.router.promise import Promise
from predictor.asking import MOST_S, Asking, AskingConfig, Scorer
from predictor.batching import Batcher
from predictor.calibration import DAY_0, Curve
from predictor.learned import LearnedConfig, LearnedPredictor

logger = logging.getLogger(__name__)

WARM_UPS = 5
WARM_UP = ("Name three rivers.", "word " * 64)
ONGOING_FACTOR = 2  # beyond what may wait in a replica, so that the replica itself says when it is full


def local_batcher(section: PredictorSection) -> Batcher:
    """The model in this process, ready to answer at once. Loading takes seconds: run it in a thread.

    Raises:
        ConfigError: there is no such checkpoint, or the packages it needs are missing.
    """
    from predictor.checkpoint import Ranker  # only here: a router without it need not load torch

    ranker = Ranker.load(section.checkpoint or DAY_0, "cuda" if section.num_gpus else "cpu", section.dtype)
    _warm_up(ranker.scores, section.deadline_s or MOST_S)
    return Batcher(ranker.tokenizer.encode, lambda prompts: ranker.outputs(prompts)[:, 0], section.batching())


def _warm_up(score: Callable[[Sequence[str]], object], deadline_s: float) -> None:
    """Warns where even a prompt alone is late: then the histogram answers, and the predictor only costs."""
    score(WARM_UP)
    took_s = []
    for _ in range(WARM_UPS):
        started_s = time.perf_counter()
        score(WARM_UP[:1])
        took_s.append(time.perf_counter() - started_s)
    if min(took_s) > deadline_s:
        logger.warning(
            "one short prompt takes the length predictor %.0f ms here, its deadline is %.0f ms: raise "
            "predictor.deadline_s, give it more processor, or use kind: histogram",
            1e3 * min(took_s),
            1e3 * deadline_s,
        )


class PredictorReplica:
    """One copy of the model; loads in its constructor, so that Serve sends nothing before it is ready."""

    def __init__(self, section: PredictorSection, logs: LogSettings) -> None:
        log_by(logs)
        keep_to_loopback()
        self._batcher = local_batcher(section)

    async def score(self, prompt: str) -> float:
        return await self._batcher.score(prompt)


def predictor_application(section: PredictorSection, logs: LogSettings) -> Application:
    """To bind into the router's arguments."""
    return serve.deployment(
        PredictorReplica,
        num_replicas=section.replicas,
        max_ongoing_requests=ONGOING_FACTOR * section.batching().max_waiting,
        ray_actor_options={"num_cpus": section.num_cpus, "num_gpus": section.num_gpus},
    ).bind(section, logs)


class RemoteScorer:
    """Asks a replica; one that is full or gone is an error of ours, never an exception of Ray's."""

    def __init__(self, replicas: DeploymentHandle) -> None:
        self._replicas = replicas

    async def score(self, prompt: str) -> float:
        """Raises AdmissionError when it is full, PredictorError when it cannot be reached."""
        try:
            return float(await self._replicas.score.remote(prompt))
        except (AdmissionError, BackPressureError) as error:
            raise AdmissionError(f"the predictor's replicas are full: {error}") from error
        except (RayError, DeploymentUnavailableError) as error:
            raise PredictorError(f"no answer from the predictor's replicas: {error!r}") from error


def learned_predictor(
    section: PredictorSection, replicas: DeploymentHandle | None, promises: Iterable[Promise] = ()
) -> LearnedPredictor | None:
    """What the router's classifier takes; None where the histogram has the word. With kind `auto` it has to prove
    better first.

    Args:
        promises: of the classes.

    Raises:
        ConfigError: there is no such checkpoint.
    """
    left_out = section.kind == "auto" and section.place == "replicas"  # where the application started
    if replicas is None and (left_out or not section.reads_prompts(promises)):
        return None
    scorer: Scorer = local_batcher(section) if replicas is None else RemoteScorer(replicas)
    asking = Asking(scorer, AskingConfig(deadline_s=section.deadline_s))
    trust = LearnedConfig(drift=DriftConfig(starts_on=section.kind == "bert"))
    return LearnedPredictor(asking, Curve.read(section.checkpoint or DAY_0), trust)
