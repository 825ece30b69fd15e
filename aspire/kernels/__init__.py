"""One file per operation: contract, torch twin, and (where there is one) the Triton kernel with its launcher."""
