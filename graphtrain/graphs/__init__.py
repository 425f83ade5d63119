"""Programs as graphs: init, train, evaluate, prefill and decode as pure functions."""
