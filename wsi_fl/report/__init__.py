"""One self-contained HTML page about a federated run, and one that compares runs."""
