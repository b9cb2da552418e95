"""The fused operations, one a file. Each file holds the contract, the eager chain, the kernel and when it may be used."""
