"""Differential privacy: the accountant, the ledger and DP-SGD."""
