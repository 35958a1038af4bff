"""What a router's front end is made of, by the kind of its engines: vLLM's own application, for which the Transformers
engine speaks vLLM's structures too, or a plain one before servers of others."""

import argparse
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol

from fastapi import FastAPI

from deployments.config.application import AppConfig
from deployments.config.scaling import may_be_none
from deployments.engines.features import Feature, why_off
from deployments.engines.vllm.grammars import Grammars
from deployments.http.middleware import log_causes
from deployments.process.heavy_imports import heavy_imports
from deployments.process.logs import log_of_vllm, root_level_kept
from deployments.responses.background import BackgroundResponses
from deployments.serving.front_end import OutputReader, request_limits
from deployments.serving.live_settings import InForce
from policies.live import Live
from router.background import BackgroundTasks
from router.prefill_decode import EngineClient

if TYPE_CHECKING:
    from deployments.engines.vllm.front_end import RoutedAsyncLLM


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Of a front end: who reads the outputs, the application, and whether its model takes images or sounds."""

    reader: OutputReader
    app: FastAPI
    takes_media: bool


@dataclass(frozen=True, slots=True)
class Given:
    """What it is made with.

    Attributes:
        max_model_len: that its replicas settled on, in tokens.
        background: runs its tasks.
        resources: ends what it opens.
        responses: makes and stores responses; None stores none.
    """

    in_force: Live[InForce]
    routed: EngineClient[Any, Any]
    max_model_len: int
    background: BackgroundTasks
    resources: AsyncExitStack
    responses: BackgroundResponses | None


class FrontEndKind(Protocol):
    @property
    def codec(self) -> Any:
        """`router.codec.EngineCodec`; a SplitCodec too where `engine.prefill` may be set."""

    @property
    def versions(self) -> Mapping[str, str]:
        """Of what runs the model, by name, for the metric of the build."""

    async def parts(self, given: Given) -> Parts:
        """Raises whatever vLLM's application does at its start."""


def kind_of(config: AppConfig) -> FrontEndKind:
    """Of one model. Raises ConfigError: vLLM refuses its arguments."""
    return OfServers() if config.engine.kind == "openai" else OfVllm(config)


class OfServers:
    """Before OpenAI-compatible servers. What they take they say themselves, so bodies may hold images."""

    versions: Mapping[str, str] = {}

    def __init__(self) -> None:
        from deployments.engines.openai.messages import OpenAiCodec

        self.codec = OpenAiCodec()

    async def parts(self, given: Given) -> Parts:
        from deployments.engines.openai.front_end import ServersFrontEnd

        config = given.in_force.now.config
        reader = ServersFrontEnd(
            routed=given.routed,
            model=config.public_name,
            server_model=config.model,
            max_model_len=given.max_model_len,
            isolates_keys=config.keys.isolate_prefixes,
        )
        return Parts(reader=reader, app=reader.application(given.background), takes_media=True)


class OfVllm:
    """vLLM's own OpenAI application."""

    def __init__(self, config: AppConfig) -> None:
        with heavy_imports():
            from deployments.engines.vllm.args import parse_vllm_args
            from deployments.engines.vllm.causes import causes_of_args
            from deployments.engines.vllm.codec import VllmCodec
            from deployments.engines.vllm.front_end import as_front_end_of_any_model
            from deployments.engines.vllm.version import ENGINE_VERSION

        args = parse_vllm_args(config.vllm_argv())
        self._args = args if config.engine.kind == "vllm" else as_front_end_of_any_model(args)
        self.versions = {"vllm": ENGINE_VERSION.removeprefix("vllm-")}
        self.codec = VllmCodec(resumes=not why_off(Feature.RESUMED_ANSWERS, causes_of_args(args)))

    async def parts(self, given: Given) -> Parts:
        self._args.max_model_len = given.max_model_len
        llm = _vllms_engine(given, self._args)
        takes_media = bool(llm.model_config.is_multimodal_model)
        config = given.in_force.now.config
        most = request_limits(config, given.max_model_len, takes_media=takes_media).max_body_bytes
        app = await _vllms_application(config, llm, self._args, given.responses, most)
        return Parts(reader=llm, app=app, takes_media=takes_media)


def _vllms_engine(given: Given, args: argparse.Namespace) -> "RoutedAsyncLLM":
    """vLLM's front end over the routed client."""
    with heavy_imports():
        from deployments.engines.transformers.step import unsupported
        from deployments.engines.vllm.front_end import RoutedAsyncLLM

    in_force, config = given.in_force, given.in_force.now.config
    is_vllm = config.engine.kind == "vllm"

    def made_grammars(vllm_config: Any) -> Grammars:
        timeout_s = in_force.view(lambda now: now.config.router.grammar_timeout_s)
        grammars = Grammars(vllm_config, timeout_s, given.background)
        given.resources.push_async_callback(grammars.close)
        return grammars

    return RoutedAsyncLLM(
        args,
        given.routed,
        unsupported=None if is_vllm else unsupported,
        max_prompt_logprobs=in_force.view(lambda now: now.config.router.max_prompt_logprobs),
        isolates_keys=config.keys.isolate_prefixes and config.caches_prefixes,
        made_grammars=made_grammars if is_vllm else None,
        may_be_none=may_be_none(config.engine),
    )


async def _vllms_application(
    config: AppConfig,
    llm: "RoutedAsyncLLM",
    args: argparse.Namespace,
    responses: BackgroundResponses | None,
    max_body_bytes: int,
) -> FastAPI:
    with heavy_imports():
        from vllm.entrypoints.launchers.api_server.app_state import init_app_state
        from vllm.entrypoints.launchers.app import build_app

        from deployments.engines.vllm.direct_outputs import write_past_generators
        from deployments.engines.vllm.media import fetch_media_from_allowed_addresses
        from deployments.engines.vllm.responses import KeptResponses, stored_responses
        from deployments.engines.vllm.validation import refuse_soon

    fetch_media_from_allowed_addresses(config.router.media_networks)
    args.enable_offline_docs = not args.disable_fastapi_docs
    tasks = await llm.get_supported_tasks()
    with root_level_kept():
        app: FastAPI = build_app(args, tasks, llm.model_config)
    refuse_soon(app)
    log_causes(app)
    kept = None if responses is None else KeptResponses(background=responses, max_bytes=max_body_bytes)
    with stored_responses(kept):
        await init_app_state(llm, app.state, args, tasks)
    write_past_generators(llm.output_processor, app.state)
    log_of_vllm()
    app.state.server = SimpleNamespace()  # vLLM's error handler looks for the server it would stop
    return app
