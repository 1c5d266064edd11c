"""What runs leave on disk: whole or damaged, locked or free, loaded again."""
