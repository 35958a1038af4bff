"""What `bins.dispatch` asks of engines of kind vllm."""

from collections.abc import Sequence

from deployments.config.engine import EngineSection, GangSection
from deployments.config.lengths import BinsSection
from router.classifier import Mode


def check_dispatch(bins: BinsSection, mode: Mode, engines: Sequence[EngineSection]) -> None:
    """Raises ValueError for settings of engines of kind vllm that do not go with how requests are handed out."""
    usual, dispatch = GangSection(), bins.dispatch
    if dispatch == "requests":
        if any(engine.gang != usual for engine in engines):
            raise ValueError(
                "engine.gang: an engine of kind vllm takes single requests, set bins.dispatch: rolling or batches, or "
                "engine.kind: transformers"
            )
        return
    if engines and mode != "full":
        raise ValueError(f"bins.dispatch: {dispatch} is a policy of mode: full, not of mode: {mode}")
    if dispatch == "rolling":
        if any(engine.gang.max_wait_s != usual.max_wait_s for engine in engines):
            raise ValueError(
                "engine.gang.max_wait_s is of whole batches, and bins.dispatch: rolling waits for slots alone: leave "
                "one of the two out"
            )
        return
    if any(engine.prefill for engine in engines):
        raise ValueError(
            "engine.prefill hands a KV cache over as soon as it is read, and with bins.dispatch: batches it would wait "
            "for a batch: leave one of the two out"
        )
    if any(engine.credit_lookahead for engine in engines):
        raise ValueError("engine.credit_lookahead is of no use with bins.dispatch: batches: replicas take whole ones")
