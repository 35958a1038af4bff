"""Who waits where, who goes when, and to whom."""
