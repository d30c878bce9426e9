"""A user's own graph: tables, PyG, GraphML or NetworkX."""
