"""Whole JSON documents as rows of requests: conversations of ShareGPT, and what load generators write of a run.

`vllm bench serve --save-result --save-detailed`; `per_request_lifecycle_metrics.json` of inference-perf;
`benchmarks.json` of guidellm. Requests that failed say nothing of lengths, and are left out.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from policies.errors import InputError
from simulator.forms import Tell

BENCH = ("input_lens", "output_lens")
_ASKS, _ANSWERS = ("human", "user"), ("gpt", "chatgpt", "assistant", "model", "bard", "bing")


def requests_of(document: Any, name: str, tell: Tell) -> list[tuple[int, Mapping[str, Any]]]:
    """Rows by our names of columns, each with the number of its entry, from 1.

    Raises:
        InputError: it is none of these, or an entry is not what the others are.
    """
    if isinstance(document, dict) and document.keys() >= set(BENCH):
        return _kept(_of_vllm_bench(document, name), name, "vllm bench serve", tell)
    if isinstance(document, dict) and "benchmarks" in document:
        return _kept(_of_guidellm(document["benchmarks"], name), name, "guidellm", tell)
    if isinstance(document, list) and document and all(isinstance(each, dict) for each in document):
        if "conversations" in document[0]:
            return _kept(_of_sharegpt(document, name), name, "ShareGPT", tell)
        if document[0].keys() >= {"start_time", "info"}:
            return _kept(_of_inference_perf(document, name), name, "inference-perf", tell)
        return list(enumerate(document, start=1))
    raise InputError(
        f"{name} is no document that is known here: a list of objects, ShareGPT's conversations, or what vllm bench "
        "serve, inference-perf and guidellm write of each request"
    )


def _kept(rows: Iterator[tuple[int, Mapping[str, Any] | None]], name: str, form: str, tell: Tell) -> list[Any]:
    """Without those that are None, of which it is told how many they are."""
    try:
        listed = list(rows)
    except (AttributeError, TypeError) as error:  # an object where a text should be, or the other way round
        raise InputError(f"{name} is not as {form} writes it: {error}") from error
    tell(f"read as {form}'s")
    if left_out := [place for place, row in listed if row is None]:
        what = (
            "conversations that do not begin with a question and an answer"
            if form == "ShareGPT"
            else "requests that failed"
        )
        tell(f"left out {len(left_out)} {what}, the first of them entry {left_out[0]}")
    return [(place, row) for place, row in listed if row is not None]


def _of_vllm_bench(found: Mapping[str, Any], name: str) -> Iterator[tuple[int, Mapping[str, Any] | None]]:
    prompts, outputs = found["input_lens"], found["output_lens"]
    starts, errors = found.get("start_times"), found.get("errors")
    for column in (prompts, outputs, starts, errors):
        if column is not None and not (isinstance(column, list) and len(column) == len(prompts)):
            raise InputError(f"{name}: input_lens, output_lens, start_times and errors must be lists of one length")
    for at, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        arrival = {} if starts is None else {"arrival_s": starts[at]}
        failed = bool(errors and errors[at]) or output == 0
        yield at + 1, None if failed else {"prompt_tokens": prompt, "output_tokens": output, **arrival}


def _of_inference_perf(found: Sequence[Any], name: str) -> Iterator[tuple[int, Mapping[str, Any] | None]]:
    for place, each in enumerate(found, start=1):
        if each.get("error") is not None:
            yield place, None
            continue
        info = each.get("info")
        if not isinstance(info, dict):
            raise InputError(f"{name}, entry {place}: there is no info")
        prompt = (info.get("request_metrics") or {}).get("text") or info
        answer = info.get("response_metrics") or info
        lengths = {"prompt_tokens": prompt.get("input_tokens"), "output_tokens": answer.get("output_tokens")}
        yield place, {"arrival_s": each.get("start_time"), **lengths}


def _of_guidellm(benchmarks: Any, name: str) -> Iterator[tuple[int, Mapping[str, Any] | None]]:
    """All benchmarks of the run, one after the other as they were; errored and incomplete requests count as failed."""
    place = 0
    for benchmark in benchmarks if isinstance(benchmarks, list) else ():
        requests = benchmark.get("requests") if isinstance(benchmark, dict) else None
        if not isinstance(requests, dict) or not isinstance(requests.get("successful"), list):
            raise InputError(f"{name}: a benchmark has no requests.successful: it was written without single requests")
        for each in requests["successful"]:
            place += 1
            lengths = {name: each.get(name) for name in ("prompt_tokens", "output_tokens")}
            yield place, {"arrival_s": each.get("request_start_time", each.get("start_time")), **lengths}
        for _ in range(sum(len(requests.get(kind) or ()) for kind in ("errored", "incomplete"))):
            place += 1
            yield place, None


def _of_sharegpt(found: Sequence[Any], name: str) -> Iterator[tuple[int, Mapping[str, Any] | None]]:
    """The first question of each conversation, and its answer, as load generators take them."""
    for place, each in enumerate(found, start=1):
        turns = each.get("conversations")
        if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
            raise InputError(f"{name}, entry {place}: conversations is no list of objects")
        first = turns[:2]
        who = [turn.get("from", turn.get("role")) for turn in first]
        texts = [turn.get("value", turn.get("content")) for turn in first]
        if len(first) == 2 and who[0] in _ASKS and who[1] in _ANSWERS and all(isinstance(text, str) for text in texts):
            yield place, {"prompt_chars": len(texts[0]), "output_chars": len(texts[1])}
        else:
            yield place, None
