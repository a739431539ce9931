"""The demonstration: a question to a long document, answered dense and with UniPrefill on real weights."""
