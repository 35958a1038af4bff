"""Requests that cost much and are sent by one client: those that once made a router stand still, and others."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
USER = [{"role": "user", "content": "hello"}]
MIB = 1 << 20


class Attack(NamedTuple):
    """One request; a body that is not bytes is sent as JSON."""

    path: str
    body: Any
    headers: Mapping[str, str] = {}

    @property
    def content(self) -> bytes:
        return self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()


def chat(**more: Any) -> dict[str, Any]:
    return {"messages": USER, "max_tokens": 4, **more}


def text(**more: Any) -> dict[str, Any]:
    return {"prompt": "hello", "max_tokens": 4, **more}


def schema_of(schema: Any) -> dict[str, Any]:
    return chat(response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": schema}})


def one_ofs(depth: int) -> dict[str, Any]:
    if depth == 0:
        return {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}
    return {"oneOf": [one_ofs(depth - 1), one_ofs(depth - 1)]}


def optionals(depth: int) -> str:
    return "(a" * depth + ")?" * depth


def tools(number: int) -> list[dict[str, Any]]:
    parameters = {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(20)}}
    return [{"type": "function", "function": {"name": f"f{n}", "parameters": parameters}} for n in range(number)]


def attacks(context_tokens: int) -> dict[str, Attack]:
    """By a name; those that follow the context are as large as it lets pass."""
    return {**as_they_were_found(), **at_the_limits(context_tokens)}


def as_they_were_found() -> dict[str, Attack]:
    """Each once stopped all streams of a router, or an engine's grammars."""
    return {
        "bad word of 3.9 MB": Attack(CHAT, chat(bad_words=["a" * 3_900_000])),
        "schema of oneOf, depth 12": Attack(CHAT, schema_of(one_ofs(12))),
        "120 000 messages": Attack(CHAT, chat(messages=USER * 120_000)),
        "100 000 choices": Attack(CHAT, chat(structured_outputs={"choice": [str(n) for n in range(100_000)]})),
        "200 000 biases": Attack(CHAT, chat(logit_bias={str(n): 1 for n in range(200_000)})),
        "tokenize 3.8 MB": Attack("/tokenize", {"prompt": "hello " * 640_000}),
        "1 500 conversations": Attack(f"{CHAT}/batch", chat(messages=[USER] * 1500)),
        "20 000 items to score": Attack(
            "/generative_scoring", {"query": "a", "items": ["b"] * 20_000, "label_token_ids": [300, 301]}
        ),
        "alternatives of a regex": Attack(
            CHAT, chat(structured_outputs={"regex": f"({'|'.join('a' * n for n in range(1, 1500))})+"})
        ),
        "300 optionals of a regex": Attack(CHAT, chat(structured_outputs={"regex": optionals(300)})),
        "20 000 properties": Attack(CHAT, schema_of({"properties": {f"p{n}": {} for n in range(20_000)}})),
        "anyOf of 1 000": Attack(CHAT, schema_of({"anyOf": [{"const": f"c{n}"} for n in range(1000)]})),
        "a recursive grammar": Attack(CHAT, chat(structured_outputs={"grammar": 'root ::= root "a"'})),
        "a schema that is itself": Attack(CHAT, schema_of({"$ref": "#"})),
    }


def at_the_limits(context_tokens: int) -> dict[str, Attack]:
    """As large as may be, so that they pass."""
    long = "The quick brown fox jumps over 13 lazy dogs. " * (context_tokens * 16 // 45)
    words = "word " * int(context_tokens * 0.9)
    many = min(2048, context_tokens // 16)
    return {
        "text as long as may be": Attack(TEXT, text(prompt=long)),
        "text that fits": Attack(TEXT, text(prompt=words)),
        "chat that fits": Attack(CHAT, chat(messages=[{"role": "user", "content": words}])),
        "tokenize what may be": Attack("/tokenize", {"prompt": long}),
        "tokenize a chat of many": Attack("/tokenize", {"messages": USER * 2048}),
        "count tokens": Attack("/v1/messages/count_tokens", {"model": "m", "messages": USER * 2048}),
        "detokenize": Attack("/detokenize", {"tokens": [300] * (4 * context_tokens)}),
        "token ids that fit": Attack(TEXT, text(prompt=[300] * (context_tokens - 8))),
        "128 prompts of token ids": Attack(TEXT, text(prompt=[[300] * (context_tokens // 64)] * 128)),
        "many messages": Attack(CHAT, chat(messages=USER * many)),
        "2 048 messages in parts": Attack(
            CHAT, chat(messages=[{"role": "user", "content": [{"type": "text", "text": "a"}] * 3}] * 2048)
        ),
        "256 conversations": Attack(f"{CHAT}/batch", chat(messages=[USER] * 256)),
        "128 prompts": Attack(TEXT, text(prompt=["a" * 200] * 128)),
        "128 answers": Attack(CHAT, chat(n=128, max_tokens=8)),
        "128 answers to a long prompt": Attack(TEXT, text(prompt=words, n=128)),
        "4 answers to a long prompt": Attack(TEXT, text(prompt=words, n=4)),
        "128 answers to 4 000 tokens": Attack(TEXT, text(prompt=words[: 5 * 4000], n=128)),
        "a beam of 10": Attack(CHAT, chat(n=10, use_beam_search=True, max_tokens=8)),
        "256 bad words": Attack(CHAT, chat(bad_words=["wordword " * 1] * 256)),
        "stop strings": Attack(CHAT, chat(stop=["x" * 1000] * 4, max_tokens=100)),
        "1 024 biases": Attack(CHAT, chat(logit_bias={str(n): 1 for n in range(1024)})),
        "300 tools": Attack(CHAT, chat(tools=tools(25) * 12, tool_choice="auto")),
        "tools that are required": Attack(CHAT, chat(tools=tools(100)[:60], tool_choice="required")),
        "schema as long as may be": Attack(
            CHAT, schema_of({"properties": {f"p{n:04}": {"type": "string"} for n in range(1800)}})
        ),
        "1 024 choices": Attack(CHAT, chat(structured_outputs={"choice": [f"choice number {n}" for n in range(1024)]})),
        "grammar as long as may be": Attack(
            CHAT, chat(structured_outputs={"grammar": "root ::= " + " | ".join(f'"w{n}"' for n in range(6000))})
        ),
        "responses of many items": Attack(RESPONSES, {"input": USER * 1024, "max_output_tokens": 4}),
        "messages of many": Attack("/v1/messages", {"model": "m", "messages": USER * 2048, "max_tokens": 4}),
        "logprobs of a prompt of 1000": Attack(TEXT, text(prompt=[300] * 1000, prompt_logprobs=20)),
        "logprobs of a prompt of 8000": Attack(TEXT, text(prompt=[300] * 8000, prompt_logprobs=20)),
        "logprobs of a long prompt": Attack(TEXT, text(prompt=[300] * (context_tokens - 8), prompt_logprobs=20)),
        "one of each token, long prompt": Attack(
            TEXT, text(prompt=[300] * (context_tokens - 8), logprobs=0, echo=True, max_tokens=1)
        ),
        "logprobs of a long answer": Attack(CHAT, chat(logprobs=True, top_logprobs=20, max_tokens=120)),
        "a megabyte of nothing": Attack(CHAT, b"[" + b"[]," * (MIB // 3) + b"[]]"),
        "a megabyte that is no JSON": Attack(CHAT, b"{" * MIB),
        "values in many lists": Attack(CHAT, chat(new=[[[1, "a"]] * 200] * 70)),
        "template arguments": Attack(CHAT, chat(chat_template_kwargs={f"k{n}": "v" * 100 for n in range(4000)})),
    }
