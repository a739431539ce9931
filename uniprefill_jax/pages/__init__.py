"""Self-contained HTML pages: templates, their shared look, and the rendering that keeps them off the network."""
