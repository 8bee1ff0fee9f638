"""Federated learning between hospitals over a server or a folder: kits, plans, sealed messages and transports."""
