"""Commands about configuration, data and this machine."""
