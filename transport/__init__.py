"""Moves pages and messages between hosts, encrypted and mutually authenticated. Knows no model."""
