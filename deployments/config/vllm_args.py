"""vLLM's arguments: which of them an application may give, and what they say of an engine."""

import re
from collections import Counter
from collections.abc import Container, Sequence
from itertools import zip_longest
from math import prod

LORA_ARGS = {"--enable-lora", "--lora-modules", "--max-loras", "--max-lora-rank", "--max-cpu-loras"}

_SET_ELSEWHERE = {
    "--model": "model",
    "--served-model-name": "served_model_name",
    "--host": "HTTP options of Serve",
    "--port": "HTTP options of Serve",
    "--api-server-count": "router.replicas",
    "--api-key": "keys",
}

# Ray Serve and HAProxy listen in its place.
_OF_VLLMS_SERVER = {
    "--ssl-keyfile", "--ssl-certfile", "--ssl-ca-certs", "--ssl-cert-reqs", "--ssl-ciphers", "--enable-ssl-refresh",
    "--uds", "--grpc", "--headless",
}  # fmt: skip

# What vLLM's front end does by statistics that are off here, or by a queue of its own.
_NOT_IN_ROUTERS = {
    "--otlp-traces-endpoint": "needs vLLM's own statistics, which are off: OTEL_EXPORTER_OTLP_ENDPOINT traces",
    "--collect-detailed-traces": "needs --otlp-traces-endpoint, which routers do not have",
    "--enable-per-request-metrics": "needs vLLM's own statistics, which are off: Server-Timing tells the times",
    "--max-num-queued-tokens": "counts whatever shows no first token here: see max_waiting and when_late of classes",
}

# Ranks of a data-parallel engine are started side by side, and routers spread the requests over them.
_OF_OTHER_RANKS = {
    "--data-parallel-rank", "-dpn", "--data-parallel-start-rank", "-dpr", "--data-parallel-size-local", "-dpl",
    "--data-parallel-address", "-dpa", "--data-parallel-rpc-port", "-dpp", "--data-parallel-backend", "-dpb",
    "--data-parallel-hybrid-lb", "-dph", "--data-parallel-external-lb", "-dpe", "--enable-elastic-ep",
}  # fmt: skip

# Ray starts an engine's processes on other nodes, in its bundles. With these it would wait for others to start them.
_OF_SEVERAL_NODES = {"--nnodes", "--node-rank", "--master-addr", "--master-port"}

DATA_PARALLEL = ("--data-parallel-size", "-dp")
# Each multiplies the GPUs of an engine.
PARALLEL = (
    ("--tensor-parallel-size", "-tp"),
    ("--pipeline-parallel-size", "-pp"),
    ("--prefill-context-parallel-size", "-pcp"),
    DATA_PARALLEL,
)

# Whoever sets these counts on another placement, precision or adapters of the model than the Transformers engine has.
NOT_FOR_TRANSFORMERS = {
    *(name for names in PARALLEL for name in names),
    "--enable-expert-parallel", "--quantization", "-q", "--speculative-config", "--scheduler-cls",
    "--additional-config", "--kv-transfer-config", *LORA_ARGS,
}  # fmt: skip

EXECUTOR = "--distributed-executor-backend"

# With these the arguments do not say how many GPUs an engine has here.
_PLACED_ELSEWHERE = {"--config", EXECUTOR}

MEMORY = {"--gpu-memory-utilization", "--kv-cache-memory-bytes", "--config"}


def why_refused(option: str) -> str | None:
    """Why `vllm_args` cannot have an option of vLLM's, with hyphens; None where they can."""
    if option in _SET_ELSEWHERE:
        return f"{option} is set by {_SET_ELSEWHERE[option]}, not by vllm_args"
    if option in _OF_VLLMS_SERVER:
        return f"{option} is of vLLM's own server, which does not run here; TLS goes in front of Sluice"
    if option in _OF_SEVERAL_NODES:
        return (
            f"{option} is for engines whose processes somebody else starts on other nodes: leave it out, and set "
            "engine.placement_group_bundles"
        )
    if option in _OF_OTHER_RANKS:
        return f"{option} is for ranks that somebody else starts: --data-parallel-size alone starts all of them here"
    return f"{option} {_NOT_IN_ROUTERS[option]}" if option in _NOT_IN_ROUTERS else None


def options(argv: Sequence[str]) -> dict[str, str]:
    """Options of a command line, with hyphens, and their values; "" where none follows."""
    found: dict[str, str] = {}
    for arg, following in zip_longest(argv, argv[1:], fillvalue=""):
        if arg.startswith("-"):
            name, _, value = arg.partition("=")
            found[name.replace("_", "-")] = value or following
    return found


def named_twice(argv: Sequence[str]) -> str | None:
    """An option that stands there more than once, of which vLLM would take the last; None without one. The middleware
    of its server may be several."""
    names = [arg.partition("=")[0].replace("_", "-") for arg in argv if re.match(r"--?[A-Za-z]", arg)]
    return next((name for name, count in Counter(names).items() if count > 1 and name != "--middleware"), None)


def without(argv: Sequence[str], names: Container[str]) -> list[str]:
    """An argument list without these options and their values."""
    kept, keeps = list[str](), True
    for arg in argv:
        keeps = arg not in names if arg.startswith("-") else keeps
        if keeps:
            kept.append(arg)
    return kept


def gpus_used(argv: Sequence[str], *, in_bundles: bool) -> int | None:
    """GPUs of one engine by vLLM's arguments; None where they do not say."""
    silent = {"--config"} if in_bundles else _PLACED_ELSEWHERE
    return None if options(argv).keys() & silent else workers_of(argv)


def ranks_of(argv: Sequence[str]) -> int:
    """Of a data-parallel engine; 1 without, and where it is for vLLM to complain."""
    given = options(argv)
    size = next((given[name] for name in DATA_PARALLEL if name in given), "1")
    return int(size) if size.isdecimal() and int(size) else 1


def workers_of(argv: Sequence[str]) -> int | None:
    """Parts into which vLLM's arguments split one engine, wherever they run; None where it is for vLLM to complain."""
    given = options(argv)
    sizes = [next((given[name] for name in names if name in given), "1") for names in PARALLEL]
    return prod(map(int, sizes)) if all(size.isdecimal() for size in sizes) else None
