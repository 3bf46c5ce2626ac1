"""Masked-LM pretraining of RoBERTa-style encoders. Imports nothing, so the launcher stays light."""
