"""How long answers are: statistics and laws."""
