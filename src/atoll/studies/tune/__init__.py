"""Search hyper-parameters on validation scores."""
