"""A byte-level decoder language model: training that resumes bit for bit, checks itself first, and can be analysed."""
