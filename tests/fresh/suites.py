"""The Debians that are tried, and the Python of each."""

SUITES = {"bookworm": "3.11", "trixie": "3.13"}
