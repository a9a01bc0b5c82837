"""Prompts as dictionaries, under vLLM's names: TextPrompt, TokensPrompt."""

from typing import NotRequired, TypedDict


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str


class TokensPrompt(TypedDict):
    """A prompt as token ids; prompt: its text, for RequestOutput."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
