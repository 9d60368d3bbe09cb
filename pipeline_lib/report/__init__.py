"""The experiment report, the record for DVC, and the results of sweeps and rehearsals."""
