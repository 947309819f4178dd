"""Prompts of a JSONL file as token ids: messages by the target's chat template, text by its tokenizer, or ids as given."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from draftscope.errors import DraftscopeError
from draftscope.pipeline.conversations import Renderer


@dataclass(frozen=True, slots=True)
class Prompt:
    """One line: its number (the first is 0), its `id` if it has one, the prompt's token ids, and its `kind` if it has one;
    raw = text that went past the chat template."""

    index: int
    id: str
    token_ids: list[int]
    kind: str | None = None
    raw: bool = False


class Tokenizing(Protocol):
    """A target as far as prompts need it: transformers' tokenizer, read when first asked for."""

    @property
    def tokenizer(self) -> Any: ...


def read_prompts(path: Path, target: Tokenizing, *, limit: int | None = None) -> list[Prompt]:
    """Read lines of {"messages"}, {"prompt"} (text as it stands, without the chat template) or {"token_ids"}; empty lines are
    passed over.

    Of `messages` an assistant turn at the end is left away: what is asked for is the answer.

    Raises:
        DraftscopeError: a line that is none of these, or that the target cannot render; nothing is skipped silently.
    """
    prompts: list[Prompt] = []
    encoder = _Encoder(target)
    try:
        with path.open("rb") as file:
            for index, line in enumerate(file):
                if limit is not None and len(prompts) >= limit:
                    break
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                    ids = encoder.encode(row)
                except (json.JSONDecodeError, UnicodeDecodeError, RecursionError):
                    raise DraftscopeError("is not JSON", where=f"{path}, line {index + 1}") from None
                except ValueError as error:
                    raise DraftscopeError(
                        str(error), where=f"{path}, line {index + 1}",
                        remedy='A line is {"messages": [...]}, {"prompt": "text"} or {"token_ids": [...]}',
                    ) from None
                kind = row.get("kind")
                prompts.append(Prompt(index, str(row.get("id", index)), ids, kind if isinstance(kind, str) else None,
                                      raw=not (row.get("messages") or row.get("token_ids"))))
    except OSError as error:
        raise DraftscopeError(error.strerror or "cannot be read", where=str(path)) from None
    if not prompts:
        raise DraftscopeError("holds no prompt", where=str(path))
    return prompts


class _Encoder:
    def __init__(self, target: Tokenizing) -> None:
        self._target = target

    @cached_property
    def _renderer(self) -> Renderer:
        return Renderer(self._target.tokenizer)

    def encode(self, row: Any) -> list[int]:
        if not isinstance(row, dict):
            raise ValueError("is not a JSON object")
        if "token_ids" in row:
            ids = row["token_ids"]
            if not isinstance(ids, list) or not all(type(i) is int for i in ids):
                raise ValueError("token_ids is not a list of token ids")
        elif "messages" in row:
            messages = row["messages"]
            turns = messages if isinstance(messages, list) else [None]
            if not all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in turns):
                raise ValueError('messages is not a list of {"role", "content"}')
            if messages and messages[-1]["role"] == "assistant":
                messages = messages[:-1]
            if not messages:
                raise ValueError("messages hold nothing to answer")
            ids = self._renderer.prompt(messages, row.get("tools"))
        elif isinstance(row.get("prompt"), str):
            ids = list(self._target.tokenizer.encode(row["prompt"]))
        else:
            raise ValueError("has neither messages nor prompt nor token_ids")
        if not ids:
            raise ValueError("gives no token")
        return ids
