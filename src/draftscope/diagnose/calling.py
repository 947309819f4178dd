"""The diagnosis as a function of Python: the options of `draftscope diagnose`, typed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from draftscope.diagnose.case import Inputs
from draftscope.diagnose.run import diagnose as examine
from draftscope.findings import Diagnosis
from draftscope.states.places import Place, place
from draftscope.target.model import Target

At = Place | str | None


def diagnose(
    *, train: At = None, train_heldout: At = None, serve: At = None, draft: At = None, target: At = None,
    loaded: Target | None = None, sweep: At = None, metrics: Path | str | Sequence[Path | str] | None = None,
    metrics_window: float = 0.0, url: str | None = None, prompts: Path | str | None = None, requests: int = 24, max_new: int = 64,
    consumer: str | None = None, k: int | None = None, max_tokens: int = 4096, seed: int = 0, formats: Sequence[str] = (),
    skip_bad: bool = False, explain: Sequence[str] = (), absorb: Path | str | None = None, source_draft: At = None,
    apply: Path | str | None = None, logs: Sequence[Path | str] = (), conversations: Path | str | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> Diagnosis:
    """Why the draft's tokens are rejected; any subset of inputs, named as the options of `draftscope diagnose`.

    Args:
        loaded: the target, where the caller has it in memory.
        consumer: whose reading of the checkpoint is in effect (`--for`); None = what the capture says.
        formats: how states are read (`--format`); logs: the training's own logs (`--log`).
        report: told what is being done, line by line.

    Raises:
        DraftscopeError: inputs that can't be read, or that contradict each other.
        UsageError: inputs that do not go together.
    """
    return examine(Inputs(
        train=_place(train), train_heldout=_place(train_heldout), serve=_place(serve), draft=_place(draft), target=_place(target),
        loaded=loaded, sweep=_place(sweep), metrics=metrics, metrics_window=metrics_window, url=url, prompts=_path(prompts),
        requests=requests, max_new=max_new, consumer=consumer, k=k, max_tokens=max_tokens, seed=seed, formats=tuple(formats),
        skip_bad=skip_bad, explain=tuple(explain), absorb=_path(absorb), source_draft=_place(source_draft), apply=_path(apply),
        logs=tuple(Path(log) for log in logs), conversations=_path(conversations),
    ), report)


def _place(given: At) -> Place | None:
    return None if given is None else place(given)


def _path(given: Path | str | None) -> Path | None:
    return None if given is None else Path(given)
