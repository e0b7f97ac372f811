"""Token ids turned back to text as they come, up to what ends it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tswift.errors import InputError, check_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BROKEN_TOKENS = 16  # after so many tokens without a whole character, broken bytes are let go
_TOKENS_PER_CHARACTER = 4  # tokens that a character may still need: it has four bytes at most
_BROKEN = "\N{REPLACEMENT CHARACTER}"
_LOOPS = 3  # times its greatest length, that a loop has to fill
_FEW = 16  # tokens that stand in a loop twice, and seldom elsewhere
_MAX_STOPS = 64
_LONGEST_STOP = 1000  # characters


def check_stop(stop: str | Sequence[str]) -> tuple[str, ...]:
    """Stop strings, one of which may be given as it is; InputError if they are none, empty,
    too many or too long.
    """
    strings = (stop,) if isinstance(stop, str) else stop
    if not isinstance(strings, Sequence) or not all(isinstance(each, str) for each in strings):
        raise InputError(f"must be one or several strings, got {stop!r:.60}", "stop")
    if "" in strings:
        raise InputError("must not be empty", "stop")
    check_text("".join(strings), "stop", "a string")
    if not all(len(each) <= _LONGEST_STOP for each in strings) or len(strings) > _MAX_STOPS:
        most = f"at most {_MAX_STOPS} strings of 1 to {_LONGEST_STOP:,} characters"
        raise InputError(f"must be {most}, got {stop!r:.60}", "stop")
    return tuple(strings)


@dataclass(frozen=True)
class TextRules:
    """What ends a text, and which of its tokens it shows.

    Attributes:
        stop: strings of :func:`check_stop`, the first of which ends it; one that is the text of a
            special token means that token.
        loop: it ends when its last tokens, thrice so many, are a loop of at most so many.
        least_loop: tokens of the shortest loop that counts.
        ends: token ids, the first of which ends it.
        skip_special: show no special tokens.
        include_stop: show the string that ends it.
        include_end: show the token that does, if it is not skipped.
        least: no string ends it within so many tokens.
    """

    stop: tuple[str, ...] = ()
    loop: int | None = None
    least_loop: int = 1
    ends: frozenset[int] = frozenset()
    skip_special: bool = True
    include_stop: bool = False
    include_end: bool = False
    least: int = 0


def text_of(
    tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int], rules: TextRules = TextRules()
) -> str:
    """The text that a :class:`TextStream` gives of tokens, its end included."""
    stream = TextStream(tokenizer, rules)
    return stream.add(tokens) + stream.finish()


class TextStream:
    """The text of a growing list of tokens, up to what ends it.

    It knows the last few tokens only, however long the text: how a token decodes may depend on the
    one before it, and a character begun on the tokens to come. The text is that of all tokens
    shown, decoded together. (Where a tokenizer falls back to bytes, and they are no characters,
    what was given before them stays given.)

    With stop strings the text ends before the first one in it: the one that is complete first, and
    of those that end with the same character the longest. What may be the beginning of one is held
    back. The tokenizer is a transformers one with a ``backend_tokenizer``.

    Attributes:
        stopped: the stop string that has ended the text; None if none has. Tokens added after it
            add nothing.
        looped: whether a loop has ended it.
        end: the token that has ended it; None if none has.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, rules: TextRules = TextRules()) -> None:
        self._tokenizer = tokenizer.backend_tokenizer
        special = {
            token: added.content
            for token, added in self._tokenizer.get_added_tokens_decoder().items()
            if added.special
        }
        self._rules = rules
        self._hidden = frozenset(special) if rules.skip_special else frozenset()
        # special tokens that a stop string names
        self._named = {token: text for token, text in special.items() if text in rules.stop}
        self._count = 0
        self.end: int | None = None
        self._newest = ""  # tokens as characters, the newest first, where loops are looked for
        self.looped = False
        self._before: list[int] = []  # the last tokens whose text was given
        self._held: list[int] = []  # those after them
        self._stop = rules.stop
        self._waiting = ""  # text that may be the beginning of a stop string
        self.stopped: str | None = None

    def add(self, tokens: Sequence[int]) -> str:
        """The characters that these tokens complete; what is begun, a character or a stop string,
        is held back.
        """
        pieces = []
        for token in tokens:
            if self.ended:
                break
            if not self._watch(token):
                continue
            self._held.append(token)
            piece = ""
            text = self._after(self._before, self._held)
            if text and not text.endswith(_BROKEN):
                piece = self._give(len(self._held), text)
            elif len(self._held) % _BROKEN_TOKENS == 0:
                piece = self._let_go(text)
            pieces.append(self._up_to_stop(piece) if self._stop else piece)
        return "".join(pieces)

    @property
    def ended(self) -> bool:
        """Whether a token, a stop string or a loop has ended the text."""
        return self.end is not None or self.stopped is not None or self.looped

    def _watch(self, token: int) -> bool:
        """Count a token, and see whether it ends the text; returns whether it is shown."""
        self._count += 1
        shown = token not in self._hidden
        if token in self._rules.ends:
            self.end = token
            shown = shown and self._rules.include_end
        elif token in self._named and not self._early:
            self.stopped = self._named[token]
            shown = shown and self._rules.include_stop
        if (loop := self._rules.loop) is not None:
            newest = self._newest = (chr(token) + self._newest)[: _LOOPS * loop]
            if newest[:loop][:_FEW] in newest[1 : loop + _FEW]:  # else it is none, which is quick
                # how long ago the same tokens stood there: in a loop that is its length
                ago = newest.find(newest[:loop], self._rules.least_loop, 2 * loop)
                whole = ago > 0 and len(newest) == _LOOPS * loop
                self.looped = whole and newest.startswith(newest[ago:])
        return shown

    @property
    def _early(self) -> bool:
        """Whether it is too early for a stop string."""
        return self._count <= self._rules.least

    def finish(self) -> str:
        """The text that was held back; bytes that are no character become U+FFFD."""
        waiting, self._waiting = self._waiting, ""
        return waiting + self._give(len(self._held), self._after(self._before, self._held))

    def _up_to_stop(self, piece: str) -> str:
        """Of text to be given, what is not, and cannot become, a part of a stop string."""
        text = self._waiting + piece
        # a token may complete a stop string and begin a character
        whole = text + self._after(self._before, self._held).rstrip(_BROKEN) if self._held else text
        found = [] if self._early else self._ends_in(whole)
        if found:
            end, length, self.stopped = min(found)
            self._held = []
            self._waiting = ""
            return whole[: end if self._rules.include_stop else end + length]
        longest = max(map(len, self._stop)) - 1
        begun = max(0, len(text) - longest)
        while not any(stop.startswith(text[begun:]) for stop in self._stop):
            begun += 1
        self._waiting = text[begun:]
        return text[:begun]

    def _ends_in(self, whole: str) -> list[tuple[int, int, str]]:
        """Of the stop strings that end behind what waits: where, less their length, and each."""
        known = len(self._waiting)
        places = ((stop, whole.find(stop, max(0, known + 1 - len(stop)))) for stop in self._stop)
        return [(at + len(stop), -len(stop), stop) for stop, at in places if at >= 0]

    def _let_go(self, text: str) -> str:
        """What of broken bytes no token to come can mend:
        those before a place where the text falls apart in two.
        """
        for count in range(len(self._held) - _TOKENS_PER_CHARACTER, 0, -1):
            first = self._held[:count]
            rest = self._held[count:]
            given = self._after(self._before, first)
            if given + self._after(first, rest) == text:
                return self._give(count, given)
        return ""

    def _give(self, count: int, text: str) -> str:
        self._before = self._held[:count]
        self._held = self._held[count:]
        return text

    def _after(self, before: list[int], tokens: list[int]) -> str:
        """The text of tokens that follow others."""
        return self._decode([*before, *tokens])[len(self._decode(before)) :]

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=False)
        return text
