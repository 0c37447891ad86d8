"""Makes smollm2_beams.npz with torch and transformers, independently of jpaged.

usage: python tests/goldens/make_beam_goldens.py

About 10 minutes on one core. Needs what make_goldens.py needs.

SmolLM2-135M-Instruct, float32, transformers' beam search: P = 20 prompts, each with W = 3 widths,
L = 3 length penalties and E = 3 rules of early stopping; at most T = 24 new tokens, the model's
end-of-sequence token ends a hypothesis. All `width` hypotheses are kept, best first.
    prompt_lengths [P], prompt_token_ids (of all prompts, joined)   int32
    widths [W] int32, length_penalties [L] float64, early_stopping [E] ("False", "True", "never")
    eos_token_id, max_new_tokens   int32
    token_ids [P, W, L, E, H, T] int32: generated tokens of hypothesis h < width, the
        end-of-sequence token included; -1 after its end and for h >= width (H = 6)
    scores [P, W, L, E, H] float32: their final scores; NaN for h >= width
    gaps [P, W, L, E] float32, gap_steps [P, W, L, E] int32: the smallest difference of two scores
        whose order decides anything, and how many tokens were generated when they were compared
        (0: the order of the finished hypotheses at the end). Nothing but a change of at least
        that much can change token_ids. Compared are: the last beam that goes on and the first
        that does not; an ending continuation and the edge of the `width` best; the last finished
        hypothesis that is kept and the first that is not; the best running beam and the worst
        finished hypothesis where that ends the search; neighbours in the final order.

The width alone decides which beams run, the other two only when to stop and what to keep. So the
model runs once for a prompt and a width, and its log-probabilities are remembered by the tokens
before them; the nine searches are transformers' `generate` on a model of almost no size whose
log-probabilities are replaced by the remembered ones.
"""

from __future__ import annotations

import itertools
import sys
import time

import numpy as np
import torch
from make_goldens import GGUF_FILE, HERE, STORIES, bundled_folder
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessor,
)

WIDTHS = (2, 4, 6)
LENGTH_PENALTIES = (0.6, 1.0, 1.5)
EARLY_STOPPING = (False, True, "never")
NEW_TOKENS = 24
# Chosen from 50 so that no gap is below 4e-4 (two engines' scores were seen to differ by 2e-4), and
# so that some answers end early.
CHATS = [
    "Say yes.",
    "Write a haiku about the sea.",
    "고마워요 😀",
    "Name one color.",
    "What day comes after Monday?",
    "Complete: The sky is",
    "What is the opposite of hot?",
    "Repeat after me: hello world.",
    "What is the chemical symbol for gold?",
    "Which animal says meow?",
]
TEXTS = [
    "def fib(n):\n    a, b = 0, 1\n",
    "El perro de mi vecina",
    STORIES[3],
    STORIES[10],
    STORIES[12] * 2,
    "".join(STORIES[5:12]),
    STORIES[0] * 6 + "Once upon a time there was",
    "import numpy as np\n",
    "Roses are red,",
    "Dear Sir or Madam,\n\n",
]


class Memory(LogitsProcessor):
    """Log-probabilities by the tokens before them: of a model that runs, or in place of one."""

    def __init__(self) -> None:
        self.rows: dict[tuple[int, ...], torch.Tensor] = {}
        self.recording = False

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        prefixes = [tuple(row) for row in input_ids.tolist()]
        if self.recording:
            for prefix, row in zip(prefixes, scores, strict=True):
                self.rows.setdefault(prefix, row.clone())
            return scores
        return torch.stack([self.rows[prefix] for prefix in prefixes])


class Stage(LlamaForCausalLM):
    """Runs transformers' beam search and notes the gaps between the scores that it compares."""

    def note(self, gap: torch.Tensor, step: int) -> None:
        self.smallest = min(self.smallest, (float(gap), step))

    def _get_top_k_continuations(self, **state):
        # It ranks 2 * width; if width of them end, the next one is compared too.
        scores = state["accumulated_log_probs"][0]
        self.next_score = scores.topk(state["beams_to_keep"] + 1).values[-1:]
        return super()._get_top_k_continuations(**state)

    def _update_finished_beams(self, **state):
        scores, ends = state["topk_log_probs"][0], state["next_token_hits_stopping_criteria"][0]
        width, step = state["num_beams"], state["cur_len"] + 1 - state["decoder_prompt_len"]
        going = torch.cat([scores[~ends], self.next_score])
        if len(going) > width:
            self.note(going[width - 1] - going[width], step)
        for rank in ends.nonzero().ravel().tolist():
            edge = scores[width] if rank < width else scores[width - 1]
            self.note(abs(scores[rank] - edge), step)
        new = scores[:width][ends[:width]] / step ** state["length_penalty"]
        merged = torch.cat([state["beam_scores"][state["is_sent_finished"]], new])
        if len(merged) > width:
            merged = merged.sort(descending=True).values
            self.note(merged[width - 1] - merged[width], step)
        return super()._update_finished_beams(**state)

    def _check_early_stop_heuristic(self, **state):
        step = state["cur_len"] - state["decoder_prompt_len"]
        most = state["max_length"] - state["decoder_prompt_len"]
        if state["is_sent_finished"].all() and state["early_stopping"] is not True and step < most:
            hopes = state["early_stopping"] == "never" and state["length_penalty"] > 0
            best = state["running_beam_scores"][0, 0]
            best = best / (most if hopes else step) ** state["length_penalty"]
            self.note(abs(best - state["beam_scores"].min()), step)
        return super()._check_early_stop_heuristic(**state)


def search(model, ids: list[int], width: int, penalty: float, stopping, eos: int, memory: Memory):
    """Return transformers' hypotheses [width, n] and scores [width]."""
    model.generation_config = GenerationConfig(
        num_beams=width,
        num_return_sequences=width,
        length_penalty=penalty,
        early_stopping=stopping,
        do_sample=False,
        max_new_tokens=NEW_TOKENS,
        eos_token_id=eos,
        pad_token_id=eos,
        output_scores=True,
        return_dict_in_generate=True,
    )
    out = model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        generation_config=model.generation_config,
        logits_processor=[memory],
    )
    return out.sequences[:, len(ids) :].numpy(), out.sequences_scores.numpy()


def prompts(tokenizer) -> list[list[int]]:
    """Return the token ids of the prompts: chats first, then texts."""
    result = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}],
            tokenize=True,
            add_generation_prompt=True,
            return_dict=False,
        )
        for question in CHATS
    ]
    return result + [tokenizer(text).input_ids for text in TEXTS]


@torch.no_grad()
def main() -> None:
    """Write smollm2_beams.npz."""
    torch.set_num_threads(1)
    folder = bundled_folder()
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=GGUF_FILE)
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=GGUF_FILE, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    stage = Stage(
        LlamaConfig(
            vocab_size=model.config.vocab_size,
            hidden_size=2,
            intermediate_size=2,
            num_hidden_layers=1,
            num_attention_heads=1,
            tie_word_embeddings=True,
        )
    ).eval()
    eos = tokenizer.eos_token_id
    all_prompts = prompts(tokenizer)
    shape = (len(all_prompts), len(WIDTHS), len(LENGTH_PENALTIES), len(EARLY_STOPPING))
    token_ids = np.full((*shape, max(WIDTHS), NEW_TOKENS), -1, np.int32)
    scores = np.full((*shape, max(WIDTHS)), np.nan, np.float32)
    gaps, gap_steps = np.zeros(shape, np.float32), np.zeros(shape, np.int32)
    start = time.time()
    for p, w in itertools.product(range(shape[0]), range(shape[1])):
        ids, width = all_prompts[p], WIDTHS[w]
        memory = Memory()
        for i, j in reversed(list(itertools.product(range(shape[2]), range(shape[3])))):
            rules = (ids, width, LENGTH_PENALTIES[i], EARLY_STOPPING[j], eos, memory)
            real = None
            stage.smallest = (np.inf, 0)
            try:
                rows, final = search(stage, *rules)
            except KeyError:  # the first of the nine, or one that runs longer than those before
                memory.recording = True
                real = search(model, *rules)
                memory.recording = False
                stage.smallest = (np.inf, 0)
                rows, final = search(stage, *rules)
                assert np.array_equal(rows, real[0]) and np.array_equal(final, real[1])
            for a, b in itertools.pairwise(final):
                stage.note(a - b, 0)
            gaps[p, w, i, j], gap_steps[p, w, i, j] = stage.smallest
            scores[p, w, i, j, :width] = final
            for h, row in enumerate(rows):
                end = row.tolist().index(eos) + 1 if eos in row else NEW_TOKENS
                token_ids[p, w, i, j, h, :end] = row[:end]
        lengths = (token_ids[p, w, :, :, :width] >= 0).sum(-1)
        print(
            f"prompt {p} ({len(ids)} tokens), width {width}: smallest gap "
            f"{gaps[p, w].min():.1e}, hypotheses of {lengths.min()} to {lengths.max()} tokens, "
            f"{time.time() - start:.0f} s",
            file=sys.stderr,
        )
    np.savez_compressed(
        HERE / "smollm2_beams.npz",
        prompt_lengths=np.array([len(ids) for ids in all_prompts], np.int32),
        prompt_token_ids=np.concatenate([np.array(ids, np.int32) for ids in all_prompts]),
        widths=np.array(WIDTHS, np.int32),
        length_penalties=np.array(LENGTH_PENALTIES),
        early_stopping=np.array([str(rule) for rule in EARLY_STOPPING]),
        eos_token_id=np.int32(eos),
        max_new_tokens=np.int32(NEW_TOKENS),
        token_ids=token_ids,
        scores=scores,
        gaps=gaps,
        gap_steps=gap_steps,
    )


if __name__ == "__main__":
    main()
