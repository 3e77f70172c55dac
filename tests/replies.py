"""Prompts of the API tests, and what is asked of their replies."""

from __future__ import annotations

from lily import Chunk

FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
STORY = "Once upon a time"
FRANCE_PROMPT = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n<think>\n"


def text_of(chunks: list[Chunk], kind: str = "text") -> str:
    """Text of one kind."""
    return "".join(chunk.text for chunk in chunks if chunk.kind == kind)


def ids_of(chunks: list[Chunk]) -> list[int]:
    """Token ids of a reply."""
    return [index for chunk in chunks for index in chunk.token_ids]
