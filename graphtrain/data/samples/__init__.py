"""Sample corpora that need no network, made from what every CPython installation contains."""
