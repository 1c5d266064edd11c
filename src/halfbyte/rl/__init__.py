"""Sample answers, score them and turn them into training rows."""
