"""Reading of compiled programs: HLO text and protos, collectives, FLOPs, provenance."""
