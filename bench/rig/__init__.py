"""Sluice's own part of a request's way, measured from inside: routers, Redis and relays around an engine that does
nothing."""
