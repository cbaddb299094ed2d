"""Real steps with planted faults and honest differences: what a comparison is tried on."""
