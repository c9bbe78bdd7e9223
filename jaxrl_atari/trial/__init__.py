"""Several sessions of one config, one after the other or each in its own process."""
