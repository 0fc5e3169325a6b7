"""One room per target kind: ``targets/<kind>/``, found by its ``target.toml``."""
