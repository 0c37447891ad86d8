"""transformers' `generate`, as the benchmarks drive it. Runs in a Python that has transformers and
torch; none of our packages is needed.

Static batches: whoever waits is batched, at most `batch_size` at once (the job's unless
--rival_args says otherwise), and the batch runs until its longest request is finished; those that
are finished sooner are delivered then.

`python _rival_transformers.py JOB.json RESULT.json`
"""

from __future__ import annotations

import os
import sys
from typing import Any

from _request_loop import Deliver, main

_MODEL_ARGUMENTS = ("attn_implementation",)  # the other --rival_args are for `generate`


class TransformersEngine:
    """A model under the request loop; a step is a whole batch."""

    def __init__(self, job: dict[str, Any]) -> None:
        import torch
        import transformers

        dtype = job["engine"]["dtype"]
        if dtype == "auto":  # as ours
            dtype = "bfloat16" if torch.cuda.is_available() else "float32"
        given = dict(job["rival_args"])
        self._batch_size = given.pop("batch_size", job["static_batch"])
        of_model = {name: given.pop(name) for name in _MODEL_ARGUMENTS if name in given}
        self._generate_arguments = given
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        auto_model: Any = transformers.AutoModelForCausalLM
        self._model = auto_model.from_pretrained(
            job["rival_model"], dtype=getattr(torch, dtype), **of_model
        )
        self._model.to(self._device)
        self._model.eval()
        self._model.generation_config.eos_token_id = None  # run to the length that is asked for
        self._torch = torch
        self._stream = job["stream"]
        self._waiting: list[tuple[str, list[int], int]] = []
        self._facts = {
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "dtype": dtype,
            "arguments": {"batch_size": self._batch_size, **job["rival_args"]},
        }

    def add(self, name: str, token_ids: list[int], output_len: int) -> None:
        self._waiting.append((name, token_ids, output_len))

    def step(self, deliver: Deliver, patience: float | None) -> None:
        torch = self._torch
        batch = self._waiting[: self._batch_size]
        del self._waiting[: self._batch_size]
        width = max(len(token_ids) for _, token_ids, _ in batch)
        padded = [[0] * (width - len(token_ids)) + token_ids for _, token_ids, _ in batch]
        mask = [[0] * (width - len(ids)) + [1] * len(ids) for _, ids, _ in batch]

        def on_token(input_ids: Any, scores: Any, **unused: Any) -> Any:
            """Deliver the newest token of every row; `generate` calls this after each."""
            num_new = input_ids.shape[1] - width
            if self._stream:
                newest = input_ids[:, -1].tolist()
                for (name, _, output_len), token in zip(batch, newest):
                    if num_new <= output_len:
                        deliver(name, [token], num_new == output_len)
            return torch.zeros(len(batch), dtype=torch.bool, device=input_ids.device)

        with torch.inference_mode():
            generated = self._model.generate(
                input_ids=torch.tensor(padded, device=self._device),
                attention_mask=torch.tensor(mask, device=self._device),
                max_new_tokens=max(output_len for _, _, output_len in batch),
                do_sample=False,
                pad_token_id=0,
                stopping_criteria=[on_token],
                **self._generate_arguments,
            )
        if not self._stream:
            for (name, _, output_len), row in zip(batch, generated.tolist()):
                deliver(name, row[width : width + output_len], True)

    def facts(self) -> dict[str, Any]:
        return self._facts


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main(sys.argv, TransformersEngine)
