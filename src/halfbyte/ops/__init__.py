"""References: short torch functions that specify each op, and run where no kernel does."""
