"""Servers of others that need a start of their own to be measured beside."""
