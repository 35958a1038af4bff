"""What a chat request asks, and under which instructions: the texts of its messages, not what a template makes of them.

A template puts the system prompt and its own marks around the question, and a long system prompt would push it out of
the few tokens that the encoder reads. So the predictor reads the user's last message, and the instructions become a
name, under which the requests that share them share a curve.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

INSTRUCTING = ("system", "developer")


@dataclass(frozen=True, slots=True)
class Asked:
    """Attributes: prompt, the user's last message; system_prompt, a digest of the instructions, "" without any."""

    prompt: str
    system_prompt: str


def asked_in(messages: Iterable[Mapping[str, Any]]) -> Asked | None:
    """What messages in OpenAI's form ask; None when no user says anything in words."""
    prompt = ""
    instructions = blake2b(digest_size=8)
    instructed = False
    for message in messages:
        role, text = message.get("role"), _text(message.get("content"))
        if role in INSTRUCTING and text:
            instructions.update(text.encode(errors="replace"))
            instructed = True
        elif role == "user" and text:
            prompt = text
    return Asked(prompt, instructions.hexdigest() if instructed else "") if prompt else None


def _text(content: Any) -> str:
    """The text of a message's content, which is a text or a list of parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    texts = (part.get("text") for part in content if isinstance(part, Mapping))
    return "\n".join(text for text in texts if isinstance(text, str))
