"""Builds a fast tokenizer from a GGUF file's metadata (for which transformers needs torch)."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from jpaged.checkpoints.tokenizer import PreTrainedTokenizerFast

_CONTROL, _USER_DEFINED = 3, 4  # llama.cpp's token types that are matched whole in a text

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


def _split(pattern: str) -> list[pre_tokenizers.PreTokenizer]:
    return [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]


def _gpt2(*, digits: bool) -> list[pre_tokenizers.PreTokenizer]:
    first = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    return [*first, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]


def _pre_tokenizers(name: str | None) -> list[pre_tokenizers.PreTokenizer] | None:
    """Return how a text is cut before merging (`tokenizer.ggml.pre`); None for an unknown way."""
    if name == "gpt-2":
        return _gpt2(digits=False)
    if name in ("smollm", "starcoder", "refact", "command-r"):
        return _gpt2(digits=True)
    if name in ("llama-bpe", "llama3", "llama-v3"):
        return _split(_LLAMA3_SPLIT)
    if name == "qwen2":
        return _split(_QWEN2_SPLIT)
    return None


def tokenizer_from_metadata(metadata: dict[str, Any], file: str) -> PreTrainedTokenizerFast:
    """Build the tokenizer from a file's `tokenizer.*` fields (without that prefix).

    Byte-level BPE ("gpt2") and SentencePiece BPE ("llama") are understood; raises ValueError naming
    the file and the field where a field is malformed, or its kind of tokenizer or pre-tokenizer is
    another.
    """
    kind = metadata["ggml.model"]
    tokens = _list(metadata, "ggml.tokens", str, file)
    special = {}
    for ours, theirs in [("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")]:
        index = metadata.get(f"ggml.{theirs}_token_id")
        if index is not None:
            if type(index) is not int or not 0 <= index < len(tokens):
                raise ValueError(
                    f"tokenizer.ggml.{theirs}_token_id of {file} must be in [0, {len(tokens)}), "
                    f"got {index!r}"
                )
            special[f"{ours}_token"] = tokens[index]
    template = metadata.get("chat_template")
    if not isinstance(template, str | None):
        raise ValueError(f"tokenizer.chat_template of {file} must be a string, got {template!r}")
    if kind == "gpt2":
        tokenizer = _byte_level(metadata, file)
    elif kind == "llama":
        tokenizer = _sentence_piece(metadata, file)
    else:
        raise ValueError(f"tokenizer.ggml.model of {file} must be gpt2 or llama, got {kind!r}")
    if "ggml.token_type" in metadata:
        _add_whole_tokens(tokenizer, tokens, _list(metadata, "ggml.token_type", int, file, tokens))
    _add_template(tokenizer, metadata, tokens, sentence_piece=kind == "llama")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=template,
        clean_up_tokenization_spaces=False,
        **special,
    )


def _list(
    metadata: dict[str, Any], key: str, kind: type, file: str, tokens: list[str] | None = None
) -> list:
    """Return a list field, checked to hold `kind` and, given `tokens`, one item for each."""
    value = metadata.get(key)
    if not isinstance(value, list) or not value or not all(isinstance(x, kind) for x in value):
        raise ValueError(f"{file} must have tokenizer.{key}, a non-empty list of {kind.__name__}")
    if tokens is not None and len(value) != len(tokens):
        raise ValueError(
            f"tokenizer.{key} of {file} must have one item for each of the {len(tokens)} tokens, "
            f"got {len(value)}"
        )
    return value


def _byte_level(metadata: dict[str, Any], file: str) -> Tokenizer:
    steps = _pre_tokenizers(metadata.get("ggml.pre"))
    if steps is None:
        raise ValueError(
            f"tokenizer.ggml.pre of {file} must be one of gpt-2, smollm, starcoder, refact, "
            f"command-r, llama-bpe, llama3, llama-v3, qwen2, got {metadata.get('ggml.pre')!r}"
        )
    vocab = {token: index for index, token in enumerate(metadata["ggml.tokens"])}
    merges = []
    for merge in _list(metadata, "ggml.merges", str, file):
        left, _, right = merge.partition(" ")
        if not left or not right or not {left, right, left + right} <= vocab.keys():
            raise ValueError(
                f"tokenizer.ggml.merges of {file} must be pairs 'left right' whose parts and whole "
                f"are in tokenizer.ggml.tokens, got {merge!r}"
            )
        merges.append((left, right))
    # Llama 3's vocabulary has words that its merges do not reach: a word in it is taken whole.
    whole_words = metadata["ggml.pre"] in ("llama-bpe", "llama3", "llama-v3")
    tokenizer = Tokenizer(BPE(vocab, merges, ignore_merges=whole_words))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_piece(metadata: dict[str, Any], file: str) -> Tokenizer:
    tokens = metadata["ggml.tokens"]
    scores = _list(metadata, "ggml.scores", float, file, tokens)
    vocab = {token: index for index, token in enumerate(tokens)}
    unknown = metadata.get("ggml.unknown_token_id")
    tokenizer = Tokenizer(
        BPE(
            vocab,
            _merges_from_scores(vocab, scores),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces: list[normalizers.Normalizer] = [normalizers.Replace(" ", "\u2581")]
    prefixed = metadata.get("ggml.add_space_prefix", True)
    if prefixed:
        spaces.insert(0, normalizers.Prepend("\u2581"))
    tokenizer.normalizer = normalizers.Sequence(spaces)
    strip = [decoders.Strip(" ", 1, 0)] if prefixed else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _merges_from_scores(vocab: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Return the merges that a SentencePiece BPE vocabulary implies, best first.

    SentencePiece joins the neighbours whose union has the best score, so every split of a token
    into two tokens is a merge of that token's score.
    """
    merges = []
    for token, index in vocab.items():
        splits = [(token[:i], token[i:]) for i in range(1, len(token))]
        known = [pair for pair in splits if pair[0] in vocab and pair[1] in vocab]
        known.sort(key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
        merges += [(-scores[index], pair) for pair in known]
    merges.sort(key=lambda merge: merge[0])
    return [pair for _, pair in merges]


def _add_whole_tokens(tokenizer: Tokenizer, tokens: list[str], types: list[int]) -> None:
    for special, wanted in ((True, _CONTROL), (False, _USER_DEFINED)):
        added = [
            AddedToken(token, normalized=False, special=special)
            for token, kind in zip(tokens, types)
            if kind == wanted
        ]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)


def _add_template(
    tokenizer: Tokenizer, metadata: dict[str, Any], tokens: list[str], *, sentence_piece: bool
) -> None:
    """Put bos and eos around a text where the file asks for it (llama.cpp's defaults otherwise)."""
    default = {"bos": sentence_piece, "eos": False}
    parts = {}
    for name in ("bos", "eos"):
        index = metadata.get(f"ggml.{name}_token_id")
        if metadata.get(f"ggml.add_{name}_token", default[name]) and index is not None:
            parts[name] = (tokens[index], index)
    if not parts:
        return
    first = [parts["bos"][0]] if "bos" in parts else []
    last = [parts["eos"][0]] if "eos" in parts else []
    tokenizer.post_processor = TemplateProcessing(
        single=[*first, "$A", *last],
        pair=[*first, "$A", *last, *(f"{t}:1" for t in first), "$B:1", *(f"{t}:1" for t in last)],
        special_tokens=list(dict.fromkeys(parts.values())),
    )
