"""Speculative decoding with an EAGLE-3 draft: draft a chain or a tree, verify it in one pass of the target, keep what matches.

Batched, rows of a batch progressing each at its own speed. Plain decoding is the same code with chains of length 0.
Conventions: row t of the draft holds the target's states at token t and the embedding of token t+1, at position t
(SGLang `eagle_worker_v2.py`, vLLM `set_inputs_first_pass`); rows that were accepted are extended with their true features.
Shapes: R rows of the batch, W tokens of a pass, K drafted tokens, D longest path of a tree, S slots, Ht target width, H draft
width.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from draftscope.eagle3.generated import Generated
from draftscope.eagle3.habits import Shared, new_drafter
from draftscope.eagle3.model import Draft
from draftscope.eagle3.sampling import Draws, Sampling
from draftscope.eagle3.stopping import StopStrings
from draftscope.eagle3.tree import Tree, TreeShape
from draftscope.eagle3.verifying import Proposal, Verdict, verify_greedy, verify_sampled
from draftscope.errors import DraftscopeError, UsageError
from draftscope.target.cache import Branches
from draftscope.target.wiring import Wiring

if TYPE_CHECKING:
    from draftscope.target.model import Target

PREFILL_ROWS = 8  # prompts of unlike length padded together; more only adds padding


@dataclass(slots=True)
class Rows:
    """Rows of one request in one pass, as the draft receives them. Views: copy what is to be kept.

    Attributes:
        start: position of the first row.
        token_ids: [W] the token whose state the row is labelled with.
        fc_input: [W, S, Ht] in the target's dtype.
        fc_output: [W, H].
        last: [W, Ht] last state before the final norm.
        verified_ids: [W] what the target chose after the row; -1 where it wasn't asked (inside the prompt, or off the path
            that sampling took).
        depths: [W] position of each row less `start`; None = 0, 1, 2, ...
        parents: [K] of a tree, drafted token (counted from 0) that each goes on from, -1 = the first row; None = a chain.
        kept: [W] bool, rows of a verify step that stand; None = the first ones.
    """

    start: int
    token_ids: Tensor
    fc_input: Tensor
    fc_output: Tensor
    last: Tensor
    verified_ids: Tensor
    depths: Tensor | None = None
    parents: Tensor | None = None
    kept: Tensor | None = None


class Observer(Protocol):
    """Sees every pass of a speculative generation. It must not raise, nor write to the tensors it is shown."""

    def prefill(self, request: int, rows: Rows) -> None:
        """The prompt's rows, in one block."""
        ...

    def step(self, request: int, rows: Rows, accepted: int, drafted: Tensor, states: Tensor) -> None:
        """One verify step: K+1 rows, the count, drafted ids [K], the draft's outputs [K, H] that they came from.

        Of a tree with fewer nodes than its shape allows there are fewer rows: K is then that tree's.
        """
        ...

    def done(self, generated: Generated) -> None:
        """The request has ended; nothing more comes of it."""
        ...


def generate(target: Target, draft: Draft | None, prompts: Iterable[Sequence[int]], *, wiring: Wiring, k: int = 3,
             tree: TreeShape | None = None, sampling: Sampling | None = None, max_new: int = 64,
             stop_ids: frozenset[int] = frozenset(), stop: StopStrings | None = None, rows: int = 1, context: int | None = None,
             feedback: Literal["pre", "post"] | None = None, seeds: Sequence[int] | None = None,
             observer: Observer | None = None, on_tokens: Callable[[int], None] | None = None,
             on_done: Callable[[Generated], None] | None = None) -> list[Generated]:
    """Answer every prompt, at most `rows` at once; a finished row makes room for the next prompt.

    Greedily in float32 the text is that of plain decoding (`draft=None`), but for places where the target's two best logits
    are closer than rounding (see `generated.divergence`). With `sampling` it is distributed as that of plain decoding.

    Args:
        prompts: token ids, none empty. All are checked before the first is answered; but where they are no sequence, each is
            asked for, and checked, when a row has room for it, which takes a `context`.
        wiring: which target states the draft gets.
        k: drafted tokens per step (the chain's length).
        tree: drafts trees of this shape instead.
        sampling: None = greedy.
        stop_ids: tokens that end the text, kept as its last token.
        stop: strings that end it; the token that completes one is kept as its last.
        context: most tokens of prompt and text together; None = the target's `max_position_embeddings`.
        feedback: the state fed back to the next draft step; None = as the draft's configuration says.
        seeds: of each prompt's draws; None = `sampling.seed_of` its number. A text does not depend on what else is answered.
        observer: sees every pass. Plain decoding has none.
        on_tokens: called after every pass with the number of tokens that it added to texts.
        on_done: called with each as it ends; these are not kept, and nothing is returned.

    Raises:
        DraftscopeError: a prompt that is empty, too long or outside the vocabulary, or a draft that does not go with the target.
        UsageError: settings that do not go together.
    """
    context = context or int(getattr(target.config, "max_position_embeddings", None) or 2**31)
    asked, longest = iter(prompts), context
    if isinstance(prompts, Sequence):
        for number, prompt in enumerate(prompts):
            _check_prompt(target, prompt, number, context)
        longest = min(max(map(len, prompts), default=0) + max_new, context)
        rows = min(rows, len(prompts))
    if draft is not None and tree is None and sampling is not None and sampling.draft == "probabilistic":
        shape: TreeShape | None = TreeShape(1, k, k + 1)  # drawn tokens: a chain is a tree without siblings
    else:
        shape = None if draft is None else tree
    _check(target, draft, wiring, k, max_new)
    _check_drawing(draft, shape, sampling)
    k = 0 if draft is None else k if shape is None else shape.drafted
    depth = k if shape is None else shape.steps
    scratch = k if shape is None else max(k, depth, shape.expanded)
    rows = max(1, rows)
    capacity = longest + scratch + 1
    taps, verified = ((), ()) if draft is None else (wiring.taps(), wiring.taps("verify"))
    cache = target.new_cache(rows, capacity)
    drafter = None if draft is None else new_drafter(draft, k, rows, capacity, feedback, shape, sampling)
    shared = Shared(0 if draft is None else draft.runtime.prefix)
    results = list[Generated]()
    texts: dict[int, Sequence[int]] = {}  # prompts of the requests in progress
    numbers = count()
    held: list[Generated | None] = [None] * rows
    bonus = torch.zeros(rows, dtype=torch.int64)  # chosen by the target after each row's last state, not yet read by it
    draws: dict[int, Draws] = {}  # of the requests in progress

    def fresh_ones(room: int) -> list[Generated]:
        taken = []
        for number, prompt in zip(islice(numbers, room), asked, strict=False):
            if not isinstance(prompts, Sequence):
                _check_prompt(target, prompt, number, context)
            texts[number] = prompt
            taken.append(Generated(number))
        return taken

    def keep(request: Generated, tokens: list[int]) -> int:
        before = len(request.token_ids)
        request.append(tokens, stop_ids, max_new, context - len(texts[request.request]), stop)
        return len(request.token_ids) - before

    def ended(request: Generated) -> None:
        del texts[request.request]
        draws.pop(request.request, None)
        if on_done is None:
            results.append(request)
        else:
            on_done(request)

    with torch.inference_mode():
        while True:
            # Prefill: prompts into free rows, as long as there are both.
            while None in held:
                free = [row for row in range(rows) if held[row] is None]
                fresh = fresh_ones(min(PREFILL_ROWS, len(free)))
                if not fresh:
                    break
                free = free[: len(fresh)]
                at = torch.tensor(free)
                ids, counts = _pad([texts[request.request] for request in fresh])
                for request in fresh:
                    request.started = time.perf_counter()
                cache.clear(at)
                seen = target.forward(ids, taps, cache=cache, rows=at)
                cache.commit(counts, at)
                ends = torch.arange(len(at)), counts - 1
                logits = target.logits(seen.post[ends])
                if sampling is None:
                    bonus[at] = logits.argmax(-1).cpu()
                else:
                    for i, request in enumerate(fresh):
                        number = request.request
                        draws[number] = sampling.draws(number) if seeds is None else Draws(seeds[number])
                        bonus[free[i]] = draws[number].choose(sampling.distribution(logits[i].cpu()))
                if drafter is not None:
                    requests = tuple(request.request for request in fresh)
                    features = wiring.apply(seen.taps, counts, requests=requests, norm=target.parts.final_norm)
                    hidden = drafter.draft.project(features)
                    following = F.pad(ids[:, 1:], (0, 1))
                    following[ends] = bonus[at]
                    begun = torch.tensor([shared.rows(texts[request.request]) for request in fresh])
                    drafter.begin(hidden, following, counts, at, begun)
                for i, (row, request) in enumerate(zip(free, fresh, strict=True)):
                    request.first_token = time.perf_counter()
                    keep(request, [int(bonus[row])])
                    held[row] = request if request.finish is None else None
                    if observer is not None and drafter is not None:
                        n = int(counts[i])
                        chosen = F.pad(bonus[row, None], (n - 1, 0), value=-1)
                        block = Rows(0, ids[i, :n], features[i, :n], hidden[i, :n], seen.last[i, :n], chosen)
                        observer.prefill(request.request, block)
                        if request.finish is not None:
                            observer.done(request)
                    if request.finish is not None:
                        ended(request)
                if on_tokens is not None:
                    on_tokens(len(fresh))

            live = [(row, request) for row, request in enumerate(held) if request is not None]
            if not live:
                return sorted(results, key=lambda request: request.request)
            at = torch.tensor([row for row, _ in live])
            some = at if len(live) < rows else None  # None spares the caches a copy of their past
            chances = [draws[request.request] for _, request in live] if sampling is not None else []

            # Draft: K tokens per row.
            proposal = Proposal(bonus.new_empty(len(live), 0), None) if drafter is None else drafter.propose(some, chances)
            drafted, grown = proposal.tokens, proposal.tree

            # Verify: the target reads the token it chose last and those drafted, which count as far as they are its own.
            ids = torch.cat([bonus[at, None], drafted.clamp(min=0)], 1)
            starts = cache.lengths[at]
            seen = target.forward(ids, verified, cache=cache, rows=some, branches=None if grown is None else _branches(grown))
            logits = target.logits(seen.post)
            if sampling is None:
                verdict = verify_greedy(proposal, logits.argmax(-1).cpu(), depth)
            else:
                verdict = verify_sampled(proposal, logits.cpu(), depth, sampling, chances,
                                         None if draft is None else draft.target_ids.cpu())
            accepted = verdict.accepted
            if verdict.path is None:
                cache.commit(accepted + 1, some)
            else:
                cache.keep(verdict.path, accepted + 1, some)
            following = verdict.along(verdict.chosen).clamp(min=0)  # beyond the accepted ones nothing counts
            bonus[at] = following.gather(1, accepted[:, None])[:, 0]
            added = 0
            for i, (row, request) in enumerate(live):
                request.accepted_counts.append(int(accepted[i]))
                request.drafted_ids.append(drafted[i].tolist())
                if grown is not None and tree is not None:
                    request.draft_parents.append(grown.parents[i].tolist())
                added += keep(request, following[i, : int(accepted[i]) + 1].tolist())
                held[row] = request if request.finish is None else None

            # Extend: the draft over the accepted rows, now with their true features.
            if drafter is not None:
                about = {"requests": tuple(r.request for _, r in live), "norm": target.parts.final_norm}
                features = _features(wiring, seen.taps, verdict, starts, about)
                hidden = drafter.draft.project(features)
                if observer is not None and proposal.states is not None:
                    for i, (_, request) in enumerate(live):
                        block = Rows(int(starts[i]), ids[i], features[i], hidden[i], seen.last[i], verdict.chosen[i])
                        shown = len(drafted[i])
                        if grown is not None and tree is not None:
                            shown = int((drafted[i] >= 0).sum())
                            block = _of_tree(block, grown, verdict, i, shown)
                        observer.step(request.request, block, int(accepted[i]), drafted[i, :shown], proposal.states[i, :shown])
                        if request.finish is not None:
                            observer.done(request)
                width = int(accepted.max()) + 1
                drafter.extend(verdict.along(hidden)[:, :width], following[:, :width], accepted + 1, some)
            for _, request in live:
                if request.finish is not None:
                    ended(request)
            if on_tokens is not None:
                on_tokens(added)


def _branches(tree: Tree) -> Branches:
    return Branches(F.pad(tree.depths, (1, 0)), tree.seen())


def _features(wiring: Wiring, taps: Tensor, verdict: Verdict, starts: Tensor, about: dict[str, Any]) -> Tensor:
    """What the draft gets of the states [R, W, S, Ht] of a verify step. Of a tree an engine hands it the path, so that is the
    block of rows in which rows are mixed up."""
    whole = torch.full_like(verdict.accepted, taps.shape[1])
    if verdict.path is None:
        return wiring.apply(taps, whole, starts, phase="verify", **about)
    features = wiring.row_by_row().apply(taps, whole, starts, phase="verify", **about)
    if any(spoiler.across for spoiler in wiring.spoiled()):
        features = features.clone()
        along = wiring.apply(verdict.along(taps), verdict.accepted + 1, starts, phase="verify", **about)
        features[torch.arange(len(taps))[:, None], verdict.path] = along
    return features


def _of_tree(block: Rows, tree: Tree, verdict: Verdict, i: int, shown: int) -> Rows:
    """Row i's block with what makes it a tree, without the nodes that this tree lacks."""
    assert verdict.path is not None
    kept = torch.zeros(len(block.token_ids), dtype=torch.bool)
    kept[verdict.path[i]] = True
    n = shown + 1
    return Rows(block.start, block.token_ids[:n], block.fc_input[:n], block.fc_output[:n], block.last[:n], block.verified_ids[:n],
                depths=F.pad(tree.depths[i, :shown], (1, 0)), parents=tree.parents[i, :shown], kept=kept[:n])


def _pad(prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    tensors = [torch.tensor(prompt) for prompt in prompts]
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True), torch.tensor([len(t) for t in tensors])


def _check_prompt(target: Target, prompt: Sequence[int], number: int, context: int) -> None:
    vocab = len(target.parts.embedding)
    if not prompt:
        raise DraftscopeError("holds no token", where=f"prompt {number}")
    if len(prompt) >= context:
        raise DraftscopeError(f"{len(prompt)} tokens leave no room for an answer in a context of {context}",
                              where=f"prompt {number}", remedy="Shorten or drop it")
    if min(prompt) < 0 or max(prompt) >= vocab:
        raise DraftscopeError(f"token ids {min(prompt)}..{max(prompt)} do not fit a vocabulary of {vocab}",
                              where=f"prompt {number}", remedy="Render the prompt with the target's own tokenizer")


def _check(target: Target, draft: Draft | None, wiring: Wiring, k: int, max_new: int) -> None:
    if max_new < 1 or (draft is not None and k < 1):
        raise UsageError(f"{max_new} new tokens with chains of {k}", remedy="Both must be at least 1")
    if draft is None:
        return
    config = draft.config
    if len(wiring.slots) != config.slots or config.target_hidden_size != target.width:
        raise DraftscopeError(
            f"the draft takes {config.slots} states {config.target_hidden_size} wide, the target's wiring gives "
            f"{len(wiring.slots)} of {target.width}", remedy="The draft was made for another target, or for other layer ids",
        )
    vocab = len(target.parts.embedding)
    if int(draft.target_ids.max()) >= vocab or int(draft.target_ids.min()) < 0:
        raise DraftscopeError(f"the draft's map leads to token {int(draft.target_ids.max())}, the target knows {vocab}")


def _check_drawing(draft: Draft | None, shape: TreeShape | None, sampling: Sampling | None) -> None:
    if draft is None:
        return
    if shape is not None and shape.topk > draft.config.draft_vocab_size:
        raise UsageError(f"topk {shape.topk} with a draft vocabulary of {draft.config.draft_vocab_size} tokens")
    if sampling is not None and sampling.draft == "probabilistic" and len(draft.target_ids.unique()) < len(draft.target_ids):
        raise DraftscopeError("the draft's map leads from several draft ids to one token, so what it draws has no distribution",
                              remedy="Mend the map (`draftscope lint`), or draft greedily")
