"""From documents to masked examples."""
