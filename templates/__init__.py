"""Files that bundles are made of: one folder per target kind and ``common`` for what several share."""
