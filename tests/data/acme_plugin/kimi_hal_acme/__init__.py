"""kimi-hal on Acme's simulator, which runs on the CPU."""
