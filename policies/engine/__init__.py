"""What an engine step may hold."""
