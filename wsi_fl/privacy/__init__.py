"""Differential privacy: the accountant, the ledger that makes releases, and DP-SGD by Opacus."""
