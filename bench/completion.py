"""Whole answers in time by Sluice with and without predictor, beside `vllm serve`: `python -m bench.completion --help`.

Tool calls: most have short answers, some long ones, all in one class and due by the same time. The model is told the
length of each answer (`bench.deployments.told_lengths`), of which nobody else knows before; only the prompt tells what
is asked. Runs are those of `bench.in_time`.
"""

import argparse
import random
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from bench.capacity import OpenLoop, classes_of, engine_arguments, targets_in_words
from bench.in_time import (
    CAPPED,
    PLAIN,
    Run,
    add_run_options,
    best_cap,
    cap_argument,
    failures,
    paired_runs,
    table,
    warm_up,
    write_figure,
)
from bench.open_loop import Arrival, Lengths, Targets, around, arrivals
from bench.session import EXIT_STATUS, Session, new_parser, positive, positive_number, run_session

WITHOUT, WITH = "Sluice without predictor", "Sluice"
SHORT, LONG = "short", "long"
SLO_CLASS = "agents"
SHORT_SHARE = 0.88
IN_SHORT_ANSWERS = 7.0  # the time for a whole answer, in short ones while all slots decode
MAX_TOKENS = 1024  # what clients allow an answer: the same for all, so that it tells nothing
AT_ONCE = 20  # requests for each slot, all at once, of which capacity is counted
TOLD = "--logits-processors=bench.deployments.told_lengths:ToldLengths"
TOKENS_OF_A_RECORD = 17  # by the demo model's tokenizer
ASKED = {
    SHORT: (
        "Which of these records has the highest amount? Answer with its number.",
        "Is any of these records overdue? Answer yes or no.",
        "Call the tool close_record for the last of these records. Answer with the call alone, as JSON.",
        "In which city is the first of these records? Answer with one word.",
    ),
    LONG: (
        "Write a detailed report about these records, with an introduction, a section on each and a conclusion.",
        "Explain step by step how to reconcile all of these records, with worked examples and the code for it.",
        "Write a long story in which every one of these records plays a part.",
    ),
}
CITIES = ("Lima", "Oslo", "Graz", "Turin", "Quito", "Leeds", "Osaka", "Perth", "Tunis", "Cork", "Basel", "Delft")
STATES = ("open", "paid", "overdue", "disputed", "closed", "on hold")

EPILOG = f"""\
examples:
  python -m bench.completion                             a random model of 27 million parameters, half an hour or so
  python -m bench.completion --rounds 1 --requests 100   a first look
  python -m bench.completion --model Qwen/Qwen3-8B --slots 256 --short-answer 45 --long-answer 900 --records 40

All get the same engine arguments, and after them whatever follows `--`. Capacity is what plain vLLM answers a second of
requests that come at once. Refused and failed requests are not in time. Sluice is told the target as that of its class,
and without its predictor `predictor.kind: histogram`; nothing else is set.

{EXIT_STATUS}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """`arrival_s` counts from the start of the run; `answer_tokens` is what the model is told."""

    arrival_s: float
    kind: str
    prompt: str
    answer_tokens: int
    slo_class: str = SLO_CLASS

    def body(self, model: str) -> bytes:
        return msgspec.json.encode(
            {
                "model": model,
                "prompt": self.prompt,
                "max_tokens": MAX_TOKENS,
                "temperature": 0,
                "vllm_xargs": {"answer_tokens": self.answer_tokens},
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )


def draw_tool_calls(count: int, rate: float, answers: Mapping[str, int], records: int, seed: int) -> list[ToolCall]:
    """Requests at `rate` a second in the mean, in order of arrival.

    Args:
        answers: mean tokens, by kind.
        records: in the mean, of a prompt.
    """
    rng, drawn = random.Random(seed), []
    for arrival_s in arrivals(rng, count, rate):
        kind = SHORT if rng.random() < SHORT_SHARE else LONG
        lines = [_record(rng) for _ in range(around(rng, records))]
        prompt = "\n".join([rng.choice(ASKED[kind]), *lines])
        tokens = around(rng, answers[kind])
        drawn.append(ToolCall(arrival_s=arrival_s, kind=kind, prompt=prompt, answer_tokens=tokens))
    return drawn


def _record(rng: random.Random) -> str:
    return f"{rng.randrange(10_000)}: {rng.choice(CITIES)}, {rng.choice(STATES)}, {rng.randrange(1, 900)}.00"


class ToolCalls(OpenLoop):
    """Open loops of tool calls."""

    def __init__(self, session: Session, prompt_tokens: int) -> None:
        options = session.options
        self._answers = {SHORT: options.short_answer, LONG: options.long_answer}
        answer = round(SHORT_SHARE * options.short_answer + (1 - SHORT_SHARE) * options.long_answer)
        super().__init__(session, Lengths(tight_prompt=prompt_tokens, loose_prompt=prompt_tokens, answer=answer))

    def targets_of(self, step_s: float, reading_s: float) -> Mapping[str, Targets]:
        return {SLO_CLASS: Targets(e2e_s=IN_SHORT_ANSWERS * (reading_s + self._answers[SHORT] * step_s))}

    def draw(self, count: int, rate: float, seed: int) -> Sequence[Arrival]:
        return draw_tool_calls(count, rate, self._answers, self.session.options.records, seed)

    def answered_a_second(self, url: str) -> float:
        """Requests that come at once, or as given."""
        count = AT_ONCE * self.slots
        self.session.stage(f"capacity: {count} requests at once")
        began_s = time.perf_counter()
        given: float | None = self.session.options.capacity
        if given is None:
            self.ask(url, self.draw(count, 1e6, seed=4))
        found = given or count / (time.perf_counter() - began_s)
        self.session.say(f"capacity: {found:.2f} requests a second")
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Everything; this is what `--json` writes.

    Attributes:
        answers: mean tokens, by kind.
        capacity: requests a second.
        cap: prompt tokens.
        believed: the share of routers that went by the predictor when it was measured.
    """

    model: str
    engine_arguments: tuple[str, ...]
    answers: Mapping[str, int]
    prompt_tokens: int
    requests: int
    targets: Mapping[str, Targets]
    capacity: float
    cap: int
    believed: float
    runs: tuple[Run, ...]


def measure(session: Session) -> Measured:
    """Raises: ServerFailed, ServerUnusable, RequestFailed, ValueError."""
    options = session.options
    plain = session.start(session.plain(PLAIN, 0)).spec.url
    loop = ToolCalls(session, options.records * TOKENS_OF_A_RECORD)
    loop.measure_targets(plain)
    capacity = loop.answered_a_second(plain)
    cap = best_cap(loop, capacity)
    settings = {"classes": classes_of(loop.targets), "default_class": SLO_CLASS, "engine": {"replicas": 1}}
    servers = {
        PLAIN: plain,
        CAPPED: session.start(session.plain(CAPPED, 1, cap_argument(cap))).spec.url,
        WITHOUT: session.start(session.sluice(WITHOUT, 2, {**settings, "predictor": {"kind": "histogram"}})).spec.url,
        WITH: session.start(session.sluice(WITH, 3, settings)).spec.url,
        **dict(options.also),
    }
    for name, url in servers.items():
        warm_up(loop, url, capacity)
        session.stage(f"{name} learns lengths")
        loop.ask(url, loop.draw(options.learn, capacity, seed=5))
    believed = believed_share(servers[WITH])
    session.say(f"of the routers of {WITH}, {believed:.0%} go by the predictor")
    return Measured(
        model=options.model or "random Qwen3, 27 million parameters",
        engine_arguments=session.engine_arguments,
        answers={SHORT: options.short_answer, LONG: options.long_answer},
        prompt_tokens=loop.lengths.tight_prompt,
        requests=options.requests,
        targets=loop.targets,
        capacity=capacity,
        cap=cap,
        believed=believed,
        runs=tuple(paired_runs(loop, servers, capacity)),
    )


def believed_share(url: str) -> float:
    """Of the routers that have an opinion, those that go by the predictor; 0 where none has one."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    said = [each.value for family in families for each in family.samples if each.name == "sluice_predictor_believed"]
    return sum(said) / len(said) if said else 0.0


def as_markdown(measured: Measured) -> str:
    return "\n\n".join([_heading(measured), table(measured.runs), *failures(measured.runs)]) + "\n"


def _heading(measured: Measured) -> str:
    answers = measured.answers
    return (
        f"Model: {measured.model}. All: `{' '.join(measured.engine_arguments)}`.\n"
        f"Prompts of about {measured.prompt_tokens} tokens; {SHORT_SHARE:.0%} of the answers have {answers[SHORT]} "
        f"tokens in the mean, the others {answers[LONG]}. Open loop, gaps with a coefficient of variation of 2, "
        f"{measured.requests} requests a run.\n"
        f"Target: {targets_in_words(measured.targets)}. Capacity of `{PLAIN}`, requests at once: "
        f"{measured.capacity:.2f} requests a second. Best cap: {measured.cap} tokens. "
        f"Of Sluice's routers, {measured.believed:.0%} went by the predictor.\n"
        "Shares of all requests: medians over the rounds, in brackets the least and the greatest; differences are "
        "paired."
    )


def _parser() -> argparse.ArgumentParser:
    what = "Measures whole answers in time, Sluice with and without its predictor beside plain `vllm serve`."
    parser = new_parser("bench.completion", what, EPILOG, first_port=18340, model=None)
    add = parser.add_argument
    add("--slots", type=positive, default=16, help="requests that run at once, --max-num-seqs (default: %(default)s)")
    add("--capacity", type=positive_number, metavar="RATE", help="requests a second (default: measured)")
    add("--rounds", type=positive, default=3, help="runs of each system at each load (default: %(default)s)")
    add("--short-answer", type=positive, default=24, metavar="TOKENS", help="mean length (default: %(default)s)")
    add("--long-answer", type=positive, default=480, metavar="TOKENS", help="mean length (default: %(default)s)")
    add("--records", type=positive, default=12, help="in the mean, of a prompt (default: %(default)s)")
    add("--learn", type=positive, default=300, help="requests before the first round (default: %(default)s)")
    add_run_options(parser, loads=(1.0, 1.5), requests=300)
    return parser


def _measured(session: Session) -> Measured:
    found = measure(session)
    if session.options.figure is not None:
        write_figure(found.runs, session.options.figure)
    return found


def _arguments(options: argparse.Namespace) -> Sequence[str]:
    return *engine_arguments(options), TOLD


def main(arguments: Sequence[str] | None = None) -> int:
    return run_session("bench.completion", _parser(), _measured, as_markdown, arguments, engine_arguments=_arguments)


if __name__ == "__main__":
    sys.exit(main())
