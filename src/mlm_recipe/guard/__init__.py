"""Policy over child processes: supervise, classify, fall back, remember, report. No jax."""
