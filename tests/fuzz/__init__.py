"""Input that nobody should send, and moments at which nothing should stop: what packager does then."""
