"""One tensor against another: every statistic in one pass, the error that is allowed, structure in what is left."""
