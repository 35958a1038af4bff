"""Programs that make what Sluice ships; none of them is in the wheel."""
