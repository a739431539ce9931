"""An HTTP server that speaks the OpenAI API over one engine. Needs the optional extra `serve`."""
