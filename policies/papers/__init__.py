"""The papers' literal and closed forms: chosen by name, never by default."""
