"""What rules of workflow/ do beside the stages: rungs of successive halving, rehearsals, stops."""
