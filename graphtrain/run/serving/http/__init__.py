"""HTTP server over an engine, with OpenAI's interface. Needs the extra `serve`."""
