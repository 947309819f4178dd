"""What a path can be that holds no states; the readers of checkpoints are imported only where one lies there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from draftscope.inspecting.figures import Inspected
from draftscope.states.places import Place

if TYPE_CHECKING:
    from draftscope.findings import Finding


def no_states(path: Place) -> tuple[Inspected, list[Finding]] | None:
    """What else it can be: a model folder, a file of tensors, conversations, a report; None = not known."""
    if path.is_dir() and not (path / "config.json").is_file():
        return None
    from draftscope.inspecting import checkpoints

    if path.is_dir():
        return checkpoints.inspect_draft(path) if checkpoints.is_draft(path) else checkpoints.inspect_target(path)
    if path.suffix == ".jsonl":
        from draftscope.inspecting.conversations import inspect_conversations

        held = inspect_conversations(path)
        return None if held is None else (held, [])
    if path.suffix == ".json":
        return checkpoints.inspect_report(path)
    if path.suffix == ".safetensors":
        report, findings = checkpoints.inspect_tensors(path)
        meant = {"hidden_states", "fc_input"} & set(report.facts["shapes"])
        # A file that tries to be states and fails is better refused with the reason.
        return None if meant else (report, findings)
    return None
