"""Bundles broken on purpose: each fault must be caught, and what is honest must raise no alarm."""
