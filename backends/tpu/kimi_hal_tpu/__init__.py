"""Google TPUs as a kimi-hal backend."""
