"""Communication between sites, federated methods, and the training loop that runs them."""
