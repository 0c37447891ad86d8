"""Tokenizers of Hugging Face folders; the one place that imports transformers."""

from __future__ import annotations

import logging
from pathlib import Path

# Without torch, transformers warns while it is imported that only its tokenizers can be used. They
# are all that is used here, so nobody needs to read that.
logging.getLogger("transformers").addFilter(
    lambda record: "PyTorch was not found" not in record.getMessage()
)

from transformers import AutoTokenizer, PreTrainedTokenizerFast  # noqa: E402

__all__ = ["PreTrainedTokenizerFast", "tokenizer_from_folder"]

_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def tokenizer_from_folder(folder: Path) -> PreTrainedTokenizerFast | None:
    """Load a folder's tokenizer, or None where it has none; no network, no remote code.

    Raises ValueError naming the folder where its tokenizer cannot be read.
    """
    if not any((folder / name).exists() for name in _FILES):
        return None
    # The tokenizers package raises bare Exception on a damaged file.
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(folder), trust_remote_code=False, local_files_only=True
        )
    except Exception as error:
        raise ValueError(f"the tokenizer in {folder} could not be read: {error}") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ValueError(
            f"the tokenizer in {folder} must be a fast one (tokenizer.json), "
            f"got {type(tokenizer).__name__}"
        )
    return tokenizer
