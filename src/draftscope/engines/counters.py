"""Acceptance as an engine counted it, from anything that tells it, in the two definitions of ours.

What can be given, any number of them together:

    http://HOST:PORT[/metrics]   the server's metrics now, and its settings where it tells them
    a scrape                     Prometheus text; two of them, the earlier first, count what came in between
    a log                        vLLM's or SGLang's, packed with gzip or not
    answers                      JSON or JSON lines with SGLang's `meta_info` or vLLM's `metrics.speculative_decoding`
    server info                  the JSON of SGLang's or vLLM's /server_info: settings, and SGLang's average
    `generate`'s JSON            ours
    figures of anyone's          {"accept_length": x, "accept_rate": x, "per_position": [...]}, whatever they count

Definitions, by release and with their sources, are in `engines/definitions.py`.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from draftscope.engines import sglang_counts, vllm_counts
from draftscope.engines.counted import Counters
from draftscope.engines.definitions import Figure
from draftscope.engines.fetching import Document, fetch, is_url, read_document
from draftscope.engines.prometheus import Scrape, difference, parse
from draftscope.engines.settings import Settings, distortions, read_settings
from draftscope.errors import DraftscopeError, UsageError

__all__ = ["Counters", "count", "read_counters"]

REMEDY = ("Give /metrics of the server (its address, or saved), its log, its answers, its server info, or the JSON that "
          "`draftscope generate --json` wrote")
JSON_CHARACTERS = 64 << 20
DEPTH, NODES = 40, 5_000_000
_STAMPED = re.compile(r"\[\d{4}-\d\d-\d\d")
"""How SGLang's log begins: `[2026-01-01 00:00:00 TP0] Decode batch`."""
ANYONES = ("accept_length", "accept_rate", "per_position")


def read_counters(places: Path | str | Sequence[Path | str], window: float = 0.0,
                  wait: Callable[[float], None] = time.sleep) -> Counters:
    """Acceptance from all that was given; the document that counts best decides, the figures of all are reported.

    Args:
        window: seconds between two scrapes of each address, what came in between being counted; 0 = one scrape.

    Raises:
        UsageError: more than two scrapes, or a window without an address.
        DraftscopeError: something unreadable, counters that contradict each other, or nothing that tells acceptance.
    """
    given = [places] if isinstance(places, (str, Path)) else list(places)
    addresses = [str(place) for place in given if is_url(str(place))]
    if window and not addresses:
        raise UsageError("a window needs the address of a server", remedy="Give --metrics http://HOST:PORT, or two scrapes")
    if len(addresses) > 1:
        raise UsageError("more than one server", remedy="Give one of them")
    documents = [read_document(Path(place)) for place in given if not is_url(str(place))]
    for address in addresses:
        metrics, info = fetch(address)
        if window:
            documents.append(replace(metrics, where=f"{metrics.where} (before)"))
            wait(window)
            metrics, info = fetch(address)
        documents += [metrics] if info is None else [metrics, info]
    return count(documents)


def count(documents: Sequence[Document]) -> Counters:
    """Acceptance from documents at hand; see `read_counters`."""
    settings, scrapes = Settings(), []
    parsed: dict[int, list[Any] | None] = {}
    for number, document in enumerate(documents):
        text = document.text[:4096].lstrip()
        if text.startswith(("{", "[")) and not _STAMPED.match(text) and (found := _json(document)) is not None:
            parsed[number] = found
            info = [one for one in found if isinstance(one, dict) and _is_info(one)]
            settings.add(read_settings([json.dumps(one) for one in info], document.where, trusted=True))
        elif _is_scrape(document.text):
            parsed[number] = None
            scrapes.append(parse(document.text, document.where, _wanted, _counts))
        else:
            settings.add(read_settings(document.text.splitlines(), document.where))
    if len(scrapes) > 2:
        raise UsageError(f"{len(scrapes)} scrapes", remedy="Give one, or two: the earlier first")
    found = []
    if scrapes:
        found.append(_from_scrapes(scrapes, settings))
    for number, document in enumerate(documents):
        if number not in parsed:
            found.append(_from_log(document, settings))
        elif (held := parsed[number]) is not None:
            found.append(_from_json(document, held, settings))
    return _best([f for f in found if f is not None], documents, settings)


def _best(found: Sequence[Counters], documents: Sequence[Document], settings: Settings) -> Counters:
    """The one with the most detail: positions before totals before averages before figures of unknown meaning."""
    where = ", ".join(document.where for document in documents)
    if not found:
        raise DraftscopeError("holds nothing of speculative decoding that is known", where=where, remedy=REMEDY)
    best = max(found, key=lambda c: (bool(c.accepted), c.drafts > 0, c.stated is not None))
    others = [f for c in found if c is not best for f in c.figures]
    unknown = tuple(u for c in found for u in c.unknown)
    caveats = best.caveats
    for other in found:
        if other is not best and other.length is not None and best.length is not None and abs(other.length - best.length) > 0.1:
            caveats += (f"{other.says} gives accept length {other.length:.2f}, {best.says} {best.length:.2f}: another span of "
                        "time, or another server",)
    return replace(best, figures=best.figures + tuple(others), caveats=caveats, unknown=unknown,
                   distortions=tuple(distortions(settings))).with_shape(settings.shape())


def _wanted(name: str) -> bool:
    plain = name.removesuffix("_total")
    return (plain.startswith(vllm_counts.PREFIX) and not plain.endswith("_created")) or plain in sglang_counts.NAMES


def _counts(name: str) -> bool:
    return vllm_counts.counts(name) or sglang_counts.counts(name)


def _is_scrape(text: str) -> bool:
    """Whether there is a line of Prometheus' text: an engine's metric at its start, or a comment that types one."""
    head = text[: 1 << 20].splitlines()
    return any(line.startswith(("vllm:", "sglang:", "# HELP ", "# TYPE ")) for line in head)


def _from_scrapes(scrapes: Sequence[Scrape], settings: Settings) -> Counters | None:
    last = scrapes[-1] if len(scrapes) == 1 else difference(scrapes[0], scrapes[1], _counts)
    counted = vllm_counts.from_scrape(last)
    if counted is None:
        counted = sglang_counts.from_scrape(last, settings.shape(), settings.release, window=len(scrapes) == 2)
    if counted is not None and len(scrapes) == 2 and not counted.drafts:
        raise DraftscopeError("no verify step between the two scrapes", where=last.where,
                              remedy="Scrape while requests are served, or give one scrape")
    return counted


def _from_log(document: Document, settings: Settings) -> Counters | None:
    lines = document.text.splitlines()
    counted = vllm_counts.from_log(lines, document.where)
    return counted or sglang_counts.from_log(lines, document.where, settings.shape(), settings.release)


def _json(document: Document) -> list[Any] | None:
    """The values of a JSON document, or of JSON lines; None where it is neither.

    Raises:
        DraftscopeError: JSON, but not to its end.
    """
    # A log may begin with a bracket.
    log = any(mark in document.text for mark in ("Decode batch", vllm_counts.LINE, "server_args="))
    if len(document.text) > JSON_CHARACTERS:
        if log:
            return None
        raise DraftscopeError(f"is JSON of more than {JSON_CHARACTERS >> 20} MiB", where=document.where,
                              remedy="Give fewer answers")
    try:
        return [json.loads(document.text)]
    except RecursionError:
        raise DraftscopeError("is nested too deeply", where=document.where, remedy=REMEDY) from None
    except ValueError as error:
        first = str(error)
    lines = [line for line in document.text.splitlines() if line.strip()]
    if len(lines) > 1:
        try:
            return [json.loads(line) for line in lines]
        except (ValueError, RecursionError):
            pass
    if log:
        return None
    raise DraftscopeError(f"is no JSON ({first})", where=document.where, remedy=REMEDY)


def _is_info(value: dict[str, Any]) -> bool:
    return "internal_states" in value or "vllm_config" in value or any(key.startswith("speculative_") for key in value)


def _walk(values: Sequence[Any], where: str) -> Iterator[dict[str, Any]]:
    """All objects within, a bounded number of them."""
    stack: list[tuple[Any, int]] = [(value, 0) for value in reversed(values)]
    seen = 0
    while stack:
        value, depth = stack.pop()
        seen += 1
        if seen > NODES or depth > DEPTH:
            raise DraftscopeError("holds more than answers do", where=where, remedy="Give fewer answers")
        if isinstance(value, dict):
            yield value
        inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        stack += [(inner, depth + 1) for inner in inside if isinstance(inner, (dict, list))]


def _from_json(document: Document, values: list[Any], settings: Settings) -> Counters | None:
    where = document.where
    first = values[0] if len(values) == 1 and isinstance(values[0], dict) else {}
    if "accepted_per_position" in first:
        return _generated(first, where)
    if "drafts" not in first and any(key in first for key in ANYONES):
        return _anyones(first, where)
    if _is_info(first):
        states = first.get("internal_states", [])
        return sglang_counts.from_server_info(states if isinstance(states, list) else [], where, settings.shape()) or Counters(
            0, (), 0, "the server's settings")
    objects = list(_walk(values, where))
    vllm = [one for one in objects if "acceptance_histogram" in one]
    if vllm:
        return vllm_counts.from_requests(vllm, where)
    sglang = [one for one in objects if "spec_verify_ct" in one]
    if sglang:
        return sglang_counts.from_requests(sglang, where, settings.shape(), settings.release)
    raise DraftscopeError("is JSON without acceptance that is known", where=where, remedy=REMEDY)


def _generated(found: dict[str, Any], where: str) -> Counters:
    try:
        steps, listed = int(found["drafts"]), found["accepted_per_position"]
        per_position = tuple(int(n) for n in listed)
        whole = all(isinstance(n, int) and not isinstance(n, bool) for n in (found["drafts"], *listed))
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise DraftscopeError(f"is no JSON of `generate` ({error})", where=where, remedy=REMEDY) from None
    if not whole or max(steps, *per_position, 0) > 2**53:
        raise DraftscopeError("is no JSON of `generate` (a count is no whole number)", where=where, remedy=REMEDY)
    return Counters(steps, per_position, sum(per_position), "counts of `draftscope generate`").checked(where)


def _anyones(found: dict[str, Any], where: str) -> Counters:
    """Figures whose definition is not known; they are compared with counts, never taken as one of ours."""
    unknown = []
    for key in ANYONES:
        if key not in found:
            continue
        values = found[key] if isinstance(found[key], list) else [found[key]]
        fine = values and len(values) <= 1024 and all(
            isinstance(v, (int, float)) and not isinstance(v, bool) and 0 <= v <= 10_000 for v in values)
        if not fine or (key != "per_position" and isinstance(found[key], list)):
            raise DraftscopeError(f"{key} is no figure of acceptance", where=where, remedy="Give numbers, not negative")
        unknown.append((key, tuple(float(v) for v in values)))
    return Counters(0, (), 0, "figures of unknown definition", unknown=tuple(unknown))


def told(counters: Counters) -> list[Figure]:
    """The figures to print, each once."""
    return list(dict.fromkeys(counters.figures))
