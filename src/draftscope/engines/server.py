"""A running server asked for answers: vLLM by `/v1/completions`, SGLang by `/generate`, which counts each request.

Prompts go as token ids, so that no template lies between them and the draft.
"""

from __future__ import annotations

import json
import urllib.parse
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from draftscope.engines.asking import ask
from draftscope.errors import DraftscopeError, UsageError
from draftscope.text import visible

REMEDY = "Give the address of vLLM's or SGLang's server"
SECONDS = 600.0
VERSIONS = (("/version", "vllm"), ("/get_server_info", "sglang"), ("/server_info", "sglang"))
"""Where a server tells its release, and whose place that is."""


@dataclass(frozen=True, slots=True)
class Server:
    """A server as it tells of itself.

    Attributes:
        url: its root, without a slash at the end.
        model: the name that it answers to; the first where it has several.
        engine, version: None where it does not tell.
        longest: tokens that prompt and answer may have together; None where it does not tell.
    """

    url: str
    model: str
    engine: str | None = None
    version: str | None = None
    longest: int | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back for one prompt.

    Attributes:
        token_ids: None where the server sends none.
        ended: by a stop token (`stop_id`, where it is told) rather than by the length.
        told: all that it said.
    """

    text: str
    token_ids: tuple[int, ...] | None
    ended: bool
    stop_id: int | None
    told: dict[str, Any]


def connect(url: str, seconds: float = 10.0) -> Server:
    """Ask a server what it is.

    Args:
        url: its root, as http://HOST:PORT.

    Raises:
        UsageError: no such address.
        DraftscopeError: nobody answers, or somebody who is no such server.
    """
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.password:
        raise UsageError("is no address of a server", where=visible(parts.hostname or url, 200),
                         remedy="--url http://HOST:PORT")
    path = parts.path.rstrip("/").removesuffix("/metrics").removesuffix("/v1")
    root = parts._replace(path=path, query="", fragment="").geturl()
    models = _ask(root, "/v1/models", None, seconds)
    held = models.get("data") if isinstance(models, dict) else None
    first = held[0] if isinstance(held, list) and held and isinstance(held[0], dict) else {}
    if not isinstance(first.get("id"), str):
        raise DraftscopeError("names no model under /v1/models", where=root, remedy=REMEDY)
    engine = version = None
    for path, whose in VERSIONS:
        try:
            told = _ask(root, path, None, seconds)
        except DraftscopeError:
            continue
        if isinstance(told, dict) and isinstance(told.get("version"), str):
            engine, version = whose, told["version"]
            break
    longest = first.get("max_model_len")
    return Server(root, first["id"], engine, version, longest if isinstance(longest, int) and longest > 0 else None)


def answer(server: Server, prompts: Sequence[Sequence[int]], max_new: int, *, at_once: int = 8, temperature: float = 0.0,
           top_p: float = 1.0, seeds: Sequence[int] | None = None, seconds: float = SECONDS) -> list[Answer]:
    """Answers, in the order of the prompts.

    Args:
        prompts: token ids of each.
        max_new: tokens of an answer at most.
        at_once: requests in flight.
        seeds: of each prompt's draws; None = the server's own, as SGLang's `/generate` always has them.

    Raises:
        DraftscopeError: the server refuses, fails or falls silent.
    """
    sampled = {"temperature": temperature, **({"top_p": top_p} if temperature else {})}

    def one(number: int) -> Answer:
        ids = [int(i) for i in prompts[number]]
        if server.engine == "sglang":
            body: dict[str, Any] = {"input_ids": ids, "sampling_params": {"max_new_tokens": max_new, **sampled}}
            return _of_sglang(_ask(server.url, "/generate", body, seconds), f"{server.url}/generate")
        seeded = {} if seeds is None or not temperature else {"seed": seeds[number]}
        body = {"model": server.model, "prompt": ids, "max_tokens": max_new, "return_token_ids": True, **sampled, **seeded}
        return _of_openai(_ask(server.url, "/v1/completions", body, seconds), f"{server.url}/v1/completions")

    with ThreadPoolExecutor(max(1, at_once)) as pool:
        return list(pool.map(one, range(len(prompts))))


def _of_sglang(told: Any, where: str) -> Answer:
    meta = told.get("meta_info") if isinstance(told, dict) else None
    if not isinstance(meta, dict):
        raise DraftscopeError("answered without `meta_info`", where=where, remedy=REMEDY)
    finish = meta.get("finish_reason")
    finish = finish if isinstance(finish, dict) else {}
    return Answer(str(told.get("text", "")), _ids(told.get("output_ids")), finish.get("type") == "stop",
                  _id(finish.get("matched")), told)


def _of_openai(told: Any, where: str) -> Answer:
    choices = told.get("choices") if isinstance(told, dict) else None
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise DraftscopeError("answered without `choices`", where=where, remedy=REMEDY)
    choice = choices[0]
    return Answer(str(choice.get("text", "")), _ids(choice.get("token_ids")), choice.get("finish_reason") == "stop",
                  _id(choice.get("stop_reason")), told)


def _ids(held: Any) -> tuple[int, ...] | None:
    return tuple(held) if isinstance(held, list) and held and all(type(i) is int for i in held) else None


def _id(held: Any) -> int | None:
    return held if type(held) is int else None


def _ask(root: str, path: str, body: dict[str, Any] | None, seconds: float) -> Any:
    """JSON of a page."""
    url = root + path
    text = ask(url, seconds, None if body is None else json.dumps(body).encode())
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise DraftscopeError("gives no JSON", where=url, remedy=REMEDY) from None
