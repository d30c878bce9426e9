"""Public data sets: the registry, fetching and untrusted files."""
