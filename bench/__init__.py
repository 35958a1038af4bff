"""Load generators and paired comparisons. `bench.session` is the frame of those that start servers."""
