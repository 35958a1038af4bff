"""A comparison as Markdown: rates and latencies, CPU per output token by role, and what to know when reading them."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from bench.cpu import Role, front_end_cpu_s
from bench.load import LEAST_FOR_P99, error_lines
from bench.pairing import Pairing, Plan, Run
from bench.summary import differences, median_interval, ratios, spread

# Above this, what other programs use is felt on a machine of few cores.
QUIET_CORES = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Everything that was measured; this is what `--json` writes."""

    machine: str
    versions: str
    model: str
    engine_arguments: tuple[str, ...]
    plan: Plan
    pairings: tuple[Pairing, ...]

    @property
    def failed_requests(self) -> int:
        return sum(run.load.failed for pairing in self.pairings for run in pairing.runs)


Value = Callable[[Run], float | None]


def _per_token_us(cpu_s: float, run: Run) -> float:
    return cpu_s / run.load.output_tokens * 1e6


def _milliseconds(value_s: float | None) -> float | None:
    return None if value_s is None else value_s * 1e3


# Title, value of one run, digits after the point.
COLUMNS: tuple[tuple[str, Value, int], ...] = (
    ("requests/s", lambda run: run.load.requests_per_s, 2),
    ("output tokens/s", lambda run: run.load.output_tokens_per_s, 0),
    ("TTFT p50, ms", lambda run: _milliseconds(run.load.ttft_p50_s), 1),
    ("TTFT p99, ms", lambda run: _milliseconds(run.load.ttft_p99_s), 1),
    ("ITL p50, ms", lambda run: _milliseconds(run.load.itl_p50_s), 2),
    ("ITL p99, ms", lambda run: _milliseconds(run.load.itl_p99_s), 2),
    ("chunks/token", lambda run: run.load.chunks_per_token, 3),
    ("front-end CPU, µs/token", lambda run: _per_token_us(front_end_cpu_s(run.cpu_s), run), 0),
    ("engine-core CPU, µs/token", lambda run: _per_token_us(run.cpu_s.get(Role.ENGINE_CORE, 0.0), run), 0),
)


def as_markdown(comparison: Comparison) -> str:
    return "\n\n".join([_heading(comparison), *(_section(pairing) for pairing in comparison.pairings)]) + "\n"


def _heading(comparison: Comparison) -> str:
    plan = comparison.plan
    return (
        f"Machine: {comparison.machine}. {comparison.versions}. Model: `{comparison.model}`.\n"
        f"Both sides: `{' '.join(comparison.engine_arguments)}`.\n"
        f"Streaming chat, {plan.max_tokens} output tokens a request, temperature 0, closed loop; "
        f"requests a run: {', '.join(f'{plan.requests(each)} (c = {each})' for each in plan.concurrency)}. "
        f"Medians of {plan.repeats} interleaved repeats; ratios are paired, in brackets the least and the greatest."
        f"{_about_intervals(plan.repeats)} TTFT p99 is left out of runs of fewer than {LEAST_FOR_P99} requests."
    )


def _about_intervals(repeats: int) -> str:
    """What the round brackets of `spread` hold."""
    interval = median_interval(range(repeats))
    if interval is None:
        return ""
    return (
        f" In round brackets, of the ratios and differences in rising order, number {interval.rank} and number "
        f"{repeats + 1 - interval.rank}: the true median lies between them with {interval.coverage:.0%}."
    )


def _section(pairing: Pairing) -> str:
    parts = [f"### {pairing.contender} and {pairing.baseline}", _rates(pairing), _cpu_by_role(pairing), _notes(pairing)]
    return "\n\n".join(parts)


def _rates(pairing: Pairing) -> str:
    head = ["concurrency", "", *(title for title, _, _ in COLUMNS)]
    rows = [row for concurrency in _concurrencies(pairing) for row in _rates_at(pairing, concurrency)]
    return markdown_table(head, rows)


def _rates_at(pairing: Pairing, concurrency: int) -> list[list[str]]:
    """One row of medians a system, then one of paired ratios."""
    theirs = pairing.runs_of(pairing.baseline, concurrency)
    ours = pairing.runs_of(pairing.contender, concurrency)
    return [
        [str(concurrency), pairing.baseline, *(_median_cell(theirs, value, digits) for _, value, digits in COLUMNS)],
        ["", pairing.contender, *(_median_cell(ours, value, digits) for _, value, digits in COLUMNS)],
        ["", "ratio", *(_ratio_cell(ours, theirs, value) for _, value, _ in COLUMNS)],
    ]


def _median_cell(runs: Sequence[Run], value: Value, digits: int) -> str:
    values = _values(runs, value)
    return "-" if values is None else f"{statistics.median(values):.{digits}f}"


def _ratio_cell(ours: Sequence[Run], theirs: Sequence[Run], value: Value) -> str:
    our_values, their_values = _values(ours, value), _values(theirs, value)
    if our_values is None or their_values is None or not all(their_values):
        return "-"
    return f"×{spread(ratios(our_values, their_values), '.2f')}"


def _values(runs: Sequence[Run], value: Value) -> list[float] | None:
    """None when a repeat lacks it: a median over the other repeats would no longer be paired."""
    values = [value(run) for run in runs]
    known = [number for number in values if number is not None]
    return known if known and len(known) == len(values) else None


def _cpu_by_role(pairing: Pairing) -> str:
    """CPU of a token, and the part above what idle processes use."""
    columns = [f"c = {each}{what}" for what in ("", ", above idle") for each in _concurrencies(pairing)]
    head = ["CPU, µs per output token", "", *columns, "idle, % of a core"]
    rows = [
        [title, system, *_role_cells(pairing, system, roles)]
        for system in pairing.idle_cpu_cores
        for title, roles in _titled_roles(pairing, system)
    ]
    return markdown_table(head, rows)


def _titled_roles(pairing: Pairing, system: str) -> list[tuple[str, list[Role]]]:
    """Every role that did something, then all but the engine."""
    idle, runs = pairing.idle_cpu_cores[system], [run for run in pairing.runs if run.system == system]
    busy = [role for role in Role if idle.get(role) or any(run.cpu_s.get(role) for run in runs)]
    front_end: list[Role] = [role for role in busy if role is not Role.ENGINE_CORE]
    return [*((str(role), [role]) for role in busy), ("all but the engine", front_end)]


def _role_cells(pairing: Pairing, system: str, roles: Sequence[Role]) -> list[str]:
    idle_cores = _sum(pairing.idle_cpu_cores[system], roles)

    def used_us(run: Run) -> float:
        return _per_token_us(_sum(run.cpu_s, roles), run)

    def above_idle_us(run: Run) -> float:
        return used_us(run) - _per_token_us(idle_cores * run.load.duration_s, run)

    cells = [
        f"{statistics.median(value(run) for run in pairing.runs_of(system, each)):.1f}"
        for value in (used_us, above_idle_us)
        for each in _concurrencies(pairing)
    ]
    return [*cells, _percent_of_a_core(idle_cores)]


def _sum(by_role: Mapping[Role, float], roles: Iterable[Role]) -> float:
    return sum(by_role.get(role, 0.0) for role in roles)


def _percent_of_a_core(cores: float) -> str:
    return f"{cores * 100:.2f}"


def _notes(pairing: Pairing) -> str:
    least = min(_concurrencies(pairing))
    client_us = statistics.median(_per_token_us(run.load.client_cpu_s, run) for run in pairing.runs)
    lines = [
        f"Added TTFT p50 at concurrency {least}, ms: {_added_ttft(pairing, least)}.",
        _idle_totals(pairing),
        _disturbance([run.other_programs_cpu_s / run.load.duration_s for run in pairing.runs]),
        f"The load generator used {client_us:.0f} µs of CPU per output token.",
        *_failures(pairing),
    ]
    return "\n".join(f"- {line}" for line in lines)


def _idle_totals(pairing: Pairing) -> str:
    used = " and ".join(
        f"{_percent_of_a_core(sum(idle.values()))} % ({system})" for system, idle in pairing.idle_cpu_cores.items()
    )
    return f"Idle, both are up and use {used} of a core: each takes that from the other while the other is loaded."


def _disturbance(other_cores: Sequence[float]) -> str:
    most = max(other_cores)
    advice = " They slowed these runs: trust CPU before rates and latencies." if most > QUIET_CORES else ""
    return f"Other programs used {statistics.median(other_cores):.2f} cores during the runs (most: {most:.2f}).{advice}"


def _added_ttft(pairing: Pairing, concurrency: int) -> str:
    ours, theirs = (
        _values(pairing.runs_of(system, concurrency), lambda run: _milliseconds(run.load.ttft_p50_s))
        for system in (pairing.contender, pairing.baseline)
    )
    if ours is None or theirs is None:
        return "unknown"
    return spread(differences(ours, theirs), "+.2f")


def _failures(pairing: Pairing) -> list[str]:
    failing = [run for run in pairing.runs if run.load.errors]
    return [
        f"**Failed** at concurrency {run.concurrency}, {run.system}, repeat {run.repeat + 1}: {line}"
        for run in failing
        for line in error_lines(run.load.errors)
    ] or ["No request failed."]


def _concurrencies(pairing: Pairing) -> list[int]:
    return list(dict.fromkeys(run.concurrency for run in pairing.runs))


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns padded to their widest cell, so that the source reads as a table too."""
    cells = [list(head), *(list(row) for row in rows)]
    widths = [max(3, *(len(row[column]) for row in cells)) for column in range(len(head))]
    lines = [_table_line(row, widths) for row in cells]
    return "\n".join([lines[0], _table_line(["-" * width for width in widths], widths), *lines[1:]])


def _table_line(row: Sequence[str], widths: Sequence[int]) -> str:
    return f"| {' | '.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))} |"
