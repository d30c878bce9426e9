"""Fuzz targets for everything that arrives from another party."""
