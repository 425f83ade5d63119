"""Serving: many sequences at once in the slots of one model, and the HTTP server over it."""
