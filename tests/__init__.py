"""The test suite; importable so that tests share `tests.helpers`."""
