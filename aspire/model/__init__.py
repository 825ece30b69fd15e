"""Which model decodes, and how does it get its weights and ids? One decoder for Llama, Qwen2 and Qwen3."""

from aspire.model.decoder import Attend, Decoder
from aspire.model.load import (
    embedded_model_path,
    hf_state_dict,
    load,
    load_folder,
    load_gguf,
    random_weights,
    read_spec,
    resolve,
)
from aspire.model.spec import ModelSpec
from aspire.model.tokenizer import load_tokenizer, prompt_ids

__all__ = [
    "Attend",
    "Decoder",
    "ModelSpec",
    "embedded_model_path",
    "hf_state_dict",
    "load",
    "load_folder",
    "load_gguf",
    "load_tokenizer",
    "prompt_ids",
    "random_weights",
    "read_spec",
    "resolve",
]
