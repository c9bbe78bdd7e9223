"""Settings of the process, made once at its start."""


def configure() -> list[str]:
    """Applies the settings; returns what was set, as lines for the user."""
    return []
