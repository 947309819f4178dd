"""Conversations, before a target has rendered them: what `extract` would take, and what it would pass over."""

from __future__ import annotations

from collections import Counter

from draftscope.inspecting.report import Group, Inspected, Skip
from draftscope.pipeline.conversations import Messages, lines_of, parse_line
from draftscope.states.places import Place

EXAMPLES = 3


def inspect_conversations(file: Place) -> Inspected | None:
    """A JSONL file of conversations, one a line; None where not one line is such.

    Raises:
        DraftscopeError: the file cannot be read, or has a line that is too long.
    """
    rendered, tokens, answers, empty = 0, 0, 0, 0
    roles: Counter[str] = Counter()
    groups: dict[str, Group] = {}
    lines = with_tools = prompts = 0
    for index, line in enumerate(lines_of(file)):
        lines += 1
        try:
            row = parse_line(line)
        except ValueError as error:
            group = groups.setdefault(str(error), Group(cause=str(error), files=0))
            group.files += 1
            prompts += str(error) == "has no assistant turn"
            if len(group.examples) < EXAMPLES:
                group.examples.append(Skip(path=str(file), why=str(error), row=index))
            continue
        if isinstance(row, Messages):
            rendered += 1
            with_tools += row.tools is not None
            roles.update(message["role"] for message in row.messages)
        else:
            tokens += len(row[0])
            answers += sum(row[1])
            empty += not any(row[1])
    usable = lines - sum(group.files for group in groups.values())
    if not usable and not prompts:
        return None
    given = usable - rendered
    report = Inspected(path=str(file), what="conversations", format="jsonl", files=1, skipped=list(groups.values()),
                       chosen='lines of {"messages"} or {"token_ids"}')
    report.facts = {"lines": lines, "usable": usable}
    if rendered:
        report.facts |= {"of messages": rendered, "turns": dict(roles), "with tools": with_tools}
    if given:
        report.facts |= {"of token ids": given, "tokens": tokens, "answer tokens": answers, "empty masks": empty}
    if prompts:
        report.notes.append(f"{prompts} lines are prompts without an answer: `extract` wants the answers too")
    if rendered:
        report.notes.append("messages are rendered by the target's chat template in `extract`: what it refuses is not known here")
    return report
