"""What a run takes: bytes and seconds, before it starts."""
