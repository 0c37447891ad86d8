"""Tokenizers built from GGUF metadata, against what transformers makes of the same vocabulary."""

from __future__ import annotations

import json
import re
from pathlib import Path

import gguf
import pytest

from jpaged.checkpoints.checkpoint import _resolve
from jpaged.checkpoints.gguf import GGUFCheckpoint
from jpaged.checkpoints.gguf_tokenizer import tokenizer_from_metadata

GOLDENS = json.loads(
    (Path(__file__).parent.parent / "goldens" / "smollm2_tokenizer.json").read_text("utf-8")
)


@pytest.fixture(scope="module")
def metadata():
    reader = gguf.GGUFReader(_resolve("smollm2-135m", "model", ()))
    return {
        key.removeprefix("tokenizer."): field.contents()
        for key, field in reader.fields.items()
        if key.startswith("tokenizer.")
    }


@pytest.fixture(scope="module")
def tokenizer(metadata):
    return tokenizer_from_metadata(metadata, "model.gguf")


@pytest.mark.parametrize("case", GOLDENS["encode"], ids=lambda case: repr(case["text"][:20]))
def test_ids_equal_transformers(case, tokenizer):
    assert tokenizer(case["text"]).input_ids == case["ids"]


def test_the_mascot(tokenizer):
    ids = tokenizer("안녕하세요 반갑습니다").input_ids
    assert ids[:12] == [183, 239, 226, 182, 223, 239, 33085, 242, 183, 222, 133, 183]
    assert tokenizer.decode(ids) == "안녕하세요 반갑습니다"


@pytest.mark.parametrize("case", GOLDENS["encode"], ids=lambda case: repr(case["text"][:20]))
def test_decoding_gives_the_text_back(case, tokenizer):
    assert tokenizer.decode(case["ids"]) == case["text"]


@pytest.mark.parametrize("case", GOLDENS["chat"], ids=lambda case: case["messages"][-1]["content"])
def test_chats_equal_transformers(case, tokenizer):
    arguments = {"add_generation_prompt": case["add_generation_prompt"]}
    text = tokenizer.apply_chat_template(case["messages"], tokenize=False, **arguments)
    assert text == case["text"]
    ids = tokenizer.apply_chat_template(case["messages"], return_dict=False, **arguments)
    assert ids == case["ids"]


def test_special_tokens(tokenizer):
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert (tokenizer.unk_token_id, tokenizer.pad_token_id) == (0, 2)
    assert tokenizer.all_special_ids
    assert tokenizer.decode([1, 15007, 2], skip_special_tokens=True) == tokenizer.decode([15007])
    assert len(tokenizer) == 49152


@pytest.mark.parametrize("name", sorted(GOLDENS["pre"]))
def test_other_pre_tokenizers_equal_transformers(name, metadata):
    tokenizer = tokenizer_from_metadata(metadata | {"ggml.pre": name}, "model.gguf")
    for case, ids in zip(GOLDENS["encode"], GOLDENS["pre"][name], strict=True):
        assert tokenizer(case["text"]).input_ids == ids, case["text"]


@pytest.mark.parametrize(
    ("flags", "ids"),
    [
        ({"ggml.add_bos_token": True}, [1, 15007]),
        ({"ggml.add_bos_token": True, "ggml.add_eos_token": True}, [1, 15007, 2]),
        ({"ggml.add_bos_token": False}, [15007]),
    ],
)
def test_bos_and_eos_are_added_where_the_file_says_so(flags, ids, metadata, tokenizer):
    text = tokenizer.decode([15007])
    changed = tokenizer_from_metadata(metadata | flags, "model.gguf")
    assert changed(text).input_ids == ids
    assert changed(text, add_special_tokens=False).input_ids == [15007]


def test_every_number_stands_alone(tokenizer):
    # As in SmolLM2's own tokenizer and in llama.cpp. transformers' conversion drops this step,
    # which shows on numbers outside ASCII alone.
    for number in "7½²٣":
        ids = [tokenizer(text).input_ids for text in ("a", " ", number, "b")]
        assert tokenizer(f"a {number}b").input_ids == [token for part in ids for token in part]


@pytest.fixture(scope="module")
def sentence_piece():
    golden = GOLDENS["sentence_piece"]
    return {
        "ggml.model": "llama",
        "ggml.tokens": golden["tokens"],
        "ggml.scores": golden["scores"],
        "ggml.token_type": golden["types"],
        "ggml.bos_token_id": 1,
        "ggml.eos_token_id": 2,
        "ggml.unknown_token_id": 0,
    }


def test_sentence_piece_equals_transformers(sentence_piece):
    tokenizer = tokenizer_from_metadata(sentence_piece, "model.gguf")
    for case in GOLDENS["sentence_piece"]["cases"]:
        ids = tokenizer(case["text"], add_special_tokens=False).input_ids
        assert ids == case["ids"], case["text"]
        assert tokenizer.decode(ids) == case["decoded"]
        assert tokenizer(case["text"]).input_ids == [1, *ids], "bos is SentencePiece's default"


def test_sentence_piece_puts_one_space_before_every_text(sentence_piece):
    tokenizer = tokenizer_from_metadata(sentence_piece, "model.gguf")
    assert "".join(tokenizer.tokenize("  x")) == "\u2581\u2581\u2581x"
    bare = tokenizer_from_metadata(sentence_piece | {"ggml.add_space_prefix": False}, "model.gguf")
    assert "".join(bare.tokenize("  x")) == "\u2581\u2581x"
    assert tokenizer.decode(tokenizer("  x").input_ids, skip_special_tokens=True) == "  x"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"ggml.model": "bert"},
            "ggml.model of m.gguf must be gpt2 or llama, got 'bert'",
        ),
        ({"ggml.pre": "tekken"}, "tokenizer.ggml.pre of m.gguf must be one of"),
        ({"ggml.pre": None}, "qwen2, got None"),
        ({"ggml.merges": None}, "m.gguf must have tokenizer.ggml.merges, a non-empty list"),
        ({"ggml.tokens": []}, "m.gguf must have tokenizer.ggml.tokens, a non-empty list"),
        (
            {"ggml.eos_token_id": 49152},
            "ggml.eos_token_id of m.gguf must be in [0, 49152)",
        ),
        (
            {"ggml.unknown_token_id": 49152},
            "ggml.unknown_token_id of m.gguf must be in [0, 49152), got 49152",
        ),
        ({"ggml.bos_token_id": -1}, "ggml.bos_token_id of m.gguf must be in [0, 49152), got -1"),
        ({"ggml.padding_token_id": "x"}, "ggml.padding_token_id of m.gguf must be in [0, 49152)"),
        ({"ggml.merges": ["th"]}, "tokenizer.ggml.merges of m.gguf must be pairs"),
        ({"ggml.merges": ["t h", "안 h"]}, "are in tokenizer.ggml.tokens, got '안 h'"),
        ({"ggml.merges": ["t h", "Ġthe Ġthe"]}, "ggml.tokens, got 'Ġthe Ġthe'"),
        ({"ggml.merges": [7]}, "must have tokenizer.ggml.merges, a non-empty list of str"),
        ({"ggml.tokens": [7]}, "must have tokenizer.ggml.tokens, a non-empty list of str"),
        ({"ggml.token_type": [1]}, "ggml.token_type of m.gguf must have one item for each"),
        ({"chat_template": 7}, "tokenizer.chat_template of m.gguf must be a string, got 7"),
    ],
)
def test_unknown_tokenizers_are_refused_by_name(changes, message, metadata):
    with pytest.raises(ValueError, match=re.escape(message)):
        tokenizer_from_metadata(metadata | changes, "m.gguf")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ggml.unknown_token_id": 10**6}, "ggml.unknown_token_id of m.gguf must be in [0, "),
        ({"ggml.scores": [1.0]}, "ggml.scores of m.gguf must have one item for each of the"),
    ],
)
def test_malformed_sentence_piece_is_refused(changes, message, sentence_piece):
    with pytest.raises(ValueError, match=re.escape(message)):
        tokenizer_from_metadata(sentence_piece | changes, "m.gguf")


def test_a_file_without_a_tokenizer_has_none(config, tensors, write_gguf):
    assert GGUFCheckpoint(write_gguf(config, tensors)).tokenizer() is None
