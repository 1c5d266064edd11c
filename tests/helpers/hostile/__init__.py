"""The hostile suite: its rows, the inputs of a case, and the process that runs cases."""
