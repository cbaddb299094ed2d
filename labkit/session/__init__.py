"""A notebook's life: parameters, the device of its kernels, the ledger of claims, its result, and records of runs."""
