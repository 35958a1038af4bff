"""The papers' figures and tables again, and the regimes in which each policy pays: `python -m simulator.reproduce`."""
