"""Prompts to conversations that a draft can be trained on: with the target's own answers, or with those at hand."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from draftscope.errors import DraftscopeError
from draftscope.pipeline.answering import Answerer
from draftscope.pipeline.conversations import Renderer
from draftscope.pipeline.prepared import LINES, Folder, Prepared
from draftscope.states.tensorfile import parse_json
from draftscope.target.model import Target

CHECKED = 64
"""Conversations whose answers are held against what the target would have written."""
AT_ONCE = 512
"""Conversations of several turns that are answered side by side."""


@dataclass(slots=True)
class Wanted:
    """One input line: messages to render, or a prompt's token ids.

    `messages` end with a user's turn where an answer is asked for; assistant turns among them are those of the source. `digest`
    changes with what the line says.
    """

    index: int
    id: str
    messages: list[dict[str, Any]] | None = None
    tools: Any = None
    prompt_ids: list[int] | None = None
    digest: str = ""


def read_wanted(path: Path, prepared: Prepared, vocab: int) -> Iterator[Wanted]:
    """Lines of {"messages"} or {"conversations"}, {"prompt"} or {"token_ids"}; what is none of these is counted as skipped.

    Args:
        vocab: token ids from here on are none of the target's.

    Raises:
        DraftscopeError: the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            for index, line in enumerate(file):
                if not line.strip():
                    continue
                try:
                    row = parse_json(line)
                except ValueError:
                    prepared.skip(index, "is not JSON")
                    continue
                try:
                    yield _wanted(index, row, vocab)
                except ValueError as error:
                    prepared.skip(index, str(error))
    except OSError as error:
        raise DraftscopeError(error.strerror or "cannot be read", where=str(path)) from None


def _wanted(index: int, row: Any, vocab: int) -> Wanted:
    if not isinstance(row, dict):
        raise ValueError("is not a JSON object")
    name, digest = str(row.get("id", index)), hashlib.sha256(json.dumps(row, sort_keys=True).encode()).hexdigest()[:12]
    if "token_ids" in row:
        ids = row["token_ids"]
        if not isinstance(ids, list) or not ids or not all(type(i) is int and i >= 0 for i in ids):
            raise ValueError("token_ids is not a list of token ids")
        if max(ids) >= vocab:
            raise ValueError(f"has token ids outside the target's vocabulary of {vocab}")
        return Wanted(index, name, prompt_ids=ids, digest=digest)
    messages = row.get("messages", row.get("conversations"))
    if isinstance(row.get("prompt"), str) and messages is None:
        messages = [{"role": "user", "content": row["prompt"]}]
    if not isinstance(messages, list) or not all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages):
        raise ValueError('has neither messages of {"role", "content"} nor prompt nor token_ids')
    if not any(message["role"] == "user" for message in messages):
        raise ValueError("has no user's turn to answer")
    return Wanted(index, name, list(messages), row.get("tools"), digest=digest)


def _pending(folder: Folder, wanted: Iterable[Wanted]) -> Iterator[Wanted]:
    """Those that are not in the folder.

    Raises:
        DraftscopeError: one that is was made of a line that said something else.
    """
    for item in wanted:
        before = folder.done.get(item.index)
        if before is None:
            yield item
        elif before not in ("", item.digest):
            raise DraftscopeError(f"holds another conversation than line {item.index + 1} of the prompts",
                                  where=str(folder.prepared.folder / LINES),
                                  remedy="Name a new folder, or give the prompts of before to go on")


def keep_answers(folder: Folder, wanted: Iterable[Wanted], renderer: Renderer) -> None:
    """Conversations with the answers that they came with."""
    for item in _pending(folder, wanted):
        if item.messages is None:
            folder.prepared.skip(item.index, "is a prompt of token ids: it has no answer to keep")
            continue
        try:
            ids, mask = renderer.conversation(item.messages, item.tools)
        except (ValueError, KeyError, TypeError) as error:
            folder.prepared.skip(item.index, " ".join(str(error).split())[:160])
            continue
        if any(mask):
            folder.add(item.index, item.id, ids, mask, ended=True, digest=item.digest)
        else:
            folder.prepared.skip(item.index, "has no answer token once rendered")


@dataclass(slots=True)
class _Talk:
    """A conversation while it is answered: its tokens so far and which of them are answers."""

    wanted: Wanted
    said: list[dict[str, Any]]
    left: list[dict[str, Any]]
    ids: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    ended: bool = True


def answer_all(
    folder: Folder, wanted: Iterable[Wanted], renderer: Renderer | None, answerer: Answerer,
    decode: Callable[[Sequence[int]], str], stop_ids: frozenset[int], *, longest: int, tokens: int | None = None,
) -> None:
    """Have every conversation answered, turn by turn; assistant turns of the source are left away.

    Args:
        longest: longer prompts are skipped.
        tokens: stop once the folder holds so many answer tokens; None = answer all.
    """
    pending = _pending(folder, wanted)
    waiting: dict[int, _Talk] = {}

    def openings() -> Iterator[tuple[int, list[int]]]:
        for item in pending:
            if tokens is not None and folder.prepared.answer_tokens >= tokens:
                return
            talk = _begin(item)
            if _ask_next(talk, renderer, folder.prepared, longest):
                waiting[item.index] = talk
                yield item.index, talk.ids
            if len(waiting) >= AT_ONCE:
                return

    again: list[tuple[int, list[int]]] = []
    some = True

    def answered(key: int, ids: list[int]) -> None:
        nonlocal some
        some = True
        talk = waiting[key]
        talk.ids, talk.mask = [*talk.ids, *ids], [*talk.mask, *[True] * len(ids)]
        talk.ended = bool(ids) and ids[-1] in stop_ids
        if talk.ended and talk.left:
            talk.said.append({"role": "assistant", "content": decode([i for i in ids if i not in stop_ids])})
            if _ask_next(talk, renderer, folder.prepared, longest):
                again.append((key, talk.ids))
                return
        del waiting[key]
        if ids:
            folder.add(key, talk.wanted.id, talk.ids, talk.mask, ended=talk.ended, digest=talk.wanted.digest)

    while some:
        some = False
        answerer(openings(), answered)
        while again:
            asked, again[:] = list(again), []
            answerer(asked, answered)


def _begin(item: Wanted) -> _Talk:
    if item.messages is None:
        return _Talk(item, [], [], list(item.prompt_ids or ()), [False] * len(item.prompt_ids or ()))
    return _Talk(item, [], [message for message in item.messages if message["role"] != "assistant"])


def _ask_next(talk: _Talk, renderer: Renderer | None, prepared: Prepared, longest: int) -> bool:
    """Tokens up to the next answer; False where there is nothing more to ask, or it cannot be rendered."""
    if talk.left:
        while talk.left:
            message = talk.left.pop(0)
            talk.said.append(message)
            if message["role"] in ("user", "tool") and (not talk.left or talk.left[0]["role"] in ("user", "system")):
                break
        try:
            if renderer is None:
                raise ValueError("the target has no chat template to render messages with")
            ids = renderer.prompt(talk.said, talk.wanted.tools)
        except (ValueError, KeyError, TypeError) as error:
            prepared.skip(talk.wanted.index, " ".join(str(error).split())[:160])
            return False
        if ids[: len(talk.ids)] != talk.ids:
            prepared.skip(talk.wanted.index, "the chat template renders earlier answers otherwise once another turn follows: "
                                             "only the first were kept" if any(talk.mask) else "cannot be rendered turn by turn")
            return False
        talk.mask += [False] * (len(ids) - len(talk.ids))
        talk.ids = ids
    if len(talk.ids) + 1 >= longest:
        prepared.skip(talk.wanted.index, f"is longer than {longest} tokens")
        return False
    return True


def own_share(folder: Folder, target: Target) -> None:
    """How much of the answers the target itself would have written, greedily, given what stands before: on CHECKED of them."""
    prepared = folder.prepared
    lines = (prepared.folder / LINES).open("rb")
    with lines:
        chosen = list(islice(lines, 0, None, max(1, prepared.conversations // CHECKED)))[:CHECKED]
    for row in map(json.loads, chosen):
        ids, mask = torch.tensor(row["token_ids"]), torch.tensor(row["loss_mask"], dtype=torch.bool)
        asked = mask[1:].nonzero().squeeze(-1)
        if len(asked):
            states = target.run(ids[None], set(), set()).post[0][asked]
            best = torch.cat([target.logits(some).argmax(-1) for some in states.split(512)])
            prepared.own += int((best.cpu() == ids[1:][asked]).sum())
            prepared.compared += len(asked)
