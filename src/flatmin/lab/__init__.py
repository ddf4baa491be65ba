"""Real data, the paper's networks and a training engine (the extra ``lab``)."""
