"""The arguments of `vllm serve`, parsed, checked, and made into vLLM's configuration: on routers and on replicas."""

import argparse
import difflib
import hashlib
import re
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from vllm.config import KVEventsConfig, VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.serve.utils.api_utils import process_lora_modules
from vllm.lora.request import LoRARequest
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser

try:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
except ModuleNotFoundError:  # vLLM 0.33
    from vllm.entrypoints.common.cli_args import make_arg_parser, validate_parsed_serve_args

from deployments.config.vllm_args import DATA_PARALLEL, why_refused
from deployments.config.yaml_text import load_yaml
from policies.errors import ConfigError

TIERED = ("OffloadingConnector", "SimpleCPUOffloadConnector", "MooncakeStoreConnector", "MultiConnector")


class _Refusing(FlexibleArgumentParser):
    """vLLM's parser, raising where argparse would end the process."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"vllm_args: {message}{self._meant(message)}")

    def _meant(self, message: str) -> str:
        """The option that is most like an unknown one."""
        unknown = re.match(r"unrecognized arguments: (--[\w-]+)", message)
        meant = difflib.get_close_matches(unknown[1], self._options(), n=1) if unknown else ()
        return f"; did you mean {meant[0]}?" if meant else ""

    def _options(self) -> list[str]:
        """All that there are, as its usage names them."""
        return re.findall(r"--[a-z][\w-]*", argparse.ArgumentParser.format_usage(self))

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """After `--help`."""
        raise ConfigError("vllm_args: nothing is served where help is asked for; `vllm serve --help=all` lists them")

    def load_config_file(self, file_path: str) -> list[str]:
        """vLLM calls this for `--config`."""
        args = super().load_config_file(file_path)
        try:
            load_yaml(Path(file_path).read_text())
        except ConfigError as error:
            raise ConfigError(f"vllm_args: {file_path}: {error}") from None
        for option in sorted({arg.replace("_", "-") for arg in args if arg.startswith("--")}):
            if option in DATA_PARALLEL:
                raise ConfigError(f"vllm_args: {option} in {file_path}: name it in vllm_args itself")
            if (why := why_refused(option)) is not None:
                raise ConfigError(f"vllm_args: {why}")
        return args


def parse_vllm_args(argv: Sequence[str]) -> Namespace:
    """The arguments of `vllm serve`, checked, with the parsers that they bring imported, as its server does.

    What `deployments.config.vllm_args` refuses by name is refused in the file of `--config` as well, and a name
    cannot be shortened to pass by it.

    Raises:
        ConfigError: unknown or wrong arguments, or some that Sluice does not leave to them.
    """
    parser = make_arg_parser(_Refusing(prog="vllm_args", allow_abbrev=False))
    try:
        args: Namespace = parser.parse_args(list(argv))
        validate_parsed_serve_args(args)
    except ConfigError:  # a ValueError too
        raise
    except (OSError, TypeError, ValueError) as error:
        raise ConfigError(f"vllm_args: {error}") from error
    if _backend_of_grammars(args) == "lm-format-enforcer":
        raise ConfigError(
            "vllm_args: --structured-outputs-config names the backend lm-format-enforcer, which does not work with "
            "this vLLM: every request with a grammar would fail; name auto, xgrammar, guidance or outlines"
        )
    if args.tool_parser_plugin:
        ToolParserManager.import_tool_parser(args.tool_parser_plugin)
    if args.reasoning_parser_plugin:
        ReasoningParserManager.import_reasoning_parser(args.reasoning_parser_plugin)
    return args


def _backend_of_grammars(args: Namespace) -> str:
    """A file of arguments leaves a dictionary."""
    config = args.structured_outputs_config
    return str(config.get("backend", "auto") if isinstance(config, dict) else config.backend)


def engine_config(engine_args: AsyncEngineArgs) -> VllmConfig:
    """As `vllm serve` makes it: slots and the tokens of a step that are not set are by the use that is named."""
    return engine_args.create_engine_config(UsageContext.OPENAI_API_SERVER)


def generating_config(args: Namespace) -> VllmConfig:
    """`engine_config` of a model that generates text.

    Raises:
        ConfigError: it embeds, classifies or scores.
    """
    engine_args = AsyncEngineArgs.from_cli_args(args)
    if engine_args.kv_events_config is None and _has_tiers(engine_args):  # vLLM says only then what lies there
        engine_args.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    config = engine_config(engine_args)
    if config.model_config.runner_type == "pooling":
        raise ConfigError(
            f"{config.model_config.model} is a pooling model, and Sluice serves models that generate text"
        )
    return config


def _has_tiers(engine_args: AsyncEngineArgs) -> bool:
    """Whether it keeps KV caches beyond the GPU whose blocks go by vLLM's own hashes. LMCache has hashes of its own."""
    if engine_args.kv_offloading_size is not None:
        return engine_args.kv_offloading_backend == "native"
    transfer = engine_args.kv_transfer_config
    return transfer is not None and transfer.kv_connector in TIERED


def kv_layout(config: VllmConfig) -> str:
    """What two replicas must have in common, besides the size of blocks, to read each other's KV cache; "" without a
    connector."""
    if (transfer := config.kv_transfer_config) is None:
        return ""
    model, cache = config.model_config, config.cache_config
    return (
        f"model={model.model} revision={model.revision} dtype={model.dtype} kv_dtype={cache.cache_dtype} "
        f"connector={transfer.kv_connector}"
    )


def lora_id(name: str, path: str) -> int:
    """By which engines tell adapters apart: the same on both sides, where vLLM's front end would count from 1.

    Above 0 and below 2**31: vLLM's model runner for GPUs keeps it in 32 bits.
    """
    return int.from_bytes(hashlib.sha256(f"{name}\0{path}".encode()).digest()[:6], "big") % (2**31 - 1) + 1


def lora_requests(args: Namespace) -> list[LoRARequest]:
    """The adapters that vLLM's arguments name, those for the modalities of chats included."""
    by_modality = args.default_mm_loras if args.enable_lora else None
    return [
        LoRARequest(
            module.name,
            lora_id(module.name, module.path),
            module.path,
            base_model_name=module.base_model_name,
            is_3d_lora_weight=module.is_3d_lora_weight,
        )
        for module in process_lora_modules(list(args.lora_modules or ()), by_modality)
    ]
