"""Start the processes of a run, compare what they were given and end them together."""
