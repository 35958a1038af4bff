"""Requests that cost much and are sent by one client: as much as passes, and hardly more, which is refused.

None makes software of others hang or crash: by what a refusal costs at so little it shows what it would at more.
"""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from deployments.http.limits import FIELD_LIMITS

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


def tools(number: int) -> list[dict[str, Any]]:
    parameters = {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(20)}}
    return [{"type": "function", "function": {"name": f"f{n}", "parameters": parameters}} for n in range(number)]


def attacks(context_tokens: int) -> dict[str, Attack]:
    """By a name; those that follow the context are as large as it lets pass."""
    return {**beyond_the_limits(context_tokens), **wrong_grammars(), **at_the_limits(context_tokens)}


def wrong_grammars() -> dict[str, Attack]:
    """They are refused once a compiler has looked at them."""
    return {
        "a schema of nothing that is there": Attack(CHAT, schema_of({"$ref": "#/definitions/x"})),
        "an open parenthesis": Attack(CHAT, chat(structured_outputs={"regex": "(a"})),
    }


def beyond_the_limits(context_tokens: int) -> dict[str, Attack]:
    """Hardly more than may be, or wrong in a way that costs no more here: all are refused."""
    parts, many = [{"type": "nobody"}], 20
    wrong: dict[str, Any] = {"role": "user", "content": parts}
    return {
        "a bad word too long": Attack(CHAT, chat(bad_words=["a" * (FIELD_LIMITS["bad_words"].chars or 0) + "a"])),
        "one message too many": Attack(CHAT, chat(messages=USER * (FIELD_LIMITS["messages"].entries + 1))),
        "one choice too many": Attack(
            CHAT,
            chat(structured_outputs={"choice": [str(n) for n in range(FIELD_LIMITS["choice"].entries + 1)]}),
        ),
        "one bias too many": Attack(
            CHAT, chat(logit_bias={str(n): 1 for n in range(FIELD_LIMITS["logit_bias"].entries + 1)})
        ),
        "one tool too many": Attack(CHAT, chat(tools=tools(1) * (FIELD_LIMITS["tools"].entries + 1))),
        "tokenize a text too long": Attack("/tokenize", {"prompt": "a" * (16 * context_tokens + 1)}),
        "one conversation too many": Attack(f"{CHAT}/batch", chat(messages=[USER] * 257)),
        "one item to score too many": Attack(
            "/generative_scoring", {"query": "a", "items": ["b"] * 257, "label_token_ids": [300, 301]}
        ),
        "a schema too long": Attack(CHAT, schema_of({"const": "a" * (FIELD_LIMITS["response_format"].chars or 0)})),
        "wrong items": Attack(RESPONSES, {"input": [wrong] * many}),
        "a wrong item at the end of many": Attack(RESPONSES, {"input": [*USER * 1000, wrong]}),
        "wrong parts of a message": Attack(RESPONSES, {"input": [{**wrong, "content": parts * many}]}),
        "wrong tools": Attack(RESPONSES, {"input": "a", "tools": [{"type": "nobody"}] * many}),
        "a model with a long name": Attack(TEXT, text(model="a" * 2000)),
        "options of another type": Attack(CHAT, chat(structured_outputs=[1])),
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
