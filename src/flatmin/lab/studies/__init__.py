"""What any study needs: conditions, paired comparisons, statistics, findings. May import sweeps and what sweeps may."""
