"""Requests without a hurry, of OpenAI's Batch API: whose goes next, and how many at a time."""
