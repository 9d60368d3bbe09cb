"""What the rules of workflow/ do beside the stages: outcomes of a sweep, rungs of successive halving, rehearsals."""
