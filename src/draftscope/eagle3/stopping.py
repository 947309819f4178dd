"""Strings that end a text, looked for in what its tokens say and not in the tokens, since a string may lie across several."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from draftscope.errors import UsageError


class StopStrings:
    """Args:
        strings: any of them ends the text; none empty.
        decode: token ids to text.

    Raises:
        UsageError: an empty string.
    """

    def __init__(self, strings: Sequence[str], decode: Callable[[Sequence[int]], str]) -> None:
        if not all(strings):
            raise UsageError("an empty stop string would end every text before it begins")
        self.strings, self._decode = tuple(strings), decode

    def found(self, token_ids: Sequence[int]) -> str | None:
        """The stop string that comes first in the text, None if there is none."""
        text = self._decode(token_ids)
        places = [(place, string) for string in self.strings if (place := text.find(string)) >= 0]
        return min(places)[1] if places else None

    def cut(self, text: str) -> str:
        """The text before the first stop string."""
        return text[: min([place for string in self.strings if (place := text.find(string)) >= 0], default=len(text))]
