"""What would Hugging Face say? Its own loading and decoding of the embedded model, as a second opinion."""

import contextlib
import io
import logging
import time
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from aspire.model import embedded_model_path


def huggingface_model() -> PreTrainedModel:
    """SmolLM2 in fp32 through transformers' own reading of the GGUF file (takes some 15 s)."""
    transformers.utils.logging.set_verbosity(logging.ERROR)
    path = embedded_model_path()
    with contextlib.redirect_stderr(io.StringIO()):  # its progress bars cannot be switched off
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32
        )
    return model.eval()


class Clock(StoppingCriteria):
    """Notes when each token was ready, and never stops."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool)


@torch.no_grad()
def generate(
    model: PreTrainedModel,
    prompts: list[list[int]],
    new_tokens: int,
    end_ids: tuple[int, ...],
    clock: Clock | None = None,
) -> list[list[int]]:
    """Greedy continuations of prompts of one length; without end_ids every one has new_tokens tokens."""
    ids = torch.tensor(prompts)
    stop = {"eos_token_id": list(end_ids)} if end_ids else {"eos_token_id": None}
    out = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False,
        pad_token_id=0, stopping_criteria=StoppingCriteriaList([clock] if clock else []), **stop,
    )  # fmt: skip
    return [line[ids.shape[1] :] for line in out.tolist()]
