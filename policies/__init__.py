"""Scheduling decisions: pure functions and small state machines, no I/O, no clock; standard library and numpy only."""
