"""The demo model, a chat model small enough for any machine, and the script that makes it."""
