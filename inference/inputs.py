"""Prompts as dictionaries, under vLLM's names: TextPrompt, TokensPrompt."""

from typing import NotRequired, TypedDict


class TextPrompt(TypedDict):
    """A prompt as text; cache_salt: a text, shares the cache with prompts of the same salt only."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """A prompt as token ids; prompt: its text, for RequestOutput; cache_salt: as in TextPrompt."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]
