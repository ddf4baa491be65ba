"""Side-by-side ratios against peers and limits. Run them all with `make bench`."""
