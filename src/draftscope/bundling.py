"""A diagnosis packed to be attached to a report upstream: small, the same bytes for the same case, and harmless to hand on.

Absolute paths, hosts and credentials become placeholders. Text of prompts and answers, token ids among it, stays out unless it is
asked for. Weights never go in; of the draft's tensors their names, shapes and dtypes do.
"""

from __future__ import annotations

import io
import json
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors.torch import save
from torch import Tensor

from draftscope.diagnose.case import Inputs
from draftscope.engines.counters import read_counters
from draftscope.engines.fetching import is_url
from draftscope.errors import DraftscopeError
from draftscope.findings import Diagnosis
from draftscope.linting.opening import open_checkpoint
from draftscope.report.html import page
from draftscope.report.terminal import show
from draftscope.states.leftover import save_bytes, sweep_up
from draftscope.states.opening import open_source
from draftscope.states.places import Place, model_folder
from draftscope.states.tensorfile import read_json
from draftscope.states.types import Sample, Trace

FOLDER, README = "draftscope-bundle", "README.txt"
LIMIT = 8_000_000
"""Bytes. Trackers take attachments of 10 to 25 MB."""
ROWS, SEQUENCES = 16, 2
WIDTH = 100

TEXTUAL = frozenset({"template", "run-ops"})
"""Faults whose figures hold token ids of texts."""
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://[^\s\"'“”,;)]+")
_PATH = re.compile(r"(?<![\w/.<>~-])(?:[A-Za-z]:)?~?[/\\](?:[^\s/\\:\"'“”,;()<>]+[/\\])+([^\s/\\:\"'“”,;()<>]*)")
_QUOTED = re.compile(r"“([^”]*)”")


@dataclass(frozen=True, slots=True)
class Bundled:
    """What was written: size in bytes, the files in it, and what was left out and why."""

    path: Path
    size: int
    files: tuple[str, ...]
    left_out: tuple[str, ...]


class Scrubber:
    """Strings without absolute paths, hosts and (unless wanted) quoted text.

    Args:
        known: paths by the role that takes their place; they may hold blanks, or lie anywhere in a text.
        labels: quoted words that are names, not text.
        text: whether text stays.
    """

    def __init__(self, known: Mapping[str, str], labels: Sequence[str], text: bool) -> None:
        self._known = sorted(known.items(), key=lambda pair: -len(pair[0]))
        self._labels, self._text = frozenset(labels), text

    def string(self, value: str) -> str:
        for path, role in self._known:
            value = value.replace(path, role)
        value = _URL.sub(r"\1://<place>", value)
        value = _PATH.sub(r"<path>/\1", value)
        return value if self._text else _QUOTED.sub(self._quoted, value)

    def _quoted(self, found: re.Match[str]) -> str:
        return found[0] if found[1] in self._labels else f"“({len(found[1])} characters of text)”"

    def value(self, value: Any) -> Any:
        """The same of a JSON value; keys too."""
        if isinstance(value, str):
            return self.string(value)
        if isinstance(value, Mapping):
            return {self.string(str(key)): self.value(one) for key, one in value.items()}
        return [self.value(one) for one in value] if isinstance(value, list) else value


def write_bundle(
    path: Path, diagnosis: Diagnosis, inputs: Inputs, *, text: bool = False, rows: int = ROWS, limit: int = LIMIT
) -> Bundled:
    """Pack a diagnosis with what it was made from.

    Args:
        path: the archive, a zip file; what lies there is overwritten.
        inputs: those of the diagnosis.
        text: with the texts that the diagnosis quotes and the tokens of the rows.
        rows: rows taken from the beginning of each of two sequences a side. Fewer go in where they would not fit.
        limit: bytes of the archive.

    Raises:
        DraftscopeError: not even the report fits, or the disk refuses.
    """
    labels = [p.label for p in (*diagnosis.placement.train, *diagnosis.placement.serve)]
    scrub = Scrubber(_known(inputs), labels, text)
    clean = _cleaned(diagnosis, scrub, text)
    left_out: list[str] = []
    files = {
        "diagnosis.json": _json(clean.model_dump(mode="json", by_alias=True)), "report.html": page(clean).encode(),
        "report.txt": _story(clean),
    }
    files |= _collected(left_out, _configs(inputs, scrub)) | _collected(left_out, _counters(inputs, scrub))
    while True:
        taken = _collected(left_out, _rows(inputs, rows, text)) if rows else {}
        said = list(dict.fromkeys(left_out if rows else [*left_out, "rows of states"]))
        packed = _zip({**files, **taken}, said, text)
        if len(packed) <= limit or not rows:
            break
        rows //= 2
    if len(packed) > limit:
        files.pop("report.html")
        said = [*said, f"report.html: the archive would be larger than {limit:,} bytes"]
        packed = _zip(files, said, text)
    if len(packed) > limit:
        raise DraftscopeError(f"would take {len(packed):,} bytes, {limit:,} are allowed", where=str(path),
                              remedy="Hand over the report alone (--html)")
    _save(path.resolve(), packed)
    return Bundled(path, len(packed), (README, *sorted({**files, **taken})), tuple(said))


def _save(path: Path, packed: bytes) -> None:
    if not path.exists() or path.is_file():
        sweep_up(path.parent, path.name)
        save_bytes(path, packed)
        return
    try:
        path.write_bytes(packed)  # a device or a pipe is not replaced
    except OSError as error:
        raise DraftscopeError(f"cannot be written ({error.strerror})", where=str(path)) from None


def _known(inputs: Inputs) -> dict[str, str]:
    known = {}
    for role in ("train", "train_heldout", "serve", "draft", "target", "sweep", "source_draft", "prompts", "absorb", "apply",
                 "conversations"):
        given = getattr(inputs, role)
        for path in () if given is None else (str(given), str(given.resolve()) if isinstance(given, Path) else ""):
            if len(path) > 1 and (path.startswith(("/", "~")) or "://" in path or "\\" in path):
                known[path] = f"<{role}>"
    metrics = inputs.metrics
    several = () if metrics is None else (metrics,) if isinstance(metrics, str | Path) else tuple(metrics)
    for role, paths in (("metrics", several), ("log", inputs.logs)):
        known |= {str(path): f"<{role}>" for path in paths if str(path).startswith("/") or "://" in str(path)}
    return known


def _cleaned(diagnosis: Diagnosis, scrub: Scrubber, text: bool) -> Diagnosis:
    held = diagnosis.model_dump(mode="json", by_alias=True)
    if not text:
        held |= {"views": _without_tokens(held["views"])} if "views" in held else {}
        for finding in held["findings"]:
            if finding["fault"] in TEXTUAL:
                for evidence in finding["evidence"]:
                    evidence["figures"] = _without_ids(evidence["figures"])
    return Diagnosis.model_validate(scrub.value(held))


def _without_tokens(views: Any) -> Any:
    """What the report draws, the tokens of requests left out of it: ids become -1, their text nothing."""
    for request in views.get("requests", ()):
        request |= {"text": [], "drafted_text": [], "ids": [-1] * len(request["ids"]), "drafted": [-1] * len(request["drafted"])}
    return views


def _without_ids(value: Any) -> Any:
    """Figures without lists of numbers, which are token ids."""
    if isinstance(value, dict):
        return {key: _without_ids(one) for key, one in value.items()}
    return f"({len(value)} values)" if isinstance(value, list) else value


def _story(diagnosis: Diagnosis) -> bytes:
    held = io.StringIO()
    show(diagnosis, Console(file=held, width=WIDTH, color_system=None, markup=False, highlight=False, emoji=False))
    return held.getvalue().encode()


def _json(value: Any) -> bytes:
    return (json.dumps(_ordered(value), indent=2, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")


def _ordered(value: Any) -> Any:
    """Keys in order, but for a schema: who looks for files of one reads their beginnings."""
    if isinstance(value, Mapping):
        return {key: _ordered(value[key]) for key in sorted(value, key=lambda key: (key != "schema", key))}
    return [_ordered(one) for one in value] if isinstance(value, list) else value


def _collected(left_out: list[str], parts: Iterator[tuple[str, Callable[[], bytes]]]) -> dict[str, bytes]:
    """What can be made; what can't is named with the reason."""
    files = {}
    for name, make in parts:
        try:
            files[name] = make()
        except DraftscopeError as error:
            left_out.append(f"{name}: {error.what}")
    return files


def _configs(inputs: Inputs, scrub: Scrubber) -> Iterator[tuple[str, Callable[[], bytes]]]:
    for role, place in (("draft", inputs.draft), ("source-draft", inputs.source_draft), ("target", inputs.target)):
        if place is not None and (place / "config.json").is_file():
            yield f"config/{role}.json", lambda at=place: _json(scrub.value(read_json(at / "config.json")))  # type: ignore[misc]
        if place is not None and role != "target":
            yield f"config/{role}-tensors.json", lambda at=place: _json(_tensors(at))  # type: ignore[misc]
    if inputs.serve is not None and (inputs.serve / "capture.json").is_file():
        serve = inputs.serve
        yield "config/capture.json", lambda: _json(scrub.value(read_json(serve / "capture.json")))


def _tensors(place: Place) -> dict[str, Any]:
    opened = open_checkpoint(model_folder(place)).checkpoint
    if opened is None:
        raise DraftscopeError("its shapes contradict its configuration: see the findings")
    return {opened.spelt.get(name, name): {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
            for name, tensor in sorted({**opened.tensors, **opened.idle}.items())}


def _counters(inputs: Inputs, scrub: Scrubber) -> Iterator[tuple[str, Callable[[], bytes]]]:
    if inputs.metrics is None:
        return
    given = [inputs.metrics] if isinstance(inputs.metrics, str | Path) else list(inputs.metrics)
    files = [one for one in given if not is_url(str(one))]

    def make() -> bytes:
        if len(files) < len(given):
            raise DraftscopeError("they came from a running server; what was counted stands in diagnosis.json")
        found = read_counters(files)
        return _json(scrub.value({
            "verify_steps": found.drafts, "accepted_per_position": list(found.accepted), "accepted": found.total,
            "accept_length": found.length, "figures": [figure.says() for figure in found.figures], "caveats": list(found.caveats),
            "settings": {one.key: one.value for one in found.distortions},
        }))

    yield "counters.json", make


def _rows(inputs: Inputs, rows: int, text: bool) -> Iterator[tuple[str, Callable[[], bytes]]]:
    formats = inputs.formats
    for side, place, kind in (("train", inputs.train, "samples"), ("serve", inputs.serve, "traces")):
        if place is None:
            continue

        def make(side: str = side, place: Place = place, kind: Any = kind) -> bytes:
            try:
                source = open_source(place, formats[0] if len(formats) == 1 else None, kind=kind, skip_bad=inputs.skip_bad)
            except DraftscopeError:
                source = open_source(place, kind=kind, skip_bad=inputs.skip_bad)
            held: dict[str, Tensor] = {}
            for number, item in enumerate(islice(source, SEQUENCES)):
                held |= {f"{number}.{name}": tensor[:rows].contiguous().clone() for name, tensor in _of(item, text)}
            return save(dict(sorted(held.items())))

        yield f"rows/{side}.safetensors", make


def _of(item: Sample | Trace, text: bool) -> Iterator[tuple[str, Tensor]]:
    """Tensors of one sequence by name; those that hold tokens only with `text`."""
    names = ("states", "loss_mask") if isinstance(item, Sample) else (
        "fc_input", "accepted", "phase", "step", "positions", "last_hidden", "fc_output", "accepted_counts", "draft_states",
        "draft_parents")
    tokens = ("token_ids", "verified_ids", "draft_input_ids", "prefix_token_ids", "draft_token_ids") if text else ()
    for name in (*names, *tokens):
        tensor = getattr(item, name, None)
        if isinstance(tensor, Tensor):
            yield name, tensor.to(torch.uint8) if tensor.dtype == torch.bool else tensor


def _zip(files: Mapping[str, bytes], left_out: Sequence[str], text: bool) -> bytes:
    """The archive: names in order, no times, no owners."""
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, content in ((README, _readme(files, left_out, text)), *sorted(files.items())):
            entry = zipfile.ZipInfo(f"{FOLDER}/{name}", date_time=(1980, 1, 1, 0, 0, 0))
            entry.compress_type, entry.create_system, entry.external_attr = zipfile.ZIP_DEFLATED, 3, 0o644 << 16
            archive.writestr(entry, content)
    return held.getvalue()


WHAT = {
    "diagnosis.json": "the whole answer, schema draftscope.diagnosis/1",
    "report.html": "the same as a page; it loads nothing and runs nothing",
    "report.txt": "the same as text",
    "config": "configurations as they were found, and names, shapes and dtypes of the draft's tensors",
    "counters.json": "what the engine counted",
    "rows": "the first rows of some sequences, as they were read",
}


def _readme(files: Mapping[str, bytes], left_out: Sequence[str], text: bool) -> bytes:
    lines = ["Why a draft model's tokens are rejected: a diagnosis by draftscope, with what it was made from.", ""]
    lines += [f"{name:<34} {len(content):>9,} bytes  {WHAT.get(name) or WHAT[name.partition('/')[0]]}"
              for name, content in sorted(files.items())]
    lines += ["", "Paths, hosts and credentials were replaced by placeholders."]
    lines += ["Texts and token ids are in it, as was asked for." if text else
              "Texts and token ids were left out. States of a model can give away the tokens that they were computed from: "
              "leave them out with --bundle-rows 0."]
    lines += [f"Left out: {one}" for one in left_out]
    return ("\n".join(lines) + "\n").encode()
