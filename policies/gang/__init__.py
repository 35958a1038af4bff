"""Batches that run to their end."""
