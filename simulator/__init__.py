"""The discrete-event simulator that drives the same policies over traces."""
