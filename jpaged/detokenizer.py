"""Turns the token ids of one sequence into text while they arrive."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any, Protocol

REPLACEMENT_CHARACTER = "\ufffd"


class Detokenizer:
    """Incremental detokenisation of one generated sequence, with stop strings.

    The text is that of `tokenizer.decode(token_ids, skip_special_tokens=True)` (without the
    clean-up of spaces, which transformers leaves out for BPE too), except that it never ends in
    half a UTF-8 character and ends before the first stop string. A call costs time in proportion
    to the new tokens alone; reading `text` costs a copy of it.

    Args:
        tokenizer: a transformers fast tokenizer.
        stop: strings, none empty, that end the text and are not part of it.
        min_tokens: stop strings completed before this many tokens are ordinary text.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = (), min_tokens: int = 0) -> None:
        self._decoder = _token_decoder(tokenizer)
        self._matchers = [_StopMatcher(string) for string in stop]
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._pieces: list[str] = []  # text that may be shown
        self._held_back = ""  # text after it, which may be the beginning of a stop string
        self._stopped_by: str | None = None

    @property
    def text(self) -> str:
        """The text that is safe to show: later calls only ever append to it."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    def add(self, token_ids: Sequence[int]) -> str | None:
        """Append tokens; returns the stop string that now ends the text, if one does.

        If stop strings of several places are completed by one token, the one that begins first
        wins (of those that begin together, the shortest). Tokens after it change nothing. Without
        stop strings any number of tokens may be added late and at once, with the same result.
        """
        if not self._matchers:
            self._pieces.append(self._decoder.decode(token_ids))
            return None
        for token_id in token_ids:
            if self._stopped_by is not None:
                break
            self._num_tokens += 1
            self._append(self._decoder.decode((token_id,)))
        return self._stopped_by

    def finish(self) -> str | None:
        """End the sequence: what was held back joins the text, half a character is dropped.

        Returns the stop string that ends the text, if one does. Calling it again does nothing.
        """
        if self._stopped_by is None:
            self._append(self._decoder.finish())
            self._pieces.append(self._held_back)
            self._held_back = ""
        return self._stopped_by

    def _append(self, new_text: str) -> None:
        matches = []
        for matcher in self._matchers:
            end = matcher.feed(new_text)
            if end is not None:
                begin = len(self._held_back) + end - len(matcher.string)
                matches.append((begin, len(matcher.string), matcher.string))
        text = self._held_back + new_text
        if matches and self._num_tokens >= self._min_tokens:
            begin, _, self._stopped_by = min(matches)
            self._pieces.append(text[:begin])
            self._held_back = ""
            return
        num_held = max((matcher.matched for matcher in self._matchers), default=0)
        self._pieces.append(text[: len(text) - num_held])
        self._held_back = text[len(text) - num_held :]


class _StopMatcher:
    """Looks for one string in a text that arrives in pieces (Knuth, Morris and Pratt, "Fast
    pattern matching in strings", 1977): every character is looked at once.

    Attributes:
        string: what is looked for.
        matched: length of the longest end of the text so far that is a beginning of `string`,
            but not the whole of it.
    """

    def __init__(self, string: str) -> None:
        self.string = string
        self.matched = 0
        # _border[i]: length of the longest proper beginning of string[:i] that also ends it.
        self._border = [0] * (len(string) + 1)
        length = 0
        for i in range(1, len(string)):
            length = self._extend(length, string[i])
            self._border[i + 1] = length

    def _extend(self, matched: int, character: str) -> int:
        while matched and self.string[matched] != character:
            matched = self._border[matched]
        return matched + (self.string[matched] == character)

    def feed(self, text: str) -> int | None:
        """Append `text`; returns the offset in it at which the string's first occurrence ends."""
        first_end = None
        for i, character in enumerate(text):
            self.matched = self._extend(self.matched, character)
            if self.matched == len(self.string):
                self.matched = self._border[self.matched]
                if first_end is None:
                    first_end = i + 1
        return first_end


class _TokenDecoder(Protocol):
    """Text of tokens that arrive in pieces."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text that becomes certain with these tokens."""

    def finish(self) -> str:
        """The rest of the text, without half a character at its end."""


def _token_decoder(tokenizer: Any) -> _TokenDecoder:
    backend = tokenizer.backend_tokenizer
    added = backend.get_added_tokens_decoder()
    special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
    if type(backend.decoder).__name__ == "ByteLevel":
        return _ByteLevelDecoder(backend, special_ids)
    return _WindowDecoder(backend, special_ids)


def _byte_of_character() -> dict[str, int]:
    """The characters with which byte-level BPE writes the 256 bytes (GPT-2, Radford et al. 2019):
    printable ones of Latin-1 stand for themselves, the others are U+0100 and on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + i): byte for i, byte in enumerate(others)
    }


_BYTE_OF_CHARACTER = _byte_of_character()


class _ByteLevelDecoder:
    """Byte-level BPE: a token is a run of bytes, so UTF-8's incremental decoder is all it takes.
    It holds back the beginning of a character and replaces invalid bytes as `decode` does."""

    def __init__(self, backend: Any, special_ids: frozenset[int]) -> None:
        self._backend = backend
        self._special_ids = special_ids
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._utf8.decode(b"".join(map(self._token_bytes, token_ids)))

    def _token_bytes(self, token_id: int) -> bytes:
        if token_id in self._special_ids:
            return b""
        # None: an id of the model's vocabulary that the tokenizer's lacks
        token = self._backend.id_to_token(int(token_id)) or ""
        try:
            return bytes(map(_BYTE_OF_CHARACTER.__getitem__, token))
        except KeyError:  # an added token, written as it reads
            return token.encode()

    def finish(self) -> str:
        return ""  # the incremental decoder holds nothing but half a character


class _WindowDecoder:
    """Any other tokenizer (SentencePiece, WordPiece): decodes a short window of tokens.

    The tokens that gave the last certain text stay in front of the new ones, so that what a
    tokenizer does at the beginning of a text (dropping a space) happens to both and cancels. Text
    that ends in U+FFFD is not certain: the character may be completed by the next token. These are
    the two offsets that text-generation-inference's and vLLM's detokenizers keep.
    """

    # A UTF-8 character has at most four bytes, so at most four tokens. When this many gave no
    # certain text, their U+FFFD are meant, and a longer window would only cost time.
    _MAX_UNCERTAIN_TOKENS = 8

    def __init__(self, backend: Any, special_ids: frozenset[int]) -> None:
        self._backend = backend
        self._special_ids = special_ids
        self._certain_ids: list[int] = []
        self._certain_text = ""
        self._new_ids: list[int] = []

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(map(self._decode_one, token_ids))

    def _decode_one(self, token_id: int) -> str:
        if token_id in self._special_ids:
            return ""
        self._new_ids.append(int(token_id))
        new_text = self._new_text()
        uncertain = not new_text or new_text.endswith(REPLACEMENT_CHARACTER)
        if uncertain and len(self._new_ids) < self._MAX_UNCERTAIN_TOKENS:
            return ""
        self._certain_ids, self._new_ids = self._new_ids, []
        self._certain_text = self._text_of(self._certain_ids)
        return new_text

    def finish(self) -> str:
        new_text = self._new_text().rstrip(REPLACEMENT_CHARACTER)
        self._new_ids = []
        return new_text

    def _new_text(self) -> str:
        return self._text_of(self._certain_ids + self._new_ids)[len(self._certain_text) :]

    def _text_of(self, token_ids: list[int]) -> str:
        return self._backend.decode(token_ids, skip_special_tokens=False)
