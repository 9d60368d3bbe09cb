"""The report, the record for DVC, and what sweeps and rehearsals come to."""
