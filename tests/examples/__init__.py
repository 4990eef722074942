"""Every script under examples/ runs here as a person would run it."""
