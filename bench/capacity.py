"""Targets and capacity that come from this machine, for open loops of tight and loose requests.

Plain vLLM is measured with all slots decoding, and with single prompts. Tight requests want 2 such decode steps a token
and the first one within 5 times the mean prompt's reading, loose ones 6 steps and 50 times. Capacity is the highest
rate at which 95 % are in time.
"""

import argparse
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence

import uvloop

from bench.chat_client import TEXT_PATH, Answer, ChatClient
from bench.load import ServerUnusable, first_model
from bench.open_loop import LOOSE, TIGHT, Arrival, Lengths, Outcome, Targets, draw_requests, run_open_loop
from bench.session import Session, positive, positive_number

KEPT_AT_CAPACITY = 0.95
IN_STEPS = {TIGHT: 2.0, LOOSE: 6.0}  # time per token, in decode steps of all slots
IN_READINGS = {TIGHT: 5.0, LOOSE: 50.0}  # first token, in readings of the mean prompt
ALONE = 12  # prompts that are read alone
FULL_TOKENS = 64  # of each answer while all slots decode
RATE_STEP = 1.25  # between two rates that are tried in search of capacity
BISECTIONS, MOST_TRIES = 2, 12


def add_options(parser: argparse.ArgumentParser, lengths: Lengths, rounds_of: str) -> None:
    """Options of an open loop."""
    add = parser.add_argument
    add("--slots", type=positive, default=16, help="requests that run at once, --max-num-seqs (default: %(default)s)")
    add("--capacity", type=positive_number, metavar="RATE", help="requests a second (default: searched for)")
    add("--rounds", type=positive, default=3, help=f"runs of {rounds_of} at each load (default: %(default)s)")
    for name, default in (
        ("tight-prompt", lengths.tight_prompt),
        ("loose-prompt", lengths.loose_prompt),
        ("answer", lengths.answer),
    ):
        add(f"--{name}", type=int, default=default, metavar="TOKENS", help="mean length (default: %(default)s)")


def engine_arguments(options: argparse.Namespace) -> Sequence[str]:
    return f"--max-num-seqs={options.slots}", "--no-enable-prefix-caching"


def lengths_of(options: argparse.Namespace) -> Lengths:
    """Raises ValueError: lengths that make no requests."""
    return Lengths(tight_prompt=options.tight_prompt, loose_prompt=options.loose_prompt, answer=options.answer)


class OpenLoop:
    """Open loops of one session, whose requests have to keep the same targets.

    Attributes:
        lengths: of the requests.
        targets: by class, once they are measured.
        busy_rate: requests a second at which all slots would be busy with reading and decoding.
    """

    def __init__(self, session: Session, lengths: Lengths) -> None:
        self.session, self.slots, self.lengths = session, session.options.slots, lengths
        self.targets: Mapping[str, Targets] = {}
        self.busy_rate = 0.0

    def measure_targets(self, url: str) -> None:
        """By plain vLLM at that address. Raises ServerUnusable, RequestFailed: it answers nothing."""
        self.session.stage("a full decode step, and reading a prompt")
        step_s, reading_s = self._full_step_s(url), self._prompt_reading_s(url)
        self.targets = self.targets_of(step_s, reading_s)
        self.busy_rate = self.slots / (self.lengths.answer * step_s + self.slots * reading_s)
        say = self.session.say
        say(f"a full decode step takes {1e3 * step_s:.1f} ms, reading a mean prompt {1e3 * reading_s:.0f} ms")
        say(f"targets: {targets_in_words(self.targets)}")

    def _full_step_s(self, url: str) -> float:
        """The median gap between tokens while all slots decode."""
        short = Lengths(tight_prompt=16, loose_prompt=16, answer=FULL_TOKENS)
        outcomes = self.ask(url, draw_requests(4 * self.slots, 1e6, short, seed=0))  # all at once
        gaps_s = [gap_s for each in outcomes if each.answer is not None for gap_s in each.answer.itl_s]
        if not gaps_s:
            raise ServerUnusable(f"{url} answered nothing: {outcomes[0].error}")
        return statistics.median(gaps_s)

    def _prompt_reading_s(self, url: str) -> float:
        """The median time to the first token of a prompt of mean length, alone."""
        mean, model = round(self.lengths.mean_prompt), first_model(url)
        alone = Lengths(tight_prompt=mean, loose_prompt=mean, answer=2)

        async def ask_all() -> list[Answer]:
            client = ChatClient(url, path=TEXT_PATH)
            answers = [await client.ask(each.body(model)) for each in draw_requests(ALONE, 1.0, alone, seed=3)]
            client.close()
            return answers

        return statistics.median(answer.ttft_s for answer in uvloop.run(ask_all()))

    def targets_of(self, step_s: float, reading_s: float) -> Mapping[str, Targets]:
        """By class, from what a full decode step and reading a mean prompt take."""
        return {
            slo_class: Targets(ttft_s=IN_READINGS[slo_class] * reading_s, tpot_s=IN_STEPS[slo_class] * step_s)
            for slo_class in (TIGHT, LOOSE)
        }

    def draw(self, count: int, rate: float, seed: int) -> Sequence[Arrival]:
        """Requests at `rate` a second in the mean, in order of arrival."""
        return draw_requests(count, rate, self.lengths, seed)

    def ask(self, url: str, requests: Sequence[Arrival]) -> list[Outcome]:
        return uvloop.run(run_open_loop(url, first_model(url), requests, self.session.bar.update))

    def in_time(self, outcomes: Sequence[Outcome]) -> list[bool]:
        """Whether each kept its targets; what was refused did not."""
        return [self.targets[each.slo_class].kept_by(each.answer) for each in outcomes]

    def capacity(self, url: str, requests_at: Callable[[float], int]) -> float:
        """As given, or the highest rate that a server keeps, searched for with this many requests at each rate."""

        def kept_at(rate: float) -> float:
            self.session.stage(f"in search of capacity, {rate:.2f} requests a second")
            requests = self.draw(requests_at(rate), rate, seed=round(1e6 * rate))
            kept = statistics.fmean(self.in_time(self.ask(url, requests)))
            self.session.say(f"at {rate:.2f} requests a second: {kept:.3f} in time")
            return kept

        found: float = self.session.options.capacity or capacity_of(kept_at, self.busy_rate)
        self.session.say(f"{KEPT_AT_CAPACITY:.0%} are in time at up to {found:.2f} requests a second")
        return found


def targets_in_words(targets: Mapping[str, Targets]) -> str:
    return "; ".join(f"{name}: {', '.join(_in_words(each))}" for name, each in targets.items())


def _in_words(targets: Targets) -> Iterator[str]:
    if targets.ttft_s is not None:
        yield f"first token within {1e3 * targets.ttft_s:.0f} ms"
    if targets.tpot_s is not None:
        yield f"{1e3 * targets.tpot_s:.0f} ms a token"
    if targets.e2e_s is not None:
        yield f"last one within {targets.e2e_s:.3g} s"


def classes_of(targets: Mapping[str, Targets]) -> dict[str, dict[str, object]]:
    """Sluice's section of settings that promises these targets."""
    return {name: {"ttft_s": each.ttft_s, "tpot_s": each.tpot_s, "e2e_s": each.e2e_s} for name, each in targets.items()}


def capacity_of(kept_at: Callable[[float], float], start: float) -> float:
    """The highest rate at which `kept_at(rate)` is at least KEPT_AT_CAPACITY: in steps, then halved.

    Raises: ServerUnusable: no rate was found in MOST_TRIES.
    """
    rate, below, above = start, None, None
    for _ in range(MOST_TRIES):
        if kept_at(rate) >= KEPT_AT_CAPACITY:
            below = rate
        else:
            above = rate
        if below is not None and above is not None:
            break
        rate = rate / RATE_STEP if below is None else rate * RATE_STEP
    if below is None or above is None:
        raise ServerUnusable(f"between {start:.3g} and {rate:.3g} requests a second there is no capacity to be found")
    for _ in range(BISECTIONS):
        middle = (below * above) ** 0.5
        if kept_at(middle) >= KEPT_AT_CAPACITY:
            below = middle
        else:
            above = middle
    return below
