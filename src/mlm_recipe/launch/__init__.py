"""What happens before jax is imported: YAML, overrides, checks, environment. Standard library
and PyYAML only, so that a typo is answered in a fraction of a second."""
