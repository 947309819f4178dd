"""What a run keeps on the disk so that it can go on: its place, its weights and optimizer state, and its log."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from draftscope.eagle3.config import DraftConfig
from draftscope.eagle3.settings import Settings
from draftscope.errors import DraftscopeError
from draftscope.states.leftover import save_text, sweep_up
from draftscope.states.tensorfile import save_tensors

STATE, LOG = "training.safetensors", "log.jsonl"
AGAIN = "Make room and run the same command again"


@dataclass(slots=True)
class Place:
    """Where a run is.

    Attributes:
        step: steps taken.
        evaluated: the step after which was evaluated last.
        best: longest held-out accept length so far; stale: evaluations since.
        stopped: it ended early, for want of patience.
    """

    step: int = 0
    evaluated: int = 0
    best: float = 0.0
    stale: int = 0
    stopped: bool = False


@dataclass(slots=True)
class RunFolder:
    """The folder of a run.

    Attributes:
        identity: settings, data and configuration, as they must stay.
    """

    folder: Path
    identity: Mapping[str, Any]
    place: Place = field(default_factory=Place)

    @property
    def state_file(self) -> Path:
        return self.folder / STATE

    def save(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace the state, whole or not at all.

        Raises:
            DraftscopeError: the disk refuses; the state saved before is kept.
        """
        place = {f.name: getattr(self.place, f.name) for f in fields(Place)}
        try:
            save_tensors(self.state_file, tensors, {"draftscope": json.dumps(place | dict(self.identity))})
        except DraftscopeError as error:
            raise DraftscopeError(error.what, where=error.where, remedy="The state saved before is kept: make room and run the "
                                  "same command again") from None

    def restore(self, *, trim: bool = True) -> dict[str, Tensor] | None:
        """The state's tensors; None where there is none yet.

        Args:
            trim: cut the log to the state.

        Raises:
            DraftscopeError: not readable, or of a run over other data or with other settings. Nothing is changed then.
        """
        if not self.state_file.is_file():
            if trim:
                (self.folder / LOG).unlink(missing_ok=True)
            return None
        if trim:
            sweep_up(self.folder)
        where = str(self.state_file)
        try:
            with safe_open(self.state_file, "pt") as f:
                held = json.loads((f.metadata() or {}).get("draftscope", "{}"))
                tensors = {key: f.get_tensor(key) for key in f.keys()}  # noqa: SIM118 (not a dict)
            held.setdefault("evaluated", held.get("step", 0))  # a state from before this was kept
            place = Place(**{f.name: held[f.name] for f in fields(Place) if f.name in held})
        except (SafetensorError, OSError, ValueError, TypeError) as error:
            raise DraftscopeError(f"not the state of a run: {error}", where=where, remedy="Train into another folder") from None
        self._agree(held)
        self.place = place
        if trim:
            self._trim_log()
        return tensors

    def _agree(self, held: dict[str, Any]) -> None:
        with suppress(ValidationError, TypeError):  # a run from before a switch was added has it at its default
            held["config"] = DraftConfig(**held.get("config", {})).model_dump(mode="json")
        if isinstance(held.get("settings"), dict):
            defaults = {f.name: f.default for f in fields(Settings)}
            held["settings"] = json.loads(json.dumps(defaults)) | held["settings"]
        for key, now in json.loads(json.dumps(dict(self.identity))).items():
            before = held.get(key, now)  # a run from before this was kept
            if before == now:
                continue
            told = ""
            if isinstance(before, dict) and isinstance(now, dict):
                changed = [k for k in sorted(before.keys() | now.keys()) if before.get(k) != now.get(k)]
                told = ": " + "; ".join(f"{k} was {before.get(k)!r} and is now {now.get(k)!r}" for k in changed)
            raise DraftscopeError(f"the folder holds a run over other {key}{told}", where=str(self.state_file),
                                  remedy="Go on as it began, or train into another folder")

    def record(self, event: Mapping[str, Any]) -> None:
        """A line of the log.

        Raises:
            DraftscopeError: the disk refuses.
        """
        path = self.folder / LOG
        try:
            with path.open("a") as f:
                f.write(json.dumps(event) + "\n")
        except OSError as error:
            raise self._unwritten(path, error) from None

    @staticmethod
    def _unwritten(path: Path, error: OSError) -> DraftscopeError:
        return DraftscopeError(f"cannot be written ({error.strerror})", where=str(path), remedy=AGAIN)

    def _trim_log(self) -> None:
        """Drop what was logged after the state was saved: those steps are taken again."""
        path = self.folder / LOG
        if path.is_file():
            kept = []
            for line in path.read_text().splitlines():
                with suppress(ValueError, KeyError, TypeError):
                    if json.loads(line)["step"] <= self.place.step:
                        kept.append(line)
            try:
                save_text(path, "".join(line + "\n" for line in kept))
            except DraftscopeError as error:
                raise DraftscopeError(error.what, where=error.where, remedy=AGAIN) from None
