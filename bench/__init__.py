"""Measuring Sluice from the outside: a streaming load generator, and plain `vllm serve` and Sluice side by side."""
