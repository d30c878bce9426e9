"""Tables, plots and text for the terminal and for files."""
