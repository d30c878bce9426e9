"""A real federation: sites on the network, each with its own data, policy and audit log."""
