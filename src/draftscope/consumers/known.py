"""All consumers that there are facts about, and the one that a name means."""

from __future__ import annotations

import re
from dataclasses import dataclass

from draftscope.consumers.facts import Consumer
from draftscope.consumers.sglang import SGLANG
from draftscope.consumers.trainers import TRAINERS
from draftscope.consumers.vllm import VLLM
from draftscope.errors import UsageError

CONSUMERS = {known.id: known for known in (*VLLM, *SGLANG, *TRAINERS)}
"""By id, of each name the newest version first."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A name, resolved.

    Attributes:
        runner: the model runner asked for; empty = the default one.
        note: where the version asked for is not among the facts, which one stands in.
    """

    known: Consumer
    runner: str
    note: str = ""

    @property
    def name(self) -> str:
        """The name that comes back to the same: the consumer's id, and the runner where one was asked for."""
        return self.known.id + (f":{self.runner}" if self.runner else "")


def ask(name: str) -> Asked:
    """A consumer by `NAME[@VERSION][:VARIANT]`, the variant being a model runner or an algorithm flag.

    A version that is not known means the nearest lower one that is; none at all means the newest.

    Raises:
        UsageError: not known; the message lists what is.
    """
    wanted, _, variant = name.strip().lower().partition(":")
    stack, _, version = wanted.partition("@")
    flag = variant if variant in {known.flag for known in CONSUMERS.values() if known.name == stack and known.flag} else ""
    runner = "" if flag or variant == _right_flag(stack) else variant
    of_name = [known for known in CONSUMERS.values() if known.name == stack and known.flag == flag]
    fitting = [known for known in of_name if not version or version in known.versions]
    note = ""
    if not fitting and (numbers := _numbers(version)):
        lower = [known for known in of_name if _numbers(known.versions[0]) <= numbers]
        if lower:
            fitting = [max(lower, key=lambda known: _numbers(known.versions[0]))]
            note = f"no facts about {stack} {version}: {fitting[0].id}, the nearest lower version known, stands in"
    if fitting and runner in ("", *(entry.runner for entry in fitting[0].layer_ids if entry.runner)):
        return Asked(fitting[0], runner, note)
    raise UsageError(f"no facts about consumer {name!r}", remedy=f"Known: {', '.join(names(variants=True))}")


def consumer(name: str) -> tuple[Consumer, str]:
    """A consumer by name, and the runner asked for (empty = the default one); `ask` without its note."""
    asked = ask(name)
    return asked.known, asked.runner


def names(*, variants: bool = False) -> list[str]:
    """Names of all consumers; with `variants`, those of the runners beside them."""
    listed = []
    for known in CONSUMERS.values():
        runners = [f"{known.id}:{entry.runner}" for entry in known.layer_ids if entry.runner]
        listed.append(f"{known.id}{''.join(f' ({name})' for name in runners)}" if variants else known.id)
    return listed


def everybody() -> list[str]:
    """One name for each way in which a checkpoint can be read: every consumer, flag and runner."""
    return [f"{known.id}:{entry.runner}" if entry.runner else known.id
            for known in CONSUMERS.values() for entry in known.layer_ids]


def _right_flag(stack: str) -> str:
    return "eagle3" if stack == "sglang" else ""


def _numbers(version: str) -> tuple[int, ...]:
    """`0.5.10.post1` as (0, 5, 10); empty where it does not begin with a number."""
    found = re.match(r"v?(\d+(?:\.\d+)*)", version)
    return tuple(int(part) for part in found.group(1).split(".")) if found else ()
