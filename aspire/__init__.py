"""Batched self-speculative decoding: one engine, one mixed forward pass, methods as small policies."""

from aspire.engine import Engine
from aspire.policies import Method
from aspire.request import Request
from aspire.settings import EngineSettings, Sampling
from aspire.verify import Emulation, Verification

__all__ = ["Emulation", "Engine", "EngineSettings", "Method", "Request", "Sampling", "Verification"]
