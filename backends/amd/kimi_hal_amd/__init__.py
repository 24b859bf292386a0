"""AMD Instinct GPUs as a kimi-hal backend."""
