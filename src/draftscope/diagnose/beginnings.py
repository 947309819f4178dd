"""Where answers begin in requests whose capture does not say it: by the markers of the target's chat template."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from draftscope.diagnose.data import tokenizer_of
from draftscope.pipeline.turns import Markers, of_template, turns

if TYPE_CHECKING:
    from draftscope.diagnose.run import Examination


def find_answers(examination: Examination) -> None:
    """Fill `Case.answers`, and say what was found and what was not.

    Only replay looks at them: which rows were prefilled and which verified stays unknown.
    """
    case = examination.case
    if case.serve is None:
        return
    silent = [s for s in case.serve.sequences if s.answer is None and s.steps is None]
    if not silent:
        return
    tokenizer = tokenizer_of(examination)
    markers = None if tokenizer is None else of_template(tokenizer)
    if markers is not None:
        whole = {text.name: text.token_ids for text in case.serve.texts}
        for sequence in silent:
            answer = last_answer(whole[sequence.name], markers) if sequence.name in whole else None
            if answer is not None and bool(answer[: len(sequence.token_ids)].any()):
                case.answers[sequence.name] = answer[: len(sequence.token_ids)]
    of = len(case.serve.sequences)
    if case.answers:
        examination.steps.append(
            f"the capture does not say where answers begin: the target's chat template shows it in {len(case.answers)} of {of} "
            "requests")
    if lost := len(silent) - len(case.answers):
        examination.next.append(
            f"the capture does not say where answers begin in {lost} of {of} requests, so that who wrote them is unknown and "
            "their prompts count with them: record `phase` (0 for the prompt's rows)")


def last_answer(token_ids: Tensor, markers: Markers) -> Tensor | None:
    """[T] bool: the tokens of a text's last answer; None where the text does not end in one."""
    ids = token_ids.numpy()
    found = turns(ids, markers)
    if not found or found[-1].start >= len(ids) or len(ids) - found[-1].end > len(markers.separators):
        return None
    answer = torch.zeros(len(ids), dtype=torch.bool)
    answer[found[-1].start : found[-1].end] = True
    return answer
