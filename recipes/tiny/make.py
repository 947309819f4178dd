"""The tiny pair of the tests: a byte-level Llama, and an EAGLE-3 draft trained on its own answers.

    python recipes/tiny/make.py [OUT=tests/data/tiny] [--work DIR]

The target (8 layers, 64 wide) learns chat turns cut from the standard library's `pydoc_data.topics` (PSF licence): the user
gives a line, the assistant goes on. Its weights are rounded to bfloat16 and meant to run in float32. It then answers prompts
of its own text, greedily and sampled, and the draft is trained on the states of those answers. A few minutes on two cores; the
result depends on torch, threads and the text of the Python release, so what is committed is the outcome of one run.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import time
from pathlib import Path
from pydoc_data import topics as pydoc_topics

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from draftscope.boundaries import Boundary, default_boundaries
from draftscope.eagle3.corpus import Held, token_counts
from draftscope.eagle3.examples import load_examples
from draftscope.eagle3.start import draft_vocabulary, shape_of
from draftscope.eagle3.train import Settings, train
from draftscope.pipeline.answers import Request, answers
from draftscope.states.types import Sample
from draftscope.target.model import load_target

LENGTH, LAYERS, WIDTH = 128, 8, 64
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


def train_target(tok: PreTrainedTokenizerFast, data: list[tuple[str, str]], steps: int, out: Path) -> None:
    torch.manual_seed(0)
    draw = random.Random(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=len(tok), hidden_size=WIDTH, intermediate_size=176, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=512, tie_word_embeddings=True, initializer_range=0.05,
        bos_token_id=tok.bos_token_id, eos_token_id=tok.eos_token_id, pad_token_id=tok.pad_token_id,
    ))
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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path, nargs="?", default=Path("tests/data/tiny"))
    parser.add_argument("--work", type=Path, default=Path.home() / ".cache" / "draftscope" / "tiny")
    parser.add_argument("--target-steps", type=int, default=600)
    parser.add_argument("--answers", type=int, default=700)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    tok = tokenizer()
    data = turns()
    random.Random(1).shuffle(data)
    kept, unseen = data[150:1050], data[:150]
    folder = options.out / "target"
    if not (folder / "model.safetensors").is_file():
        train_target(tok, kept, options.target_steps, folder)

    target = load_target(folder)
    draw = random.Random(2)

    def rendered(opening: str) -> list[int]:
        messages = [{"role": "user", "content": draw.choice(ASKS).format(opening)}]
        return tok.encode(tok.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))

    openings = [opening for opening, _ in draw.sample(kept, options.answers) + unseen[:64]]
    requests = [
        Request(i, rendered(opening), 0.8 if i % 2 and i < options.answers else 0.0, target.stop_ids, 160)
        for i, opening in enumerate(openings)
    ]
    finished = sorted(answers(target.model, requests, rows=64, capacity=320, seed=3), key=lambda r: r.key)
    for request in finished[:3] + finished[-3:]:
        print(repr(tok.decode(request.prompt_ids + request.answer_ids)))

    boundaries = default_boundaries(LAYERS)
    samples = []
    for request in finished:
        ids = torch.tensor(request.prompt_ids + request.answer_ids)
        run = target.forward(ids[None], [Boundary(b) for b in (*boundaries, LAYERS)])
        mask = torch.arange(len(ids)) >= len(request.prompt_ids)
        samples.append(Sample(f"answer {request.key}", ids, run.taps[0], mask, ("", "", "", ""), request.key))
    examples = load_examples(samples[: options.answers], target.parts)
    heldout = load_examples(samples[options.answers :], target.parts)
    d2t, t2d, covered = draft_vocabulary(token_counts(Held(examples), len(tok)), 80)
    print(f"draft vocabulary: {int(t2d.sum())} of {len(tok)} tokens cover {covered:.4f} of the answers")
    config = shape_of(target.config.to_dict(), 80, boundaries=boundaries)

    def show(event: dict[str, object]) -> None:
        if "heldout" in event or int(event["step"]) % 100 == 0:  # type: ignore[call-overload]
            print(json.dumps({k: v for k, v in event.items() if k != "grad_norm"}), flush=True)

    settings = Settings(epochs=options.epochs, batch_tokens=2048, learning_rate=4e-3, head_rate=0.5, warmup=60)
    result = train(examples, target.parts, config, d2t, options.work / "run", settings=settings, heldout=heldout, on_event=show)
    assert result.finished
    for name in ("config.json", "model.safetensors"):
        (options.out / "draft").mkdir(exist_ok=True)
        (options.out / "draft" / name).write_bytes((options.work / "run" / "draft" / name).read_bytes())
    prompts = {
        "train": [r.prompt_ids for r in finished[:48]], "heldout": [r.prompt_ids for r in finished[options.answers :]],
        "figures": result.heldout and {"k": result.heldout.k, "joint": result.heldout.joint, "length": result.heldout.length},
    }
    (options.out / "prompts.json").write_text(json.dumps(prompts) + "\n")
    print(prompts["figures"])


if __name__ == "__main__":
    main()
