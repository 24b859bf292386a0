"""A worked example of a kimi-hal backend: a device like AWS Trainium by name, torch on the CPU inside."""
