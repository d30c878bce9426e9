"""Data: loading, preparing, dividing and splitting graphs, and measuring how clients differ."""
