"""kvbench: how much load an LLM serving setup takes before its KV cache gives way, and what gives way first."""

__version__ = "0.1.0"
