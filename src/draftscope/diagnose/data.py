"""What texts, masks, logs and files tell of data and training, measured once for the faults of that family."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from draftscope.boundaries import Boundary
from draftscope.diagnose.authors import domain_facts, policy_facts
from draftscope.diagnose.case import Selected, Text
from draftscope.diagnose.framing import first_tokens, template_facts
from draftscope.diagnose.learning import budget_facts, curve_facts, read_budget
from draftscope.diagnose.masks import mask_facts
from draftscope.diagnose.operation import compare_conversations, ops_facts, ranks_of
from draftscope.diagnose.traininglog import read_curve
from draftscope.errors import DraftscopeError
from draftscope.faults.facts_data import LeakFacts, TemplateFacts
from draftscope.faults.leak import ABOVE
from draftscope.pipeline.turns import Markers, find, of_requests, of_template
from draftscope.target.model import Target, load_tokenizer
from draftscope.target.norms import taken_after_norm

if TYPE_CHECKING:
    from draftscope.diagnose.run import Examination

DOCUMENTS, EDGE = 8, 4
"""Packed samples run again at most; rows at a document's beginning that are left out (sinks)."""


def look(examination: Examination) -> None:
    """Fill `Measurements.data` with all that the inputs allow."""
    case, data = examination.case, examination.m.data
    train = [] if case.train is None else case.train.texts
    serve = [] if case.serve is None else case.serve.texts
    wanted = train or serve or case.inputs.conversations is not None
    examination.tokenizer = tokenizer = tokenizer_of(examination) if wanted else None
    markers = of_template(tokenizer) if tokenizer is not None else None
    if markers is None and serve:
        markers = of_requests(*_requests(serve), case.target.stop_ids if case.target is not None else frozenset())
    if train:
        data.mask = mask_facts(train, markers)
        if data.mask is not None:
            examination.steps.append(
                f"loss masks against answers found by {data.mask.marked_by}: {data.mask.turns} answers in {data.mask.samples} "
                f"samples, {data.mask.offsets.get((0, 0), 0)} supervised from edge to edge")
    if train and serve:
        data.template = template_facts(train, serve, markers, tokenizer)
        assert case.serve is not None
        data.template.early, data.template.later = first_tokens(case.serve.sequences)
        data.domain = domain_facts(train, serve, case.serve.sequences)
    _policy(examination)
    _files(examination, tokenizer)
    _logs(examination)
    _leaks(examination, markers)


def tokenizer_of(examination: Examination) -> Any:
    """The target's, where its folder has one; None without."""
    case = examination.case
    if case.target is not None:
        folder = case.target.folder
    elif isinstance(case.inputs.target, Path):
        folder = case.inputs.target
    else:
        return None
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        return None
    try:
        return case.target.tokenizer if case.target is not None else load_tokenizer(folder)
    except DraftscopeError as error:
        examination.next.append(f"turns are not looked for by the chat template: {error.what}")
        return None


def _requests(serve: list[Text]) -> tuple[list[np.ndarray[Any, Any]], list[np.ndarray[Any, Any]]]:
    """Prompts and answers of requests whose answers are known."""
    prompts, answers = [], []
    for text in serve:
        if text.answer is None or not bool(text.answer.any()):
            continue
        start = int(text.answer.int().argmax())
        prompts.append(text.token_ids[:start].numpy())
        answers.append(text.token_ids[start:].numpy())
    return prompts, answers


def _policy(examination: Examination) -> None:
    case, m = examination.case, examination.m
    if case.train is None or case.parts is None or m.train is None or m.train.nonfinite:
        return
    first = next((s.last for s in case.train.sequences if s.last is not None), None)
    if first is None or first.shape[1] != case.parts.width:
        return
    swept = examination.swept.get("train")
    found = policy_facts(case.train.sequences, case.parts, normed=bool(taken_after_norm(case.parts, first)),
                         again=None if swept is None else swept.last)
    if found is None:
        return
    policy, (earlier, last) = found
    m.data.policy = policy
    if m.data.mask is not None and m.data.mask.repeats:
        m.data.mask.first_agreement, m.data.mask.last_agreement = earlier, last
    examination.steps.append(
        f"the target over {policy.tokens} training answer tokens: its first choice is {policy.agreement:.1%} of them; -log p "
        f"{policy.nll:.2f}, entropy {policy.entropy:.2f}")


def _files(examination: Examination, tokenizer: Any) -> None:
    case, data = examination.case, examination.m.data
    if case.train is None:
        return
    data.ops = ops_facts(case.train)
    if case.inputs.conversations is not None:
        data.template = data.template or TemplateFacts()
        folder = case.inputs.train if isinstance(case.inputs.train, Path) else None
        examination.steps.append(compare_conversations(
            case.inputs.conversations, case.train.texts, folder, tokenizer, data.template, data.ops,
            complete=len(case.train.texts) == case.train.total))


def _logs(examination: Examination) -> None:
    case, m = examination.case, examination.m
    budget = read_budget()
    rung = m.rungs.get("reference") or m.rungs.get("served") or m.rungs.get("trained")
    own = None if rung is None or budget is None or budget.k != case.k else rung.length
    if not case.inputs.logs:
        if budget is not None and own is not None and m.train is not None and m.train.answer_tokens:
            reached, low, high = budget_facts(budget, m.train.answer_tokens, own).reached
            examination.steps.append(
                f"were the {m.train.answer_tokens:,} answer tokens at hand all that the draft was trained on: with as many "
                f"drafts of this kind reach about {reached:.2f} ({low:.2f} to {high:.2f}, measured on {budget.target}); "
                f"this one has {own:.2f}")
        return
    examination.curve = curve = read_curve(case.inputs.logs)
    vocabulary = None if case.checkpoint is None else case.checkpoint.config.draft_vocab_size
    m.data.curve = facts = curve_facts(curve, vocabulary)
    loss = "" if facts.last_loss is None else f", loss {facts.first_loss:.3f} to {facts.last_loss:.3f}"
    held = f", {len(facts.held)} evaluations ({facts.held_what})" if facts.held else ""
    examination.steps.append(f"training log ({facts.format}): {facts.points} records to step {facts.steps}{loss}{held}")
    if m.data.ops is not None:
        ranks_of(case.inputs.logs, m.data.ops)
    if budget is not None and facts.tokens and own is not None:
        m.data.budget = budget_facts(budget, facts.tokens, own)


def _leaks(examination: Examination, markers: Markers | None) -> None:
    case, m = examination.case, examination.m
    if case.train is None:
        return
    m.data.leak = leak = LeakFacts()
    trained = m.rungs.get("trained")
    if m.data.curve is not None:
        leak.logged = m.data.curve.accuracy
        if trained is not None and trained.joint and case.heldout is None:
            leak.replayed = trained.joint[0] / max(trained.coverage or 1.0, 0.1)
        _readings(examination, leak)
    if case.heldout is not None:
        known = {text.token_ids.numpy().tobytes() for text in case.train.texts}
        prompts = {prompt.tobytes() for prompt in _requests(case.train.texts)[0]}
        leak.heldout = len(case.heldout.texts)
        leak.known = sum(text.token_ids.numpy().tobytes() in known for text in case.heldout.texts)
        leak.same_prompt = sum(prompt.tobytes() in prompts for prompt in _requests(case.heldout.texts)[0])
    if markers is not None and markers.once and case.target is not None:
        _documents(case.train, case.target, markers, leak)


def _readings(examination: Examination, leak: LeakFacts) -> None:
    """Another reading of the checkpoint is no explanation where the training's own log is far above it as well."""
    facts = examination.m.checkpoint
    if leak.logged is None or facts is None or facts.otherwise is None:
        return
    if leak.logged - facts.otherwise.other_first >= ABOVE:
        examination.steps.append(
            f"read with {facts.otherwise.key} the draft does better on its training states, {facts.otherwise.other_first:.0%} at "
            f"the first position, but not what its log says ({leak.logged:.0%}): not how it was trained")
        facts.otherwise = None


def _documents(selected: Selected, target: Target, markers: Markers, leak: LeakFacts) -> None:
    """Later documents of packed samples: their last states against the target run over them alone, and over the whole sample.

    A document begins where the sample holds again what the template writes at a text's beginning only.
    """
    alone: list[torch.Tensor] = []
    together: list[torch.Tensor] = []
    taps = [Boundary(target.layers)]
    for sequence in selected.sequences:
        ids = sequence.token_ids[: sequence.rows]
        starts = sorted({int(at) for once in markers.once for at in find(ids.numpy(), once)})
        starts = [start for start in starts if start > 0]
        if not starts or sequence.last is None or int(selected.sequences[0].features.shape[2]) != target.width:
            continue
        leak.documents += len(starts)
        if len(alone) >= DOCUMENTS:
            continue
        start, end = starts[-1], len(ids)
        stored = sequence.last[start + EDGE : end].float()
        if not len(stored):
            continue
        with torch.inference_mode():
            own = target.forward(ids[None, start:], taps).last[0][EDGE:].float()
            whole = target.forward(ids[None], taps).last[0][start + EDGE :].float()
        if bool(taken_after_norm(target.parts, sequence.last)):
            own, whole = target.parts.final_norm(own), target.parts.final_norm(whole)
        alone.append((stored - own).norm(dim=-1) / own.norm(dim=-1))
        together.append((stored - whole).norm(dim=-1) / whole.norm(dim=-1))
    if alone:
        leak.seen = sum(map(len, alone))
        leak.alone, leak.together = float(torch.cat(alone).median()), float(torch.cat(together).median())
