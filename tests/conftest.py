"""Settings that all tests share."""

from hypothesis import settings

# A property is about values, not about how busy the machine is.
settings.register_profile("project", deadline=None)
settings.load_profile("project")
