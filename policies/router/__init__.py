"""Where requests wait, when they are sent, and to which replica."""
