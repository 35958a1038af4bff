"""The process that compiles grammars for a router: `python -m deployments.engines.vllm.grammar_child FD`.

A compilation cannot be called off, and may take for ever or all memory. So each runs in a fork of this process, which
has one thread, and is killed at its deadline: by the seconds of a core that it used, for a busy machine may give it
less than one, and at some time anyway. What comes over the socket FD is the router's own.
"""

import math
import os
import pickle
import resource
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from deployments.engines.vllm.grammars import CLOCK_PER_CPU, LENGTH, Asked, Compiled
from deployments.process.parent import die_with_parent

MEMORY_BYTES = 2 << 30  # that a compilation may take beyond what this process has
MAX_ERROR_CHARS = 500  # some hold the whole grammar
NICE = 5  # streams go first
_PAGE_BYTES = resource.getpagesize()


class Compiler:
    """vLLM's own checks and backends, as its engine will use them."""

    def __init__(self, config: Any) -> None:
        from vllm.tokenizers import cached_tokenizer_from_config
        from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

        self._config = config
        self._tokenizer = cached_tokenizer_from_config(model_config=config.model_config)
        self._vocab_size = config.model_config.get_vocab_size()
        # What takes longest of it, the vocabulary, every compilation then finds made.
        self._xgrammar = XgrammarBackend(config, tokenizer=self._tokenizer, vocab_size=self._vocab_size)

    def compile(self, fields: dict[str, Any]) -> Compiled:
        """Raises an exception with vLLM's or the backend's words."""
        from vllm import SamplingParams
        from vllm.sampling_params import StructuredOutputsParams
        from vllm.v1.structured_output.request import get_structured_output_key

        params = SamplingParams(structured_outputs=StructuredOutputsParams(**fields))
        config = self._config
        params._validate_structured_outputs(config.model_config, config.structured_outputs_config, self._tokenizer)
        checked = params.structured_outputs
        backend = self._backend(checked._backend)
        grammar = backend.compile_grammar(*get_structured_output_key(checked))
        mask = backend.allocate_token_bitmask(1)
        grammar.fill_bitmask(mask, 0)
        if not mask.any():
            raise ValueError("it allows no first token")
        return Compiled(
            backend=checked._backend,
            was_auto=checked._backend_was_auto,
            choice=checked.choice,
            grammar=checked.grammar,
        )

    def _backend(self, name: str) -> Any:
        from vllm.v1.structured_output.backend_guidance import GuidanceBackend
        from vllm.v1.structured_output.backend_lm_format_enforcer import LMFormatEnforcerBackend
        from vllm.v1.structured_output.backend_outlines import OutlinesBackend

        if name == "xgrammar":
            return self._xgrammar
        others = {
            "guidance": GuidanceBackend,
            "outlines": OutlinesBackend,
            "lm-format-enforcer": LMFormatEnforcerBackend,
        }
        return others[name](self._config, tokenizer=self._tokenizer, vocab_size=self._vocab_size)


@dataclass(slots=True)
class _Compilation:
    asked: Asked
    pid: int
    deadline_s: float
    answer: bytearray = field(default_factory=bytearray)


class Server:
    """Starts, watches and ends compilations; each answer is one frame."""

    def __init__(self, router: socket.socket, compile_fields: Callable[[dict[str, Any]], Compiled]) -> None:
        self._router, self._compile = router, compile_fields
        self._selector = selectors.DefaultSelector()
        self._selector.register(router, selectors.EVENT_READ)
        self._running: dict[int, _Compilation] = {}

    def serve(self) -> None:
        """Until the router closes its end."""
        while True:
            for key, _ in self._selector.select(self._patience_s()):
                if key.fileobj is not self._router:
                    self._read(key.fd)
                elif (frame := receive(self._router)) is None:
                    return
                else:
                    self._start(msgspec.msgpack.decode(frame, type=Asked))
            now_s = time.monotonic()
            for fd in [fd for fd, each in self._running.items() if each.deadline_s <= now_s]:
                late = self._running[fd]
                os.kill(late.pid, signal.SIGKILL)
                self._end(fd, _late(late.asked))

    def _patience_s(self) -> float | None:
        deadlines = [each.deadline_s for each in self._running.values()]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def _start(self, asked: Asked) -> None:
        ours, its = os.pipe()
        if (pid := os.fork()) == 0:
            _compile_and_exit(self._compile, asked, its)
        os.close(its)
        self._running[ours] = _Compilation(asked, pid, time.monotonic() + CLOCK_PER_CPU * asked.timeout_s)
        self._selector.register(ours, selectors.EVENT_READ)

    def _read(self, fd: int) -> None:
        if part := os.read(fd, 1 << 16):
            self._running[fd].answer += part
            return
        answer = self._running[fd].answer
        self._end(fd, msgspec.msgpack.decode(answer, type=Compiled) if answer else None)

    def _end(self, fd: int, compiled: Compiled | None) -> None:
        compilation = self._running.pop(fd)
        self._selector.unregister(fd)
        os.close(fd)
        _, status = os.waitpid(compilation.pid, 0)
        if compiled is None:
            code = os.waitstatus_to_exitcode(status)
            is_late = code == -signal.SIGXCPU
            compiled = _late(compilation.asked) if is_late else Compiled(error=f"its compilation ended with {code}")
        compiled.number = compilation.asked.number
        send(self._router, msgspec.msgpack.encode(compiled))


def _late(asked: Asked) -> Compiled:
    return Compiled(error=f"it takes longer than {asked.timeout_s:g} s to compile (router.grammar_timeout_s)")


def _compile_and_exit(compile_fields: Callable[[dict[str, Any]], Compiled], asked: Asked, fd: int) -> None:
    """In the fork. However it goes, nothing of the parent's is run on the way out."""
    try:
        die_with_parent()
        _bound(math.ceil(asked.timeout_s))
        compiled = outcome(compile_fields, asked.fields)
        with open(fd, "wb") as answer:
            answer.write(msgspec.msgpack.encode(compiled))
    finally:
        os._exit(0)


def outcome(compile_fields: Callable[[dict[str, Any]], Compiled], fields: dict[str, Any]) -> Compiled:
    try:
        return compile_fields(fields)
    except Exception as error:  # of whatever kind: the grammar is its client's, but what is installed is not
        said = str(error)[:MAX_ERROR_CHARS] or type(error).__name__
        return Compiled(error=said, is_ours=isinstance(error, ImportError))


def _bound(cpu_s: int) -> None:
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * _PAGE_BYTES
    most = used + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))


def receive(connection: socket.socket) -> bytes | None:
    """One frame; None at the end."""
    if (head := _exactly(connection, LENGTH.size)) is None:
        return None
    return _exactly(connection, LENGTH.unpack(head)[0])


def _exactly(connection: socket.socket, size: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < size:
        if not (part := connection.recv(size - len(parts))):
            return None
        parts += part
    return bytes(parts)


def send(connection: socket.socket, frame: bytes) -> None:
    connection.sendall(LENGTH.pack(len(frame)) + frame)


def main() -> None:
    die_with_parent()
    os.nice(NICE)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the application, which ends this process
    router = socket.socket(fileno=int(sys.argv[1]))
    config = receive(router)
    assert config is not None, "the router ended before it had started this"
    compiler = Compiler(pickle.loads(config))
    send(router, b"")  # ready
    Server(router, compiler.compile).serve()


if __name__ == "__main__":
    main()
