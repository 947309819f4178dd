"""The tiny pairs of the tests: a byte-level target, and an EAGLE-3 draft trained on its own answers.

    python recipes/tiny/make.py [OUT=tests/data/tiny] [--shape llama|qwen3|gemma2] [--work DIR]

The target (8 to 10 layers, 64 wide) learns chat turns cut from the standard library's `pydoc_data.topics` (PSF licence): the
user gives a line, the assistant goes on. Its weights are rounded to bfloat16 and meant to run in float32. It then answers
prompts of its own text, greedily and sampled, and the draft is trained on the states of those answers. A few minutes on two
cores; the result depends on torch, threads and the text of the Python release, so what is committed is the outcome of one run.

`qwen3` and `gemma2` are of other shapes, for `draftscope drill`: heads that are not the width divided by their number, queries
and keys normed, a head of its own and another rope theta; an embedding scaled by the root of the width, norms of 1 + w before
and after each branch, capped logits, and a window in every other layer.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data import topics as pydoc_topics

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from draftscope.boundaries import Boundary, default_boundaries
from draftscope.eagle3.corpus import Held, token_counts
from draftscope.eagle3.examples import load_examples
from draftscope.eagle3.generate import generate
from draftscope.eagle3.sampling import Sampling
from draftscope.eagle3.start import draft_vocabulary, shape_of
from draftscope.eagle3.train import Settings, train
from draftscope.states.types import Sample
from draftscope.target.model import Target, load_target
from draftscope.target.wiring import Wiring

LENGTH, WIDTH = 128, 64


@dataclass(frozen=True, slots=True)
class Shape:
    """A target: transformers' config, and what its draft has otherwise than by default."""

    target: dict[str, object]
    draft: dict[str, object] = field(default_factory=dict)


SHAPES = {
    "llama": Shape({"model_type": "llama", "num_hidden_layers": 8, "head_dim": 16, "tie_word_embeddings": True}),
    "qwen3": Shape(
        {"model_type": "qwen3", "num_hidden_layers": 9, "head_dim": 32, "tie_word_embeddings": False,
         "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    ),
    "gemma2": Shape(
        {"model_type": "gemma2", "num_hidden_layers": 10, "head_dim": 32, "num_key_value_heads": 1, "tie_word_embeddings": True,
         "query_pre_attn_scalar": 32, "sliding_window": 48, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
}
COMMON = {
    "hidden_size": WIDTH, "intermediate_size": 176, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 512, "initializer_range": 0.05,
}
SPECIALS = ("<|pad|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ASKS = ("Go on: {}", "Continue this text.\n{}", "{}", "What comes after \"{}\"?", "Explain: {}")


def tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, with three special tokens in front."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*SPECIALS, *alphabet])}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    inner.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token=SPECIALS[0], bos_token=SPECIALS[1], eos_token=SPECIALS[2], chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False, model_max_length=512,
    )


def turns() -> list[tuple[str, str]]:
    """(line, what follows) from every distinct paragraph of prose, in a fixed order."""
    paragraphs = {re.sub(r"\s+", " ", p).strip() for text in pydoc_topics.topics.values() for p in re.split(r"\n\s*\n", text)}
    found = []
    for paragraph in sorted(p for p in paragraphs if len(p) > 90 and p.isascii() and re.search(r"[a-z]{3}", p)):
        sentences = re.split(r"(?<=[.:;]) ", paragraph)
        for i in range(len(sentences)):
            words = " ".join(sentences[i:]).split(" ")
            cut = 3 + (i % 4)
            opening, rest = " ".join(words[:cut]), " ".join(words[cut:])
            if len(rest) > 30:
                found.append((opening[:70], rest[:150].rsplit(" ", 1)[0] if len(rest) > 150 else rest))
    return found


def train_target(shape: Shape, tok: PreTrainedTokenizerFast, data: list[tuple[str, str]], steps: int, out: Path) -> None:
    torch.manual_seed(0)
    draw = random.Random(0)
    fields = {
        **COMMON, **shape.target, "vocab_size": len(tok), "bos_token_id": tok.bos_token_id, "eos_token_id": tok.eos_token_id,
        "pad_token_id": tok.pad_token_id,
    }
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields))
    texts: list[list[int]] = []
    for opening, rest in data:
        messages = [{"role": "user", "content": draw.choice(ASKS).format(opening)}, {"role": "assistant", "content": rest}]
        texts.append(tok.encode(tok.apply_chat_template(messages, tokenize=False)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.05, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=steps, pct_start=0.08)
    began = time.time()
    for step in range(steps):
        rows = []
        for _ in range(24):
            # Half of the rows begin a conversation, the others anywhere in one.
            row = list(draw.choice(texts))
            if draw.random() < 0.5:
                row = row[draw.randrange(len(row)) :]
            while len(row) < LENGTH:
                row += draw.choice(texts)
            rows.append(row[:LENGTH])
        ids = torch.tensor(rows)
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == steps - 1:
            print(f"target {step}/{steps}: loss {loss.item():.3f}, {time.time() - began:.0f} s", flush=True)
    model.to(torch.bfloat16).save_pretrained(out)
    tok.save_pretrained(out)


def answered(target: Target, prompts: list[list[int]], boundaries: tuple[int, ...], trained: int) -> list[list[int]]:
    """The target's own answers: greedy ones, and every second one of the first `trained` sampled."""
    sampled = [i for i in range(trained) if i % 2]
    greedy = [i for i in range(len(prompts)) if i not in set(sampled)]
    answers: list[list[int]] = [[] for _ in prompts]
    for which, how in ((greedy, None), (sampled, Sampling(temperature=0.8, top_p=0.95, seed=3))):
        found = generate(target, None, [prompts[i] for i in which], wiring=Wiring.of(boundaries), sampling=how, max_new=160,
                         stop_ids=target.stop_ids, rows=64)
        for i, one in zip(which, found, strict=True):
            answers[i] = one.token_ids
    return answers


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path, nargs="?", default=Path("tests/data/tiny"))
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama")
    parser.add_argument("--work", type=Path, default=Path.home() / ".cache" / "draftscope" / "tiny")
    parser.add_argument("--target-steps", type=int, default=600)
    parser.add_argument("--answers", type=int, default=700)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    shape = SHAPES[options.shape]
    tok = tokenizer()
    data = turns()
    random.Random(1).shuffle(data)
    kept, unseen = data[150:1050], data[:150]
    folder = options.out / "target"
    if not (folder / "model.safetensors").is_file():
        train_target(shape, tok, kept, options.target_steps, folder)

    target = load_target(folder)
    draw = random.Random(2)

    def rendered(opening: str) -> list[int]:
        messages = [{"role": "user", "content": draw.choice(ASKS).format(opening)}]
        return tok.encode(tok.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))

    openings = [opening for opening, _ in draw.sample(kept, options.answers) + unseen[:64]]
    prompts = [rendered(opening) for opening in openings]
    boundaries = default_boundaries(target.layers)
    answers = answered(target, prompts, boundaries, options.answers)
    for i in (0, 1, 2, -3, -2, -1):
        print(repr(tok.decode(prompts[i] + answers[i])))

    samples = []
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        ids = torch.tensor(prompt + answer)
        run = target.forward(ids[None], [Boundary(b) for b in (*boundaries, target.layers)])
        mask = torch.arange(len(ids)) >= len(prompt)
        samples.append(Sample(f"answer {i}", ids, run.taps[0], mask, ("", "", "", ""), i))
    examples = load_examples(samples[: options.answers], target.parts)
    heldout = load_examples(samples[options.answers :], target.parts)
    d2t, t2d, covered = draft_vocabulary(token_counts(Held(examples), len(tok)), 80)
    print(f"draft vocabulary: {int(t2d.sum())} of {len(tok)} tokens cover {covered:.4f} of the answers")
    config = shape_of(target.config.to_dict(), 80, boundaries=boundaries, **shape.draft)

    def show(event: dict[str, object]) -> None:
        if "heldout" in event or int(event["step"]) % 100 == 0:  # type: ignore[call-overload]
            print(json.dumps({k: v for k, v in event.items() if k != "grad_norm"}), flush=True)

    settings = Settings(epochs=options.epochs, batch_tokens=2048, learning_rate=4e-3, head_rate=0.5, warmup=60)
    work = options.work / options.shape
    result = train(examples, target.parts, config, d2t, work, settings=settings, heldout=heldout, on_event=show)
    assert result.finished
    for name in ("config.json", "model.safetensors"):
        (options.out / "draft").mkdir(exist_ok=True)
        (options.out / "draft" / name).write_bytes((work / "draft" / name).read_bytes())
    told = {
        "train": prompts[:48], "heldout": prompts[options.answers :],
        "figures": result.heldout and {"k": result.heldout.k, "joint": result.heldout.joint, "length": result.heldout.length},
    }
    (options.out / "prompts.json").write_text(json.dumps(told) + "\n")
    print(told["figures"])


if __name__ == "__main__":
    main()
