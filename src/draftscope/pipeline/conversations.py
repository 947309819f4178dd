"""Conversations as token ids with a loss mask: from messages, from token ids, or from answers kept as token ids."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftscope.errors import DraftscopeError
from draftscope.states.places import Place
from draftscope.states.tensorfile import TensorFile

LINE = 256 << 20
"""Bytes of a line: a device gives bytes for ever."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """One training text.

    Attributes:
        index: input line, the first is 0.
        token_ids: [T] int32.
        loss_mask: [T] bool, true on answer tokens, the closing end-of-turn token included, in every assistant turn.
    """

    index: int
    token_ids: Tensor
    loss_mask: Tensor


@dataclass(frozen=True, slots=True)
class Unusable:
    """An input line that gives no training text, and why."""

    index: int
    why: str


class Renderer:
    """Messages to token ids and loss mask, by the target's own chat template.

    Args:
        tokenizer: transformers tokenizer with a chat template.
        closing: ids of tokens that end an answer; the tokenizer's special tokens count too.

    Raises:
        DraftscopeError: the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: Any, closing: frozenset[int] = frozenset()) -> None:
        if not tokenizer.chat_template:
            raise DraftscopeError("the target has no chat template, so messages cannot be rendered",
                                  where=str(tokenizer.name_or_path),
                                  remedy='Add chat_template.jinja to the target, or give lines of {"token_ids", "loss_mask"}')
        self._tokenizer = tokenizer
        special = (i for i, token in tokenizer.added_tokens_decoder.items() if token.special)
        self._closing = closing | frozenset(special) | frozenset(tokenizer.all_special_ids)

    def prompt(self, messages: Sequence[Mapping[str, Any]], tools: Any = None) -> list[int]:
        """Token ids up to where the assistant's answer begins."""
        return self._encode(self._text(messages, tools, answer_next=True))

    def conversation(self, messages: Sequence[Mapping[str, Any]], tools: Any = None) -> tuple[list[int], list[bool]]:
        """Token ids [T] and loss mask [T] of a whole conversation.

        An answer is what the rendering up to an assistant turn adds to the prompt rendered before it. Tokens that the
        template puts after the end-of-turn token are not part of it.

        Raises:
            ValueError: the first turn is an answer, or the template or the tokenizer makes those renderings anything but
                prefixes of the whole.
        """
        if messages[0]["role"] == "assistant":
            raise ValueError("begins with an assistant turn, which answers nothing")
        text = self._text(messages, tools)
        ids = self._encode(text)
        mask = [False] * len(ids)
        for turn, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._text(messages[:turn], tools, answer_next=True)
            through = self._text(messages[: turn + 1], tools)
            if not through.startswith(before):
                raise ValueError(f"the chat template does not continue the prompt of turn {turn} with its answer"
                                 + self._marker(messages[:turn], tools, before, through))
            if not text.startswith(through):
                raise ValueError(f"the chat template renders turn {turn} differently once later turns follow")
            prompt, answered = self._encode(before), self._encode(through)
            if ids[: len(prompt)] != prompt or ids[: len(answered)] != answered:
                raise ValueError(f"the tokenizer joins turn {turn} to its neighbours: the prompt's tokens are no prefix")
            end = self._close(ids, len(prompt), len(answered))
            mask[len(prompt) : end] = [True] * (end - len(prompt))
        return ids, mask

    def _marker(self, messages: Sequence[Mapping[str, Any]], tools: Any, before: str, through: str) -> str:
        """What should stand before the answer and does not, where the template tells it."""
        without = self._text(messages, tools)
        marker = before[len(without) :] if before.startswith(without) else ""
        return f": its marker {marker!r} is not in the rendered text" if marker and marker not in through else ""

    def _close(self, ids: list[int], start: int, end: int) -> int:
        last = next((i for i in range(end - 1, start - 1, -1) if ids[i] in self._closing), None)
        if last is None or self._tokenizer.decode(ids[last + 1 : end]).strip():
            return end
        return last + 1

    def _text(self, messages: Sequence[Mapping[str, Any]], tools: Any, answer_next: bool = False) -> str:
        try:
            return str(self._tokenizer.apply_chat_template(
                list(messages), tools=tools, tokenize=False, add_generation_prompt=answer_next,
            ))
        except Exception as error:  # templates raise what they like
            raise ValueError(f"the chat template refuses it ({_short(error)})") from None

    def _encode(self, text: str) -> list[int]:
        # Templates write the special tokens themselves.
        return list(self._tokenizer.encode(text, add_special_tokens=False))


@dataclass(frozen=True, slots=True)
class Messages:
    """A line still to be rendered."""

    messages: list[dict[str, Any]]
    tools: Any = None


def parse_line(line: bytes) -> Messages | tuple[list[int], list[bool]]:
    """One line: messages, or token ids [T] with their loss mask [T].

    Raises:
        ValueError: what it lacks.
    """
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError("is not JSON") from None
    if not isinstance(row, dict):
        raise ValueError("is not a JSON object")
    return _tokens(row) if "token_ids" in row else Messages(_messages(row), row.get("tools"))


def read_lines(path: Path, renderer: Callable[[], Renderer]) -> Iterator[Conversation | Unusable]:
    """Conversations of a JSONL file, one a line, in order.

    A line holds `messages` (or `conversations`) of {"role", "content"}, with `tools` if any; or `token_ids` with
    `loss_mask` or `prompt_length`.

    Args:
        renderer: called when the first line with messages comes.

    Raises:
        DraftscopeError: the file cannot be read, or the target cannot render messages.
    """
    made: Renderer | None = None
    for index, line in enumerate(lines_of(path)):
        try:
            row = parse_line(line)
            if isinstance(row, Messages):
                made = made or renderer()
                ids, mask = made.conversation(row.messages, row.tools)
            else:
                ids, mask = row
        except ValueError as error:
            yield Unusable(index, _short(error))
            continue
        yield Conversation(index, torch.tensor(ids, dtype=torch.int32), torch.tensor(mask, dtype=torch.bool))


def lines_of(path: Place) -> Iterator[bytes]:
    """Lines of a JSONL file.

    Raises:
        DraftscopeError: the file cannot be read, or a line is longer than `LINE`.
    """
    try:
        with path.open("rb") as file:
            for index, line in enumerate(iter(lambda: file.readline(LINE), b"")):
                if len(line) == LINE:
                    raise DraftscopeError(f"line {index + 1} is longer than {LINE >> 20} MiB", where=str(path),
                                          remedy="Give JSONL: one conversation a line")
                yield line
    except OSError as error:
        raise DraftscopeError(error.strerror or "cannot be read", where=str(path)) from None


def read_answers(folder: Path) -> Iterator[Conversation | Unusable]:
    """Conversations of a folder of answers kept as token ids: `part-*.safetensors`.

    Each part holds `token_ids` [N] (conversations end to end), `lengths` [S], `prompt_lengths` [S] (tokens before the
    answer) and `prompt_index` [S], which becomes the index. Answer tokens are those after the prompt.

    Raises:
        DraftscopeError: no part, or one whose tensors do not add up.
    """
    parts = sorted(folder.glob("part-*.safetensors"))
    if not parts:
        raise DraftscopeError("holds no part-*.safetensors", where=str(folder),
                              remedy="Name a JSONL file of conversations, or a folder of answers")
    seen: set[int] = set()
    for part in parts:
        file = TensorFile(part)
        token_ids, lengths, prompts, indices = (
            file.integers(name, 1, layout).to(torch.int32)
            for name, layout in (("token_ids", "[N]"), ("lengths", "[S]"), ("prompt_lengths", "[S]"), ("prompt_index", "[S]"))
        )
        if int(lengths.sum()) != len(token_ids) or not len(lengths) == len(prompts) == len(indices):
            raise file.fail(f"lengths sum to {int(lengths.sum())} for {len(token_ids)} tokens", "lengths")
        for ids, prompt, index in zip(token_ids.split(lengths.tolist()), prompts.tolist(), indices.tolist(), strict=True):
            if index in seen:
                yield Unusable(index, "its prompt was answered twice")
                continue
            seen.add(index)
            yield Conversation(index, ids.clone(), torch.arange(len(ids)) >= prompt)


def _messages(row: dict[str, Any]) -> list[dict[str, Any]]:
    messages = row.get("messages", row.get("conversations"))
    if not isinstance(messages, list) or not messages:
        raise ValueError("has neither messages nor token_ids")
    for turn, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            raise ValueError(f'message {turn} is not {{"role", "content"}}')
    if not any(message["role"] == "assistant" for message in messages):
        raise ValueError("has no assistant turn")
    return [{**message, "content": _plain(message["content"], turn)} for turn, message in enumerate(messages)]


def _plain(content: Any, turn: int) -> str | None:
    """Content parts of type text joined; tool calls may come with no content at all."""
    if content is None or isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in content):
        return "".join(p["text"] for p in content)
    raise ValueError(f"message {turn} holds something else than text")


def _tokens(row: dict[str, Any]) -> tuple[list[int], list[bool]]:
    ids = row["token_ids"]
    if not isinstance(ids, list) or not ids or not all(type(i) is int and 0 <= i < 2**31 for i in ids):
        raise ValueError("token_ids is not a list of token ids")
    mask = row.get("loss_mask")
    if mask is not None:
        if not isinstance(mask, list) or len(mask) != len(ids) or not all(m in (0, 1) for m in mask):
            raise ValueError("loss_mask is not a list of 0 and 1, one for each token")
        return ids, [bool(m) for m in mask]
    prompt = row.get("prompt_length")
    if type(prompt) is not int or not 0 <= prompt <= len(ids):
        raise ValueError("has token_ids but neither loss_mask nor a prompt_length within them")
    return ids, [t >= prompt for t in range(len(ids))]


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:160] or type(error).__name__
