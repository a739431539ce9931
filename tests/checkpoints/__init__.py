"""Readers, writers and tokenizers, mostly on tiny files made here."""
