"""Numbers: the library against transformers and against an independent plain model."""
