"""The embedded draft in every form that `convert` gives it, served by vLLM, greedily: the forms accept the same tokens, and as
many as our own speculation does (recipes/foreign/serve.py, scripts/env-vllm).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peers import run_recipe
from safetensors.torch import load_file

from draftscope.eagle3.checkpoint import build_draft, load_checkpoint
from draftscope.eagle3.generate import generate
from draftscope.embedded import pair
from draftscope.pipeline.convert_drafts import convert_draft
from draftscope.target.embedded import ensure_target
from draftscope.target.model import load_target
from draftscope.target.wiring import Wiring

K, TOKENS, PROMPTS = 3, 48, 4
FORMS = ("native", "speculators", "flattened")

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def target() -> Path:
    return ensure_target(report=lambda _: None)


@pytest.fixture(scope="module")
def served(target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Per form, request by request, what the rows at the draft's input say."""
    folder = tmp_path_factory.mktemp("served")
    convert_draft(pair.DRAFT, "native", folder / "native", target=target)
    convert_draft(folder / "native", "speculators", folder / "speculators", target=target)
    convert_draft(folder / "speculators", "vllm@0.32", folder / "flattened", target=target)
    found = {}
    for form in FORMS:
        run_recipe("vllm", "serve.py", target, folder / form, folder / "out" / form, "--prompts", str(PROMPTS),
                   "--tokens", str(TOKENS), "--k", str(K), threads=2)
        found[form] = [load_file(path) for path in sorted((folder / "out" / form / "capture").glob("request-*.safetensors"))]
        assert len(found[form]) == PROMPTS
    return found


@pytest.mark.parametrize("form", FORMS[1:])
def test_every_form_accepts_the_same_tokens(form: str, served: dict[str, list[dict[str, Any]]]) -> None:
    for was, now in zip(served["native"], served[form], strict=True):
        assert was.keys() == now.keys()
        for name in ("token_ids", "accepted", "accepted_counts", "draft_token_ids"):
            assert torch.equal(was[name], now[name]), name


def test_our_speculation_accepts_as_vllm_does(target: Path, served: dict[str, list[dict[str, Any]]]) -> None:
    model = load_target(target)
    draft = build_draft(load_checkpoint(pair.DRAFT, target_layers=model.layers), model.parts)
    prompts, answers = [], []
    for held in served["native"]:
        kept = held["token_ids"][held["accepted"]]
        length = int((held["phase"] == 0).sum())
        prompts.append(kept[:length].tolist())
        answers.append(kept[length:].tolist())
    ours = generate(model, draft, prompts, wiring=Wiring.of(pair.BOUNDARIES), k=K, max_new=TOKENS, rows=PROMPTS)
    compared = 0
    for mine, answer, held in zip(ours, answers, served["native"], strict=True):
        # Up to where the texts part, if they do; vLLM counts a step that goes beyond the end of the text as far as it goes.
        shared = next((i for i, (a, b) in enumerate(zip(mine.token_ids, answer, strict=False)) if a != b),
                      min(len(mine.token_ids), len(answer)))
        at = 1  # the first token comes from the prompt's pass
        for k, (count, theirs) in enumerate(zip(mine.accepted_counts, held["accepted_counts"].tolist(), strict=False)):
            at += count + 1
            if at > shared:
                break
            assert count == theirs, (k, at)
            assert mine.drafted_ids[k] == held["draft_token_ids"][k].tolist(), k
            compared += 1
    assert compared >= PROMPTS * TOKENS // (K + 1) // 2
    total = sum(int(held["accepted_counts"].sum()) for held in served["native"])
    assert total > PROMPTS * 5, "a draft that accepts nothing would show nothing"
