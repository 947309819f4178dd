"""What a pickle would make, told from its opcodes: the names that it calls, and how far it would unfold.

In a pickle an object may stand in many places. A few hundred bytes of lists that hold each other many times over become gigabytes
once they are written out, compared or hashed; so what would grow beyond its own bytes is refused before anything is made.
"""

from __future__ import annotations

import pickletools
from collections.abc import Sequence

UNFOLDED = 2**20
"""Values that a pickle may unfold to beyond its own number of bytes."""
CONTAINERS = 2**22
DEEPEST = 64
KEY = 64
"""Values of a tuple that is a key."""
BITS = 1024
"""Of a number: one of many digits cannot be written out."""
_CALLS = ("STACK_GLOBAL", "INST", "EXT1", "EXT2", "EXT4")
_PUT = ("PUT", "BINPUT", "LONG_BINPUT")
_GET = ("GET", "BINGET", "LONG_BINGET")
_FILL = ("APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD")
"""Opcodes that put something into the object below it."""
_MADE = (pickletools.pylist, pickletools.pydict, pickletools.pytuple, pickletools.pyset)


class Unfolds(ValueError):
    """A pickle that would become more than its bytes can be meant for."""


class _Node:
    """A container: the values in it that hold nothing, and those that do."""

    __slots__ = ("depth", "inner", "leaves", "size")

    def __init__(self) -> None:
        self.inner: list[_Node] | None = None
        self.leaves = self.size = self.depth = 0

    def add(self, values: Sequence[_Node | None]) -> None:
        held = [value for value in values if value is not None]
        self.leaves += len(values) - len(held)
        if held:
            self.inner = held if self.inner is None else self.inner
            if self.inner is not held:
                self.inner += held


def names_in(text: bytes) -> list[str]:
    """Names that a pickle calls, `module attribute`; `pickle OPCODE` for a call by other means.

    Raises:
        Unfolds: it would unfold to more than `UNFOLDED` values beyond its bytes, nests deeper than `DEEPEST`, holds itself, has
            keys that are no texts or numbers, or a number of more than `BITS`.
        ValueError and others: the pickle is broken.
    """
    names: list[str] = []
    nodes: list[_Node] = []
    stack: list[_Node | None] = []
    marks: list[int] = []
    memo: dict[int, _Node | None] = {}

    def popped(count: int) -> list[_Node | None]:
        if count > len(stack) - (marks[-1] if marks else 0):
            raise ValueError("an opcode takes more than there is")
        taken = stack[len(stack) - count :]
        del stack[len(stack) - count :]
        return taken

    def to_mark() -> list[_Node | None]:
        at = marks.pop()
        taken = stack[at:]
        del stack[at:]
        return taken

    for opcode, argument, _ in pickletools.genops(text):
        name, before = opcode.name, opcode.stack_before
        if name == "GLOBAL":
            names.append(str(argument))
        elif name in _CALLS:
            names.append(f"pickle {name}")
        elif isinstance(argument, int) and argument.bit_length() > BITS:
            raise Unfolds(f"holds a number of {argument.bit_length():,} bits")
        if name == "MARK":
            marks.append(len(stack))
        elif name in _PUT or name == "MEMOIZE":
            memo[len(memo) if name == "MEMOIZE" else int(str(argument))] = stack[-1]
        elif name in _GET:
            stack.append(memo[int(str(argument))])
        elif name == "DUP":
            stack.append(stack[-1])
        else:
            sliced = pickletools.stackslice in before
            values = to_mark() if sliced else popped(len(before) - (name in _FILL))
            if sliced and name not in _FILL:
                values = [*popped(before.index(pickletools.markobject)), *values]
            if name in ("SETITEM", "SETITEMS", "DICT"):
                _check_keys(values[::2])
            if name in _FILL:
                if (into := stack[-1]) is not None:
                    into.add(values)
            elif opcode.stack_after:
                node = None
                if values or opcode.stack_after[0] in _MADE:
                    node = _Node()
                    node.add(values)
                    nodes.append(node)
                    if len(nodes) > CONTAINERS:
                        raise Unfolds(f"holds more than {CONTAINERS:,} lists, dicts and tensors")
                stack.append(node)
    limit = len(text) + UNFOLDED
    for node in nodes:
        _measure(node, limit)
        if node.size > limit:
            raise Unfolds(f"would unfold to more than {limit:,} values: it holds the same lists many times over")
        if node.depth > DEEPEST:
            raise Unfolds(f"nests more than {DEEPEST} deep")
    return names


def _check_keys(keys: Sequence[_Node | None]) -> None:
    if any(key is not None and (key.inner or key.leaves > KEY) for key in keys):
        raise Unfolds("has keys that are no texts or numbers")


def _measure(node: _Node, limit: int) -> None:
    """Size and depth of a node and of what it holds, from the innermost out."""
    todo = [node]
    while todo:
        one = todo[-1]
        if one.size > 0:
            todo.pop()
        elif one.size == 0:
            one.size = -1
            waiting = [inner for inner in one.inner or () if inner.size <= 0]
            if any(inner.size < 0 for inner in waiting):
                raise Unfolds("holds itself")
            todo += waiting
        else:
            held = one.inner or ()
            one.size = min(1 + one.leaves + sum(inner.size for inner in held), limit + 1)
            one.depth = 1 + max((inner.depth for inner in held), default=0)
            todo.pop()
