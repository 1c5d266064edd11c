"""References: short torch functions that specify each op, and run it where no device twin does."""
